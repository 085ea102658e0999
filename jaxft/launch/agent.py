"""The agent: one a host, supervises the host's SMP and ranks, and decides with the other agents.

It is a loop: wait until something happens (a process ends, the SMP or a person says something, the
store has changed), take note of it, ask `membership` what is to be done, do that. All decisions are
there; here they are performed. Whatever fails is tried again with the next turn of the loop, since
the decision is still the same then.

A thread beside the loop renews the lease and follows the store (`registration`). It wakes up for
that now and then in any case, so it also looks whether the SMP stands still, and the loop sleeps.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import signal
import time
from types import FrameType

import msgspec

from jaxft import config, faults
from jaxft.errors import JaxftError, LaunchError, StoreError
from jaxft.group import membership as m
from jaxft.group.absence import mind_absence
from jaxft.group.messages import Turn
from jaxft.group.records import (
    DONE,
    END,
    ENDING,
    FAULT,
    GENERATION,
    SURROUNDINGS,
    Fault,
    HostRecord,
    JobEnd,
    View,
)
from jaxft.group.world import Generation, Member, encode
from jaxft.host import protocol
from jaxft.host.local import make_private
from jaxft.launch.announcements import in_words
from jaxft.launch.console import Console
from jaxft.launch.ended_run import clear_ended_run
from jaxft.launch.fitting import Fitting
from jaxft.launch.floor import (
    known_generation,
    remember,
    remember_generation,
    stored_generation,
)
from jaxft.launch.hostdir import (
    LOOPBACK,
    Lock,
    RankFile,
    ReservedPort,
    StoreNote,
    note_store,
    remove,
)
from jaxft.launch.job_keys import job_trust
from jaxft.launch.last_snapshot import LastSnapshot, last_words
from jaxft.launch.leaving import INTERRUPT_S, Leaving
from jaxft.launch.options import KILL_S, RunOptions
from jaxft.launch.persisting import Persisting
from jaxft.launch.preemption import LOOK_S, PreemptionNotice
from jaxft.launch.probe import answering
from jaxft.launch.progress import ProgressLog
from jaxft.launch.ranks import Ranks
from jaxft.launch.registration import (
    Registration,
    StoreWatcher,
    machine_id,
    wait_for_name,
)
from jaxft.launch.smp_process import Died, Happening, SnapshotProcess, Up
from jaxft.launch.speaker import Speaker
from jaxft.launch.store import Store
from jaxft.launch.stores import open_store, wait_for_store
from jaxft.launch.watchdog import Watchdog
from jaxft.status.events import EventLog

# How often the clock is looked at while something is waited for, and at least while nothing is;
# what must be quick (a process that ends, a message, a change in the store) wakes the loop itself.
TICK_S = 0.25
CALM_S = 10.0
TURNS_MAX = 20
PROBE_EVERY_S = 1.0
QUIET_KINDS = frozenset({"committed", "chosen"})


class Interrupted(Exception):
    """A signal told this agent to end, or what counts as one."""

    def __init__(self, number: int, why: str = "") -> None:
        super().__init__(why or f"signal {number} ({signal.Signals(number).name})")
        self.number = number


class Agent:
    """One host's agent.

    Args:
        options: of the run.
        console: who is told.

    Raises:
        JobInUse: another agent of this job runs on this host.
    """

    def __init__(self, options: RunOptions, console: Console) -> None:
        self.options = options
        self.directory = options.directory()
        self._host = options.host
        self._console = console
        self._identity = secrets.token_hex(8)
        self._lock = Lock(self.directory / "lock", f"job {options.job} on host {options.host}")
        make_private(options.logs())
        self._events = EventLog(config.events_dir(), host=options.host, role="agent")
        self._speaker = Speaker(console, self._events, options.host, options.lease_s)
        self._fitting = Fitting(options.host, console.say)
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signal = 0
        self._hurried = False
        self._notice = PreemptionNotice(options.preemption_file, options.host)
        self._rank_file = RankFile(self.directory / "ranks")
        self._smp = SnapshotProcess(
            options, self.directory, options.logs() / "smp.log", console.say
        )
        self._persisting = Persisting(options, self._smp)
        self._last_snapshot = LastSnapshot(options.host, self._smp)
        self._leaving: Leaving | None = None
        self._progress = ProgressLog()
        self._ranks = self._new_ranks()
        self._watchdog = Watchdog(options, self._ranks, self._smp.look_s, console.say)
        self._observer = m.Observer(options.rules())
        self._port = self._new_port()
        self._store: Store | None = None
        self._registration: Registration | None = None
        self._watcher: StoreWatcher | None = None
        self._generation: Generation | None = None
        self._left = 0
        self._floor = 0
        self._checked = 0
        self._report: tuple[str, str, str] | None = None
        self._answers: dict[str, bool] = {}
        self._probed_s = 0.0
        self._unheard: dict[str, float] = {}
        self._waits_long = False
        self._why_it_waits = ""
        self._failed = True
        self._keeps_memory = False  # for the agent after this one

    def _new_ranks(self) -> Ranks:
        return Ranks(self.options, self._smp.socket, self._rank_file, self._console, self._events)

    def _new_port(self) -> ReservedPort:
        """Where JAX's coordinator listens, should this host be the first."""
        return ReservedPort(self.options.address or LOOPBACK)

    # -------------------------------------------------------------------- from start to end

    def run(self) -> JobEnd:
        """Takes part in the job until it is over; leaves no process behind.

        Raises:
            Interrupted: by SIGINT or SIGTERM.
            JaxftError: this host cannot go on.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        faults.arm(config.faults_text())
        self._events.emit("agent_started", agent=self._identity)
        try:
            self._heed()
            self._rank_file.kill_left(KILL_S)
            access = self.options.store_access()
            self._store = wait_for_store(
                lambda: open_store(self.options.store, job=self.options.job, access=access),
                self.options.form_timeout_s,
                self._console.say,
                self._wait_on,
            )
            where = StoreNote(
                url=self.options.store, ca=access.ca, cert=access.cert, key=access.key
            )
            note_store(self.directory, where)
            clear_ended_run(self._store)
            self._wait_for_name(self._store)
            self._smp.begin(job_trust(self.options, self._store, self._console.say))
            end = self._loop(self._store)
            self._failed = not end.ok
            self._events.emit(
                "job_finished", ok=end.ok, reason=end.reason, generation=end.generation
            )
            return end
        except Interrupted as interrupted:
            self._leave_job(interrupted)
            raise
        finally:
            self._shut_down()

    def _loop(self, store: Store) -> JobEnd:
        while True:
            self._wait(self._left_s())
            self._heed()
            for happening in self._smp.poll():
                self._smp_happened(happening, store)
            self._ranks.poll()
            self._mind_helper()
            self._mind_absent_store()
            end = self._take_turns(store)
            if end is not None:
                return end

    def _left_s(self) -> float:
        """How long nothing comes that only the clock can bring."""
        registration, watcher = self._registration, self._watcher
        calm = (
            registration is not None
            and watcher is not None
            and watcher.view() is not None
            and registration.silent_s() < self.options.lease_s
            and self._waits_long
            and self._smp.is_calm
            and self._progress.is_written
            and not self._ranks.is_chatty
            and not self._watchdog.suspects
        )
        if registration is None or not calm:
            return TICK_S
        # It may stay away without a word, and this host may not go on without it for longer.
        left_s = self.options.store_grace_s - registration.silent_s()
        calm_s = LOOK_S if self._notice.is_expected else CALM_S
        return max(TICK_S, min(calm_s, left_s))

    def _heed(self) -> None:
        """Raises Interrupted if this host is to go."""
        if self._signal:
            raise Interrupted(self._signal)
        if self._notice.is_there():
            self._events.emit("preempted", path=self._notice.path, generation=self._entered)
            self._signal = signal.SIGTERM
            raise Interrupted(signal.SIGTERM, str(self._notice))

    def _wait(self, timeout_s: float) -> None:
        poller = select.poll()
        fds = (*self._smp.fds(), *self._ranks.fds(), *self._persisting.fds())
        for fd in (self._wake_r, *fds):
            poller.register(fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def _wait_on(self, timeout_s: float) -> None:
        self._wait(timeout_s)
        self._heed()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"!")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Not a second SIGINT: it may be the first one, come by another way.
        after_another = self._signal not in (0, signal.SIGINT)
        self._hurried = self._hurried or (after_another and number == signal.SIGINT)
        self._signal = self._signal or number
        self._wake()

    def _wait_for_name(self, store: Store) -> None:
        """An agent that was lost with another machine has this host's name for a lease."""
        try:
            wait_for_name(store, self._host, machine_id(), self._console.say, self._heed)
        except Interrupted:
            # Nothing of this host is in the job yet, so there is nothing to leave.
            store.close()
            self._store = None
            raise

    def _leave_job(self, told: Interrupted) -> None:
        """This host is to go; so may be the whole job, which then writes its newest snapshot."""
        store = self._store
        if store is None or told.number != signal.SIGTERM:
            if store is None:
                self._console.say(f"{told}: this host leaves before it has joined the job")
            self._end_ranks(told, INTERRUPT_S, quietly=True)
            return
        leaving = self._leaving = Leaving(self.options)
        self._console.say(f"{told}: this host is to go, within {self.options.grace_s:g} s")
        self._register()
        if not self._is_export:
            self._take_last_snapshot(store, leaving.snapshot_until_s)
            self._end_ranks(told, leaving.ranks_until_s - time.monotonic())
        self._stay(store, leaving)

    def _end_ranks(self, told: Interrupted, left_s: float, *, quietly: bool = False) -> None:
        """Tells the ranks to end.

        Args:
            quietly: nobody wants to see how they do, and what breaks in them one after the other.
        """
        if self._ranks.running:
            logs = f"; what they say now is in their logs, {self.options.logs()}" if quietly else ""
            self._console.say(f"{told}: the ranks are told to end{logs}")
        self._ranks.end(told.number, max(0.0, left_s), lambda: self._hurried, quietly=quietly)

    def _stay(self, store: Store, leaving: Leaving) -> None:
        """Takes part in what all hosts that were told to end do before they go."""
        why = ""
        try:
            while not why and not self._hurried:
                view = self._watcher.view() if self._watcher is not None else None
                why = leaving.reason_to_go(view)
                end = self._take_turns(store)
                if end is not None:
                    why = end.reason
                    break
                self._wait(TICK_S)
                for happening in self._smp.poll():
                    self._smp_happened(happening, store)
                self._ranks.poll()
        except JaxftError as error:
            why = str(error)
        self._console.say(f"this host leaves the job: {why or 'SIGINT ended the wait'}")

    @property
    def _is_export(self) -> bool:
        """Are the ranks that run here those that write to storage?"""
        generation = self._generation
        return bool(self._ranks.running) and generation is not None and bool(generation.export)

    def _take_last_snapshot(self, store: Store, deadline_s: float) -> None:
        """This host is to go (preemption, for example): asks for a snapshot out of turn and waits
        until it is protected, or for a share of the time there is. SIGINT ends the wait."""
        if not self._ranks.running:
            return
        why_not = self._no_last_snapshot(deadline_s)
        if not why_not:
            self._last_snapshot.ask()
        try:
            while self._last_snapshot.answer is None and not why_not:
                self._wait(TICK_S)
                for happening in self._smp.poll():
                    self._smp_happened(happening, store)
                self._ranks.poll()
                self._mind_helper()
                why_not = self._no_last_snapshot(deadline_s)
        except LaunchError as error:
            why_not = str(error)
        turn = self._last_snapshot.answer or Turn(number=0, result=why_not)
        self._console.say(last_words(turn))
        self._events.emit(
            "last_snapshot", generation=self._entered, step=turn.step, result=turn.result
        )

    def _no_last_snapshot(self, deadline_s: float) -> str:
        """Why it is not waited for any more; "" while it is."""
        if self._ranks.exits:
            return f"rank {self._ranks.exits[0].rank} of this host has ended"
        view = self._watcher.view() if self._watcher is not None else None
        fault = view.faults.get(self._entered) if view is not None else None
        if fault is not None:
            return f"generation {self._entered} has ended: {fault.detail}"
        if self._hurried:
            return "SIGINT ended the wait for it"
        return "there was no time for it" if time.monotonic() > deadline_s else ""

    def _shut_down(self) -> None:
        """Ends everything, whatever of it there is; the SMP is given a few seconds."""
        try:
            self._persisting.kill()
            self._ranks.close()
        finally:
            if self._watcher is not None:
                self._watcher.close()
            if self._keeps_memory:
                self._smp.leave()
            else:
                self._smp.stop()
            self._port.close()
            if self._store is not None:
                self._store.close()
            self._events.close()
            if self._keeps_memory:
                self._lock.release()
            else:
                remove(self.directory, self._lock, keep_logs=self._failed)
            os.close(self._wake_r)
            os.close(self._wake_w)

    # -------------------------------------------------------------------- the SMP

    def _smp_happened(self, happening: Happening, store: Store) -> None:
        match happening:
            case Up(welcome, how):
                self._smp_up(welcome, how, store)
            case Died(pid):
                self._console.say(f"the SMP (pid {pid}) died; it is started again")
                self._events.emit("smp_died", pid=pid, generation=self._entered)
            case protocol.FaultTold(host=host, reason=reason, kind=kind):
                self._report = (host, reason, kind)
            case protocol.PersistTold(order=order):
                self._persisting.ordered(order, self._generation)
            case protocol.TurnTold(turn=turn):
                self._last_snapshot.told(turn)
            case protocol.Announced(kind=kind, detail=detail):
                self._announced(kind, detail)
            case protocol.Refused(reason=reason):
                self._console.say(f"the SMP refuses: {reason}")
            case _:
                pass

    def _smp_up(self, welcome: protocol.Welcome, how: str, store: Store) -> None:
        self._events.emit(
            f"smp_{how}", pid=welcome.pid, arena=welcome.arena, generation=self._entered
        )
        if self._registration is None:
            job = self.options.job
            self._floor = max(self._floor, stored_generation(job), known_generation(job))
            self._registration = Registration(store, self.options.lease_s)
            self._watcher = StoreWatcher(
                store,
                self._registration,
                look=self._look,
                look_s=self._smp.look_s,
                wake=self._wake,
            )
        self._register()
        self._events.emit("registered", address=welcome.address, generation=self._entered)
        if self._generation is not None:
            self._smp.enter(self._generation)
        self._last_snapshot.ask_again()

    def _look(self) -> bool:
        """By the thread that follows the store, which is awake: whether the loop is to be."""
        return any([self._smp.look(), self._watchdog.look()])

    def _register(self) -> None:
        """Writes this host's record as it is now."""
        welcome = self._smp.welcome
        if welcome is None or self._registration is None or self._watcher is None:
            return
        self._registration.put(self._record(welcome))
        with contextlib.suppress(StoreError):
            self._watcher.refresh()

    def _record(self, welcome: protocol.Welcome) -> HostRecord:
        options = self.options
        return HostRecord(
            host=options.host,
            agent=self._identity,
            arena=welcome.arena,
            address=welcome.address,
            coordinator=self._port.address,
            ranks=options.ranks_per_host,
            domain=options.failure_domain,
            newest=max(welcome.generation, self._entered, self._floor),
            snapshot=welcome.newest,
            left=self._left,
            fresh=options.fresh,
            leaving=self._leaving is not None,
            waits=self._why_it_waits,
            trust=welcome.trust,
            asks=options.asks(),
            lease_s=options.lease_s,
            machine=machine_id(),
        )

    def _announced(self, kind: str, detail: dict[str, str | int | float]) -> None:
        number = self._entered
        facts = {key: value for key, value in detail.items() if key not in ("event", "generation")}
        self._events.emit(kind, generation=number, **facts)
        # Where ranks were stopped, that snapshots are held is no news.
        beside = kind in ("held", "held_over") and not self._ranks.running
        if kind not in QUIET_KINDS and not beside:
            words = in_words(kind, facts, exports=self._is_export)
            self._console.say(f"generation {number}: {words}")
        if kind == "generation_floor":
            self._floor = max(self._floor, int(detail.get("number", 0)))
            self._register()
        if kind == "settled":
            remember(self.options.job, str(detail["directory"]))
        if kind in ("settled", "committed", "persisted"):
            self._progress.announced(kind, detail)

    def _mind_helper(self) -> None:
        failure = self._persisting.poll()
        if failure:
            self._console.say(failure)

    # -------------------------------------------------------------------- the store

    def _mind_absent_store(self) -> None:
        """Training goes on without the store for a while, and not for longer (`absence`).

        Raises:
            StoreError: it did not come back.
        """
        if self._registration is None or self._watcher is None:
            return
        error = self._watcher.error
        absence = mind_absence(
            self._registration.silent_s(),
            "" if error is None else str(error),
            running=bool(self._ranks.running),
            grace_s=self.options.store_grace_s,
            patience_s=self.options.form_timeout_s,
            unheard_s=self._unheard_s(away=error is not None),
            peer_s=self.options.lease_s,
        )
        if absence.action == "kill":
            self._console.say(absence.reason)
            self._persisting.kill()
            self._ranks.kill()
        elif absence.action == "give up" and error is not None:
            raise error
        else:
            self._speaker.store(absence.reason)

    def _unheard_s(self, *, away: bool) -> dict[str, float]:
        """Members whose SMP does not answer, and for how long; asked while the store is away."""
        now_s = time.monotonic()
        if not away:
            self._unheard = {}
        elif self._generation is not None and now_s - self._probed_s > PROBE_EVERY_S:
            others = [one for one in self._generation.hosts if one.host != self._host]
            silent = [host for host, there in answering(others).items() if not there]
            # Since before it was asked: the answer may have taken its time.
            self._unheard = {host: self._unheard.get(host, now_s) for host in silent}
            self._probed_s = time.monotonic()
        return {host: now_s - since_s for host, since_s in self._unheard.items()}

    # -------------------------------------------------------------------- deciding and doing

    @property
    def _entered(self) -> int:
        return self._generation.number if self._generation is not None else 0

    def _me(self) -> m.Me:
        return m.Me(
            host=self._host,
            agent=self._identity,
            entered=self._entered,
            running=self._ranks.running,
            exits=self._ranks.exits,
            report=self._report,
            answers=self._answers,
            leaving=self._leaving is not None,
            store_back_s=math.inf if self._registration is None else self._registration.back_s(),
        )

    def _take_turns(self, store: Store) -> JobEnd | None:
        """Does what is to be done, until there is nothing left or the job is over."""
        self._waits_long = False
        try:
            self._progress.write(store)
            for _ in range(TURNS_MAX):
                view = self._watcher.view() if self._watcher is not None else None
                if view is None or self._watcher is None:
                    return None
                if (view := self._fitting.only_those(view)) is None:
                    return None
                self._watchdog.tell(store, view)
                self._mind_warm(store, view)
                decision = self._observer.decide(
                    view, self._me(), time.monotonic(), secrets.token_hex(8)
                )
                if isinstance(decision, m.Finish):
                    return self._finish(decision, store)
                self._tell_wait(view)
                if not self._perform(decision, store, view):
                    return None
                self._watcher.refresh()
        except StoreError as error:
            self._speaker.store(f"the store does not answer: {error}")
        return None

    def _tell_wait(self, view: View) -> None:
        """This host's record says why it takes no part."""
        why = self._observer.why_it_waits(view, self._host)
        if why != self._why_it_waits:
            self._why_it_waits = why
            self._register()

    def _mind_warm(self, store: Store, view: View) -> None:
        """Others know by what JAX goes in the ranks that train, for those of theirs that wait."""
        mine, generation = self._ranks.surroundings, view.generation
        if mine and not view.surroundings:
            store.commit({SURROUNDINGS: None}, {SURROUNDINGS: encode(mine)})
        if generation is None or not view.surroundings or view.fault is not None:
            return
        if generation.index_of(self._host) is None and self._leaving is None:
            self._ranks.wait_as_spare(generation.number, view.surroundings)

    def _perform(self, decision: m.Decision, store: Store, view: View) -> bool:
        """Whether the store has to be read again for the next decision."""
        match decision:
            case m.Wait(reason, left_s, probe, tell):
                self._speaker.wait(reason, left_s, tell=tell)
                self._probe(probe)
                owes = tell and not self._speaker.has_said(reason)
                self._waits_long = not (left_s or probe or owes or self._observer.counts)
                return False
            case m.Form():
                self._form(decision, store)
            case m.Enter(generation, index, reason):
                if not self._smp.is_up:
                    return False
                self._enter(generation, index, reason)
            case m.AskSnapshot(reason):
                self._speaker.once(reason)
                self._smp.send(protocol.SnapshotNow(reason=reason))
                self._progress.hurry()
                return False
            case m.KillRanks(generation=number):
                fault = view.faults.get(number)
                # On one console who has found it has said it.
                if fault is not None and not self.options.shares_console:
                    self._speaker.ended(fault, self._generation)
                return self._leave(number, store, fault)
            case m.DeclareFault(fault, expect, _):
                key = f"{FAULT}{fault.generation}"
                fault = msgspec.structs.replace(fault, at_s=time.time())
                if store.commit({key: expect}, {key: encode(fault)}):
                    self._tell_fault(fault)
            case m.ReportDone(generation=number, ranks=ranks):
                # Who sees all ranks done has to see their last snapshot, too.
                self._flush_progress(store)
                store.commit({}, {f"{DONE}{number}/{self._host}": encode(ranks)})
                self._say_exported()
        return True

    def _probe(self, members: tuple[Member, ...]) -> None:
        """Asks, now and then, whether the SMPs of hosts without an agent answer."""
        if not members:
            return
        if time.monotonic() - self._probed_s > PROBE_EVERY_S:
            self._answers = answering(members)
            self._probed_s = time.monotonic()

    def _form(self, decision: m.Form, store: Store) -> None:
        generation = decision.generation
        faults.reach("agent.forming", host=self._host, generation=generation.number)
        put = {GENERATION: encode(generation)}
        if decision.end is not None:
            put[ENDING] = encode(decision.end)
        if store.commit(decision.expect, put, decision.delete):
            self._speaker.formed(generation)

    def _enter(self, generation: Generation, index: int | None, reason: str) -> None:
        """Old ranks are dead; the SMP is told; then the new ones are started."""
        faults.reach("agent.entering", host=self._host, generation=generation.number)
        self._ranks.kill()
        self._persisting.leave()
        self._generation, self._report = generation, None
        remember_generation(self.options.job, generation.number)
        self._progress.enter(generation)
        self._last_snapshot.enter()
        self._answers = {}
        self._unheard = {}
        self._smp.enter(generation)
        self._events.emit(
            "generation_entered",
            number=generation.number,
            generation=generation.number,
            index=index,
        )
        # On one console who has formed it has said it.
        if not self.options.shares_console:
            self._speaker.generation(generation)
        if index is not None:
            self._ranks.start(generation, index)

    def _leave(self, number: int, store: Store, fault: Fault | None) -> bool:
        """Sees to it that no rank of this generation lives here any more, and then tells the
        others, who may form the next one. That needs an SMP that answers: if the root has said
        that this one does not, it is asked, or started again, first.
        """
        self._persisting.kill()
        self._ranks.kill()
        kinds = ("smp_report", "unreachable")
        reported = fault is not None and fault.kind in kinds and fault.host == self._host
        if reported and self._checked != number:
            self._checked = number
            self._smp.check()
        if not self._smp.is_sure:
            return False
        self._left = max(self._left, number)
        # A port of its own for each generation: what is left of an older one must not meet it.
        old, self._port = self._port, self._new_port()
        old.close()
        with contextlib.suppress(StoreError):
            self._flush_progress(store)
        self._register()
        return True

    def _flush_progress(self, store: Store) -> None:
        """Writes all that the SMP has said of it by now."""
        for happening in self._smp.poll():
            self._smp_happened(happening, store)
        self._progress.write(store, at_once=True)

    def _say_exported(self) -> None:
        generation = self._generation
        if generation is None or generation.export is None or generation.index_of(self._host):
            return
        step, directory = self._progress.step, generation.export.directory
        self._events.emit("exported", generation=generation.number, step=step, directory=directory)
        self._console.say(f"step {step} is on storage, in {directory}")

    def _tell_fault(self, fault: Fault) -> None:
        generation = self._generation
        self._speaker.fault(fault, generation)
        if fault.kind == "hung" and (generation is None or generation.export is None):
            self._watchdog.tell_fault(fault)

    def _finish(self, decision: m.Finish, store: Store) -> JobEnd | None:
        """The end, once it stands in the store."""
        if decision.known or store.commit({END: None}, {END: encode(decision.end)}):
            return decision.end
        return None
