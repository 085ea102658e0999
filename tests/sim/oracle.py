"""Who takes part, decided by an oracle: the leases and the store's transaction, without their code.

It knows at once what agents would find out by leases, waits as long as they would, and forms the
next generation from the hosts that are there. Every agent learns of it at another time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import StorageEntry
from jaxft.group.placement import form_groups
from jaxft.group.world import Generation, Member
from tests.sim.rank import Job, Rank, State

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.simulator import Simulator


class Oracle:
    """The store, as far as the simulator needs it."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.generation: Generation | None = None
        self.number = 0
        self.reports: dict[int, tuple[str, str]] = {}  # by generation: of whom, and of which kind
        self._wanted = False

    # ------------------------------------------------------------------ why

    def start(self) -> None:
        self.want("start", 0.05)

    def agent_started(self, machine: Machine) -> None:
        """It waits for a generation that it is in."""

    def rank_exited(self, rank: Rank) -> None:
        self.fault(rank.generation.number, f"rank {rank.number} died")

    def reported(
        self, machine: Machine, number: int, host: str, reason: str, kind: str = "smp_report"
    ) -> None:
        self.reports[number] = (host, kind)
        self.fault(number, f"{host}: {reason}")

    def hangs(self, rank: Rank) -> None:
        self.fault(rank.generation.number, f"rank {rank.number} hangs")

    def announced(self, machine: Machine, kind: str, detail: Mapping[str, object]) -> None:
        """How far a generation is does not matter here."""

    def woke(self, machine: Machine, paused_s: float) -> None:
        """A host that was left out meanwhile kills its ranks, and comes again."""
        if self.generation is not machine.generation and machine.agent:
            machine.kill_ranks()
            self.came_back(machine)

    def fault(self, generation: int, reason: str) -> None:
        """An agent or a root says that the generation cannot go on."""
        if self.generation is not None and generation == self.generation.number:
            self.sim.log("*", f"fault in generation {generation}: {reason}")
            self.want(reason, self.sim.soon(0.05, 0.3))

    def lease_lapsed(self, machine: Machine) -> None:
        if self.generation is not None and self.generation.index_of(machine.name) is not None:
            self.want(f"{machine.name} is lost", self.sim.soon(0.3, 0.8))

    def came_back(self, machine: Machine) -> None:
        if self.generation is None or len(self.generation.hosts) < self._most():
            self.want(f"{machine.name} is there", self.sim.soon(0.1, 0.6))
        elif self.generation.index_of(machine.name) is not None:
            self.want(f"{machine.name} is there again", self.sim.soon(0.1, 0.4))

    def want(self, reason: str, delay_s: float) -> None:
        if not self._wanted:
            self._wanted = True
            self.sim.at(delay_s, self._form, reason)

    def _most(self) -> int:
        return self.sim.setup.hosts_max or self.sim.setup.hosts

    # ------------------------------------------------------------------ forming

    def _form(self, reason: str) -> None:
        self._wanted = False
        there = [machine for machine in self.sim.machines if machine.agent and not machine.paused]
        if len(there) < self.sim.setup.hosts_min:
            self.want(reason, 0.2)
            return
        last = self.generation
        if last is not None:
            # Hosts of the last world first, then those that waited.
            there.sort(key=lambda machine: last.index_of(machine.name) is None)
        hosts, rest = there[: self._most()], there[self._most() :]
        found = [m.memory.ledger.generation for m in there if m.memory is not None]
        self.number = 1 + max([self.number, *found])
        code = self.sim.setup.code
        self.generation = Generation(
            job="job",
            number=self.number,
            nonce=f"n{self.number}",
            hosts=tuple(self._member(machine, self.sim.setup.ranks) for machine in hosts),
            groups=form_groups(len(hosts), code),
            code=code,
            holders=tuple(self._member(machine, 0) for machine in rest),
            reason=reason,
        )
        self.sim.jobs[self.number] = Job(self.sim, self.generation)
        names = "".join(machine.name for machine in hosts)
        self.sim.log("*", f"GENERATION {self.number} of {names}: {reason}")
        self.sim.checker.on_generation(self.generation)
        for machine in there:
            self.sim.at(self.sim.soon(0.01, 0.5), machine.enter, self.generation)

    def _member(self, machine: Machine, ranks: int) -> Member:
        assert machine.memory is not None
        agent = f"agent-{machine.name}{machine.agents}"
        return Member(machine.name, agent, machine.memory.arena, machine.address, ranks)

    # ------------------------------------------------------------------ the store of checkpoints

    def persisted(self, identity: SnapshotId, step: int, state: State, machine: Machine) -> None:
        assert machine.memory is not None
        self.sim.log("*", f"checkpoint of {identity} is on storage")
        self.sim.stored[identity] = state
        entry = StorageEntry(step=step, id=identity, lineage=machine.memory.ledger.lineage)
        self.sim.storage.append(entry)
