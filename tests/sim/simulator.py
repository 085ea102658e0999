"""A whole job in one thread: hosts, network, ranks and faults on a virtual clock.

The cores under test are the production ones; what surrounds them here does what `host/driver.py`,
the agent and a rank do, with every delay and every fault drawn from one seeded random number
generator. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from jaxft.group import events as e
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Envelope, StorageEntry
from jaxft.group.timing import Timing
from jaxft.group.world import Code, Generation
from tests.sim.checker import Checker
from tests.sim.machine import Machine
from tests.sim.oracle import Oracle
from tests.sim.rank import Job, Rank, State
from tests.sim.store import Store
from tests.sim.story import brief

CODE = Code(data=2, parity=1)
TIMING = Timing(silence_s=1.5, rejoin_s=0.5, persist_s=5.0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run is made of. `calm`: no random delays, losses or doubles; for scenarios. `agents`:
    generations are formed by production agents, not by an oracle."""

    hosts: int = 3
    hosts_max: int = 0
    hosts_min: int = 2
    code: Code = CODE
    ranks: int = 1
    every_steps: int = 3
    every_s: float = 0.0
    overhead: float = 0.0
    persist_every: int = 0
    lost: float = 0.0
    doubled: float = 0.0
    slow: float = 0.0
    calm: bool = True
    check_budget: bool = True
    agents: bool = False
    timing: Timing = TIMING


class Simulator:
    """Owns the clock, the network and the machines."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self.random = Random(seed)
        self.now = 0.0
        self.trace: list[tuple[float, str, object]] = []
        self.events = 0
        self.messages = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()
        self._tokens: dict[object, int] = {}
        self.state_of: dict[int, State] = {}
        self.blocked: set[frozenset[str]] = set()
        self.held: list[tuple[Callable[[Envelope, str], bool], list[tuple[Envelope, str]]]] = []
        self.stuck: set[str] = set()
        self.crash_points: list[tuple[str, Callable[[e.Effect], bool]]] = []
        self.digests: dict[str, str] = {}
        self.odd_plans = 0.0
        self.staging_fails = 0.0
        self.grants_fail = 0.0
        self.measured_s = 0.05
        self.skipping: set[tuple[int, int]] = set()
        self.storage: list[StorageEntry] = []
        self.stored: dict[SnapshotId, State] = {}
        self.written: dict[SnapshotId, set[str]] = {}
        self.jobs: dict[int, Job] = {}
        self.checker = Checker(self)
        self.machines = [
            Machine(self, "abcdefghijklmnop"[index], index) for index in range(setup.hosts)
        ]
        self.by_name = {machine.name: machine for machine in self.machines}
        self.by_address = {machine.address: machine for machine in self.machines}
        self.oracle: Oracle | Store = Store(self) if setup.agents else Oracle(self)

    def start(self) -> None:
        for machine in self.machines:
            machine.boot()
        self.oracle.start()

    # ------------------------------------------------------------------ the clock

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), action, args))

    def step(self) -> bool:
        """The next event. False: nothing is left to happen."""
        if not self._queue:
            return False
        self.now, _, action, args = heapq.heappop(self._queue)
        self.events += 1
        action(*args)
        self.checker.after_event()
        return True

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Runs until `done` or the virtual time `until_s`; says whether `done`."""
        while not done():
            if not self._queue or self._queue[0][0] > until_s:
                self.now = max(self.now, until_s)
                return done()
            self.step()
        return True

    def log(self, who: str, what: object) -> None:
        self.trace.append((self.now, who, what))

    def story(self, last: int = 400) -> str:
        """The last events, one a line."""
        return "\n".join(f"{at:8.3f} {who:3} {brief(what)}" for at, who, what in self.trace[-last:])

    # ------------------------------------------------------------------ delays

    def soon(self, least_s: float, most_s: float) -> float:
        """A delay: `least_s` in a calm run."""
        return least_s if self.setup.calm else self.random.uniform(least_s, most_s)

    def crash_point(self, name: str, effect: e.Effect) -> bool:
        """Is this host's SMP to die before it performs this effect? Each point strikes once."""
        for point in self.crash_points:
            if point[0] == name and point[1](effect):
                self.crash_points.remove(point)
                return True
        return False

    def chance(self, share: float) -> bool:
        return share > 0 and not self.setup.calm and self.random.random() < share

    # ------------------------------------------------------------------ the network

    def connected(self, one: str, other: str) -> bool:
        return one == other or frozenset((one, other)) not in self.blocked

    def send(self, envelope: Envelope, address: str, late_s: float = 0.0) -> None:
        """Late, lost, doubled, reordered; `late_s` later than that."""
        self.messages += 1
        for predicate, kept in self.held:
            if predicate(envelope, address):
                kept.append((envelope, address))
                return
        if self.chance(self.setup.lost):
            return
        copies = 2 if self.chance(self.setup.doubled) else 1
        for _ in range(copies):
            delay_s = self.soon(0.002, 0.02)
            if self.chance(self.setup.slow):
                delay_s = self.random.uniform(0.1, 2.0)
            self.at(late_s + delay_s, self._arrive, envelope, address)

    def _arrive(self, envelope: Envelope, address: str) -> None:
        machine = self.by_address[address]
        if self.connected(envelope.sender, machine.name) and machine.smp is not None:
            machine.smp.receive(envelope)

    # ------------------------------------------------------------------ bytes

    def token(self, state: State, identity: SnapshotId, place: int, piece: int) -> int:
        """The content of one piece of a segment of one state."""
        key = (state, identity, place, piece)
        token = self._tokens.get(key)
        if token is None:
            token = self._tokens[key] = len(self._tokens) + 1
            self.state_of[token] = state
        return token

    # ------------------------------------------------------------------ looking

    @property
    def generation(self) -> Generation | None:
        return self.oracle.generation

    def ranks(self) -> list[Rank]:
        return [rank for machine in self.machines for rank in machine.ranks]

    def up(self) -> Sequence[Machine]:
        return [machine for machine in self.machines if machine.up]

    def reader(self, name: str, address: str) -> Machine | None:
        """The machine at `address`, if the host `name` can read from its SMP now."""
        machine = self.by_address.get(address)
        if machine is None or machine.smp is None or machine.paused or not machine.smp.alive:
            return None
        return machine if self.connected(name, machine.name) else None
