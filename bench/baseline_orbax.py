"""Orbax's own asynchronous checkpoints on tmpfs, used as its documentation says."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from bench.states import ready

TMPFS = Path("/dev/shm")
KEPT = 1


class Saved(NamedTuple):
    """What a save took: the training thread's time, and the time until it was committed."""

    blocked_s: float
    committed_s: float


class OrbaxPeer:
    """A checkpoint manager on tmpfs. `close` takes its files away.

    Args:
        directory: the same on all processes; None makes one, for a process that is alone.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix="jaxft-bench-", dir=TMPFS))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=True, create=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._step = 0

    def save(self, state: Any) -> Saved:
        """Saves, and waits until it is committed."""
        began_s = time.perf_counter()
        blocked_s = self.begin(state)
        self._manager.wait_until_finished()
        return Saved(blocked_s, time.perf_counter() - began_s)

    def begin(self, state: Any) -> float:
        """Begins a save; how long that blocked."""
        began_s = time.perf_counter()
        self._step += 1
        self._manager.save(self._step, args=ocp.args.StandardSave(state))
        return time.perf_counter() - began_s

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, like: Any) -> float:
        """Seconds to restore the newest checkpoint onto the devices."""
        began_s = time.perf_counter()
        args = ocp.args.StandardRestore(like)
        ready(self._manager.restore(self._step, args=args))
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._manager.close()
        shutil.rmtree(self.directory, ignore_errors=True)
