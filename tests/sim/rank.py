"""A training process, and the job that all ranks of a generation run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxft.group import events as e
from jaxft.group.manifest import Manifest, Part
from jaxft.group.messages import Damage, Outcome, Plan, RankOptions
from jaxft.group.world import Generation
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
        self.step = 0
        self.asked: dict[int, int] = {}
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
        self.running = False
        self.next_seq = 0
        self.known = -1
        self.last_step = 0
        self.intervals: dict[int, int] = {}
        self.saving: State | None = None
        self.staged = False
        self.blocked = False
        self.writing: list[int] | None = None
        self.granted: e.Grant | None = None
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
            self.sim.at(self.sim.soon(0.005, 0.3), self.die)

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
                self.sim.oracle.fault(self.generation.number, f"rank {self.number} died")

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
                if self.saving is not None:
                    self._ask()
        self.later(0.15, self._join)

    def _options(self) -> RankOptions:
        setup = self.sim.setup
        return RankOptions(
            every_steps=setup.every_steps,
            every_s=setup.every_s,
            persist_every=setup.persist_every,
            storage=tuple(self.sim.storage),
        )

    def _tell(self, event: e.Event) -> None:
        if self.smp is not None and self.smp.alive:
            self.smp.deliver(event)

    def hear(self, effect: e.Effect) -> None:
        self.later(LOCAL_S, self._hear, effect, self.smp)

    def _hear(self, effect: e.Effect, smp: Smp) -> None:
        if smp is not self.smp:
            return
        match effect:
            case e.TellPlan(plan):
                self._planned(plan)
            case e.TellSettled(directive):
                self._settled(directive.interval)
                self.sim.checker.on_settled(self, directive.base)
            case e.Grant():
                self._write(effect)
            case e.TellStaged(seq):
                if seq == self.next_seq:
                    self.staged = True
            case e.TellOutcome(outcome):
                self._outcome(outcome)

    # ------------------------------------------------------------------ restoring

    def _planned(self, plan: Plan) -> None:
        if self.verified is not None and self.verified.attempt == plan.attempt:
            self._tell(e.RankRestored(self.number, plan.attempt, "verified"))
            return
        if self.plan is not None and self.plan.attempt == plan.attempt:
            return
        self.plan = plan
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
        self.sim.checker.on_read(manifest, tokens)
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
        self.state = state
        self.verified = plan
        self._tell(e.RankRestored(self.number, plan.attempt, "verified"))

    def _settled(self, interval: int) -> None:
        if self.running or self.state is None:
            return
        self.running = True
        self.intervals[1] = interval
        self.state = State(self.generation.number, self.state.step)
        self._save()

    # ------------------------------------------------------------------ training and saving

    def do_step(self) -> None:
        assert self.state is not None
        self.state = State(self.generation.number, self.state.step + 1)
        self._save()

    def _due(self) -> bool:
        assert self.state is not None
        if self.next_seq == 0:
            return True
        interval = self.intervals.get(self.next_seq)
        if interval is None:
            self.sim.checker.fail("I2", f"rank {self.number} knows no interval")
            return False
        return self.state.step >= self.last_step + interval

    def _save(self) -> None:
        """The call of `save` after each step; waits where the last outcome is not known."""
        if self._due():
            if self.known < self.next_seq - 1 or self.saving is not None:
                self.blocked = True
                return
            assert self.state is not None
            self.saving = self.state
            self.staged = False
            self.sim.checker.on_save(self, self.next_seq, self.state)
            self._ask()
        self.blocked = False
        job = self.sim.jobs[self.generation.number]
        job.rank_ready(self)

    def _ask(self) -> None:
        assert self.saving is not None
        plan = f"plan{self.sim.checker.odd_plan(self)}"
        step = self.saving.step
        self._tell(e.SlotWanted(self.number, self.next_seq, step, plan, 64, 0.05 + 0.1 * self.sim.soon(0, 1)))

    def _write(self, grant: e.Grant) -> None:
        if self.saving is None or grant.id.seq != self.next_seq or self.staged:
            return
        busy = self.writing is not None
        self.granted = grant
        self.writing = list(range(PIECES))
        if self.sim.chance(0.01):
            self.writing = None
            self._tell(e.StagingFailed(self.number, grant.id.seq, "leaf w could not be copied"))
            return
        if not busy:
            self.later(self.sim.soon(0.005, 0.05), self._piece)

    def _tokens(self, grant: e.Grant) -> list[int]:
        assert self.saving is not None
        place = self.generation.index_of(self.machine.name)
        assert place is not None
        return [
            self.sim.token(self.saving, grant.id, place, self.local * PIECES + index)
            for index in range(PIECES)
        ]

    def _piece(self) -> None:
        """One piece lands in the slot."""
        grant = self.granted
        if grant is None or self.writing is None or self.machine.memory is None:
            return
        index = self.writing.pop(0)
        tokens = self._tokens(grant)
        self.sim.checker.on_write(self.machine, grant.slot, grant.id, "rank")
        content = self.machine.memory.slots[grant.slot]
        content.pieces[self.local * PIECES + index] = tokens[index]
        content.parity = {}
        content.group = {}
        content.manifest = None
        if self.writing:
            self.later(self.sim.soon(0.005, 0.06), self._piece)
            return
        self.writing = None
        part = Part(self.number, 64 * self.local, 64, (), checksums(tokens))
        self._tell(e.PartStaged(self.number, grant.id.seq, part))
        self._go_on()

    def _outcome(self, outcome: Outcome) -> None:
        if outcome.seq <= self.known:
            return
        self.known = outcome.seq
        self.sim.checker.on_told(self, outcome)
        self.intervals[outcome.seq + 2] = outcome.interval
        self.last_step = outcome.step
        self.next_seq = outcome.seq + 1
        if self.writing is None:
            self.saving = None
        self._go_on()

    def _go_on(self) -> None:
        """The writer is free, or an outcome is known: a blocked `save` may go on."""
        if self.writing is None and self.saving is not None and self.known == self.next_seq - 1:
            pass
        if self.blocked and self.writing is None:
            self.later(LOCAL_S, self._retry)

    def _retry(self) -> None:
        if self.blocked:
            self._save()
