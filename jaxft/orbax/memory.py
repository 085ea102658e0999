"""The memory below a manager: a Snapshotter, which of its snapshots is the newest, and its leaves.

A Snapshotter restores once, before its first save, and all ranks together; a manager's script may
restore as often as it likes. So the first time that the newest snapshot is asked for, it is
restored whole, and what nobody asks for goes to the CPU, as it has to stay in the snapshots. Later,
the newest committed snapshot is read while training stands still in the call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxft.device.assembly import Table, match
from jaxft.device.leaves import flatten
from jaxft.errors import (
    ChunkDamaged,
    JaxftError,
    NothingRecoverable,
    PeerUnreachable,
    RestoreError,
    RestoreTimeout,
    SnapshotError,
    StagingError,
)
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Outcome, Plan
from jaxft.host import protocol as p
from jaxft.orbax.items import Contents, Held, empty_node
from jaxft.orbax.storage import Storage
from jaxft.orbax.targets import Want, like, tree_of
from jaxft.receipt import Receipt
from jaxft.restorer import SnapshotReader
from jaxft.snapshotter import Snapshotter

_log = logging.getLogger(__name__)
CLOSE_S, FAILING_S = 30.0, 1.0


class Newest(NamedTuple):
    """The newest snapshot that is whole; `is_first`: of before this process."""

    step: int
    id: SnapshotId
    is_first: bool


class Memory:
    """Takes and gives back snapshots.

    Args:
        snapshotter: this process's; `close` ends it.
        storage: its fallback.
    """

    def __init__(self, snapshotter: Snapshotter, storage: Storage) -> None:
        self.snapshotter = snapshotter
        self.storage = storage
        storage.tell(lambda step: snapshotter.client.say(p.Wrote(step=step)))
        self.receipt: Receipt | None = None
        self.begun = False
        self._unwritten: list[Receipt] = []
        self._contents: tuple[SnapshotId, Contents] | None = None
        self._told: JaxftError | None = None

    # -------------------------------------------------------------------- what there is

    @property
    def plan(self) -> Plan:
        """What the world goes on from, once that is decided.

        Raises:
            RestoreTimeout: the other ranks or hosts did not come.
            NothingRecoverable: there was a snapshot, and nothing can give it back.
        """
        client, timeout_s = self.snapshotter.client, self.snapshotter.timeout_s
        try:
            told = client.wait(lambda: client.plan, timeout_s, "the decision what to restore")
        except JaxftError as error:
            raise RestoreTimeout(f"{error}; every rank has to make its manager") from error
        plan = told.plan
        if plan.chosen is None and plan.storage is None and plan.newest_known is not None:
            raise NothingRecoverable(
                f"snapshot {plan.newest_known}, or a newer one, was committed and cannot be given "
                f"back: {'; '.join(plan.reasons)}; and {self.storage.root} has no step. Bring back "
                "the lost hosts, or start anew with `jaxft run --fresh`"
            )
        return plan

    @property
    def first_step(self) -> int | None:
        """The step that this process would go on from."""
        plan = self.plan
        return None if plan.chosen is None and plan.storage is None else plan.step

    def newest(self) -> Newest | None:
        """The newest snapshot that can be read. Waits for one that is on its way."""
        if self.receipt is not None:
            self.wait()
        committed = self._committed()
        if committed is not None:
            return Newest(*committed, is_first=False)
        plan = self.plan
        if plan.chosen is None or (self.begun and self.receipt is not None):
            return None
        return Newest(plan.step, plan.chosen, is_first=True)

    def wait_for_first(self) -> None:
        """Until it is decided on what was restored, which is the first snapshot of this process."""
        if self.begun and self.receipt is None:
            client, timeout_s = self.snapshotter.client, self.snapshotter.timeout_s
            client.wait(lambda: client.outcomes.get(0), timeout_s, "the first snapshot's outcome")

    def _committed(self) -> tuple[int, SnapshotId] | None:
        """The newest snapshot of this generation that is committed: its step and identity."""
        outcomes: dict[int, Outcome] = dict(self.snapshotter.client.outcomes)
        newest = outcomes[max(outcomes)].committed if outcomes else None
        if newest is None:
            return None
        known = outcomes.get(newest.seq)
        step = known.step if known is not None else self.snapshotter.latest
        return None if step is None else (step, newest)

    @property
    def step(self) -> int | None:
        """The step of the newest snapshot, also of one that is on its way."""
        receipt = self.receipt
        if receipt is not None and not receipt.protected.done():
            return receipt.step
        newest = self.newest()
        return None if newest is None else newest.step

    def contents(self, newest: Newest) -> Contents:
        """What is in it.

        Raises:
            JaxftError: it cannot be read.
        """
        while self._contents is None or self._contents[0] != newest.id:
            try:
                reader = self._reader(newest)
            except ChunkDamaged as error:
                self._plan_again(newest, error)
            else:
                self._contents = newest.id, Contents.of(reader.manifests.values())
        return self._contents[1]

    def _plan_again(self, newest: Newest, error: ChunkDamaged) -> None:
        """The root is told what was found damaged, and finds another way to this snapshot, if there
        is one."""
        client = self.snapshotter.client
        told = client.plan
        if self.begun or told is None or told.plan.chosen != newest.id:
            raise RestoreError(f"step {newest.step} cannot be read from memory: {error}") from error
        attempt = told.plan.attempt
        damaged = getattr(error, "damaged", ())
        failed = p.RestoreFailed(attempt=attempt, reason=str(error), damaged=damaged)
        client.say(failed, open_as="restored")

        def newer() -> p.PlanTold | None:
            plan = client.plan
            return plan if plan is not None and plan.plan.attempt > attempt else None

        again = client.wait(newer, self.snapshotter.timeout_s, "another way to restore").plan
        if again.chosen != newest.id:
            raise _other_step(newest, again.step if again.source != "none" else None)

    def _reader(self, newest: Newest) -> SnapshotReader:
        return SnapshotReader(
            self.snapshotter.client,
            newest.id,
            None,
            attempt=None,
            timeout_s=self.snapshotter.timeout_s,
        )

    # -------------------------------------------------------------------- restoring

    def restore(
        self, newest: Newest, contents: Contents, wants: Mapping[int, Want | None]
    ) -> dict[int, Any]:
        """The values of the leaves that are wanted, by their number; None: on the CPU.

        Raises:
            RestoreError: this snapshot could not be had after all.
        """
        if newest.is_first and not self.begun:
            return self._restore_first(newest, contents, wants)
        asked = tree_of(
            (contents.leaves[n].path, like(contents.leaves[n], w)) for n, w in wants.items()
        )
        reader = self._reader(newest)
        table = Table.of(reader.manifests.values(), self.snapshotter.env.rank)
        return _by_number(reader.assemble(match(asked, table, strict=False)), contents)

    def _restore_first(
        self, newest: Newest, contents: Contents, wants: Mapping[int, Want | None]
    ) -> dict[int, Any]:
        leaves = [(leaf.path, like(leaf, wants.get(n))) for n, leaf in enumerate(contents.leaves)]
        target = tree_of([*leaves, *((leaf.path, empty_node(leaf)) for leaf in contents.empty)])
        restored = self.snapshotter.restore(target)
        self.begun = True
        if restored is None or restored.id != newest.id:
            raise _other_step(newest, None if restored is None else restored.step)
        return _by_number(restored.state, contents)

    def settle(self) -> None:
        """Goes on from the snapshot of before this process, and gives nothing of it."""
        newest = None if self.begun else self.newest()
        if newest is not None:
            self._restore_first(newest, self.contents(newest), {})

    def adopt(self, held: Held, extras: dict[str, Any]) -> None:
        """Goes on from a step that was read from storage; it is the first snapshot then."""
        self.storage.offer(held.state, extras)
        self.snapshotter.restore(held.state)
        self.begun = True

    # -------------------------------------------------------------------- saving

    def save(self, step: int, held: Held, extras: dict[str, Any], *, force: bool) -> Receipt:
        receipt = self.snapshotter.save(step, held.state, extras, force=force)
        self.begun = True
        if receipt.skipped is None:
            self.receipt = receipt
            self._unwritten = [one for one in self._unwritten if not one.persisted.done()]
            self._unwritten.append(receipt)
        return receipt

    def identity(self, receipt: Receipt | None) -> tuple[SnapshotId, SnapshotId | None]:
        """The identity that a step on storage is to have, and what its generation went on from, if
        it did and that is known.

        Without a snapshot of its own, the step is newer than the last one all the same.
        """
        env, base = self.snapshotter.env, self.base
        if receipt is not None and receipt.id is not None:
            return receipt.id, base
        return SnapshotId(env.generation, self.snapshotter.next_seq, env.nonce), base

    @property
    def base(self) -> SnapshotId | None:
        """What this generation went on from, if it did and that is known."""
        settled = self.snapshotter.client.settled
        return None if settled is None else settled.base

    def wait(self) -> None:
        """Until the snapshot that is on its way is protected, or is not to be."""
        if self.receipt is not None:
            what = f"the outcome of step {self.receipt.step}'s snapshot"
            _until(self.receipt.protected, self.snapshotter.timeout_s, what)

    def wait_for_helpers(self) -> None:
        """Until the steps that helpers write are on storage, or are not to be. What is not the
        snapshot's that is chosen for storage ends at once."""
        for receipt in self._unwritten:
            _until(receipt.persisted, self.snapshotter.timeout_s, f"step {receipt.step} on storage")
        self._unwritten.clear()

    def failure(self) -> JaxftError | None:
        """Why the newest snapshot could not be protected; said once."""
        receipt = self.receipt
        if receipt is None or not receipt.protected.done():
            return None
        error = receipt.protected.exception()
        if error is None or error is self._told:
            return None
        assert isinstance(error, JaxftError)
        self._told = error
        return error

    def refused(self) -> StagingError | None:
        """Why nothing of the newest snapshot was taken: an array was donated before, say."""
        receipt = self.receipt
        error = receipt.staged.exception() if receipt and receipt.staged.done() else None
        if not isinstance(error, StagingError):
            return None
        self._told = error
        return error

    def close(self, *, failing: bool) -> None:
        """Ends. A last snapshot that failed has been told by `failure`."""
        timeout_s = FAILING_S if failing else CLOSE_S
        try:
            self.snapshotter.close(timeout_s=timeout_s, failing=failing)
        except SnapshotError as error:
            _log.error("%s", error)


def _until(future: Future[Any], timeout_s: float, what: str) -> None:
    try:
        future.exception(timeout_s)
    except TimeoutError as error:
        raise PeerUnreachable(f"{what} did not come within {timeout_s:g} s") from error


def _other_step(newest: Newest, step: int | None) -> RestoreError:
    found = "nothing" if step is None else f"step {step}"
    return RestoreError(
        f"step {newest.step} was found damaged while it was read, and what can be had is {found}. "
        "Start the script again: latest_step() then says so"
    )


def _by_number(tree: Any, contents: Contents) -> dict[int, Any]:
    numbers = {leaf.path: number for number, leaf in enumerate(contents.leaves)}
    return {numbers[path]: value for path, value in flatten(tree)[0]}
