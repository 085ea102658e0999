"""Who works below a run directory."""

from __future__ import annotations

from pathlib import Path


def working(run: str, module: str = "jaxft") -> list[int]:
    """Processes of `module` below this run directory; dead ones have no command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            setting = (path / "environ").read_bytes()
        except OSError:
            continue
        if module.encode() in command and run.encode() in setting:
            found.append(int(path.name))
    return found
