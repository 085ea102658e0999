"""What a person is told of a job that has failed: why, what came first, where to look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from jaxft.group.records import Fault, JobEnd

FAILURES_SHOWN = 10


def summary(end: JobEnd, logs: Path) -> Iterator[str]:
    """Lines for the end of a run: the reason, the first failure on top of all others, the last
    words of the rank that the reason is about, and where the logs are."""
    yield f"jaxft: error: {end.reason}"
    failures = sorted(end.failures, key=lambda one: one.generation)
    if len(failures) > 1:
        yield f"  what happened, the first of {len(failures)} on top:"
        shown = failures[:1] + failures[1:][-(FAILURES_SHOWN - 1) :]
        for fault in shown:
            if fault is shown[1] and len(failures) > len(shown):
                yield f"    ... {len(failures) - len(shown)} more ..."
            yield f"    {_when(fault)}generation {fault.generation}: {fault.detail}"
    if end.tail:
        whose = f"rank {end.rank} on {end.host}" if end.rank >= 0 else end.host
        yield f"  the last lines of {whose}, generation {end.generation}:"
        yield from (f"  | {line}" for line in end.tail.splitlines())
    yield f"  logs: {logs}"


def _when(fault: Fault) -> str:
    return time.strftime("%H:%M:%S ", time.localtime(fault.at_s)) if fault.at_s else ""
