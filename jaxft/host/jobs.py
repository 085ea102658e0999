"""Work that takes time, in threads of its own, so that the SMP's loop never waits.

A job is a function that is given an event which is set when it should stop. What it returns, or the
error it ended with, comes back to the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from jaxft.host.priority import step_back

Done = Callable[[Any, BaseException | None], None]


@dataclass
class Job:
    """One piece of work. `done(result, error)` is called by the loop; `low` work steps back behind
    the training."""

    key: Hashable
    work: Callable[[threading.Event], Any]
    done: Done
    low: bool = False
    cancel: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class Jobs:
    """The jobs of one SMP.

    Args:
        wake: called from a job's thread when it has ended.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._running: list[Job] = []
        self._ended: list[Job] = []

    def start(
        self,
        key: Hashable,
        work: Callable[[threading.Event], Any],
        done: Done,
        *,
        low: bool = False,
    ) -> Job:
        """Runs `work(cancel)` in a thread, at low priority if `low`."""
        job = Job(key, work, done, low)
        with self._lock:
            self._running.append(job)
        threading.Thread(target=self._run, args=(job,), daemon=True, name=f"job-{key}").start()
        return job

    def _run(self, job: Job) -> None:
        if job.low:
            step_back()
        try:
            job.result = job.work(job.cancel)
        except BaseException as error:  # noqa: BLE001 - it is handed to the loop
            job.error = error
        with self._lock:
            self._running.remove(job)
            self._ended.append(job)
        self._wake()

    def cancel(self, *keys: Hashable) -> None:
        """Asks the jobs with these keys to stop, or all of them."""
        with self._lock:
            for job in self._running:
                if not keys or job.key in keys:
                    job.cancel.set()

    @property
    def unfinished(self) -> int:
        """How many run, or have ended and not been reaped."""
        with self._lock:
            return len(self._running) + len(self._ended)

    def reap(self) -> None:
        """Calls `done` of every job that has ended since."""
        with self._lock:
            ended, self._ended = self._ended, []
        for job in ended:
            job.done(job.result, job.error)
