"""What the recipes' tests share: programs on PATH, and an etcd."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import etcd_url
from tests.recipes.places import ROOT

__all__ = ["etcd_url"]

SBIN = ":/usr/sbin:/sbin"
# As with the store's tests: where etcd, or SLURM, is not installed, what needs it is left out.
NEEDS = {
    "test_tpu.py": ("etcd",),
    "test_slurm.py": ("etcd", "curl", "munged", "slurmctld", "slurmd", "sbatch"),
}
collect_ignore = [
    name
    for name, programs in NEEDS.items()
    if not all(shutil.which(one, path=os.environ["PATH"] + SBIN) for one in programs)
]


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a short path, for the sockets below it."""
    directory = Path(tempfile.mkdtemp(prefix="jx-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def programs(base: Path) -> Path:
    """A directory for PATH, with `jaxft` and this Python in it."""
    directory = base / "bin"
    directory.mkdir()
    python = shlex.quote(sys.executable)
    program(directory, "jaxft", f'PYTHONPATH={shlex.quote(str(ROOT))} exec {python} -m jaxft "$@"')
    program(directory, "python", f'exec {python} "$@"')
    return directory


def program(directory: Path, name: str, script: str) -> None:
    """A shell script on PATH."""
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def environ(programs: Path, **variables: str) -> dict[str, str]:
    """This process's environment, less what jaxft reads in it, with these programs found first."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JAXFT_")}
    path = f"{programs}:{os.environ['PATH']}{SBIN}"
    return {**inherited, "PATH": path, "JAX_PLATFORMS": "cpu", **variables}


def marked(variable: str) -> list[int]:
    """The living processes with this variable ("NAME=value") in their environment, but for this."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            dead = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not dead and variable.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return [pid for pid in found if pid != os.getpid()]
