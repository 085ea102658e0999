"""Saving: how a snapshot is taken, from the call of `save` to its outcome.

    due? -> the one before decided? -> plan -> stage (donation is safe from here on; save returns)
        in a background thread:  slot granted -> copied and checksummed into it -> staged
        in the SMPs:             coded -> committed or aborted -> protected

Every rank decides by what all ranks know at that call: the steps of the snapshots before, and the
intervals that came with their outcomes. So all ranks begin the same snapshots, and nobody is asked.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from jaxft import config
from jaxft.device.shards import Plan, PlanCache
from jaxft.device.transfer import StagedLeaves, Staging, default_staging, stage
from jaxft.errors import (
    ConfigError,
    JaxftError,
    MemoryLimitError,
    SnapshotAborted,
    SnapshotError,
    SnapshotLost,
    SnapshotSkipped,
    StagingError,
)
from jaxft.fallback import OrbaxFallback
from jaxft.faults import arm, reach
from jaxft.group.manifest import Part, SnapshotId
from jaxft.group.messages import Outcome, RankOptions
from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from jaxft.receipt import Receipt
from jaxft.restorer import Restored, restore
from jaxft.startup import take_seat
from jaxft.status.events import EventLog

_log = logging.getLogger(__name__)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class _Job(NamedTuple):
    """A snapshot on its way into the slot."""

    seq: int
    step: int
    plan: Plan
    staged: StagedLeaves
    extras: bytes
    receipt: Receipt
    step_s: float


class Snapshotter:
    """Saves and restores a job's state. One for each process; use it in a `with` statement.

    Args:
        every: how often a call of `save` takes a snapshot: a number of steps (int), or a time
            ("10s", "2min"), which the root turns into steps.
        staging: how the bytes are kept until they are copied: "view" (the default on CPU),
            "pinned_host" (the default elsewhere) or "device".
        fallback: where checkpoints go and come from when memory is not enough.
        fresh: begin anew, whatever the job's memory holds.
        job: the job's name in a script that was not started by `jaxft run` (named after the script
            if None). Such a script is alone; its memory outlives its crashes in a process that is
            started beside it.
        timeout_s: for everything that other processes have to do before `restore` can return.
        save_wait_s: how long a due `save` waits for the outcome of the snapshot before.

    Raises:
        ConfigError: an option that cannot work.
        PeerUnreachable: this host's snapshot process does not answer.
    """

    def __init__(
        self,
        *,
        every: int | str = 10,
        staging: Staging | None = None,
        fallback: OrbaxFallback | None = None,
        fresh: bool = False,
        job: str | None = None,
        timeout_s: float = 600.0,
        save_wait_s: float = 60.0,
    ) -> None:
        arm(config.faults_text())
        self._seat = take_seat(job)
        self.env = self._seat.env
        self.fallback = fallback
        self.staging: Staging = staging if staging is not None else default_staging()
        self.timeout_s = timeout_s
        self.save_wait_s = save_wait_s
        self._fresh = fresh
        self._events = EventLog(config.events_dir(), host=self.env.host, role="rank")
        self._options = _rank_options(every, fallback)
        hello = greeting(
            "rank",
            generation=self.env.generation,
            nonce=self.env.nonce,
            rank=self.env.rank,
            options=self._options,
        )
        self.client = SmpClient(Path(self.env.smp), hello)
        self.client.listeners.append(self._heard)
        self._plans = PlanCache()
        self._receipts: dict[int, Receipt] = {}
        self._lock = threading.Lock()
        self._seq = 0
        self._steps: list[int] = []
        self._last_call: tuple[float, int] | None = None
        self._step_s = 0.0
        self._latest_step: int | None = None
        self._unseen: JaxftError | None = None
        self._begun = False
        self._closed = False
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, daemon=True, name="jaxft-stage")
        self._worker.start()

    # -------------------------------------------------------------------- restore

    def restore(self, like: Any, *, strict: bool = True) -> Restored | None:
        """Gives the newest snapshot that can be had, the same on every rank, on `like`'s shardings.

        What was restored is also the first snapshot of this incarnation of the world, so that a
        host that came in empty is protected and protects again.

        Args:
            like: a tree of arrays or `jax.ShapeDtypeStruct`s with shardings on the mesh of now.
            strict: leaves of the snapshot that `like` lacks are an error.

        Returns:
            None where the job has nothing to restore.

        Raises:
            TreeMismatch: `like` is not the tree that was saved; names the leaf.
            NothingRecoverable: there was a snapshot, and nothing can give it back.
            MemoryLimitError: the snapshot slots do not fit into this host's memory.
            RestoreTimeout: the other ranks or hosts did not come within `timeout_s`.
        """
        if self._begun:
            raise ConfigError("restore comes once, before the first save")
        self._reserve(self._plans.get(like).length)
        if self._fresh:
            self._begin()
            return None
        restored = restore(
            self.client,
            like,
            rank=self.env.rank,
            fallback=self.fallback,
            strict=strict,
            timeout_s=self.timeout_s,
        )
        self._begun = True
        if restored is not None:
            self._events.emit(
                "restored",
                step=restored.step,
                source=restored.source,
                snapshot=str(restored.id),
                restore_s=restored.seconds,
                generation=self.env.generation,
            )
            self.save(restored.step, restored.state, restored.extras)
        return restored

    def _reserve(self, nbytes: int) -> None:
        """Refuses to begin where the slots cannot fit."""
        self.client.say(p.Reserve(nbytes=nbytes), open_as="reserve")
        told = self.client.wait(lambda: self.client.reserved, self.timeout_s, "a word on memory")
        self.client.close_open("reserve")
        if told.error:
            raise MemoryLimitError(told.error)

    def _begin(self) -> None:
        """Saving without restoring: this job's earlier snapshots are left behind."""
        told = self.client.wait(lambda: self.client.plan or None, self.timeout_s, "the first plan")
        attempt = told.plan.attempt
        if told.plan.base is not None and not self._fresh:
            _log.warning(
                "save was called before restore, and job %s has snapshot %s of step %d: it is left "
                "behind. Call restore first, or say fresh=True",
                self.env.job,
                told.plan.base,
                told.plan.step,
            )
        self.client.say(p.Restored(attempt=attempt, how="skipped"), open_as="restored")
        self.client.wait(lambda: self.client.settled, self.timeout_s, "the others' first save")
        self._begun = True

    # -------------------------------------------------------------------- save

    def save(self, step: int, state: Any, extras: Any = None) -> Receipt:
        """Takes a snapshot if one is due. The state may be donated as soon as this returns.

        Args:
            step: a label that grows; every rank calls with the same ones.
            state: any tree of arrays.
            extras: small host values of this rank that belong to this step (None, bool, int, float,
                str, bytes, and lists and dicts of these), for example a data iterator's position.

        Returns:
            A Receipt. A call that is not due is `skipped`, on every rank alike.

        Raises:
            ConfigError: an extra that cannot be kept, or a leaf that cannot.
        """
        if self._closed:
            raise ConfigError("save was called after close")
        encoded = _encode_extras(extras)
        if not self._begun:
            self._begin()
        self._measure(step)
        due_step = self._due_step()
        if due_step is not None and step < due_step:
            return self._skip(step, f"the next snapshot is due at step {due_step}")
        waited_s = self._wait_for_the_last()
        if waited_s is None:
            return self._skip(step, f"snapshot {self._seq - 1} is not decided yet")
        return self._begin_snapshot(step, state, encoded, waited_s)

    def _skip(self, step: int, why: str) -> Receipt:
        self._events.emit("save_skipped", step=step, reason=why)
        return Receipt(step, None, self.code, skipped=why)

    def _measure(self, step: int) -> None:
        """How long a step takes, for intervals in seconds."""
        now_s = time.monotonic()
        if self._last_call is not None and step > self._last_call[1]:
            taken_s = (now_s - self._last_call[0]) / (step - self._last_call[1])
            self._step_s = taken_s if self._step_s == 0.0 else 0.8 * self._step_s + 0.2 * taken_s
        self._last_call = (now_s, step)

    def _due_step(self) -> int | None:
        """The first step at which the next snapshot is due; None for the very first one.

        The interval from snapshot k to k + 1 came with the outcome of k - 1, which was known here
        before k began.
        """
        if self._seq == 0:
            return None
        if self._seq == 1:
            assert self.client.settled is not None
            interval = self.client.settled.interval
        else:
            interval = self.client.outcomes[self._seq - 2].interval
        return self._steps[-1] + interval

    def _wait_for_the_last(self) -> float | None:
        """Waits for the outcome of the snapshot before; None if it does not come in time."""
        if self._seq == 0 or self._seq - 1 in self.client.outcomes:
            return 0.0
        began_s = time.monotonic()
        last = self._seq - 1
        try:
            self.client.wait(
                lambda: self.client.outcomes.get(last), self.save_wait_s, f"outcome of {last}"
            )
        except JaxftError as error:
            _log.error("step not saved: %s", error)
            return None
        return time.monotonic() - began_s

    def _begin_snapshot(self, step: int, state: Any, extras: bytes, waited_s: float) -> Receipt:
        seq = self._seq
        identity = SnapshotId(self.env.generation, seq, self.env.nonce)
        receipt = Receipt(step, identity, self.code)
        receipt.wait_s = waited_s
        plan = self._plans.get(state)
        self._seq += 1
        self._steps = [*self._steps[-1:], step]
        with self._lock:
            self._receipts[seq] = receipt
        known = self.client.outcomes.get(seq)
        if known is not None:
            self._decided(known)
            return receipt
        self._events.emit("saved", seq=seq, step=step, wait_s=waited_s)
        reach("save.begun", rank=self.env.rank, seq=seq, step=step)
        try:
            staged = stage(plan, state, self.staging)
        except StagingError as error:
            self._staging_failed(seq, step, plan, receipt, error)
            return receipt
        self._jobs.put(_Job(seq, step, plan, staged, extras, receipt, self._step_s))
        return receipt

    # -------------------------------------------------------------------- the background thread

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                self._put_into_slot(job)
            except JaxftError as error:
                self._staging_failed(job.seq, job.step, job.plan, job.receipt, error)
            except Exception as error:  # noqa: BLE001 - it is reported, and training goes on
                _log.exception("snapshot %d", job.seq)
                failure = StagingError(
                    f"host {self.env.host}, step {job.step}: the snapshot could not be copied: "
                    f"{error!r}"
                )
                self._staging_failed(job.seq, job.step, job.plan, job.receipt, failure)

    def _put_into_slot(self, job: _Job) -> None:
        """Copies the part into the granted slot and tells the SMP."""
        client = self.client
        self._want_slot(job)

        def answer() -> p.Granted | Outcome | None:
            return client.granted.get(job.seq) or client.outcomes.get(job.seq)

        granted: p.Granted | Outcome = client.wait(
            answer, self.timeout_s, f"a slot for snapshot {job.seq}"
        )
        if isinstance(granted, Outcome):
            job.staged.release()
            return
        arena = client.slot(granted.slot, granted.base + job.plan.length)
        view = arena.view(granted.base, job.plan.length)
        reach("stage.granted", rank=self.env.rank, seq=job.seq, step=job.step)
        checksums = job.staged.copy_into(view, on_progress=lambda done: self._copied(job, done))
        reach("stage.copied", rank=self.env.rank, seq=job.seq, step=job.step)
        part = Part(
            rank=self.env.rank,
            base=granted.base,
            length=job.plan.length,
            ranges=job.plan.ranges,
            checksums=checksums,
            extras=job.extras,
        )
        leaves = msgspec.msgpack.encode(job.staged.leaves)
        client.say(p.Staged(seq=job.seq, part=part, leaves=leaves), open_as="staged")
        reach("stage.told", rank=self.env.rank, seq=job.seq, step=job.step)

    def _want_slot(self, job: _Job) -> None:
        self.client.close_open("staged", "failed")
        want = p.WantSlot(
            seq=job.seq,
            step=job.step,
            plan=job.plan.digest,
            nbytes=job.plan.length,
            step_s=job.step_s,
        )
        self.client.say(want, open_as="slot")

    def _copied(self, job: _Job, done_bytes: int) -> None:
        if 2 * done_bytes >= job.plan.length:
            reach("stage.half", rank=self.env.rank, seq=job.seq, step=job.step)

    def _staging_failed(
        self, seq: int, step: int, plan: Plan, receipt: Receipt, error: JaxftError
    ) -> None:
        """This rank has no part of this snapshot: the root is told, and aborts it for all."""
        _log.error("snapshot of step %d: %s", step, error)
        wrapped = (
            error
            if isinstance(error, SnapshotError)
            else SnapshotLost(f"host {self.env.host}, step {step}: {error}")
        )
        with self._lock:
            self._unseen = wrapped
        receipt.fail(wrapped)
        reason = f"rank {self.env.rank}, step {step}: {error}"
        want = p.WantSlot(seq=seq, step=step, plan=plan.digest, nbytes=plan.length)
        self.client.say(want, open_as="slot")
        self.client.say(p.StagingFailed(seq=seq, reason=reason), open_as="failed")

    # -------------------------------------------------------------------- what the SMP says

    def _heard(self, message: p.ServerMessage) -> None:
        """Called in the connection's thread."""
        match message:
            case p.StagedTold():
                with self._lock:
                    receipt = self._receipts.get(message.seq)
                if receipt is not None and not receipt.staged.done():
                    receipt.staged.set_result(None)
            case p.OutcomeTold():
                self._decided(message.outcome)
            case p.PersistTold():
                self._persist_told(message)

    def _decided(self, outcome: Outcome) -> None:
        """Ends the snapshot's receipt; one that goes to storage stays open for that."""
        with self._lock:
            if outcome.ok:
                self._latest_step = outcome.step
            if outcome.ok and outcome.persist:
                receipt = self._receipts.get(outcome.seq)
            else:
                receipt = self._receipts.pop(outcome.seq, None)
        if receipt is None or receipt.protected.done():
            return
        if outcome.ok:
            if not receipt.staged.done():
                receipt.staged.set_result(None)
            receipt.protected.set_result(None)
            if not outcome.persist:
                receipt.fail(SnapshotSkipped(f"step {outcome.step} was not chosen for storage"))
            return
        error = SnapshotAborted(
            f"snapshot {outcome.seq} of step {receipt.step} was aborted: {outcome.reason}"
        )
        with self._lock:
            self._unseen = error
        receipt.fail(error)
        _log.error("%s", error)

    def _persist_told(self, message: p.PersistTold) -> None:
        order = message.order
        if order.id is None or not order.result:
            return
        with self._lock:
            receipt = self._receipts.pop(order.id.seq, None)
        if receipt is None or receipt.persisted.done():
            return
        if order.result == "written":
            receipt.persisted.set_result(order.step)
        else:
            receipt.fail(SnapshotError(f"step {order.step} was not persisted: {order.result}"))

    # -------------------------------------------------------------------- the rest

    @property
    def code(self) -> Code:
        """What protects this host's snapshots: the code of its group."""
        return Code.parse(self.client.welcome.code)

    @property
    def latest(self) -> int | None:
        """The step of the newest snapshot that is protected, as far as this rank knows."""
        with self._lock:
            return self._latest_step

    def close(self, *, timeout_s: float = 30.0, failing: bool = False) -> None:
        """Waits for the snapshot in progress to be decided, and ends.

        Args:
            timeout_s: how long to wait.
            failing: the script has failed and will be run again. A script that nobody launched
                keeps its memory then, and lets it go otherwise: its job is done.

        Raises:
            SnapshotError: the last snapshot failed and nobody has looked at its receipt.
        """
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._worker.join(timeout_s)
        unseen: JaxftError | None = None
        try:
            if self._seq > 0:
                last = self._seq - 1
                outcome = self.client.wait(
                    lambda: self.client.outcomes.get(last), timeout_s, f"outcome of {last}"
                )
                unseen = self._unseen if not outcome.ok else None
        except JaxftError as error:
            unseen = SnapshotLost(f"the last snapshot was not decided: {error}")
        finally:
            with self._lock:
                receipts, self._receipts = self._receipts, {}
            for receipt in receipts.values():
                receipt.fail(SnapshotLost("the snapshotter was closed before it was known"))
            self.client.close()
            self._events.close()
            if failing:
                self._seat.leave()
            else:
                self._seat.finish()
        if unseen is not None:
            raise unseen

    def __enter__(self) -> Snapshotter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(timeout_s=1.0, failing=True)
        except JaxftError as also:
            _log.error("while the script was failing: %s", also)


def _rank_options(every: int | str, fallback: OrbaxFallback | None) -> RankOptions:
    steps, seconds = _interval(every)
    if fallback is None:
        return RankOptions(every_steps=steps, every_s=seconds)
    return RankOptions(
        every_steps=steps,
        every_s=seconds,
        directory=str(fallback.directory),
        persist_every=fallback.every,
        persist_keep=fallback.keep,
        storage=fallback.entries(),
    )


def _interval(every: int | str) -> tuple[int, float]:
    """(steps, 0) or (0, seconds)."""
    if isinstance(every, bool) or not isinstance(every, int | str):
        raise ConfigError(f'every={every!r}: expected a number of steps or a time like "10s"')
    if isinstance(every, int):
        if every < 1:
            raise ConfigError(f"every={every}: expected at least 1 step")
        return every, 0.0
    match = _DURATION.fullmatch(every)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f'every="{every}": expected a time like "500ms", "10s", "2min" or "1h"')
    return 0, float(match[1]) * _SECONDS[match[2]]


def _encode_extras(extras: Any) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(extras)
        if msgspec.msgpack.decode(encoded) == extras:
            return encoded
        problem = "they would come back changed (tuples, or keys that are no strings)"
    except (TypeError, OverflowError, msgspec.MsgspecError) as error:
        problem = str(error)
    raise ConfigError(
        f"extras of type {type(extras).__name__} cannot be kept: {problem}. Use None, bool, int, "
        "float, str, bytes, and lists and dicts of these"
    )
