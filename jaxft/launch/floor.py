"""Which generation number a run must begin above, when its store and its memory are new.

Snapshots are ordered by their generation's number. A run whose store and memory are new would count
from 1, and its snapshots would seem older than the checkpoints of the run before. Its ranks find
that out, and the root refuses the number, but by then every rank has been started in vain. So this
machine remembers where a job's checkpoints are, and looks there before it takes a number. It also
remembers the newest generation itself, so that a person who reads logs and lists of failures never
finds two of the same number.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jaxft import config
from jaxft.checkpoint import Directory
from jaxft.errors import RestoreError


def _note(job: str) -> Path:
    """No job's or host's directory: their names begin with a letter or a digit."""
    return config.run_dir() / f".checkpoints-{job}"


def remember(job: str, directory: str) -> None:
    """Notes where the job's checkpoints go. Where that is impossible, the next run starts later."""
    note = _note(job)
    with contextlib.suppress(OSError):
        if directory and (not note.exists() or note.read_text() != directory):
            note.write_text(directory)


def remember_generation(job: str, number: int) -> None:
    """Notes the newest generation of the job."""
    note = _numbers(job)
    with contextlib.suppress(OSError):
        if known_generation(job) < number:
            fresh = note.with_name(f"{note.name}.{os.getpid()}")
            fresh.write_text(f"{number}\n")
            fresh.replace(note)


def known_generation(job: str) -> int:
    """The newest generation that this machine has taken part in; 0: none."""
    with contextlib.suppress(OSError, ValueError):
        return int(_numbers(job).read_text())
    return 0


def _numbers(job: str) -> Path:
    return config.run_dir() / f".generation-{job}"


def stored_generation(job: str) -> int:
    """The newest generation that has a checkpoint, as far as this machine knows; 0: none."""
    with contextlib.suppress(OSError, RestoreError):
        found = Directory(Path(_note(job).read_text())).found()
        known = (one.record for one in found)
        return max((one.id.generation for one in known if one and one.job in ("", job)), default=0)
    return 0
