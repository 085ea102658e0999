"""A script that nobody launched, which is how the subjects of one host use the product."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxft
from bench.processes import end_all

JOB = "bench"
WAIT_S = 120.0


@contextlib.contextmanager
def own_run_dir() -> Iterator[None]:
    """Sockets and locks of this measurement lie apart from those of anything else."""
    directory = tempfile.mkdtemp(prefix="jaxft-bench-")
    before = os.environ.get("JAXFT_RUN_DIR")
    os.environ["JAXFT_RUN_DIR"] = directory
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAXFT_RUN_DIR"]
        else:
            os.environ["JAXFT_RUN_DIR"] = before
        end_all(Path(directory))
        shutil.rmtree(directory, ignore_errors=True)


def open_snapshotter(**options: Any) -> jaxft.Snapshotter:
    """A snapshot at every call of `save`."""
    return jaxft.Snapshotter(every=1, job=JOB, **options)
