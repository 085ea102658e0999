"""The invariants of the design, checked at every event of a run.

    I1      whatever the budget still allows to be lost, the rest rebuilds a snapshot that is at
            least as new as the last one any rank was told was protected
    I2      every snapshot has one outcome, and all ranks go on from the same snapshot
    I3      no byte of the newest committed, or a pinned, snapshot is written
    I4      nothing of an older generation takes effect
    I6      restored bytes are the saved ones, and a ledger does not say more than there is
    storm   the number of messages a second has a limit
    world   no two generations train at the same time

The budget: between two commits a run loses at most `parity` hosts (or fragments) of every group.
What a plan gives is decided by the production `choose` over the ledgers of the hosts that are left,
and then looked up in the bytes that are really there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jaxft.group import events as e
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Damage, Ledger, Outcome, Plan, Slot
from jaxft.group.recovery import Holder, choose
from jaxft.group.world import Generation, Group, World
from tests.sim.memory import PIECES, SlotBytes, damage_found

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.rank import Rank, State
    from tests.sim.simulator import Simulator

PATTERNS_MAX = 4
WAKING_S = 0.6


class Violation(AssertionError):
    """`rule` is the name of the invariant that does not hold."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Checker:
    """What it knows of the run is the truth, not what any core believes."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.changed = False
        self.saved: dict[SnapshotId, dict[tuple[int, int], int]] = {}
        self.saved_state: dict[SnapshotId, set[tuple[State, str]]] = {}
        self.worlds: dict[SnapshotId, World] = {}
        self.arenas: dict[int, dict[str, str]] = {}
        self.hosts: dict[int, list[str]] = {}
        self.roots: dict[int, str] = {}
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.told: SnapshotId | None = None
        self.newest: SnapshotId | None = None
        self.commits: list[SnapshotId] = []
        self.told_commits: list[SnapshotId] = []
        self.bases: dict[int, SnapshotId | None] = {}
        self.settled: dict[int, set[str]] = {}
        self.went_on: dict[int, SnapshotId | None] = {}
        self.trains = 0
        self.absent: dict[SnapshotId, set[str]] = {}
        self.damaged: set[tuple[SnapshotId, str]] = set()
        self.announced: list[tuple[str, Mapping[str, str | int | float]]] = []
        self.odd = False

    def fail(self, rule: str, text: str) -> None:
        self.sim.log("*", f"VIOLATION of {rule}: {text}")
        raise Violation(rule, text)

    # ------------------------------------------------------------------ what is noted

    def on_generation(self, generation: Generation) -> None:
        members = (*generation.hosts, *generation.holders)
        self.arenas[generation.number] = {member.host: member.arena for member in members}
        self.hosts[generation.number] = [member.host for member in generation.hosts]
        self.roots[generation.number] = generation.hosts[0].host

    def on_announce(self, kind: str, detail: Mapping[str, str | int | float]) -> None:
        self.announced.append((kind, detail))
        if kind == "aborted" and "disagree" in str(detail["reason"]) and not self.odd:
            self.fail("I2", f"ranks were led to disagree: {detail['reason']}")

    def on_damage(self, identity: SnapshotId, name: str) -> None:
        self.damaged.add((identity, name))
        self.changed = True

    def on_save(self, rank: Rank, seq: int, state: State, digest: str) -> None:
        generation = rank.generation
        identity = SnapshotId(generation.number, seq, generation.nonce)
        place = generation.index_of(rank.machine.name)
        assert place is not None
        tokens = self.saved.setdefault(identity, {})
        for index in range(PIECES):
            piece = rank.local * PIECES + index
            tokens[place, piece] = self.sim.token(state, identity, place, piece)
        self.saved_state.setdefault(identity, set()).add((state, digest))
        self.worlds[identity] = World.of(generation)

    def on_told(self, outcome: Outcome, identity: SnapshotId) -> None:
        """A rank hears of it; one that wakes up, perhaps of a branch that the job has left."""
        if abandoned(identity, self.bases) is not None:
            return
        if outcome.ok and (self.told is None or self.told < identity):
            self.told = identity
            self.told_commits.append(identity)
            self.changed = True

    # ------------------------------------------------------------------ ledgers

    def on_ledger(self, machine: Machine, old: Ledger, new: Ledger, cause: int) -> None:
        if cause and cause != new.generation:
            self.fail("I4", f"{machine.name} of generation {new.generation} obeys {cause}")
        if new.generation < old.generation:
            self.fail("I4", f"{machine.name} goes back to generation {new.generation}")
        for number, (before, after) in enumerate(zip(old.slots, new.slots, strict=True)):
            if before != after:
                self.changed = True
                self._check_slot(machine, new, number, before, after)
        if old.outcome != new.outcome and new.outcome is not None:
            self._check_outcome(machine, old, new, new.outcome)
        if old.lineage != new.lineage:
            self.changed = True
            self._settle(machine, new)

    def _check_slot(
        self, machine: Machine, ledger: Ledger, number: int, before: Slot, after: Slot
    ) -> None:
        identity = after.id
        if identity is None:
            return
        if after.state == "writing":
            if identity.generation != ledger.generation:
                self.fail("I4", f"{machine.name} grants {identity} in {ledger.generation}")
            if not ledger.settled:
                self.fail("I3", f"{machine.name} grants {identity} before the generation settled")
            if before.id != identity:
                self._check_free(machine, before, f"is granted to {identity}")
            elif before.readable:
                self.fail("I3", f"{machine.name} grants {identity} again though it is whole")
        elif after.readable:
            assert machine.memory is not None
            wrong = self.wrong(identity, after, machine.memory.slots[number])
            if wrong:
                self.fail("I6", f"{machine.name} says {identity} is {after.state}: {wrong}")

    def _check_free(self, machine: Machine, record: Slot, what: str) -> None:
        why = self._protected(machine, record)
        if why:
            self.fail("I3", f"slot of {record.id} on {machine.name} {what}, but it is {why}")

    def _protected(self, machine: Machine, record: Slot) -> str:
        if record.id is None or not record.readable:
            return ""
        if record.id == self.newest and machine.name not in self.absent.get(record.id, ()):
            return "the newest committed one, or what the generation goes on from"
        helper = machine.helper
        copying = helper is not None and helper.alive and helper.state == "ready"
        if helper is not None and copying and helper.copying == record.id:
            return "being copied to storage"
        return ""

    def _check_outcome(self, machine: Machine, old: Ledger, new: Ledger, outcome: Outcome) -> None:
        key = (new.generation, outcome.seq)
        known = self.outcomes.get(key)
        last = -1
        if old.outcome is not None and old.generation == new.generation:
            last = old.outcome.seq
        if outcome.seq != last + 1 and machine.name in self.hosts[new.generation]:
            self.fail("I2", f"{machine.name} learns outcome {outcome.seq} after {last}")
        if known is not None:
            if known != outcome:
                self.fail("I2", f"snapshot {key} has two outcomes: {known} and {outcome}")
            return
        if machine.name != self.roots[new.generation]:
            self.fail("I2", f"{machine.name} knows outcome {key} before the root has written it")
        self.outcomes[key] = outcome
        if outcome.ok:
            identity = SnapshotId(new.generation, outcome.seq, new.nonce)
            if not any(later > new.generation for later in self.bases):
                self._check_commit(identity)
            self.commits.append(identity)
            self.newest = identity if self.newest is None else max(self.newest, identity)
            self.changed = True

    def _check_commit(self, identity: SnapshotId) -> None:
        """Every host that still has the generation's memory holds its whole share."""
        if len(self.saved_state[identity]) != 1:
            self.fail("I2", f"{identity} is committed of states {self.saved_state[identity]}")
        world = self.worlds[identity]
        for place, name in enumerate(world.hosts):
            if name in self.lost(identity):
                continue
            memory = self.sim.by_name[name].memory
            found = memory.find(identity) if memory is not None else None
            if found is None or found[0].state != "coded" or found[0].host != place:
                self.fail("I1", f"{identity} is committed, {name} does not hold its whole share")

    def _settle(self, machine: Machine, ledger: Ledger) -> None:
        record = ledger.lineage[-1]
        number, base = record.generation, record.base
        if number not in self.bases:
            if machine.name != self.roots[number]:
                self.fail("I2", f"{machine.name} has settled before the root has written it")
            self._first_to_settle(number, base)
        if self.bases[number] != base:
            self.fail("I2", f"generation {number} goes on from {self.bases[number]} and {base}")
        there = self.settled.setdefault(number, set())
        there.add(machine.name)
        if there >= set(self.hosts[number]):
            self.went_on[number] = base

    def _first_to_settle(self, number: int, base: SnapshotId | None) -> None:
        late = any(later > number for later in self.bases)
        self.bases[number] = base
        if late:  # the root of a generation that the others have left; nobody hears it any more
            return
        left = abandoned(base, self.went_on) if base is not None else None
        if left is not None:
            self.fail("I2", f"{base} is restored, but generation {left} had left its branch")
        if self.told is not None and (base is None or base < self.told):
            absent = set(self.by_arena(self.told)) - self.arenas[number].keys()
            if self.sim.setup.check_budget and self.within_budget(absent):
                self.fail("I1", f"generation {number} went back to {base}")
            self.told = base
        if self.newest is None or self.newest.generation < number:
            self.newest = base
        if base is not None:
            # A holder that has not entered has not said what it holds.
            ledgers = {one.name: one.memory.ledger for one in self.sim.machines if one.memory}
            here = {
                name
                for name in self.arenas[number]
                if name in ledgers and ledgers[name].generation == number
            }
            away = self.absent.setdefault(base, set())
            away |= self.by_arena(base).keys() - here

    # ------------------------------------------------------------------ writes

    def on_write(
        self, machine: Machine, slot: int, identity: SnapshotId, kind: str, generation: int
    ) -> None:
        """A write by a process of `generation` lands in the slot."""
        assert machine.memory is not None
        ledger = machine.memory.ledger
        record = ledger.slots[slot]
        if generation < ledger.generation:
            self.fail("I4", f"a {kind} of generation {generation} writes on {machine.name}")
        if record.id != identity:
            self._check_free(machine, record, f"is written by a {kind} of {identity}")
            self.fail("I3", f"a {kind} of {identity} writes into the slot of {record.id}")
        wanted = "staged" if kind == "parity" else "writing"
        if record.state != wanted:
            self.fail("I3", f"a {kind} of {identity} writes though it is {record.state}")

    def on_grant(self, machine: Machine, grant: e.Grant) -> None:
        assert machine.memory is not None
        ledger = machine.memory.ledger
        record = ledger.slots[grant.slot]
        if (record.id, record.state) != (grant.id, "writing"):
            self.fail("I3", f"{machine.name} grants {grant.id} before its ledger says so")

    # ------------------------------------------------------------------ restoring

    def on_read(self, identity: SnapshotId, place: int, tokens: list[int]) -> None:
        saved = self.saved[identity]
        if tokens != [saved.get((place, piece)) for piece in range(len(tokens))]:
            self.fail("I6", f"wrong bytes of place {place} of {identity} are given to a rank")

    def on_restored(self, rank: Rank, plan: Plan, states: set[State]) -> None:
        if len(states) != 1 or (
            plan.chosen is not None and len(self.saved_state[plan.chosen]) != 1
        ):
            self.fail("I2", f"rank {rank.number} restores a mixture: {sorted(states)}")

    def on_settled(self, rank: Rank, base: SnapshotId | None) -> None:
        """A rank returns from `restore`."""
        if rank.running:
            return
        number = rank.generation.number
        ranks = [one for one in self.sim.ranks() if one.generation.number == number and one.alive]
        for one in ranks:
            if one.verified is None:
                self.fail("I2", f"rank {rank.number} returns, rank {one.number} has not restored")
            elif one.verified.base != base:
                self.fail(
                    "I2", f"rank {one.number} restored {one.verified.base}, the base is {base}"
                )
        states = {one.restored for one in ranks}
        if len(states) != 1:
            self.fail("I2", f"ranks of generation {number} go on from {states}")

    # ------------------------------------------------------------------ one world

    def on_step(self, generation: Generation) -> None:
        """A rank of this generation has taken a step. Its world can only take one while all of its
        ranks live. A host that wakes up after a long pause has a moment to kill its own."""
        number = generation.number
        if number > self.trains:
            others = {rank.generation.number: rank.generation for rank in self.sim.ranks()}
            for other in others.values():
                if other.number < number and self._may_train(other):
                    self.fail("world", f"generation {number} trains, {other.number} does as well")
            self.trains = number
        elif number < self.trains and self._may_train(generation):
            self.fail("world", f"generation {number} still trains, {self.trains} does already")

    def _may_train(self, generation: Generation) -> bool:
        there = [
            rank
            for rank in self.sim.ranks()
            if rank.generation is generation
            and rank.alive
            and not (rank.stopped or rank.machine.paused)
            and self.sim.now - rank.machine.woke_at_s > WAKING_S
        ]
        return len(there) == generation.rank_count and all(rank.running for rank in there)

    # ------------------------------------------------------------------ I1

    def lost(self, identity: SnapshotId) -> set[str]:
        """The hosts of this snapshot's world whose share is gone with their memory, or damaged, or
        that were away when a generation went on from it."""
        gone = {name for damaged, name in self.damaged if damaged >= identity}
        gone |= self.absent.get(identity, set())
        for name, arena in self.by_arena(identity).items():
            memory = self.sim.by_name[name].memory
            if memory is None or memory.arena != arena:
                gone.add(name)
        return gone

    def by_arena(self, identity: SnapshotId) -> dict[str, str]:
        """The memory that this snapshot's world was formed with, by host."""
        arenas = self.arenas[identity.generation]
        return {name: arenas[name] for name in self.worlds[identity].hosts}

    def within_budget(self, names: Iterable[str]) -> bool:
        """May these hosts be lost as well?"""
        wanted = [one for one in (self.told, self.newest) if one is not None]
        for identity in wanted:
            gone = self.lost(identity) | set(names)
            world = self.worlds[identity]
            for group in world.groups:
                if sum(world.hosts[host] in gone for host in group.hosts) > group.parity:
                    return False
        return True

    def after_event(self) -> None:
        if not self.changed:
            return
        self.changed = False
        if self.told is None or not self.sim.setup.check_budget or not self.within_budget(()):
            return
        away = sorted(self.absent.get(self.newest, ())) if self.newest is not None else []
        for pattern in self._patterns(self.told):
            self.check_loss(pattern)
            if away:
                self.check_loss((*pattern, *away))

    def _patterns(self, identity: SnapshotId) -> list[tuple[str, ...]]:
        """The empty one and those that use the whole budget, or some of them."""
        world, gone = self.worlds[identity], self.lost(identity)
        choices = []
        for group in world.groups:
            names = [world.hosts[host] for host in group.hosts]
            left = [name for name in names if name not in gone]
            more = group.parity - (len(names) - len(left))
            choices.append(list(itertools.combinations(left, more)))
        patterns = [tuple(itertools.chain(*one)) for one in itertools.product(*choices)]
        if len(patterns) > PATTERNS_MAX:
            patterns = self.sim.random.sample(patterns, PATTERNS_MAX)
        return [(), *(one for one in patterns if one and self.within_budget(one))]

    def check_loss(self, pattern: tuple[str, ...]) -> None:
        """What the survivors would go on from if these hosts were lost now."""
        told = self.told
        assert told is not None
        holders = [
            Holder(machine.name, machine.address, machine.memory.ledger)
            for machine in self.sim.machines
            if machine.memory is not None and machine.name not in pattern
        ]
        damages: dict[SnapshotId, frozenset[Damage]] = {}
        for attempt in range(1, 20):
            plan = choose(holders, attempt=attempt, damages=damages, storage=self.sim.storage)
            if plan.base is None or plan.base < told:
                self.fail(
                    "I1",
                    f"after losing {pattern} the rest goes on from {plan.base}, but {told} was "
                    f"told protected: {plan.reasons}",
                )
            if plan.chosen is None:
                return
            damaged = self._find_damage(plan)
            if not damaged:
                return
            damages[plan.chosen] = damages.get(plan.chosen, frozenset()) | damaged
        self.fail("I1", f"after losing {pattern} no plan is found")

    def _find_damage(self, plan: Plan) -> frozenset[Damage]:
        """What the ranks and the rebuilding hosts would find out about this plan."""
        found: set[Damage] = set()
        rebuilding = any(segment.rebuilt for segment in plan.segments)
        for place, address in plan.shares:
            memory = self.sim.by_address[address].memory
            holds = memory.find(plan.chosen) if memory is not None and plan.chosen else None
            assert holds is not None
            content = holds[1]
            if Damage(place) in plan.damaged:
                continue
            if content.manifest is None:
                found.add(Damage(place))
                continue
            found |= {Damage(place, 0, index) for index in damage_found(content.manifest, content)}
            if rebuilding:
                found |= {
                    Damage(place, 0, index)
                    for index in range(self.sim.setup.ranks * PIECES)
                    if holds[0].state == "coded"
                    and content.parity.get(index) is None
                    and len(self._group(plan.world, place).hosts) > 1
                }
        return frozenset(found) - frozenset(plan.damaged)

    def _group(self, world: World, place: int) -> Group:
        return world.group_of(place)

    # ------------------------------------------------------------------ the bytes of a share

    def wrong(self, identity: SnapshotId, record: Slot, content: SlotBytes) -> str:
        """Why this share is not what its ledger says, or ""."""
        saved = self.saved[identity]
        count = self.sim.setup.ranks * PIECES
        if any(name == record.world.hosts[record.host] for _, name in self.damaged):
            return ""
        if content.manifest is None:
            return "its manifest is missing"
        for piece in range(count):
            if content.pieces.get(piece) != saved.get((record.host, piece)):
                return f"piece {piece} is wrong"
        group = record.world.group_of(record.host)
        if record.state != "coded" or group.parity == 0:
            return ""
        mates = [host for host in group.hosts if host != record.host]
        for piece in range(count):
            if content.parity.get(piece) != tuple(
                (mate, saved.get((mate, piece))) for mate in mates
            ):
                return f"parity {piece} is wrong"
        return ""


def abandoned(identity: SnapshotId, bases: Mapping[int, SnapshotId | None]) -> int | None:
    """The generation that went on from something older than this, if there is one."""
    for generation, base in bases.items():
        if identity.generation < generation and (base is None or base < identity):
            return generation
    return None
