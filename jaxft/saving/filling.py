"""Filling: the thread of a rank that copies what was staged into its host's snapshot memory.

    slot granted -> copied and checksummed into it -> the SMP is told

A rank that cannot do its part says so to the SMP, by which the root aborts the snapshot for all.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import NamedTuple

import msgspec

from jaxft.device.gather import Gatherer
from jaxft.device.shards import Plan
from jaxft.device.transfer import StagedLeaves
from jaxft.errors import JaxftError, SnapshotAborted, StagingError
from jaxft.faults import reach
from jaxft.group.manifest import Part
from jaxft.group.messages import Measured
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient
from jaxft.receipt import Receipt
from jaxft.saving.open_receipts import OpenReceipts

_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A snapshot on its way into the slot; `staged` is why it is not, where a leaf failed."""

    seq: int
    step: int
    plan: Plan
    staged: StagedLeaves | StagingError
    extras: bytes
    receipt: Receipt
    step_s: float
    call: int
    measured: Measured


class Filler:
    """Fills slots, one after the other, in a thread of its own.

    Args:
        gatherer: its programs for a plan are compiled here, while there is nothing to fill.
        timeout_s: how long a snapshot waits for its slot.
    """

    def __init__(
        self,
        client: SmpClient,
        rank: int,
        receipts: OpenReceipts,
        gatherer: Gatherer,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._rank = rank
        self._receipts = receipts
        self._gatherer = gatherer
        self._timeout_s = timeout_s
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="jaxft-stage")
        self._thread.start()

    def put(self, job: Job) -> None:
        """Fills the snapshot's slot as soon as it is its turn."""
        self._jobs.put(job)

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be filled."""
        return self._jobs.empty()

    def finish(self, timeout_s: float) -> None:
        """Fills what it was given, and ends."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._fill(job)
            except JaxftError as error:
                self._say_failed(job, error)
            except Exception as error:  # noqa: BLE001 - its receipt says it, and training goes on
                _log.exception("snapshot %d of step %d", job.seq, job.step)
                self._say_failed(job, StagingError(f"it could not be copied: {error!r}"))
            plan = job.plan
            del job  # the last reference to the state's bytes
            self._gatherer.prepare(plan, may_go_on=self._jobs.empty)

    def _fill(self, job: Job) -> None:
        """Copies the part into the granted slot and tells the SMP."""
        if isinstance(job.staged, StagingError):
            raise job.staged
        client = self._client
        self._want_slot(job)

        def answered() -> bool | None:
            known = job.seq in client.granted or job.seq in client.outcomes
            return known or bool(client.held) or None

        client.wait(answered, self._timeout_s, f"a slot for snapshot {job.seq}")
        if job.seq in client.outcomes:  # aborted meanwhile
            return
        if job.seq not in client.granted:  # the bytes are not kept for as long as that lasts
            raise SnapshotAborted(f"it had no slot yet: {client.held}")
        granted = client.granted[job.seq]
        nbytes = job.staged.length
        arena = client.slot(granted.slot, granted.base + nbytes)
        arena.map_pages(granted.base, nbytes)
        view = arena.view(granted.base, nbytes)
        reach("stage.granted", rank=self._rank, seq=job.seq, step=job.step)
        checksums = job.staged.copy_into(view, on_progress=lambda done: self._copied(job, done))
        reach("stage.copied", rank=self._rank, seq=job.seq, step=job.step)
        part = Part(
            rank=self._rank,
            base=granted.base,
            length=nbytes,
            ranges=job.plan.ranges,
            checksums=checksums,
            extras=job.extras,
            lanes=job.plan.spans,
            parity=job.plan.length if job.staged.parity_bytes else 0,
        )
        leaves = msgspec.msgpack.encode(job.staged.leaves + job.plan.empty)
        client.say(p.Staged(seq=job.seq, part=part, leaves=leaves), open_as="staged")
        reach("stage.told", rank=self._rank, seq=job.seq, step=job.step)

    def _want_slot(self, job: Job) -> None:
        self._client.close_open("staged", "failed")
        nbytes, given = job.plan.length, 0
        if isinstance(job.staged, StagedLeaves) and job.staged.parity_bytes:
            assert job.plan.lanes is not None, "there is no parity without lanes"
            nbytes = job.staged.length
            given = job.plan.lanes.end + job.staged.parity_bytes
        want = p.WantSlot(
            seq=job.seq,
            step=job.step,
            plan=job.plan.digest,
            nbytes=nbytes,
            step_s=job.step_s,
            call=job.call,
            measured=job.measured,
            given=given,
        )
        self._client.say(want, open_as="slot")

    def _copied(self, job: Job, done_bytes: int) -> None:
        if 2 * done_bytes >= job.plan.length:
            reach("stage.half", rank=self._rank, seq=job.seq, step=job.step)

    def _say_failed(self, job: Job, error: JaxftError) -> None:
        """This rank has no part of this snapshot: the root is told, and aborts it for all."""
        self._receipts.fail(job.receipt, error)
        self._want_slot(job)
        reason = f"rank {self._rank}, step {job.step}: {error}"
        self._client.say(p.StagingFailed(seq=job.seq, reason=reason), open_as="failed")
