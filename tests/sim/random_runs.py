"""A random run from a seed: a setup, faults at random moments, then peace and progress.

While faults strike, the checker looks at every event. When they have stopped, everything that was
stopped, cut off or lost comes back, and the job has to commit again within bounded virtual time,
with a bounded number of messages.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from jaxft.group import events as e
from jaxft.group.world import Code
from tests.sim.checker import Violation
from tests.sim.machine import Machine
from tests.sim.memory import PIECES
from tests.sim.rank import Rank
from tests.sim.simulator import Setup, Simulator
from tests.sim.store import Store

COMMITS = 2
PEACE_S = 25.0
MESSAGES_A_HOST_S = 120

CODES = ((3, "2+1"), (3, "2+1"), (4, "3+1"), (4, "2+2"), (4, "2+1"), (5, "2+2"), (6, "2+1"))
LARGE = ((7, "3+1"), (8, "2+2"), (8, "3+1"), (7, "2+1"))


def setup_of(random: Random) -> Setup:
    hosts, code = random.choice(CODES if random.random() < 0.93 else LARGE)
    agents = random.random() < 0.5
    spares = random.choice((0, 0, 1) if agents else (0, 0, 0, 1))
    # With a spare that may go on alone, a world that is cut off could live on beside the next.
    least = 1 if agents and spares else 2
    return Setup(
        hosts=hosts + spares,
        hosts_max=hosts,
        hosts_min=max(least, hosts - random.choice((1, 1, 2, 6, 6))),
        code=Code.parse(code),
        ranks=random.choice((1, 1, 1, 2)),
        every_steps=random.choice((1, 2, 3)),
        every_s=random.choice((0.0, 0.0, 0.4)),
        persist_every=random.choice((0, 0, 1, 2)),
        lost=random.choice((0.0, 0.05, 0.2)),
        doubled=random.choice((0.0, 0.1)),
        slow=random.choice((0.0, 0.05, 0.2)),
        calm=False,
        check_budget=random.random() < 0.9,
        agents=agents,
        overhead=random.choice((0.0, 0.0, 0.0, 0.0, 0.3)),
    )


class Chaos:
    """Strikes, and keeps what is needed to make good again."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.random = sim.random
        self.over = False
        self.agents = isinstance(sim.oracle, Store)

    def fault(self) -> None:
        kinds: list[Callable[[Machine], None]] = [
            self.crash_rank,
            self.crash_rank,
            self.stop_rank,
            self.kill_smp,
            self.kill_smp,
            self.lose_host,
            self.lose_host,
            self.lose_memory,
            self.kill_agent,
            self.pause,
            self.cut,
            self.isolate,
            self.damage,
            self.want_snapshot,
            *([self.cut_store, self.divide, self.outage] if self.agents else []),
        ]
        machines = self.sim.up()
        if machines and not self.over:
            self.random.choice(kinds)(self.random.choice(machines))

    def _later(self, least_s: float, most_s: float, action: Callable[[], None]) -> None:
        self.sim.at(self.random.uniform(least_s, most_s), action)

    def _spare(self, machine: Machine) -> bool:
        """May this host's memory be lost?"""
        return not self.sim.setup.check_budget or self.sim.checker.within_budget((machine.name,))

    # ------------------------------------------------------------------ kinds of faults

    def crash_rank(self, machine: Machine) -> None:
        if machine.ranks:
            self.random.choice(machine.ranks).crash()

    def stop_rank(self, machine: Machine) -> None:
        if machine.ranks:
            rank = machine.ranks[0]
            rank.stop()
            self._later(0.1, 3.0, rank.wake)
            self.sim.at(1.5, self._watchdog, rank)

    def _watchdog(self, rank: Rank) -> None:
        if rank.stopped:
            self.sim.oracle.hangs(rank)

    def kill_smp(self, machine: Machine) -> None:
        if machine.smp is not None:
            if self.random.random() < 0.3:
                machine.kill_smp()
            else:
                machine.smp.crash_after = self.random.randrange(40)

    def lose_host(self, machine: Machine) -> None:
        if self._spare(machine):
            machine.lose()
            self._later(0.2, 3.0, lambda: self.bring_back(machine))

    def lose_memory(self, machine: Machine) -> None:
        if machine.agent and self._spare(machine):
            self.sim.log(machine.name, "AGENT AND SMP DIE")
            machine.lose_agent_and_smp()
            self.sim.oracle.lease_lapsed(machine)
            self._later(0.1, 2.0, lambda: self.bring_back(machine))

    def kill_agent(self, machine: Machine) -> None:
        if machine.agent:
            self.sim.log(machine.name, "agent dies")
            machine.kill_agent()
            self.sim.oracle.lease_lapsed(machine)
            self._later(0.1, 2.0, lambda: self.bring_back(machine))

    def bring_back(self, machine: Machine) -> None:
        if not machine.up:
            self.sim.log(machine.name, "host is back, empty")
            machine.boot()
        elif not machine.agent:
            self.sim.log(machine.name, "agent is back")
            machine.start_agent()
        else:
            return
        self.sim.oracle.came_back(machine)

    def pause(self, machine: Machine) -> None:
        if not machine.paused:
            machine.pause()
            self._later(0.1, 3.0, lambda: self.wake(machine))
            self._later(0.7, 1.2, lambda: self._lapsed(machine))

    def _lapsed(self, machine: Machine) -> None:
        if machine.paused:
            self.sim.oracle.lease_lapsed(machine)

    def wake(self, machine: Machine) -> None:
        if not machine.paused:
            return
        machine.wake()

    def cut(self, machine: Machine) -> None:
        other = self.random.choice(self.sim.machines)
        if other is not machine:
            self._block([frozenset((machine.name, other.name))])

    def isolate(self, machine: Machine) -> None:
        others = [one.name for one in self.sim.machines if one is not machine]
        self._block([frozenset((machine.name, other)) for other in others])

    def _block(self, pairs: list[frozenset[str]], *, most_s: float = 3.0) -> None:
        self.sim.log("*", f"network cut: {' '.join('-'.join(sorted(pair)) for pair in pairs)}")
        self.sim.blocked.update(pairs)
        self._later(0.2, most_s, lambda: self.sim.blocked.difference_update(pairs))

    def cut_store(self, machine: Machine) -> None:
        """This host cannot reach the store, or some cannot."""
        names = {machine.name}
        if self.random.random() < 0.5:
            count = self.random.randrange(len(self.sim.machines))
            names |= {one.name for one in self.random.sample(self.sim.machines, count)}
        self._cut_store(names)

    def divide(self, machine: Machine) -> None:
        """The network falls in two: the world on one side, on the other the store and who waits."""
        if self.sim.generation is not None:
            names = {member.host for member in self.sim.generation.hosts}
            others = {one.name for one in self.sim.machines} - names
            pairs = [frozenset((name, other)) for name in sorted(names) for other in sorted(others)]
            self._block(pairs, most_s=6.0)
            self._cut_store(names)

    def _cut_store(self, names: set[str]) -> None:
        store = self.sim.oracle
        assert isinstance(store, Store)
        self.sim.log("*", f"cut off from the store: {' '.join(sorted(names))}")
        store.cut_off |= names
        self._later(0.2, 6.0, lambda: store.cut_off.difference_update(names))

    def outage(self, machine: Machine) -> None:
        store = self.sim.oracle
        assert isinstance(store, Store)
        store.go_away()
        self._later(0.2, 4.5, store.come_back)

    def want_snapshot(self, machine: Machine) -> None:
        """Out of turn."""
        if machine.smp is not None:
            machine.smp.deliver(e.TurnWanted("chaos"))

    def damage(self, machine: Machine) -> None:
        if machine.memory is not None and self._spare(machine):
            what = self.random.choice(("data", "data", "parity", "manifest"))
            piece = self.random.randrange(self.sim.setup.ranks * PIECES)
            machine.damage(self.random.randrange(2), piece, what)

    # ------------------------------------------------------------------ making good

    def heal(self) -> None:
        self.over = True
        self.sim.log("*", "no more faults")
        self.sim.odd_plans = self.sim.staging_fails = self.sim.grants_fail = 0.0
        self.sim.blocked.clear()
        if isinstance(self.sim.oracle, Store):
            self.sim.oracle.cut_off.clear()
            self.sim.oracle.come_back()
        for machine in self.sim.machines:
            self.wake(machine)
            self.bring_back(machine)
            if machine.smp is not None:
                machine.smp.crash_after = None
            for rank in machine.ranks:
                rank.wake()


def run_seed(seed: int) -> Simulator:
    """One run. Raises Violation, with the story of the run in its notes."""
    random = Random(seed)
    sim = Simulator(setup_of(random), seed)
    try:
        _run(sim, random)
    except BaseException as error:
        error.add_note(f"seed {seed}, {sim.setup}\n{sim.story()}")
        raise
    return sim


def _run(sim: Simulator, random: Random) -> None:
    sim.odd_plans = random.choice((0.0, 0.0, 0.02))
    sim.staging_fails = random.choice((0.0, 0.0, 0.04))
    sim.grants_fail = random.choice((0.0, 0.0, 0.03))
    chaos = Chaos(sim)
    at_s = random.choice((0.3, 1.5, 2.0, 2.5))
    for _ in range(random.choice((1, 2, 3, 4, 6))):
        at_s += random.choice((random.uniform(0.0, 0.3), random.uniform(0.3, 1.5)))
        sim.at(at_s, chaos.fault)
    sim.start()
    # Long enough, now and then, for a world that is cut off from the store to come to its end.
    long = chaos.agents and random.random() < 0.2
    sim.run(at_s + (4.5 if long else 0.7))
    chaos.heal()
    before, messages, since_s = len(sim.checker.told_commits), sim.messages, sim.now
    if not sim.run(sim.now + PEACE_S, lambda: len(sim.checker.told_commits) >= before + COMMITS):
        raise Violation("progress", f"no {COMMITS} commits within {PEACE_S} s of peace")
    rate = (sim.messages - messages) / max(1.0, sim.now - since_s) / len(sim.machines)
    if rate > MESSAGES_A_HOST_S:
        raise Violation("storm", f"{rate:.0f} messages a second and host")
