"""What `save` returns: how far a snapshot has come, and why it did not come further."""

from __future__ import annotations

from concurrent.futures import Future

from jaxft.errors import JaxftError, SnapshotSkipped
from jaxft.group.manifest import SnapshotId
from jaxft.group.world import Code


class Receipt:
    """The state of one call of `save`.

    Attributes:
        step: the step it was called with.
        id: the snapshot's identity, None if the call was skipped.
        code: what protects it: this host's group survives the loss of `code.parity` hosts. A world
            that is too small for the job's code has less; a lone host has 0.
        skipped: why no snapshot was begun, the same on every rank; None if one was.
        wait_s: how long the call waited for the snapshot before it to be decided.
        staged: done when this host's bytes are in its snapshot process: a crash of the ranks loses
            nothing of it.
        protected: done when the snapshot is committed: losing as many hosts of each group as the
            code has parity loses nothing of it.
        persisted: done with the checkpoint's step when it is committed on storage; most snapshots
            are not chosen for storage, and this then raises SnapshotSkipped.

    A future's `result(timeout)` raises the SnapshotError that says why it could not be.
    """

    def __init__(
        self,
        step: int,
        identity: SnapshotId | None,
        code: Code,
        *,
        skipped: str | None = None,
    ) -> None:
        self.step = step
        self.id = identity
        self.code = code
        self.skipped = skipped
        self.wait_s = 0.0
        self.staged: Future[None] = Future()
        self.protected: Future[None] = Future()
        self.persisted: Future[int] = Future()
        if skipped is not None:
            self.fail(SnapshotSkipped(f"step {step} was not saved: {skipped}"))

    def fail(self, error: JaxftError) -> None:
        """Ends every future that is still open with this error."""
        for future in (self.staged, self.protected, self.persisted):
            if not future.done():
                future.set_exception(error)

    def __repr__(self) -> str:
        if self.skipped is not None:
            return f"Receipt(step={self.step}, skipped={self.skipped!r})"
        states = ", ".join(
            f"{name}={_state(future)}"
            for name, future in (
                ("staged", self.staged),
                ("protected", self.protected),
                ("persisted", self.persisted),
            )
        )
        return f"Receipt(step={self.step}, id={self.id}, {states})"


def _state(future: Future[None] | Future[int]) -> str:
    if not future.done():
        return "pending"
    return "yes" if future.exception() is None else "no"
