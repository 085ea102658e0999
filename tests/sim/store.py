"""The store and the agents' decisions: production membership code over a simulated store.

Every agent renews its lease and decides at its own moments, by `membership.Observer` from what it
sees in the store, and by `absence` while it cannot reach it. What it decides is done here: writes
that are refused when somebody was faster, entering, killing, probing.

A host may be cut off from the store: its lease runs out like that of a lost one. Or the store may
be away: nobody reaches it, and every lease has its whole time again when it is back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from jaxft.group import events as e
from jaxft.group import membership as m
from jaxft.group.absence import mind_absence
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import StorageEntry
from jaxft.group.records import Fault, HostRecord, Progress, View
from jaxft.group.restarts import EARLIER_MAX, RestartPolicy
from jaxft.group.world import Generation, Member
from tests.sim.rank import Job, Rank, State

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.simulator import Simulator

LEASE_S = 0.6
POLL_S = 0.12
TICK_S = 0.05
GRACE_S = 3.0
KILL_S = 0.5


class Store:
    """Takes the place of the oracle."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.generation: Generation | None = None
        self.agents = {machine.name: Agent(self, machine) for machine in sim.machines}
        self.expires: dict[str, float] = {}
        self.revision = 0
        self.hosts: dict[str, HostRecord] = {}
        self.faults: dict[int, Fault] = {}
        self.progress: dict[int, Progress] = {}
        self.revisions: dict[str, int] = {}
        self.nonces = 0
        self.away = False
        self.cut_off: set[str] = set()
        self.grace_s = GRACE_S
        setup = sim.setup
        self.rules = m.Rules(
            job="job",
            code=setup.code,
            hosts_min=setup.hosts_min,
            hosts_max=setup.hosts_max or setup.hosts,
            settle_s=0.4,
            agent_grace_s=1.2,
            cut_off_s=GRACE_S + KILL_S,
            form_timeout_s=1e9,
            exit_grace_s=1e9,
            ack_s=1.0,
            late_s=0.8,
            restarts=RestartPolicy(
                max_restarts=EARLIER_MAX, same_step_max=10**9, early_s=0.0, flap_s=0.5
            ),
        )

    # ------------------------------------------------------------------ the records

    def view(self) -> View:
        for host in [host for host, until_s in self.expires.items() if until_s < self.sim.now]:
            self.sim.log("*", f"the lease of {host} ends")
            del self.expires[host], self.hosts[host], self.revisions[f"host/{host}"]
        return View(
            revisions=dict(self.revisions),
            hosts=dict(self.hosts),
            generation=self.generation,
            faults=dict(self.faults),
            progress=dict(self.progress),
            number=0,
        )

    def touch(self, key: str) -> None:
        self.revision += 1
        self.revisions[key] = self.revision

    def register(self, record: HostRecord) -> None:
        self.expires[record.host] = self.sim.now + LEASE_S
        if self.hosts.get(record.host) != record:
            self.hosts[record.host] = record
            self.touch(f"host/{record.host}")

    def form(self, generation: Generation, expect: Mapping[str, int | None]) -> None:
        self.view()
        if any(self.revisions.get(key) != revision for key, revision in expect.items()):
            return
        self.generation = generation
        self.touch("generation")
        self.sim.jobs[generation.number] = Job(self.sim, generation)
        names = "".join(member.host for member in generation.hosts)
        holders = "".join(member.host for member in generation.holders)
        self.sim.log("*", f"GENERATION {generation.number} of {names}+{holders}")
        self.sim.checker.on_generation(generation)

    def declare(self, fault: Fault, expect: int | None) -> None:
        key = f"fault/{fault.generation}"
        if self.revisions.get(key) == expect:
            self.sim.log("*", f"fault in generation {fault.generation}: {fault.detail}")
            self.faults[fault.generation] = msgspec.structs.replace(fault, at_s=self.sim.now)
            self.touch(key)

    # ------------------------------------------------------------------ who reaches it

    def reaches(self, name: str) -> bool:
        return not self.away and name not in self.cut_off

    def go_away(self) -> None:
        self.sim.log("*", "the store is away")
        self.away = True

    def come_back(self) -> None:
        if self.away:
            self.sim.log("*", "the store is back")
            self.away = False
            self.expires = dict.fromkeys(self.expires, self.sim.now + LEASE_S)

    # ------------------------------------------------------------------ what happens to agents

    def start(self) -> None:
        """Agents start with their hosts."""

    def agent_started(self, machine: Machine) -> None:
        agent = self.agents[machine.name] = Agent(self, machine)
        self.sim.at(self.sim.soon(0.01, POLL_S), agent.poll)

    def rank_exited(self, rank: Rank) -> None:
        self.agents[rank.machine.name].exits.append(
            m.Exit(rank=rank.number, code=-9, lived_s=self.sim.now)
        )

    def reported(
        self, machine: Machine, number: int, host: str, reason: str, kind: str = "smp_report"
    ) -> None:
        self.agents[machine.name].report = (number, host, reason, kind)

    def hangs(self, rank: Rank) -> None:
        machine = rank.machine
        self.reported(machine, rank.generation.number, machine.name, "a rank hangs")

    def announced(self, machine: Machine, kind: str, detail: Mapping[str, object]) -> None:
        """The root's agent says how far the generation is."""
        smp = machine.smp
        if smp is None or kind not in ("settled", "committed"):
            return
        ledger, step = smp.memory.ledger, detail["step"]
        number = ledger.generation
        assert isinstance(step, int)
        agent = self.agents[machine.name]
        known = agent.progress
        base = known[1].base if known is not None and known[0] == number else step
        snapshot = None
        if kind == "committed":
            snapshot = SnapshotId(number, int(str(detail["seq"])), ledger.nonce)
        elif detail["base"]:
            snapshot = SnapshotId.parse(str(detail["base"]), str(detail["nonce"]))
        agent.progress = (number, Progress(base=base, step=step, snapshot=snapshot))
        if machine.agent and self.reaches(machine.name):
            self.write_progress(*agent.progress)

    def write_progress(self, number: int, progress: Progress) -> None:
        if self.progress.get(number) != progress:
            self.progress[number] = progress
            self.touch(f"progress/{number}")

    def lease_lapsed(self, machine: Machine) -> None:
        """Leases end by themselves."""

    def came_back(self, machine: Machine) -> None:
        """Agents see that by themselves."""

    def woke(self, machine: Machine, paused_s: float) -> None:
        """An agent that has not reached the store for long kills its ranks first of all."""
        if machine.agent:
            self.agents[machine.name].mind()

    def persisted(self, identity: SnapshotId, step: int, state: State, machine: Machine) -> None:
        assert machine.memory is not None
        self.sim.log("*", f"checkpoint of {identity} is on storage")
        self.sim.stored[identity] = state
        entry = StorageEntry(step=step, id=identity, lineage=machine.memory.ledger.lineage)
        self.sim.storage.append(entry)


class Agent:
    """One start of a host's agent, as far as membership is concerned."""

    def __init__(self, store: Store, machine: Machine) -> None:
        self.store = store
        self.sim = store.sim
        self.machine = machine
        self.start = machine.agents
        self.observer: m.Observer | None = None
        self.entered = 0
        self.running = 0
        self.left = 0
        self.exits: list[m.Exit] = []
        self.report: tuple[int, str, str, str] | None = None
        self.answers: dict[str, bool] = {}
        self.progress: tuple[int, Progress] | None = None
        self.renewed_s = self.sim.now
        self.killing = False
        self.members: tuple[Member, ...] = ()
        self.unheard: dict[str, float] = {}

    def poll(self) -> None:
        """Renews, looks, decides, acts; and again, while this agent lives."""
        machine = self.machine
        if not machine.agent or machine.agents != self.start or machine.memory is None:
            return
        if machine.paused:
            machine.backlog.append((self.poll, ()))
            return
        self.mind()
        if not self.store.reaches(machine.name):
            self.sim.at(self.sim.soon(TICK_S, 2 * TICK_S), self.poll)
            return
        self.renewed_s = self.sim.now
        self.store.register(self._record())
        if self.killing:
            self.sim.at(self.sim.soon(TICK_S, 2 * TICK_S), self.poll)
            return
        self.observer = self.observer or m.Observer(self.store.rules)
        if self.progress is not None and self.progress[0] == self.entered:
            self.store.write_progress(*self.progress)
        self.store.nonces += 1
        nonce = f"n{self.store.nonces}"
        self._act(self.observer.decide(self.store.view(), self._me(), self.sim.now, nonce))
        self.sim.at(self.sim.soon(POLL_S, 2 * POLL_S), self.poll)

    def _record(self) -> HostRecord:
        machine = self.machine
        assert machine.memory is not None
        ledger = machine.memory.ledger
        held = [slot.id for slot in ledger.slots if slot.readable and slot.id is not None]
        known = self.store.hosts.get(machine.name)
        mine = known is not None and known.agent == f"agent-{machine.name}{self.start}"
        return HostRecord(
            host=machine.name,
            agent=f"agent-{machine.name}{self.start}",
            arena=machine.memory.arena,
            address=machine.address,
            coordinator="",
            ranks=self.sim.setup.ranks,
            newest=known.newest if mine and known is not None else ledger.generation,
            snapshot=known.snapshot if mine and known is not None else max(held, default=None),
            left=self.left,
        )

    def _me(self) -> m.Me:
        report = None
        if self.report is not None and self.report[0] == self.entered:
            report = self.report[1:]
        return m.Me(
            host=self.machine.name,
            agent=f"agent-{self.machine.name}{self.start}",
            entered=self.entered,
            running=self.running,
            exits=tuple(self.exits),
            report=report,
            answers=dict(self.answers),
        )

    def _act(self, decision: m.Decision) -> None:
        match decision:
            case m.Wait(probe=probe):
                for member in probe:
                    reader = self.sim.reader(self.machine.name, member.address)
                    self.answers[member.host] = reader is not None
            case m.Form(generation=generation, expect=expect):
                self.store.form(generation, expect)
            case m.Enter(generation=generation):
                self.entered = generation.number
                self.running = 0 if generation.index_of(self.machine.name) is None else self.entered
                self.exits = []
                self.answers = {}
                self.members, self.unheard = generation.hosts, {}
                self.machine.enter(generation)
            case m.AskSnapshot(reason=reason):
                if self.machine.smp is not None:
                    self.machine.smp.deliver(e.TurnWanted(reason))
            case m.KillRanks(generation=number):
                self.machine.kill_ranks()
                if not any(rank.alive for rank in self.machine.ranks):
                    self.running, self.left = 0, max(self.left, number)
            case m.DeclareFault(fault=fault, expect=expect_one):
                self.store.declare(fault, expect_one)
            case _:
                self.sim.checker.fail("progress", f"{self.machine.name} decides {decision}")

    def _unheard_s(self) -> dict[str, float]:
        """Members of the generation that was entered whose SMP does not answer, and since when."""
        for member in self.members:
            if self.sim.reader(self.machine.name, member.address) is not None:
                self.unheard.pop(member.host, None)
            else:
                self.unheard.setdefault(member.host, self.sim.now)
        return {host: self.sim.now - since_s for host, since_s in self.unheard.items()}

    def mind(self) -> None:
        """What a store that does not answer means for this host's ranks. Nothing else is done until
        they are dead."""
        silent_s = self.sim.now - self.renewed_s
        absence = mind_absence(
            silent_s,
            "" if self.store.reaches(self.machine.name) else "it does not answer",
            running=bool(self.running) and not self.killing,
            grace_s=self.store.grace_s,
            patience_s=self.store.rules.form_timeout_s,
            unheard_s=self._unheard_s(),
            peer_s=LEASE_S,
        )
        if absence.action == "kill":
            self.sim.log(self.machine.name, absence.reason)
            self.machine.end_helper()
            self.machine.kill_ranks()
            self.killing = True
        if self.killing and not any(rank.alive for rank in self.machine.ranks):
            self.killing, self.running = False, 0
