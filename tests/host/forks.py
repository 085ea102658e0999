"""Real processes that start fast: forked from one that has imported what they need.

An SMP started here runs `jaxft.host.smp.main` as its command line does, on descriptors that it
inherits; a tenth of a second of imports is saved for each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.host.forks", "tests.host.ranks", "jaxft.host.smp"])


class Command:
    """An SMP as the agent starts it."""

    def __init__(self, arguments: list[str], fds: Sequence[int], log: Path, faults: str) -> None:
        adopted = ["--fds", ",".join(map(str, fds))] if fds else []
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxft.host.smp", *arguments, *adopted],
                pass_fds=fds,
                stderr=stderr,
                env={**os.environ, "JAXFT_FAULTS": faults},
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def is_alive(self) -> bool:
        return self._process.poll() is None


class Descriptors:
    """Descriptors that the new process gets as its own."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, ([reduction.DupFd(fd) for fd in self.fds],)


def _arrived(copies: list[Any]) -> Descriptors:
    return Descriptors([copy.detach() for copy in copies])


def start_smp(
    arguments: list[str], fds: Sequence[int], log: Path, faults: str
) -> multiprocessing.process.BaseProcess:
    """An SMP with this command line, on this memory (none: new memory)."""
    process = context.Process(
        target=_run_smp, args=(arguments, Descriptors(fds), log, faults), daemon=True
    )
    process.start()
    return process


def _run_smp(arguments: list[str], memory: Descriptors, log: Path, faults: str) -> None:
    from jaxft.host import smp

    os.environ["JAXFT_FAULTS"] = faults
    stderr = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(stderr, sys.stderr.fileno())
    os.close(stderr)
    adopted = ["--fds", ",".join(map(str, memory.fds))] if memory.fds else []
    sys.exit(smp.main([*arguments, *adopted]))
