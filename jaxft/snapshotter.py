"""Saving: how a snapshot is taken, from the call of `save` to its outcome.

    due? -> the one before decided? -> plan -> stage (donation is safe from here on; save returns)
        in a background thread:  slot granted -> copied and checksummed into it -> staged
        in the SMPs:             coded -> committed or aborted -> protected

What a call is, `saving.due` says; `saving.filling` has the background thread; and what becomes of a
snapshot, `saving.open_receipts` tells its receipt.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import jax
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
)
from jaxft.errors import (
    ConfigError,
    JaxftError,
    MemoryLimitError,
    SnapshotLost,
    StagingError,
)
from jaxft.extras import encode_extras
from jaxft.fallback import OrbaxFallback
from jaxft.faults import arm, reach
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import RankOptions
from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from jaxft.overhead import Auto, Meter
from jaxft.receipt import Receipt
from jaxft.restorer import Restored, restore
from jaxft.saving.due import DueCalls
from jaxft.saving.filling import Filler, Job
from jaxft.saving.open_receipts import OpenReceipts
from jaxft.schedule import Begin
from jaxft.startup import leaves_by, rank_options, take_seat
from jaxft.status.events import EventLog
from jaxft.watched import be_watched

_log = logging.getLogger(__name__)

Parity = Literal["host", "device"]


# Runs the step that this call is within, and gives the bytes of the state it was given. What it is
# handed: the snapshot, its plan, the state's leaves, and what stages them as `save` does.
RunStep = Callable[[SnapshotId, Plan, list[Any], Callable[[], StagedLeaves]], StagedLeaves]


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
            if None). Without a store such a script is alone; its memory outlives its crashes in a
            process that is started beside it.
        store: where the hosts of such a script meet, if a scheduler has started it as many ranks
            (`srun python train.py`): a URL as for `jaxft run --store`. Call
            `jax.distributed.initialize()` before. A script that `jaxft run` has started has that
            run's store, whatever is said here, and its code.
        code: how many hosts may be lost, with `store`: a `Code`, or "K+M"; 3+1 by default, with as
            much parity as there are hosts for.
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
        store: str = "",
        code: Code | str = "",
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
        self._seat = take_seat(
            job, lambda: rank_options(every, fallback).newest_generation, store, _check_code(code)
        )
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
        self._page = be_watched()
        self._receipts = OpenReceipts(self.env.host, self.client)
        meter = Meter() if isinstance(every, Auto) else None
        self._due = DueCalls(
            self.client, self._receipts, self._events, self._page, meter, self.save_wait_s
        )
        self._filler = Filler(
            self.client, self.env.rank, self._receipts, self._gatherer, self.timeout_s
        )
        self._begun = False
        self._closed = False
        self.client.listeners.append(self._heard)
        self.client.failure_listeners.append(self._receipts.end_all)

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
        if self.parity == "host":
            return None
        if not any(group.parity for group in welcome.groups):
            hosts = sum(len(group.hosts) for group in welcome.groups)
            why = "of one host" if hosts == 1 else f"of {hosts} hosts, whose code has none"
            _log.warning(
                'parity="device": there is no parity in this world %s: neither devices nor hosts '
                "compute any",
                why,
            )
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
        receipt = None if force else self._due.skip(step, began_s)
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
        receipt = self._due.skip(step, began_s)
        if receipt is None:
            receipt = self._save(step, state(), extras(), began_s, run)
            receipt.stall_s = time.monotonic() - began_s
        return receipt

    def skip(self, step: int) -> Receipt | None:
        """`save` in a call that is known not to be due, for whoever has to make the state and the
        extras first. None: it may be due, and `save` has to be called."""
        return self._due.skip(_check_step(step), time.monotonic())

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
        due, within = self._due, run is not None
        due.enter(step, state, now_s, forced=force)
        planned = None
        if due.is_due(step):  # a tree that cannot be saved is refused before it begins
            planned = self._plans.find(state)
        decision, receipt = due.decide(step)
        if isinstance(decision, Begin):
            plan, values = planned or self._plans.find(state)
            self._begin_snapshot(receipt, decision.seq, plan, values, encoded, run)
        due.leave(decision, receipt, within=within)
        return receipt

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
        self._receipts.open(seq, receipt)
        measured = self._due.begin(seq, within=run is not None)
        self._events.emit("saved", seq=seq, step=step, wait_s=receipt.wait_s)
        reach("save.begun", rank=self.env.rank, seq=seq, step=step)
        decided = self.client.outcomes.get(seq)
        if decided is not None:  # another host could not take it
            self._receipts.decide(decided)
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
            self._receipts.fail(receipt, error)
            staged = error
        except BaseException as error:
            # It has begun, on other ranks too, which wait for its outcome.
            staged = StagingError(str(error) or repr(error))
            self._receipts.fail(receipt, staged)
            raise
        finally:
            known = self._due.schedule
            step_s, call = known.step_s, known.calls
            self._filler.put(Job(seq, step, plan, staged, extras, receipt, step_s, call, measured))

    def _mind_parity(self, plan: Plan, seq: int) -> None:
        """Says once that `save` leaves parity to the hosts. (What `restore` has brought, the start
        and the end are saved by it in a script that wraps its step, too.)"""
        if plan.lanes is not None and seq > 0 and not self._wraps:
            self._wraps = True
            _log.warning(
                'parity="device" is for steps that jaxft.wrap has made: the hosts compute the '
                "parity of what save takes"
            )

    # -------------------------------------------------------------------- what the SMP says

    def _heard(self, message: p.ServerMessage) -> None:
        """Called in the connection's thread."""
        match message:
            case p.StagedTold():
                self._receipts.stage(message.seq)
            case p.OutcomeTold():
                self._due.learn(message.outcome)
                self._receipts.decide(message.outcome)
            case p.HeldTold():
                self._due.hold(self.env.host, message.reason)
            case p.TurnTold():
                self._due.hear(message.turn)
            case p.PersistTold():
                self._receipts.persist(message.order)

    # -------------------------------------------------------------------- the rest

    @property
    def code(self) -> Code:
        """What protects this host's snapshots: the code of its group."""
        return self._due.code

    @property
    def latest(self) -> int | None:
        """The step of the newest snapshot that is protected, as far as this rank knows."""
        return self._receipts.latest_step

    def is_due(self, step: int) -> bool:
        """Would a call of `save` with this step take a snapshot, unless what is on its way now, or
        one out of turn, changes that? It does not count as a call."""
        return self._due.is_due(step)

    @property
    def next_seq(self) -> int:
        """The number that the next snapshot will have in its identity."""
        return self._due.schedule.seq

    @property
    def turn(self) -> int:
        """The number of the last snapshot out of turn that was begun here; 0 before any."""
        return self._due.schedule.taken

    @property
    def step(self) -> int | None:
        """The step of the last call of `save`, or what was restored; None before either."""
        return self._due.schedule.last_step

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
        self._closed = True
        self._due.stop()
        self._page.end()
        deadline_s = time.monotonic() + timeout_s
        self._filler.finish(timeout_s)
        last = self._due.schedule.seq - 1
        try:
            if last >= 0:
                left_s = max(0.0, deadline_s - time.monotonic())
                what = f"the outcome of snapshot {last}"
                self.client.wait(lambda: self.client.outcomes.get(last), left_s, what)
        except JaxftError as error:
            self._receipts.end_all(error)
        self.client.close()
        self._receipts.end_all(SnapshotLost("the snapshotter was closed before it was known"))
        self._events.close()
        if failing:
            self._seat.leave()
        else:
            self._seat.finish()
        if self._receipts.last_failure is not None:
            raise self._receipts.last_failure

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


def _check_code(code: Code | str) -> str:
    return str(Code.parse(code) if isinstance(code, str) and code else code)


def _check_seconds(name: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{name}={value!r}: expected more than 0 seconds")
    return value


def _check_step(step: Any) -> int:
    """A step as an int, also from NumPy and JAX."""
    try:
        return operator.index(step)
    except TypeError as error:
        raise ConfigError(f"step={step!r}: expected an integer") from error
