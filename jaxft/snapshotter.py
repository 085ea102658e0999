"""Saving: how a snapshot is taken, from the call of `save` to its outcome.

    due? -> the one before decided? -> plan -> stage (donation is safe from here on; save returns)
        in a background thread:  slot granted -> copied and checksummed into it -> staged
        in the SMPs:             coded -> committed or aborted -> protected

Every rank decides by what all ranks know at that call: the steps of the snapshots before, and the
intervals that came with their outcomes. So all ranks begin the same snapshots, and nobody is asked.
While snapshots are held (a host's SMP cannot hear the root's) no call waits and none is begun.
"""

from __future__ import annotations

import functools
import logging
import operator
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import jax
import msgspec
from jax.profiler import TraceAnnotation

from jaxft import config
from jaxft.device.lanes import Rings, find_rings
from jaxft.device.shards import Plan, PlanCache, Processes
from jaxft.device.transfer import (
    StagedLeaves,
    Staging,
    check_staging,
    gatherer_for,
    stage_leaves,
    wait_computed,
)
from jaxft.errors import (
    ConfigError,
    JaxftError,
    MemoryLimitError,
    PeerUnreachable,
    SnapshotAborted,
    SnapshotError,
    SnapshotLost,
    SnapshotSkipped,
    StagingError,
)
from jaxft.extras import encode_extras
from jaxft.fallback import OrbaxFallback
from jaxft.faults import arm, reach
from jaxft.group.manifest import Part, SnapshotId
from jaxft.group.messages import Measured, Outcome, RankOptions, Turn
from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from jaxft.overhead import Auto, Meter
from jaxft.receipt import Receipt, SkippedReceipt
from jaxft.restorer import Restored, restore
from jaxft.schedule import AwaitTurn, Begin, Missed, Schedule, Skip
from jaxft.startup import leaves_by, rank_options, take_seat
from jaxft.status.events import EventLog
from jaxft.watched import be_watched

_log = logging.getLogger(__name__)

Parity = Literal["host", "device"]


class _Job(NamedTuple):
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


# Runs the step that this call is within, and gives the bytes of the state it was given. What it is
# handed: the snapshot, its plan, the state's leaves, and what stages them as `save` does.
RunStep = Callable[[SnapshotId, Plan, list[Any], Callable[[], StagedLeaves]], StagedLeaves]


class _Quiet(NamedTuple):
    """Until something is learned, no call of `save` before step `until` is due, and `why`."""

    until: int
    why: str
    code: Code


class Snapshotter:
    """Saves and restores a job's state. One for each process; use it in a `with` statement.

    Args:
        every: how often a call of `save` takes a snapshot: a number of steps (int), or a time
            ("10s", "2min"), which the root turns into steps, or a budget (`Auto`).
        staging: how the bytes are kept until they are copied: "view" (the default on CPU),
            "pinned_host" (the default elsewhere) or "device". With "view", `save` waits for a step
            that still computes the state: JAX gives no hold on a buffer before.
        parity: who computes what protects the snapshots: "host", the snapshot processes; or
            "device", the devices, in the program that a step which `jaxft.wrap` has made runs. What
            they do not have alike (small and uneven leaves, NumPy arrays), and what `save` itself
            takes, is left to the hosts. By default what JAXFT_PARITY says, else "host"; the same on
            all ranks.
        fallback: where checkpoints go and come from when memory is not enough.
        fresh: begin anew, whatever the job's memory holds.
        job: the job's name in a script that was not started by `jaxft run` (named after the script
            if None). Such a script is alone; its memory outlives its crashes in a process that is
            started beside it.
        timeout_s: for everything that other processes have to do before `restore` can return.
        save_wait_s: how long a due `save` waits for the outcome of the snapshot before. It does not
            wait at all while snapshots are held.

    Its methods are for one thread. Callbacks on a receipt's futures run in a thread of the
    snapshotter, and must not wait for anything of it.

    Raises:
        ConfigError: an option that cannot work.
        PeerUnreachable: this host's snapshot process does not answer.
    """

    def __init__(
        self,
        *,
        every: int | str | Auto = 10,
        staging: Staging | None = None,
        parity: Parity | None = None,
        fallback: OrbaxFallback | None = None,
        fresh: bool = False,
        job: str | None = None,
        timeout_s: float = 600.0,
        save_wait_s: float = 60.0,
    ) -> None:
        arm(config.faults_text())
        self.staging = check_staging(staging)
        self.parity = _check_parity(parity or config.parity() or "host")
        self.timeout_s = _check_seconds("timeout_s", timeout_s)
        self.save_wait_s = _check_seconds("save_wait_s", save_wait_s)
        self.fallback = fallback
        self._fresh = fresh
        rank_options(every, None)  # what cannot work is refused first
        self._seat = take_seat(job, lambda: rank_options(every, fallback).newest_generation)
        self.env = self._seat.env
        options = self._options(every)
        hello = greeting(
            "rank",
            generation=self.env.generation,
            nonce=self.env.nonce,
            rank=self.env.rank,
            options=options,
        )
        try:
            self.client = SmpClient(Path(self.env.smp), hello)
        except BaseException:
            self._seat.leave()
            raise
        self._events = EventLog(config.events_dir(), host=self.env.host, role="rank")
        self.rings = self._find_rings()
        self._plans = PlanCache(rings=self.rings)
        self._wraps = False
        self._gatherer = gatherer_for(self.staging)
        self._lock = threading.Lock()  # guards the next six, which both threads change
        self._quiet: _Quiet | None = None
        self._schedule = Schedule()
        self._page = be_watched()
        self._counter = self._page.counter  # of calls, which the agent looks at
        self._meter = Meter() if isinstance(every, Auto) else None
        self._receipts: dict[int, Receipt] = {}
        self._latest_step: int | None = None
        self._last_failure: JaxftError | None = None
        self._begun = False
        self._held = ""
        self._closed = False
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, daemon=True, name="jaxft-stage")
        self._worker.start()
        self.client.listeners.append(self._heard)
        self.client.failure_listeners.append(self._end_receipts)

    def _options(self, every: int | str | Auto) -> RankOptions:
        """What this rank asks of its world. Another job's checkpoints are refused: restoring would
        take them for this job's own."""
        try:
            if self.fallback is not None:
                self.fallback.check_job(self.env.job)
            return rank_options(every, self.fallback)
        except BaseException:
            self._seat.leave()
            raise

    def _find_rings(self) -> Rings | None:
        """Which devices code with each other, if they are to, and this world is one where they can:
        all ranks find the same."""
        welcome = self.client.welcome
        if self.parity == "host" or not any(group.parity for group in welcome.groups):
            return None
        world = Processes.here()
        try:
            return find_rings(welcome.groups, welcome.ranks, jax.devices(), world.of, world.index)
        except ConfigError as error:
            _log.warning('parity="device": the hosts compute all parity in this world: %s', error)
            return None

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
        if self._begun or self._closed:
            raise ConfigError("restore comes once, before the first save and before close")
        if self._fresh:
            self._begin(like)
            return None
        self._reserve(like)
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

    def _reserve(self, state: Any) -> None:
        """Refuses to begin where the slots cannot fit."""
        nbytes = self._plans.get(state).length
        self.client.say(p.Reserve(nbytes=nbytes), open_as="reserve")
        told = self.client.wait(lambda: self.client.reserved, self.timeout_s, "a word on memory")
        self.client.close_open("reserve")
        if told.error:
            raise MemoryLimitError(told.error)

    def _begin(self, state: Any) -> None:
        """Saving without restoring: this job's earlier snapshots are left behind."""
        self._reserve(state)
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

    def save(self, step: int, state: Any, extras: Any = None, *, force: bool = False) -> Receipt:
        """Takes a snapshot if one is due. The state may be donated as soon as this returns.

        Args:
            step: a label that grows; every rank calls with the same ones.
            state: any tree of arrays.
            extras: small host values of this rank that belong to this step (None, bool, int, float,
                str, bytes, and lists and dicts of these), for example a data iterator's position.
            force: this call is due, whatever the interval says; every rank says so of the same one.

        Returns:
            A Receipt. A call that is not due is `skipped`, on every rank alike, and does not look
            at the state; it takes some microseconds. What goes wrong
            with a snapshot never raises here: its receipt says so, and so does the next call's
            `last_failure`. While snapshots are held, because a host's SMP does not hear the root's,
            a due call begins none and does not wait, and its futures raise SnapshotAborted.

        Raises:
            ConfigError: a step that is no integer; in a call that is due, an extra or a leaf that
                cannot be kept.
            MemoryLimitError: the first call, where `restore` was not called and slots do not fit.
        """
        began_s = time.monotonic()
        if type(step) is not int:
            step = _check_step(step)
        receipt = None if force else self._skip(step, began_s)
        if receipt is not None:
            return receipt
        with TraceAnnotation("jaxft.save"):  # what a profile of the training shows it as
            receipt = self._save(step, state, extras, began_s, force=force)
        receipt.stall_s = time.monotonic() - began_s
        return receipt

    def save_within(
        self, step: int, state: Callable[[], Any], extras: Callable[[], Any], run: RunStep
    ) -> Receipt:
        """`save`, for whoever runs the step on that state at the same time, as `jaxft.wrap` does.

        Args:
            step: as for `save`.
            state: gives the state; called unless the call is known not to be due.
            extras: gives the extras, likewise.
            run: called if, and only if, this call begins a snapshot that is to be staged. What it
                raises comes through, and ends the snapshot.
        """
        began_s = time.monotonic()
        self._wraps = True
        step = _check_step(step)
        receipt = self._skip(step, began_s)
        if receipt is None:
            receipt = self._save(step, state(), extras(), began_s, run)
            receipt.stall_s = time.monotonic() - began_s
        return receipt

    def skip(self, step: int) -> Receipt | None:
        """`save` in a call that is known not to be due, for whoever has to make the state and the
        extras first. None: it may be due, and `save` has to be called."""
        return self._skip(_check_step(step), time.monotonic())

    def _skip(self, step: int, now_s: float) -> Receipt | None:
        """A call that is known not to be due. Most calls are, each just after a step that has left
        cold caches: nothing is touched that is not needed."""
        with self._lock:
            quiet = self._quiet
            if quiet is None or step >= quiet.until:
                return None
            self._schedule.skip(step, now_s)
            self._counter[0] = self._schedule.calls
        if self._events.is_on:
            self._events.emit("save_skipped", step=step, due_step=quiet.until)
        receipt = SkippedReceipt(step, quiet.code, quiet.why, self._last_failure)
        receipt.stall_s = time.monotonic() - now_s
        if self._meter is not None:
            self._meter.skipped(receipt.stall_s)
        return receipt

    def _save(
        self,
        step: int,
        state: Any,
        extras: Any,
        now_s: float,
        run: RunStep | None = None,
        *,
        force: bool = False,
    ) -> Receipt:
        if self._closed:
            raise ConfigError("save was called after close")
        encoded = encode_extras(extras)
        if not self._begun:
            self._begin(state)
            now_s = time.monotonic()
        self._schedule.called(step, now_s)
        with self._lock:
            self._quiet = None
            self._schedule.enter(forced=force)
            self._counter[0] = self._schedule.calls
        self._meter_called(step, state, now_s)
        planned = None
        if self._schedule.is_due(step):  # a tree that cannot be saved is refused before it begins
            planned = self._plans.find(state)
        decision, receipt = self._decide(step)
        if isinstance(decision, Skip):
            self._events.emit("save_skipped", step=step, due_step=decision.due_step)
        elif isinstance(decision, Begin):
            plan, values = planned or self._plans.find(state)
            self._begin_snapshot(receipt, decision.seq, plan, values, encoded, run)
        with self._lock:
            if self._meter is not None and (run is None or not isinstance(decision, Begin)):
                self._meter.left(time.monotonic(), skipped=isinstance(decision, Skip))
            self._find_quiet(receipt)
        return receipt

    def _find_quiet(self, receipt: Receipt) -> None:
        """Are the calls after this one, which was skipped, known not to be due?"""
        until = self._schedule.due_step
        if receipt.skipped is None or until is None or not self._schedule.quiet:
            return
        if self._meter is None or not self._meter.watching:
            self._quiet = _Quiet(until, _why_not(until), receipt.code)

    def _meter_called(self, step: int, state: Any, now_s: float) -> None:
        """A step that is measured ends when its state is there."""
        if self._meter is None:
            return
        is_measured = self._meter.watching or self._schedule.is_due(step)
        if is_measured and wait_computed(state):
            now_s = time.monotonic()
        with self._lock:
            self._meter.called(step, now_s)

    def _decide(self, step: int) -> tuple[Skip | Begin | None, Receipt]:
        """What this call is. One that is due waits for the outcome of the snapshot before, unless
        snapshots are held; None: it ends without, and its receipt says why."""
        assert self.client.settled is not None, "it is waited for before the first save"
        self._schedule.first_interval = self.client.settled.interval
        began_s = time.monotonic()
        wait_s = 0.0
        while True:
            with self._lock:
                decision = self._schedule.decide(step, held=bool(self.client.held))
            if isinstance(decision, Skip | Begin):
                return decision, self._receipt(step, wait_s, decision)
            error: JaxftError | None = None
            try:
                if isinstance(decision, AwaitTurn):
                    self._wait_for_turn(decision.number, began_s + self.save_wait_s)
                else:
                    self._wait_for(decision.seq, began_s + self.save_wait_s)
            except JaxftError as failure:
                error = failure
            wait_s = time.monotonic() - began_s
            if error is not None:
                receipt = self._receipt(step, wait_s)
                self._let_pass(receipt, error)
                return None, receipt

    def _receipt(self, step: int, wait_s: float, decision: Skip | Begin | None = None) -> Receipt:
        receipt: Receipt
        if isinstance(decision, Skip):
            why = _why_not(decision.due_step)
            receipt = SkippedReceipt(step, self.code, why, self._last_failure)
        else:
            receipt = Receipt(step, self.code, last_failure=self._last_failure)
        receipt.wait_s = wait_s
        return receipt

    def _wait_for_turn(self, number: int, deadline_s: float) -> None:
        """Waits until it is known which call snapshot out of turn `number` is to be. If that does
        not come, this call goes on without.

        Raises:
            JaxftError: the connection is lost.
        """

        def known_or_held() -> bool | None:
            return self._schedule.knows_turn(number) or bool(self.client.held) or None

        what = f"the word which call of save is snapshot out of turn {number}"
        try:
            self.client.wait(known_or_held, max(0.0, deadline_s - time.monotonic()), what)
        except PeerUnreachable as error:
            if self.client.failure is not None:
                raise
            _log.warning("%s", error)
        with self._lock:
            if not self._schedule.knows_turn(number):
                self._schedule.break_promise()

    def _wait_for(self, seq: int, deadline_s: float) -> None:
        """Waits until this rank has learned the outcome of `seq`.

        Raises:
            SnapshotAborted: snapshots are held.
            JaxftError: none came by then, or the connection is lost.
        """

        def known_or_held() -> bool | None:
            return seq in self._schedule.outcomes or bool(self.client.held) or None

        what = f"the outcome of snapshot {seq} (every rank has to call save with the same steps)"
        self.client.wait(known_or_held, max(0.0, deadline_s - time.monotonic()), what)
        if self.client.held:
            raise SnapshotAborted(f"no snapshot is begun for now: {self.client.held}")

    def _let_pass(self, receipt: Receipt, error: JaxftError) -> None:
        """A due call ends without a snapshot; training goes on."""
        # What holds snapshots was said when it began; not again with every call.
        self._fail(receipt, error, loud=not isinstance(error, SnapshotAborted))
        with self._lock:
            missed = self._schedule.let_pass(receipt.step)
            if self._meter is not None:
                self._meter.spoil()
        self._say_missed(missed, str(error))

    def _say_missed(self, missed: Missed | None, reason: str) -> None:
        if missed is not None:
            told = p.Missed(seq=missed.seq, step=missed.step, reason=reason, call=missed.call)
            self.client.say(told, open_as="missed")

    def _begin_snapshot(
        self,
        receipt: Receipt,
        seq: int,
        plan: Plan,
        values: list[Any],
        extras: bytes,
        run: RunStep | None,
    ) -> None:
        """Holds the state's bytes, and leaves the rest to the background thread."""
        step = receipt.step
        receipt.id = SnapshotId(self.env.generation, seq, self.env.nonce)
        measured = Measured()
        with self._lock:
            self._receipts[seq] = receipt
            if self._meter is not None:
                self._meter.begins(seq)
                measured = self._meter.measured()
                if run is not None:  # what follows is a step, which is slower for the snapshot
                    self._meter.left(time.monotonic(), skipped=False)
        self._events.emit("saved", seq=seq, step=step, wait_s=receipt.wait_s)
        reach("save.begun", rank=self.env.rank, seq=seq, step=step)
        decided = self.client.outcomes.get(seq)
        if decided is not None:  # another host could not take it
            self._decided(decided)
            return
        staged: StagedLeaves | StagingError
        try:
            if run is None:
                self._mind_parity(plan, seq)
                staged = stage_leaves(plan, values, self.staging, self._gatherer)
            else:
                stage = functools.partial(stage_leaves, plan, values, self.staging, self._gatherer)
                staged = run(receipt.id, plan, values, stage)
                receipt.parity = "device" if staged.parity_bytes else "host"
        except StagingError as error:
            self._fail(receipt, error)
            staged = error
        except BaseException as error:
            # It has begun, on other ranks too, which wait for its outcome.
            staged = StagingError(str(error) or repr(error))
            self._fail(receipt, staged)
            raise
        finally:
            step_s, call = self._schedule.step_s, self._schedule.calls
            self._jobs.put(_Job(seq, step, plan, staged, extras, receipt, step_s, call, measured))

    def _mind_parity(self, plan: Plan, seq: int) -> None:
        """Says once that `save` leaves parity to the hosts. (What `restore` has brought, the start
        and the end are saved by it in a script that wraps its step, too.)"""
        if plan.lanes is not None and seq > 0 and not self._wraps:
            self._wraps = True
            _log.warning(
                'parity="device" is for steps that jaxft.wrap has made: the hosts compute the '
                "parity of what save takes"
            )

    # -------------------------------------------------------------------- the background thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._put_into_slot(job)
            except JaxftError as error:
                self._say_failed(job, error)
            except Exception as error:  # noqa: BLE001 - its receipt says it, and training goes on
                _log.exception("snapshot %d of step %d", job.seq, job.step)
                self._say_failed(job, StagingError(f"it could not be copied: {error!r}"))
            plan = job.plan
            del job  # the last reference to the state's bytes
            self._gatherer.prepare(plan, may_go_on=self._jobs.empty)

    def _put_into_slot(self, job: _Job) -> None:
        """Copies the part into the granted slot and tells the SMP."""
        if isinstance(job.staged, StagingError):
            raise job.staged
        client = self.client
        self._want_slot(job)

        def answered() -> bool | None:
            known = job.seq in client.granted or job.seq in client.outcomes
            return known or bool(client.held) or None

        client.wait(answered, self.timeout_s, f"a slot for snapshot {job.seq}")
        if job.seq in client.outcomes:  # aborted meanwhile
            return
        if job.seq not in client.granted:  # the bytes are not kept for as long as that lasts
            raise SnapshotAborted(f"it had no slot yet: {client.held}")
        granted = client.granted[job.seq]
        nbytes = job.staged.length
        arena = client.slot(granted.slot, granted.base + nbytes)
        arena.map_pages(granted.base, nbytes)
        view = arena.view(granted.base, nbytes)
        reach("stage.granted", rank=self.env.rank, seq=job.seq, step=job.step)
        checksums = job.staged.copy_into(view, on_progress=lambda done: self._copied(job, done))
        reach("stage.copied", rank=self.env.rank, seq=job.seq, step=job.step)
        part = Part(
            rank=self.env.rank,
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
        reach("stage.told", rank=self.env.rank, seq=job.seq, step=job.step)

    def _want_slot(self, job: _Job) -> None:
        self.client.close_open("staged", "failed")
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
        self.client.say(want, open_as="slot")

    def _copied(self, job: _Job, done_bytes: int) -> None:
        if 2 * done_bytes >= job.plan.length:
            reach("stage.half", rank=self.env.rank, seq=job.seq, step=job.step)

    def _say_failed(self, job: _Job, error: JaxftError) -> None:
        """This rank has no part of this snapshot: the root is told, and aborts it for all."""
        self._fail(job.receipt, error)
        self._want_slot(job)
        reason = f"rank {self.env.rank}, step {job.step}: {error}"
        self.client.say(p.StagingFailed(seq=job.seq, reason=reason), open_as="failed")

    def _fail(self, receipt: Receipt, error: JaxftError, *, loud: bool = True) -> None:
        """Ends a receipt with an error that names host and step; the first one is the cause."""
        kind = type(error) if isinstance(error, SnapshotError) else SnapshotLost
        failure = kind(f"host {self.env.host}, step {receipt.step}: {error}")
        if not receipt.protected.done():
            # What ended the connection for good was said when it did.
            if loud and error is not self.client.failure:
                _log.error("%s", failure)
            with self._lock:
                self._last_failure = failure
        receipt.fail(failure)

    # -------------------------------------------------------------------- what the SMP says

    def _heard(self, message: p.ServerMessage) -> None:
        """Called in the connection's thread."""
        match message:
            case p.StagedTold():
                with self._lock:
                    receipt = self._receipts.get(message.seq)
                if receipt is not None:
                    receipt.stage()
            case p.OutcomeTold():
                self._learn(message.outcome)
                self._decided(message.outcome)
            case p.HeldTold():
                self._held_told(message.reason)
            case p.TurnTold():
                self._turn_told(message.turn)
            case p.PersistTold():
                self._persist_told(message)

    def _learn(self, outcome: Outcome) -> None:
        """What the schedule makes of an outcome; calls of `save` that wait for it go on."""
        with self._lock:
            self._quiet = None
            unbegun = outcome.seq >= self._schedule.seq and not outcome.ok
            missed = self._schedule.learn(outcome)
            if self._meter is not None:
                self._meter.decided(outcome.seq, time.monotonic(), ok=outcome.ok)
            if unbegun:
                self._last_failure = SnapshotAborted(
                    f"host {self.env.host}, step {outcome.step}: snapshot {outcome.seq} was "
                    f"aborted before it began here: {outcome.reason}"
                )
                _log.error("%s", self._last_failure)
        self.client.notify()
        # It was due at a call that is over: other ranks may have begun it there.
        self._say_missed(missed, f"the outcome of snapshot {outcome.seq} was not known here yet")

    def _turn_told(self, turn: Turn) -> None:
        """The root asks for the last call of `save`, or names the one that is to be a snapshot."""
        with self._lock:
            self._quiet = None
            answer, missed = self._schedule.hear(turn)
        self.client.notify()
        if answer is not None:
            told = p.LastCall(number=answer.number, call=answer.call)
            self.client.say(told, open_as="turn")
        self._say_missed(missed, f"its call {turn.call} of save was to be a snapshot out of turn")

    def _held_told(self, reason: str) -> None:
        """Said once when it begins and once when it is over, not with every call of `save`."""
        if reason and not self._held:
            _log.warning(
                "host %s: no snapshot can be protected for now, training goes on: %s",
                self.env.host,
                reason,
            )
        elif self._held and not reason:
            _log.warning("host %s: snapshots go on", self.env.host)
        self._held = reason

    def _decided(self, outcome: Outcome) -> None:
        """Ends the snapshot's receipt; one that goes to storage stays open for that."""
        with self._lock:
            receipt = self._receipts.get(outcome.seq)
            if not (outcome.ok and outcome.persist):
                self._receipts.pop(outcome.seq, None)
            if outcome.ok:
                self._latest_step = outcome.step
                self._last_failure = None
        if receipt is None:
            return
        if not outcome.ok:
            what = f"snapshot {outcome.seq} was aborted: {outcome.reason}"
            self._fail(receipt, SnapshotAborted(what))
            return
        receipt.protect()
        if not outcome.persist:
            receipt.fail(SnapshotSkipped(f"step {outcome.step} was not chosen for storage"))

    def _persist_told(self, message: p.PersistTold) -> None:
        order = message.order
        if order.id is None or not order.result:
            return
        with self._lock:
            receipt = self._receipts.pop(order.id.seq, None)
        if receipt is None:
            return
        if order.result == "written":
            receipt.persist(order.step)
        else:
            receipt.fail(SnapshotError(f"step {order.step} was not persisted: {order.result}"))

    def _end_receipts(self, error: JaxftError) -> None:
        """Nothing that is still open can be known any more, for example: the SMP is lost."""
        with self._lock:
            receipts, self._receipts = self._receipts, {}
        for receipt in receipts.values():
            self._fail(receipt, error)

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

    def is_due(self, step: int) -> bool:
        """Would a call of `save` with this step take a snapshot, unless what is on its way now, or
        one out of turn, changes that? It does not count as a call."""
        with self._lock:
            return self._schedule.is_due(step)

    @property
    def next_seq(self) -> int:
        """The number that the next snapshot will have in its identity."""
        return self._schedule.seq

    @property
    def turn(self) -> int:
        """The number of the last snapshot out of turn that was begun here; 0 before any."""
        return self._schedule.taken

    @property
    def step(self) -> int | None:
        """The step of the last call of `save`, or what was restored; None before either."""
        return self._schedule.last_step

    def close(self, *, timeout_s: float = 30.0, failing: bool = False) -> None:
        """Waits for the snapshot in progress to be decided, and ends.

        Args:
            timeout_s: how long to wait.
            failing: the script has failed and will be run again. A script that nobody launched
                keeps its memory then, and lets it go otherwise: its job is done.

        Raises:
            SnapshotError: the last snapshot failed.
        """
        if self._closed:
            return
        with self._lock:
            self._closed, self._quiet = True, None
        self._page.end()
        deadline_s = time.monotonic() + timeout_s
        self._jobs.put(None)
        self._worker.join(timeout_s)
        last = self._schedule.seq - 1
        try:
            if last >= 0:
                left_s = max(0.0, deadline_s - time.monotonic())
                what = f"the outcome of snapshot {last}"
                self.client.wait(lambda: self.client.outcomes.get(last), left_s, what)
        except JaxftError as error:
            self._end_receipts(error)
        self.client.close()
        self._end_receipts(SnapshotLost("the snapshotter was closed before it was known"))
        self._events.close()
        if failing:
            self._seat.leave()
        else:
            self._seat.finish()
        if self._last_failure is not None:
            raise self._last_failure

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
        if isinstance(error, SystemExit):
            leaves_by(error)
        try:
            self.close(timeout_s=1.0, failing=True)
        except JaxftError as also:
            _log.error("while the script was failing: %s", also)


def _check_parity(parity: str) -> Parity:
    known: Parity
    for known in get_args(Parity):
        if parity == known:
            return known
    raise ConfigError(f'parity={parity!r} (or JAXFT_PARITY): expected "host" or "device"')


def _check_seconds(name: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{name}={value!r}: expected more than 0 seconds")
    return value


def _why_not(due_step: int) -> str:
    return f"the next snapshot is due at step {due_step}"


def _check_step(step: Any) -> int:
    """A step as an int, also from NumPy and JAX."""
    try:
        return operator.index(step)
    except TypeError as error:
        raise ConfigError(f"step={step!r}: expected an integer") from error
