"""A virtual environment with all that this one has, but for jaxft."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def make(directory: Path) -> Path:
    """Makes it; returns its Python. Its packages are links to those of this environment."""
    venv.create(directory, symlinks=True)
    here = Path(sysconfig.get_path("purelib"))
    there = directory / here.relative_to(sysconfig.get_path("data"))
    for path in here.iterdir():
        # An editable install is a file of paths, or one that finds modules.
        named = path.name.lower()
        if "jaxft" not in named and not (path.suffix == ".pth" and is_of_jaxft(path)):
            (there / path.name).symlink_to(path)
    return directory / "bin" / "python"


def is_of_jaxft(path: Path) -> bool:
    return any((Path(line) / "jaxft").is_dir() for line in path.read_text().split("\n") if line)
