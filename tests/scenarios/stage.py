"""A small language for scenarios: a calm job whose every fault is placed by hand.

    stage = Stage(hosts=3, code="2+1")  # agents=True: with a store, and with production agents
    stage.commits(2)                    # until two more snapshots were told protected
    stage.rank("b").stop()              # SIGSTOP
    stage.until(stage.writing("c"))     # until a rank of c is in the middle of its slot
    stage.lose("b")
    stage.peace()                       # everything comes back; two more commits have to follow

The checker looks at every event, so a scenario fails where an invariant does. `shown` runs one
twice: with the rule it is about, and with the rule taken out, when the checker has to notice.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxft.group import events as e
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Body, Envelope
from jaxft.group.world import Code
from tests.sim.checker import Violation
from tests.sim.machine import Machine
from tests.sim.oracle import Oracle
from tests.sim.rank import Rank
from tests.sim.simulator import Setup, Simulator
from tests.sim.smp import Coding
from tests.sim.store import Store

WITHIN_S = 10.0
Condition = Callable[[], bool]


class Held:
    """Messages that the network keeps back until they are let go, or for ever."""

    def __init__(self, sim: Simulator, predicate: Callable[[Envelope, str], bool]) -> None:
        self._sim = sim
        self.kept: list[tuple[Envelope, str]] = []
        self._entry = (predicate, self.kept)
        sim.held.append(self._entry)

    def release(self) -> None:
        self._sim.held.remove(self._entry)
        for envelope, address in self.kept:
            self._sim.send(envelope, address)

    def drop(self) -> None:
        self._sim.held.remove(self._entry)


class Stage:
    """A job of hosts a, b, c ... in which nothing happens by chance."""

    def __init__(
        self,
        hosts: int = 3,
        code: str = "2+1",
        *,
        spares: int = 0,
        hosts_min: int = 2,
        ranks: int = 1,
        every_steps: int = 3,
        every_s: float = 0.0,
        persist_every: int = 0,
        agents: bool = False,
    ) -> None:
        setup = Setup(
            hosts=hosts + spares,
            hosts_max=hosts,
            hosts_min=hosts_min,
            code=Code.parse(code),
            ranks=ranks,
            every_steps=every_steps,
            every_s=every_s,
            persist_every=persist_every,
            agents=agents,
        )
        self.sim = Simulator(setup)
        self.sim.start()

    # ------------------------------------------------------------------ time

    def until(self, condition: Condition, what: str = "what the scenario waits for") -> None:
        """Lets the job run until `condition`."""
        if not self.sim.run(self.sim.now + WITHIN_S, condition):
            raise Violation("progress", f"{what} does not happen:\n{self.sim.story(60)}")

    def run(self, seconds: float) -> None:
        self.sim.run(self.sim.now + seconds)

    def commits(self, count: int) -> None:
        """Until `count` more snapshots were told protected."""
        told = self.sim.checker.told_commits
        before = len(told)
        self.until(lambda: len(told) >= before + count, f"{count} commits")

    def peace(self) -> None:
        """Faults end and everything comes back; the job has to commit twice more."""
        self.sim.stuck.clear()
        self.sim.blocked.clear()
        self.sim.held.clear()
        if isinstance(self.sim.oracle, Store):
            self.sim.oracle.cut_off.clear()
            self.sim.oracle.come_back()
        for machine in self.sim.machines:
            if machine.paused:
                machine.wake()
            if not machine.agent:
                machine.boot() if not machine.up else machine.start_agent()
                self.sim.oracle.came_back(machine)
            for rank in machine.ranks:
                rank.wake()
        self.commits(2)

    # ------------------------------------------------------------------ who

    def host(self, name: str) -> Machine:
        return self.sim.by_name[name]

    def rank(self, name: str, local: int = 0) -> Rank:
        return self.host(name).ranks[local]

    @property
    def number(self) -> int:
        """The generation's."""
        assert self.sim.generation is not None
        return self.sim.generation.number

    def base(self) -> SnapshotId | None:
        """What the newest generation goes on from."""
        return self.sim.checker.bases[self.number]

    @property
    def store(self) -> Store:
        """With agents: the store."""
        assert isinstance(self.sim.oracle, Store)
        return self.sim.oracle

    def members(self) -> str:
        """The hosts of the newest generation."""
        assert self.sim.generation is not None
        return "".join(member.host for member in self.sim.generation.hosts)

    def keep(self, kept: bool, rule: str, text: str) -> None:
        """Something that no invariant says, and that is promised all the same."""
        if not kept:
            self.sim.checker.fail(rule, text)

    # ------------------------------------------------------------------ conditions

    def slot(self, name: str, seq: int, *states: str) -> Condition:
        """Host `name` says that snapshot `seq` of the newest generation is in one of `states`."""

        def there() -> bool:
            memory = self.host(name).memory
            assert memory is not None
            return any(
                slot.id is not None
                and (slot.id.generation, slot.id.seq) == (self.number, seq)
                and slot.state in states
                for slot in memory.ledger.slots
            )

        return there

    def slot_number(self, name: str, seq: int) -> int:
        """The slot of host `name` that holds snapshot `seq`."""
        memory = self.host(name).memory
        assert memory is not None
        slots = memory.ledger.slots
        return next(i for i, slot in enumerate(slots) if slot.id is not None and slot.id.seq == seq)

    def writing(self, name: str, seq: int | None = None) -> Condition:
        """A rank of `name` has written a piece of its part of snapshot `seq`, and not all."""
        return lambda: any(
            rank.alive
            and rank.writer is not None
            and rank.writer.next_piece > 0
            and seq in (None, rank.writer.grant.id.seq)
            for rank in self.host(name).ranks
        )

    def coding(self, name: str) -> Condition:
        """Host `name` is in the middle of writing a piece of parity."""

        def there() -> bool:
            smp = self.host(name).smp
            jobs = smp.jobs if smp is not None else ()
            return any(isinstance(job, Coding) and job.landing is not None for job in jobs)

        return there

    def knows(self, name: str, seq: int) -> Condition:
        """Host `name` has the outcome of snapshot `seq` in its ledger."""

        def there() -> bool:
            memory = self.host(name).memory
            outcome = memory.ledger.outcome if memory is not None else None
            return outcome is not None and outcome.seq >= seq

        return there

    def settled(self, number: int) -> Condition:
        """Every rank of generation `number` has returned from `restore`."""

        def there() -> bool:
            ranks = [rank for rank in self.sim.ranks() if rank.generation.number == number]
            return self.number == number and bool(ranks) and all(rank.running for rank in ranks)

        return there

    # ------------------------------------------------------------------ faults

    def lose(self, name: str) -> None:
        self.host(name).lose()

    def fault(self) -> None:
        """A new generation is wanted, for no particular reason."""
        assert isinstance(self.sim.oracle, Oracle)
        self.sim.oracle.fault(self.number, "the scenario wants it")

    def pause(self, name: str) -> None:
        """The host stands still long enough to be given up."""
        self.host(name).pause()
        self.sim.oracle.lease_lapsed(self.host(name))

    def wake(self, name: str) -> None:
        self.host(name).wake()

    def stick(self, *names: str) -> None:
        """The coding of these hosts stands still."""
        self.sim.stuck.update(names)

    def unstick(self, *names: str) -> None:
        self.sim.stuck.difference_update(names)

    def cut(self, one: str, other: str) -> None:
        self.sim.blocked.add(frozenset((one, other)))

    def cut_store(self, *names: str) -> None:
        """These hosts cannot reach the store."""
        self.store.cut_off.update(names)

    def reach_store(self, *names: str) -> None:
        self.store.cut_off.difference_update(names)

    def die_before(self, name: str, effect: Callable[[e.Effect], bool]) -> None:
        """The SMP of this host dies just before it performs such an effect."""
        self.sim.crash_points.append((name, effect))

    def fail_staging(self, name: str) -> None:
        """The rank of this host says that a leaf could not be copied."""
        rank, smp = self.rank(name), self.host(name).smp
        assert smp is not None
        rank.failed = e.StagingFailed(rank.number, rank.asked, "leaf w could not be copied")
        smp.deliver(rank.failed)

    def hold(
        self, kind: type[Body] | tuple[type[Body], ...], *, to: str = "", of: str = ""
    ) -> Held:
        """The network keeps messages of this kind back."""
        return Held(
            self.sim,
            lambda envelope, address: (
                isinstance(envelope.body, kind)
                and address in (f"smp-{to}", address if not to else "")
                and envelope.sender in (of, envelope.sender if not of else "")
            ),
        )


Patch = Callable[[pytest.MonkeyPatch], None]


def shown(
    scenario: Callable[[], object], without: Patch, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scenario keeps every invariant, and breaks `breaks` when the rule is taken out."""
    scenario()
    with monkeypatch.context() as patch:
        without(patch)
        with pytest.raises(Violation) as caught:
            scenario()
    assert caught.value.rule == breaks, caught.value
