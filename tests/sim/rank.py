"""A training process, and the job that all ranks of a generation run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxft.group import events as e
from jaxft.group.manifest import Manifest, Part, SnapshotId
from jaxft.group.messages import Damage, Measured, Outcome, Plan, RankOptions
from jaxft.group.world import Generation
from jaxft.schedule import Await, AwaitTurn, Begin, Missed, Schedule
from tests.sim.memory import PIECES, checks, checksums

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.simulator import Simulator
    from tests.sim.smp import Smp

READ_S = 1.2
LOCAL_S = 0.001


class State(NamedTuple):
    """The model's state: the generation that computed it, and the step."""

    branch: int
    step: int


class Job:
    """The ranks of one generation: a step is a collective, none goes ahead of the others."""

    def __init__(self, sim: Simulator, generation: Generation) -> None:
        self.sim = sim
        self.generation = generation
        self.ready: set[int] = set()
        self.step_s = sim.soon(0.12, 0.25)

    def rank_ready(self, rank: Rank) -> None:
        self.ready.add(rank.number)
        if len(self.ready) == self.generation.rank_count:
            self.ready.clear()
            ranks = [
                one
                for machine in self.sim.machines
                for one in machine.ranks
                if one.generation is self.generation and one.alive
            ]
            for one in ranks:
                one.later(self.step_s + self.sim.soon(0, 0.04), one.do_step)


class Rank:
    """Restores what it is told, then trains and saves when it is due."""

    def __init__(self, machine: Machine, generation: Generation, number: int, local: int) -> None:
        self.machine = machine
        self.sim = machine.sim
        self.generation = generation
        self.number = number
        self.local = local
        self.alive = True
        self.stopped = False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.smp: Smp | None = None
        self.state: State | None = None
        self.plan: Plan | None = None
        self.verified: Plan | None = None
        self.restored: State | None = None
        self.running = False
        self.asked = -1
        self.known = -1
        self.schedule = Schedule()
        self.held = ""
        self.saving: State | None = None
        self.saving_call = 0
        self.digest = ""
        self.staged = False
        self.blocked = False
        self.writer: Writer | None = None
        self.part: e.PartStaged | None = None
        self.failed: e.StagingFailed | None = None
        self.missed: e.SnapshotMissed | None = None
        self.later(self.sim.soon(0.02, 0.3), self._join)

    # ------------------------------------------------------------------ living and dying

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.sim.at(delay_s, self._run, action, args)

    def _run(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((action, args))
        elif self.machine.paused:
            self.machine.backlog.append((self._run, (action, args)))
        else:
            action(*args)

    def stop(self) -> None:
        self.sim.log(self.machine.name, f"rank {self.number} stops")
        self.stopped = True

    def wake(self) -> None:
        if self.alive and self.stopped:
            self.sim.log(self.machine.name, f"rank {self.number} wakes up")
            self.stopped = False
            backlog, self.backlog = self.backlog, []
            for action, args in backlog:
                self._run(action, args)

    def kill(self) -> None:
        """SIGKILL by the agent: it may take a while until the process is really gone."""
        if self.alive:
            self.sim.at(self.sim.soon(self.machine.kill_s, 0.3), self.die)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            if self.machine.smp is not None:
                self.machine.smp.try_frozen()

    def crash(self) -> None:
        """Dies by itself; the agent notices."""
        if self.alive:
            self.sim.log(self.machine.name, f"rank {self.number} dies")
            self.die()
            if self.machine.agent:
                self.sim.oracle.rank_exited(self)

    # ------------------------------------------------------------------ the local channel

    def _join(self) -> None:
        """Connects to the SMP, again after the SMP was started again."""
        smp = self.machine.smp
        if smp is None or not smp.alive:
            self.smp = None
        elif smp is not self.smp:
            current = smp.core.keeper.generation
            if current is self.generation and smp.core.keeper.frozen:
                self.smp = smp
                smp.deliver(e.RankJoined(self.number, self._options()))
                self._repeat()
        self.later(0.15, self._join)

    def _repeat(self) -> None:
        """To an SMP that was started again: what is still open."""
        if self.saving is not None:
            self._ask()
        if self.verified is not None and not self.running:
            self._tell(e.RankRestored(self.number, self.verified.attempt, "verified"))
        for said in (self.part, self.failed, self.missed):
            if said is not None:
                self._tell(said)

    def _options(self) -> RankOptions:
        setup = self.sim.setup
        return RankOptions(
            every_steps=setup.every_steps,
            every_s=setup.every_s,
            overhead=setup.overhead,
            persist_every=setup.persist_every,
            storage=tuple(self.sim.storage),
        )

    def _tell(self, event: e.Event) -> None:
        smp = self.smp
        if smp is not None and smp.alive and smp.core.keeper.generation is self.generation:
            smp.deliver(event)

    def hear(self, effect: e.Effect) -> None:
        self.later(LOCAL_S, self._hear, effect, self.smp)

    def _hear(self, effect: e.Effect, smp: Smp) -> None:
        if smp is not self.smp:
            return
        match effect:
            case e.TellPlan(plan):
                self._planned(plan)
            case e.TellSettled(directive):
                self.sim.checker.on_settled(self, directive.base)
                self._settled(directive.interval)
            case e.Grant():
                self._write(effect)
            case e.TellStaged(seq):
                if seq == self.asked:
                    self.staged = True
            case e.TellOutcome(outcome):
                self._outcome(outcome)
            case e.TellHeld(reason):
                self.held = reason
                self._go_on()
            case e.TellTurn(turn):
                answer, missed = self.schedule.hear(turn)
                if answer is not None:
                    self._tell(e.TurnAnswered(self.number, answer.number, answer.call))
                self._miss(missed)
                self._go_on()

    # ------------------------------------------------------------------ restoring

    def _planned(self, plan: Plan) -> None:
        if self.plan is not None and self.plan.attempt == plan.attempt:
            return
        self.plan = plan
        if (self.generation.number, self.number) in self.sim.skipping:
            self.state = State(0, 0)
            self._tell(e.RankRestored(self.number, plan.attempt, "skipped"))
            return
        places = [
            place
            for place in range(len(plan.world.hosts))
            if place % self.generation.rank_count == self.number
        ]
        if plan.chosen is None or not places:
            places = [] if plan.chosen is None else [0]
        self.later(self.sim.soon(0.01, 0.1), self._read, plan, places, [], self.sim.now + READ_S)

    def _read(self, plan: Plan, places: list[int], got: list[State], deadline_s: float) -> None:
        if self.plan is not plan:
            return
        if not places:
            self._restored(plan, got)
            return
        result = self._fetch(plan, places[0])
        if result is None:
            if self.sim.now > deadline_s:
                self._tell(e.RankFailed(self.number, plan.attempt, "cannot read"))
                return
            self.later(0.1, self._read, plan, places, got, deadline_s)
            return
        manifest, tokens = result
        damaged = self._damage(places[0], manifest, tokens)
        if damaged or manifest is None:
            self._tell(e.RankFailed(self.number, plan.attempt, "damaged", damaged))
            return
        self.sim.checker.on_read(manifest.id, manifest.host, tokens)
        states = {self.sim.state_of[token] for token in tokens}
        self.later(
            self.sim.soon(0.005, 0.05), self._read, plan, places[1:], [*got, *states], deadline_s
        )

    def _fetch(self, plan: Plan, place: int) -> tuple[Manifest | None, list[int]] | None:
        segment = plan.segments[place]
        machine = self.sim.reader(self.machine.name, segment.address)
        if machine is None or machine.smp is None or plan.chosen is None:
            return None
        if segment.rebuilt:
            return machine.smp.rebuilt.get((plan.chosen, place))
        return machine.smp.serve(plan.chosen, place)

    def _damage(
        self, place: int, manifest: Manifest | None, tokens: list[int]
    ) -> tuple[Damage, ...]:
        if manifest is None:
            return (Damage(place),)
        return tuple(
            Damage(place, 0, index)
            for index, token in enumerate(checks(manifest))
            if tokens[index] != token
        )

    def _restored(self, plan: Plan, got: list[State]) -> None:
        if plan.chosen is not None:
            state = got[0]
        elif plan.storage is not None:
            assert plan.storage.id is not None
            state = self.sim.stored[plan.storage.id]
        else:
            state = State(0, 0)
        self.sim.checker.on_restored(self, plan, {state, *got})
        self.state = self.restored = state
        self.verified = plan
        self._tell(e.RankRestored(self.number, plan.attempt, "verified"))

    def _settled(self, interval: int) -> None:
        if self.running or self.state is None:
            return
        self.running = True
        self.schedule.first_interval = interval
        self.schedule.enter()
        self._save()

    # ------------------------------------------------------------------ training and saving

    def do_step(self) -> None:
        assert self.state is not None
        self.sim.checker.on_step(self.generation)
        self.state = State(self.generation.number, self.state.step + 1)
        self.schedule.enter()
        self._save()

    def _save(self) -> None:
        """The call of `save` after each step. One that is due waits for its own writer and for the
        last outcome, unless snapshots are held."""
        assert self.state is not None
        step = self.state.step
        seq = self.schedule.seq
        if seq >= 2 and seq - 2 not in self.schedule.outcomes:
            self.sim.checker.fail("I2", f"rank {self.number} does not know when {seq} is due")
        self.blocked = self.schedule.is_due(step) and self.writer is not None
        if self.blocked:
            return
        match self.schedule.decide(step, held=bool(self.held)):
            case AwaitTurn():
                if not self.held:
                    self.blocked = True
                    return
                self.schedule.break_promise()
                self._save()
                return
            case Await():
                if not self.held:
                    self.blocked = True
                    return
                self._miss(self.schedule.let_pass(step))
            case Begin(seq):
                self._begin(seq)
        self.sim.jobs[self.generation.number].rank_ready(self)

    def _begin(self, seq: int) -> None:
        assert self.state is not None
        self.asked = seq
        self.saving = self.state
        self.saving_call = self.schedule.calls
        self.staged = False
        self.part = self.failed = self.missed = None
        self.digest = self.sim.digests.get(self.machine.name, "plan")
        if self.sim.chance(self.sim.odd_plans):
            self.digest = f"odd plan {self.number}"
            self.sim.checker.odd = True
        self.sim.checker.on_save(self, seq, self.state, self.digest)
        self._ask()

    def _miss(self, missed: Missed | None) -> None:
        """This rank has let the call pass at which a snapshot was due."""
        if missed is not None:
            # It may begin the next one at another call than the others.
            self.sim.checker.odd = True
            self.asked, self.saving = missed.seq, None
            said = (missed.seq, missed.step, "held", missed.call)
            self.missed = e.SnapshotMissed(self.number, *said)
            self._tell(self.missed)

    def _ask(self) -> None:
        assert self.saving is not None
        step_s = self.sim.measured_s + 0.05 * self.sim.soon(0, 4)
        measured = Measured(cost_s=step_s * (self.number % 3), protect_s=0.3, step_s=step_s)
        step, call = self.saving.step, self.saving_call
        ask = e.SlotWanted(self.number, self.asked, step, self.digest, 64, step_s, call, measured)
        self._tell(ask)

    def _write(self, grant: e.Grant) -> None:
        """A slot was granted; once more after a restart of the SMP, and then there is no more to do
        than goes on already."""
        if self.saving is None or grant.id.seq != self.asked or self.staged or self.writer:
            return
        if self.part is not None or self.failed is not None:
            return
        if self.number not in {rank for rank, _, _ in grant.bases}:
            return
        if self.sim.chance(self.sim.staging_fails):
            self.failed = e.StagingFailed(self.number, self.asked, "leaf w could not be copied")
            self._tell(self.failed)
            return
        self.writer = Writer(grant, self.saving)
        self.later(self.sim.soon(0.005, 0.05), self._piece)

    def _piece(self) -> None:
        """One piece lands in the slot."""
        writer, memory = self.writer, self.machine.memory
        place = self.generation.index_of(self.machine.name)
        assert writer is not None
        assert memory is not None
        assert place is not None
        grant, sim = writer.grant, self.sim
        number = self.generation.number
        pieces = [self.local * PIECES + index for index in range(PIECES)]
        tokens = [sim.token(writer.state, grant.id, place, piece) for piece in pieces]
        index, writer.next_piece = writer.next_piece, writer.next_piece + 1
        sim.checker.on_write(self.machine, grant.slot, grant.id, "rank", number)
        content = memory.slots[grant.slot]
        content.pieces[pieces[index]] = tokens[index]
        content.parity = {}
        content.group = {}
        content.manifest = None
        if writer.next_piece < PIECES:
            self.later(sim.soon(0.005, 0.06), self._piece)
            return
        self.writer = None
        part = Part(self.number, 64 * self.local, 64, (), checksums(tokens))
        self.part = e.PartStaged(self.number, grant.id.seq, part)
        if self.known < grant.id.seq:
            self._tell(self.part)
        self._go_on()

    def _outcome(self, outcome: Outcome) -> None:
        if outcome.seq <= self.known:
            return
        self.known = outcome.seq
        identity = SnapshotId(self.generation.number, outcome.seq, self.generation.nonce)
        self.sim.checker.on_told(outcome, identity)
        if outcome.seq >= self.asked:
            self.saving = self.part = self.failed = self.missed = None
        self._miss(self.schedule.learn(outcome))
        self._go_on()

    def _go_on(self) -> None:
        """The writer is free, or an outcome is known: a blocked `save` may go on."""
        if self.blocked:
            self.later(LOCAL_S, self._retry)

    def _retry(self) -> None:
        if self.blocked:
            self._save()


class Writer:
    """The background thread that copies one state into the slot it was granted."""

    def __init__(self, grant: e.Grant, state: State) -> None:
        self.grant = grant
        self.state = state
        self.next_piece = 0
