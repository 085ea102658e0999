"""What `save` returns: how far a snapshot has come, and why it did not come further."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import Future, InvalidStateError
from typing import Any, Literal

from jaxft.errors import JaxftError, SnapshotSkipped
from jaxft.group.manifest import SnapshotId
from jaxft.group.world import Code


class Receipt:
    """The state of one call of `save`.

    Attributes:
        step: the step it was called with.
        id: the snapshot's identity, None if the call began none.
        code: what protects it: this host's group survives the loss of `code.parity` hosts. A world
            that is too small for the job's code has less; a lone host has 0.
        skipped: why the call was not due, the same on every rank; None if it was.
        parity: "device" if the devices compute the parity of all that they can, in the program that
            the call runs; "host" if the snapshot processes compute all of it.
        wait_s: how long the call waited for the snapshot before it to be decided, or to know which
            call is to be a snapshot out of turn.
        stall_s: how long the call took, `wait_s` included. A profile (jax.profiler) shows it as
            "jaxft.save" where a snapshot was due.
        last_failure: why the snapshot before this call could not be protected; None if it could, or
            if that is not known yet.
        staged: done when this host's bytes are in its snapshot process: a crash of the ranks loses
            nothing of it.
        protected: done when the snapshot is committed: losing as many hosts of each group as the
            code has parity loses nothing of it.
        persisted: done with the checkpoint's step when it is committed on storage; most snapshots
            are not chosen for storage, and this then raises SnapshotSkipped.

    A future's `result(timeout)` raises the SnapshotError that says why it could not be.
    """

    id: SnapshotId | None = None
    skipped: str | None = None
    parity: Literal["host", "device"] = "host"
    wait_s = 0.0
    stall_s = 0.0

    def __init__(self, step: int, code: Code, *, last_failure: JaxftError | None = None) -> None:
        self.step = step
        self.code = code
        self.last_failure = last_failure
        self.staged: Future[None] = Future()
        self.protected: Future[None] = Future()
        self.persisted: Future[int] = Future()

    def fail(self, error: JaxftError) -> None:
        """Ends every future that is still open with this error."""
        for future in (self.staged, self.protected, self.persisted):
            _end(future, error=error)

    def stage(self) -> None:
        """This host's bytes are safe from a crash of its ranks."""
        _end(self.staged)

    def protect(self) -> None:
        """The snapshot is committed, so its bytes were staged on every host."""
        self.stage()
        _end(self.protected)

    def persist(self, step: int) -> None:
        """A checkpoint of it is committed on storage, as `step`."""
        _end(self.persisted, step)

    def __repr__(self) -> str:
        states = ", ".join(
            f"{name}={_state(future)}"
            for name, future in (
                ("staged", self.staged),
                ("protected", self.protected),
                ("persisted", self.persisted),
            )
        )
        return f"Receipt(step={self.step}, id={self.id}, {states}, parity={self.parity!r})"


class SkippedReceipt(Receipt):
    """The receipt of a call that was not due. Most calls are such: whoever asks for one of its
    futures makes it."""

    def __init__(self, step: int, code: Code, why: str, last_failure: JaxftError | None) -> None:
        self.step = step
        self.code = code
        self.skipped = why
        self.last_failure = last_failure

    @functools.cached_property
    def staged(self) -> Future[None]:  # type: ignore[override]
        return self._failed()

    @functools.cached_property
    def protected(self) -> Future[None]:  # type: ignore[override]
        return self._failed()

    @functools.cached_property
    def persisted(self) -> Future[int]:  # type: ignore[override]
        return self._failed()

    def _failed(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(SnapshotSkipped(f"step {self.step} was not saved: {self.skipped}"))
        return future

    def __repr__(self) -> str:
        return f"Receipt(step={self.step}, skipped={self.skipped!r})"


def _end(future: Future[Any], result: Any = None, *, error: JaxftError | None = None) -> None:
    """Ends a future, unless another thread was first or the caller has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _state(future: Future[Any]) -> str:
    if not future.done():
        return "pending"
    return "no" if future.cancelled() or future.exception() is not None else "yes"
