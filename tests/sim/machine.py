"""One host: its memory, its SMP, its ranks, and the agent that looks after them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxft.group import events as e
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Ledger, PersistOrder, PersistState
from jaxft.group.world import Generation
from tests.sim.memory import DAMAGED, Memory, checks
from tests.sim.rank import Rank
from tests.sim.smp import Smp

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator


class Machine:
    """`up`: the host runs at all. `paused`: every process of it stands still (and may wake up)."""

    def __init__(self, sim: Simulator, name: str, number: int) -> None:
        self.sim = sim
        self.name = name
        self.number = number
        self.address = f"smp-{name}"
        self.up = False
        self.agent = False
        self.agents = 0
        self.arenas = 0
        self.paused = False
        self.paused_at_s = 0.0
        self.woke_at_s = -math.inf
        self.kill_s = 0.005
        self.copy_s = 0.05
        self.helper_start_s = 0.05  # at least
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.memory: Memory | None = None
        self.smp: Smp | None = None
        self.ranks: list[Rank] = []
        self.generation: Generation | None = None
        self.helper: Helper | None = None

    # ------------------------------------------------------------------ the agent

    def boot(self) -> None:
        """The host comes up with nothing in its memory."""
        self.up = True
        self.paused = False
        self.backlog = []
        self.start_agent()

    def start_agent(self) -> None:
        self.agent = True
        self.agents += 1
        self.generation = None
        if self.memory is None:
            self.arenas += 1
            arena = f"{self.name}{self.arenas}"
            self.memory = Memory(arena, Ledger(arena=arena))
            self.sim.checker.changed = True
        if self.smp is None:
            self.start_smp()
        self.sim.oracle.agent_started(self)

    def start_smp(self) -> None:
        if not (self.up and self.agent) or self.memory is None or self.smp is not None:
            return
        self.smp = Smp(self, self.memory)
        self.sim.log(self.name, "SMP starts")
        if self.generation is not None:
            self.smp.enter(self.generation)

    def enter(self, generation: Generation) -> None:
        """The store has a new generation: kill the old ranks, tell the SMP, start the new ranks."""
        if not (self.up and self.agent):
            return
        if self.generation is not None and self.generation.number >= generation.number:
            return
        if self.paused:
            self.backlog.append((self.enter, (generation,)))
            return
        self.generation = generation
        self.kill_ranks()
        if self.smp is not None:
            self.smp.enter(generation)
        self.start_ranks(generation)

    def kill_ranks(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def start_ranks(self, generation: Generation) -> None:
        """Only when the old ones are gone."""
        if self.generation is not generation or not (self.up and self.agent):
            return
        if any(rank.alive for rank in self.ranks):
            self.sim.at(0.02, self.start_ranks, generation)
            return
        index = generation.index_of(self.name)
        self.ranks = []
        if index is None:
            return
        first = generation.first_rank(index)
        for number in range(first, first + generation.hosts[index].ranks):
            self.ranks.append(Rank(self, generation, number, number - first))

    # ------------------------------------------------------------------ losing things

    def lose(self) -> None:
        """The host is gone with all that it had."""
        self.sim.log(self.name, "HOST LOST")
        self.up = False
        self.lose_agent_and_smp()
        self.sim.oracle.lease_lapsed(self)

    def lose_agent_and_smp(self) -> None:
        """Nobody holds the memory any more."""
        self.kill_agent()
        self.kill_smp(restart=False)
        self.memory = None
        self.sim.checker.changed = True

    def kill_agent(self) -> None:
        self.agent = False
        self.end_helper()
        for rank in self.ranks:
            rank.die()

    def kill_smp(self, *, restart: bool = True) -> None:
        if self.smp is None:
            return
        self.sim.log(self.name, "SMP dies")
        self.smp.die()
        self.smp = None
        if restart:
            self.sim.at(self.sim.soon(0.1, 0.4), self.start_smp)

    def pause(self) -> None:
        self.sim.log(self.name, "host stops")
        self.paused = True
        self.paused_at_s = self.sim.now

    def wake(self) -> None:
        self.sim.log(self.name, "host wakes up")
        self.paused = False
        self.woke_at_s = self.sim.now
        backlog, self.backlog = self.backlog, []
        self.sim.oracle.woke(self, self.sim.now - self.paused_at_s)
        for action, args in backlog:
            action(*args)

    def damage(self, slot: int, piece: int, what: str) -> bool:
        """A byte flips in memory. False where there was nothing to damage."""
        assert self.memory is not None
        record, content = self.memory.ledger.slots[slot], self.memory.slots[slot]
        if not record.readable or record.id is None:
            return False
        if what == "manifest":
            content.manifest = None
        elif what == "parity":
            if piece not in content.parity:
                return False
            content.parity[piece] = None
        else:
            content.pieces[piece] = DAMAGED
        self.sim.log(self.name, f"byte flips in {what} {piece} of {record.id}")
        self.sim.checker.on_damage(record.id, self.name)
        return True

    # ------------------------------------------------------------------ persisting

    def end_helper(self) -> None:
        if self.helper is not None:
            self.helper.alive = False
            self.helper = None

    def persist(self, order: PersistOrder) -> None:
        """What the agent and the helper make of an order."""
        helper = self.helper
        if helper is not None and (helper.number != order.number or not order.wanted):
            helper.alive = False
            self.helper = helper = None
        if helper is None and order.wanted and self.agent and self.generation is not None:
            self.helper = helper = Helper(self, order.number)
        if helper is not None and order.id is not None:
            helper.copy(order.id, order.step)


class Helper:
    """The process that writes this host's part of a checkpoint."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.sim = machine.sim
        self.number = number
        self.alive = True
        self.generation = machine.generation
        self.copying: SnapshotId | None = None
        self.state = "starting"
        self.sim.at(0.001, self._say, "starting", "")
        self.sim.at(self.sim.soon(machine.helper_start_s, 0.4), self._say, "ready", "")

    def _say(self, state: str, detail: str) -> None:
        if not self.alive or not self.machine.agent:
            return
        if self.machine.paused:
            self.machine.backlog.append((self._say, (state, detail)))
            return
        self.state = state
        self.tell()

    def tell(self) -> None:
        """Also after the SMP was started again."""
        smp = self.machine.smp
        if smp is not None:
            state = PersistState(number=self.number, state=self.state, coordinator="")
            smp.deliver(e.PersistProgressed(state))

    def copy(self, identity: SnapshotId, step: int) -> None:
        if self.copying is None:
            self.copying = identity
            self.sim.at(self.sim.soon(self.machine.copy_s, 0.6), self._copied, identity, step)

    def _copied(self, identity: SnapshotId, step: int) -> None:
        memory = self.machine.memory
        if not self.alive or memory is None or not self.machine.agent:
            return
        if self.machine.paused:
            self.machine.backlog.append((self._copied, (identity, step)))
            return
        found = memory.find(identity)
        if found is None or found[1].manifest is None:
            self._say("failed", "the slot does not hold it")
            return
        tokens = checks(found[1].manifest)
        if [found[1].pieces.get(index) for index in range(len(tokens))] != tokens:
            self._say("failed", "damaged")
            return
        self.state = "copied"
        self._say("copied", "")
        self.sim.at(self.sim.soon(0.05, 0.4), self._wrote, identity, step, tokens[0])

    def _wrote(self, identity: SnapshotId, step: int, token: int) -> None:
        """The last host's part makes the checkpoint."""
        if not self.alive or self.generation is None:
            return
        hosts = self.sim.written.setdefault(identity, set())
        hosts.add(self.machine.name)
        if hosts >= {member.host for member in self.generation.hosts}:
            self.sim.oracle.persisted(identity, step, self.sim.state_of[token], self.machine)
        self._say("written", "")
