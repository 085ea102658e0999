"""The SMP's driver: performs what its core wants, and tells it what happens.

What takes time (sealing, coding, rebuilding) is a job in small steps on the clock. A step that has
begun lands even if it was told to stop meanwhile; a job that stands still wakes up later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from jaxft.group import events as e
from jaxft.group.host import HostCore
from jaxft.group.manifest import Manifest, SnapshotId
from jaxft.group.messages import (
    Blob,
    Body,
    Damage,
    Envelope,
    Invite,
    ManifestNotice,
    Plan,
    Status,
)
from jaxft.group.world import Generation
from tests.sim.memory import PIECES, Memory, Parity, checks, damage_found

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.rank import Rank

PULL_S = 1.2
LOCAL_S = 0.001
PAUSED_S = 0.25


class Smp:
    """One start of a host's snapshot process on its memory."""

    def __init__(self, machine: Machine, memory: Memory) -> None:
        self.machine = machine
        self.sim = machine.sim
        self.memory = memory
        memory.ledger = msgspec.structs.replace(memory.ledger, boots=memory.ledger.boots + 1)
        self.core = HostCore(machine.name, machine.address, memory.ledger, self.sim.setup.timing)
        self.alive = True
        self.crash_after: int | None = None
        self.jobs: set[Work] = set()
        self.rebuilt: dict[tuple[SnapshotId, int], tuple[Manifest, list[int]]] = {}
        self.freezing: int | None = None
        self.cause: int = 0
        self.said: dict[str, Body] = {}
        self.tick_s = float("inf")
        self._mind_tick(self.sim.now + self.sim.soon(0.05, 0.25))

    def die(self) -> None:
        self.alive = False
        for work in self.jobs:
            work.alive = False

    # ------------------------------------------------------------------ what happens

    def _mind_tick(self, due_s: float) -> None:
        """Lets time pass when it is due; a moment later, as a loop of its own would."""
        if self.alive and due_s < self.tick_s:
            self.tick_s = max(due_s, self.sim.now) + LOCAL_S
            self.sim.at(self.tick_s - self.sim.now, self._tick, self.tick_s)

    def _tick(self, at_s: float) -> None:
        if self.alive and at_s == self.tick_s:
            self.tick_s = float("inf")
            if self.core.due_s(self.sim.now) <= self.sim.now:
                self.deliver(e.Ticked())
            pause_s = PAUSED_S if self.machine.paused else 0.0
            self._mind_tick(max(self.core.due_s(self.sim.now), self.sim.now + pause_s))

    def enter(self, generation: Generation) -> None:
        self.deliver(e.EnterWanted(generation))
        if self.machine.helper is not None and self.machine.generation is generation:
            self.machine.helper.tell()

    def receive(self, envelope: Envelope) -> None:
        """Drops what is not of this generation, or not from the memory it was formed with."""
        if not self.alive:
            return
        if self.machine.paused:
            self.machine.backlog.append((self.receive, (envelope,)))
            return
        if isinstance(envelope.body, Invite):
            self._invited(envelope.body.generation)
            return
        if not self.is_ours(envelope):
            return
        self.cause = envelope.generation
        self.deliver(e.Heard(envelope.sender, envelope.body))
        self.cause = 0

    def _invited(self, generation: Generation) -> None:
        """A newer generation counts on this memory. Perhaps there is no agent to say so, or it is
        cut off from the store."""
        mine = (self.machine.name, self.memory.arena)
        if any((member.host, member.arena) == mine for member in generation.holders):
            self.deliver(e.EnterWanted(generation))

    def is_ours(self, envelope: Envelope) -> bool:
        """Is it of this generation, and from the memory that the generation was formed with?"""
        generation = self.core.keeper.generation
        if generation is None or generation.number != envelope.generation:
            return False
        members = (*generation.hosts, *generation.holders)
        arenas = {member.host: member.arena for member in members}
        return generation.nonce == envelope.nonce and arenas.get(envelope.sender) == envelope.arena

    def deliver(self, event: e.Event) -> None:
        if not self.alive:
            return
        if self.machine.paused:
            if not isinstance(event, e.Ticked):
                self.machine.backlog.append((self.deliver, (event,)))
            return
        if not isinstance(event, e.Ticked):
            self.sim.log(self.machine.name, event)
        for effect in self.core.handle(event, self.sim.now):
            if self._dies_before(effect):
                self.machine.kill_smp()
                return
            self.perform(effect)
        self._mind_tick(self.core.due_s(self.sim.now))

    def _dies_before(self, effect: e.Effect) -> bool:
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                return True
        return self.sim.crash_point(self.machine.name, effect)

    # ------------------------------------------------------------------ what is done

    def perform(self, effect: e.Effect) -> None:
        match effect:
            case e.Send(address, body):
                self._send(address, body)
                return
            case e.SendManifest(address, slot, wanted):
                manifest = self.memory.slots[slot].manifest
                if manifest is not None:
                    self._send(address, ManifestNotice(manifest=manifest, wanted=wanted))
                    return
                identity = self.memory.ledger.slots[slot].id
                assert identity is not None
                failed = e.GrantFailed(identity, "the manifest is damaged")
                self.sim.at(LOCAL_S, self.deliver, failed)
                return
            case _:
                self.sim.log(self.machine.name, effect)
        match effect:
            case e.WriteLedger(ledger):
                old, self.memory.ledger = self.memory.ledger, ledger
                self.sim.checker.on_ledger(self.machine, old, ledger, self.cause)
            case e.Freeze(number):
                self.freezing = number
                for work in self.jobs:
                    work.stopped = True
                self.machine.end_helper()
                for rank in self.machine.ranks:
                    if rank.generation.number < number:
                        rank.kill()
                self.try_frozen()
            case e.Grant():
                self._grant(effect)
            case e.Seal():
                self._seal(effect)
            case e.Code():
                Coding(self, effect)
            case e.StopCoding(identity):
                running = [one for one in self.jobs if isinstance(one, Coding)]
                for one in running:
                    if one.order.id == identity:
                        one.stopped = True
            case e.Rebuild(plan):
                Rebuilding(self, plan)
            case e.ReleaseRebuilt():
                self.rebuilt.clear()
            case e.TellPersist(order):
                self.machine.persist(order)
            case e.DeclareFault(host, reason, kind):
                number = self.memory.ledger.generation
                self.sim.oracle.reported(self.machine, number, host, reason, kind)
            case e.Announce(kind, detail):
                self.sim.checker.on_announce(kind, detail)
                self.sim.oracle.announced(self.machine, kind, detail)
            case (
                e.TellPlan()
                | e.TellSettled()
                | e.TellStaged()
                | e.TellOutcome()
                | e.TellHeld()
                | e.TellTurn()
            ):
                for rank in self.ranks():
                    rank.hear(effect)
            case _:
                raise AssertionError(f"nobody performs {effect}")

    def _send(self, address: str, body: Body) -> None:
        generation = self.core.keeper.generation
        assert generation is not None
        envelope = Envelope(
            job="job",
            generation=generation.number,
            nonce=generation.nonce,
            sender=self.machine.name,
            arena=self.memory.arena,
            body=body,
        )
        last, self.said[address] = self.said.get(address), body
        quiet = isinstance(body, Status) and body is last and self.core.is_calm(self.sim.now)
        # The root takes note of a whisper when it next says something itself.
        late_s = self.core.timing.heartbeat_s if quiet else 0.0
        self.sim.send(envelope, address, late_s)

    def ranks(self) -> list[Rank]:
        """Those that it talks to: connected, and of the generation it is in."""
        generation = self.core.keeper.generation
        return [
            rank
            for rank in self.machine.ranks
            if rank.alive and rank.smp is self and rank.generation is generation
        ]

    def _grant(self, grant: e.Grant) -> None:
        self.sim.checker.on_grant(self.machine, grant)
        if self.sim.chance(self.sim.grants_fail):
            self.sim.at(LOCAL_S, self.deliver, e.GrantFailed(grant.id, "no memory"))
            return
        Granting(self, grant)

    def _seal(self, order: e.Seal) -> None:
        """Writes the manifest of the parts into the slot, at once."""
        generation = self.memory.ledger.generation
        self.sim.checker.on_write(self.machine, order.slot, order.id, "manifest", generation)
        length = 64 * len(order.parts)
        self.memory.slots[order.slot].manifest = Manifest(
            id=order.id,
            step=order.step,
            host=order.host,
            world=self.memory.ledger.slots[order.slot].world,
            plan=order.plan,
            leaves=(),
            parts=order.parts,
            length=length,
            lanes=((0, length),),
        )
        self.sim.at(LOCAL_S, self.deliver, e.SegmentSealed(order.id, length, Blob(length, 8, 1)))

    def try_frozen(self) -> None:
        """Frozen once nothing of the old generation can write any more."""
        if self.freezing is None or not self.alive or self.jobs:
            return
        if any(r.alive and r.generation.number < self.freezing for r in self.machine.ranks):
            return
        number, self.freezing = self.freezing, None
        for slot, (record, content) in enumerate(
            zip(self.memory.ledger.slots, self.memory.slots, strict=True)
        ):
            if record.readable and content.manifest is None:
                self.sim.at(LOCAL_S, self.deliver, e.SlotSpoiled(slot, "damaged"))
        self.sim.at(LOCAL_S, self.deliver, e.Frozen(number))

    # ------------------------------------------------------------------ serving peers

    def serve(self, identity: SnapshotId, place: int) -> tuple[Manifest | None, list[int]] | None:
        """A segment that lies in a slot: its manifest (None: damaged) and its pieces."""
        found = self.memory.find(identity)
        if found is None or found[0].host != place:
            return None
        content = found[1]
        count = self.sim.setup.ranks * PIECES
        return content.manifest, [content.pieces.get(index, 0) for index in range(count)]


class Work:
    """A job of the SMP, in steps. It dies with the SMP and stands still with the host."""

    def __init__(self, smp: Smp) -> None:
        self.smp = smp
        self.sim = smp.sim
        self.alive = True
        self.stopped = False
        self.deadline_s = self.sim.now + PULL_S
        self.generation = smp.memory.ledger.generation
        smp.jobs.add(self)
        self.again(self.sim.soon(0.005, 0.05))

    def again(self, delay_s: float) -> None:
        if self.sim.chance(0.02):
            delay_s += self.sim.random.uniform(0.3, 1.5)
        self.sim.at(delay_s, self._wake)

    def _wake(self) -> None:
        if not self.alive:
            return
        if self.smp.machine.paused:
            self.smp.machine.backlog.append((self._wake, ()))
        elif isinstance(self, Coding) and self.smp.machine.name in self.sim.stuck:
            self.sim.at(0.01, self._wake)
        else:
            self.step()

    def step(self) -> None:
        """What this kind of job does next; every kind has its own."""
        raise NotImplementedError

    def end(self, event: e.Event) -> None:
        self.alive = False
        self.smp.jobs.discard(self)
        self.sim.at(LOCAL_S, self.smp.deliver, event)
        self.smp.try_frozen()

    def write(self, slot: int, identity: SnapshotId, kind: str) -> None:
        self.sim.checker.on_write(self.smp.machine, slot, identity, kind, self.generation)


class Granting(Work):
    """Makes room in the slot, then tells the ranks."""

    def __init__(self, smp: Smp, order: e.Grant) -> None:
        self.order = order
        super().__init__(smp)

    def step(self) -> None:
        self.alive = False
        self.smp.jobs.discard(self)
        if self.order.id == self.smp.core.keeper.next_id and not self.stopped:
            for rank in self.smp.ranks():
                rank.hear(self.order)
        self.smp.try_frozen()


class Coding(Work):
    """Pulls the other members' pieces, then writes this member's parity, piece by piece."""

    def __init__(self, smp: Smp, order: e.Code) -> None:
        self.order = order
        world, own = order.record.world, order.record.host
        self.mates = [host for host in world.group_of(own).hosts if host != own]
        self.sources = list(self.mates)
        self.manifests = {manifest.host: manifest for manifest in order.manifests}
        self.read: dict[int, list[int]] = {}
        self.landing: int | None = None
        self.todo = list(range(smp.sim.setup.ranks * PIECES))
        super().__init__(smp)

    def step(self) -> None:
        content = self.smp.memory.slots[self.order.slot]
        if self.landing is not None:
            self.write(self.order.slot, self.order.id, "parity")
            content.parity[self.landing] = self._parity(self.landing)
            self.landing = None
        if self.stopped:
            self.end(e.CodingFailed(self.order.id, "stopped"))
        elif self.sources:
            self._pull(self.sources[0])
        elif self.todo:
            self.landing = self.todo.pop(0)
            self.again(self.sim.soon(0.005, 0.04))
        else:
            content.group = dict(self.manifests)
            self.end(e.CodingDone(self.order.id, Blob(128, 64, 2), Blob(192, 8, 3)))

    def _parity(self, piece: int) -> Parity:
        return tuple((mate, self.read[mate][piece]) for mate in self.mates)

    def _pull(self, mate: int) -> None:
        address = dict(self.order.addresses)[mate]
        machine = self.sim.reader(self.smp.machine.name, address)
        served = None
        if machine is not None and machine.smp is not None:
            served = machine.smp.serve(self.order.id, mate)
        if served is None:
            if self.sim.now > self.deadline_s:
                self.end(e.CodingFailed(self.order.id, f"{address} does not give its segment"))
            else:
                self.again(0.1)
            return
        manifest = self.manifests.get(mate) or served[0]
        wrong = (
            []
            if manifest is None
            else [
                index for index, token in enumerate(checks(manifest)) if served[1][index] != token
            ]
        )
        if manifest is None or wrong:
            self.end(e.CodingFailed(self.order.id, f"damaged bytes from {address}"))
            return
        self.manifests[mate] = manifest
        self.read[mate] = served[1]
        self.sources.pop(0)
        self.again(self.sim.soon(0.005, 0.05))


class Rebuilding(Work):
    """Rebuilds the segments that a plan gives to this host into memory of their own."""

    def __init__(self, smp: Smp, plan: Plan) -> None:
        self.plan = plan
        self.places = [
            segment.host
            for segment in plan.segments
            if segment.rebuilt and segment.address == smp.machine.address
        ]
        for other in list(smp.jobs):
            if isinstance(other, Rebuilding):
                other.stopped = True
        super().__init__(smp)

    def step(self) -> None:
        identity = self.plan.chosen
        assert identity is not None
        if self.stopped:
            self.end(e.RebuildFailed(self.plan.attempt, "stopped"))
            return
        while self.places:
            result = self._rebuild(self.places[0], identity)
            if isinstance(result, str):
                if self.sim.now > self.deadline_s:
                    self.end(e.RebuildFailed(self.plan.attempt, result))
                else:
                    self.again(0.1)
                return
            if isinstance(result, Damage):
                damaged = (result,)
                self.end(e.RebuildFailed(self.plan.attempt, "damaged fragment", damaged))
                return
            self.smp.rebuilt[identity, self.places.pop(0)] = result
        self.end(e.Rebuilt(self.plan.attempt))

    def _rebuild(
        self, place: int, identity: SnapshotId
    ) -> tuple[Manifest, list[int]] | Damage | str:
        shares = dict(self.plan.shares)
        manifest: Manifest | None = None
        pieces: dict[int, int] = {}
        for mate in self.plan.world.group_of(place).hosts:
            if mate not in shares:
                continue
            machine = self.sim.reader(self.smp.machine.name, shares[mate])
            found = None
            if machine is not None and machine.smp is not None:
                found = machine.smp.memory.find(identity)
            if found is None:
                return f"{shares[mate]} does not give its share"
            content = found[1]
            if content.manifest is None:
                return Damage(mate)
            for index in range(self.sim.setup.ranks * PIECES):
                if Damage(mate, 0, index) in self.plan.damaged:
                    continue
                parity = content.parity.get(index)
                if parity is None or index in damage_found(content.manifest, content):
                    return Damage(mate, 0, index)
                known = dict(parity)
                if place in known:
                    pieces[index] = known[place]
            manifest = content.group.get(place, manifest)
            if mate == place:
                manifest = content.manifest
        if manifest is None or len(pieces) < self.sim.setup.ranks * PIECES:
            return f"too little is left to rebuild place {place}"
        return manifest, [pieces[index] for index in sorted(pieces)]
