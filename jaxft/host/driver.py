"""Performs the effects of a host's core, and turns what happens into its events.

This is the only place where the protocol meets sockets, memory and threads. It belongs to the SMP's
loop; whatever takes time is a job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from jaxft.errors import JaxftError, MemoryLimitError, ReadCancelled
from jaxft.faults import reach
from jaxft.group import events as e
from jaxft.group.host import HostCore
from jaxft.group.manifest import Leaf, Manifest, SnapshotId
from jaxft.group.messages import (
    Damage,
    Invite,
    Ledger,
    ManifestNotice,
    PersistOrder,
    Plan,
    Segment,
    Slot,
)
from jaxft.group.timing import Timing
from jaxft.group.world import World
from jaxft.host import protocol as p
from jaxft.host.clients import Clients
from jaxft.host.coding import Sources, check_given, encode_share
from jaxft.host.diary import Diary
from jaxft.host.jobs import Jobs
from jaxft.host.layout import GroupBlob, GroupLayout
from jaxft.host.memory import available_bytes, check_fits
from jaxft.host.pace import Pace
from jaxft.host.peers import Peers
from jaxft.host.recall import Recall, bulk_address, control_address
from jaxft.host.shares import Shares, whole_manifest
from jaxft.host.wire import Endpoint, Network

_log = logging.getLogger(__name__)
SPARE_BYTES = 64 << 20


class Driver:
    """One host's core with its hands.

    Args:
        job, host: names.
        address: "control,bulk" of this SMP.
        shares: its memory.
        network, endpoint: to other SMPs.
        clients: to this host's processes.
        timing: the root's patience.
        memory_bytes_max: what both slots may take together, if not all that there is.
        pace: what pulling for coding has to keep to, if it has to.
        trust: the name of what peers know each other by.
    """

    def __init__(
        self,
        *,
        job: str,
        host: str,
        address: str,
        shares: Shares,
        ledger: Ledger,
        network: Network,
        endpoint: Endpoint,
        clients: Clients,
        timing: Timing,
        memory_bytes_max: int | None = None,
        pace: Pace | None = None,
        trust: str = "",
    ) -> None:
        self.trust = trust
        self.memory_bytes_max = memory_bytes_max
        self.pace = pace
        self._room = threading.Lock()
        self.job = job
        self.host = host
        self.address = address
        self.shares = shares
        self.network = network
        self.endpoint = endpoint
        self.clients = clients
        self.jobs = Jobs(endpoint.wake)
        self.core = HostCore(host, address, ledger, timing)
        self.diary = Diary(ledger)
        self.peers = Peers(job=job, host=host, arena=ledger.arena, endpoint=endpoint)
        self.recall: Recall | None = None
        self._reader = network.reader()
        self._events: deque[e.Event] = deque()
        self._leaves: dict[int, tuple[Leaf, ...]] = {}
        self._freezing: int | None = None
        self._room_bytes = 0
        self._plan: Plan | None = None
        self._perform: dict[type, Callable[..., None]] = {
            e.WriteLedger: self._write_ledger,
            e.Freeze: self._freeze,
            e.Send: self._send,
            e.SendManifest: self._send_manifest,
            e.Grant: self._grant,
            e.Seal: self._seal,
            e.Code: self._code,
            e.StopCoding: self._stop_coding,
            e.Rebuild: self._rebuild,
            e.ReleaseRebuilt: self._release_rebuilt,
            e.TellPlan: self._tell_plan,
            e.TellSettled: self._tell_settled,
            e.TellStaged: self._tell_staged,
            e.TellOutcome: self._tell_outcome,
            e.TellHeld: self._tell_held,
            e.TellTurn: self._tell_turn,
            e.TellPersist: self._tell_persist,
            e.DeclareFault: self._declare_fault,
            e.Announce: self._announce,
        }

    @property
    def ledger(self) -> Ledger:
        return self.core.keeper.ledger

    # -------------------------------------------------------------------- events

    def happen(self, event: e.Event) -> None:
        """Feeds an event in, and performs all that follows from it."""
        self._events.append(event)
        while self._events:
            now_s = time.monotonic()
            for effect in self.core.handle(self._events.popleft(), now_s):
                self.diary.see(effect)
                self._perform[type(effect)](effect)

    def hear(self, payload: bytes) -> None:
        """A message from a peer. One of another job, generation or memory has no effect."""
        envelope = self.peers.hear(payload, self.core.keeper.generation)
        if envelope is None:
            return
        if isinstance(envelope.body, Invite):
            self._invited(envelope.body)
        else:
            self.happen(e.Heard(envelope.sender, envelope.body))

    def _invited(self, invite: Invite) -> None:
        """A newer generation counts on this memory. Nobody else says so where there is no agent, or
        one that is cut off from the store. The ranks of the old generation, which has ended for
        good, are dead or will be killed before anything is answered."""
        generation = invite.generation
        mine = (self.host, self.ledger.arena)
        if generation.job == self.job and any(
            (member.host, member.arena) == mine for member in generation.holders
        ):
            self.happen(e.EnterWanted(generation))

    def tick(self) -> None:
        """Lets time pass in the core."""
        self.happen(e.Ticked())

    @property
    def due_s(self) -> float:
        """When `tick` is to be called, if nothing else happens before; monotonic time."""
        return self.core.due_s(time.monotonic())

    def try_frozen(self) -> None:
        """Says that the host is frozen, once no old rank lives and no old job runs."""
        if self._freezing is None:
            return
        living = self.clients.living_writers()
        if living:
            self.clients.kill_writers()
        if living or self.jobs.unfinished:
            return
        number, self._freezing = self._freezing, None
        for slot, reason in self.shares.spoiled(self.ledger):
            _log.error("slot %d is damaged and counts as lost: %s", slot, reason)
            self._tell_agent("slot_damaged", {"slot": slot, "reason": reason})
            self.diary.note("slot_damaged", f"slot {slot} counts as lost: {reason}")
            self.happen(e.SlotSpoiled(slot, reason))
        self.happen(e.Frozen(number))

    def writer_fds(self) -> list[int]:
        """What becomes readable when an old rank, whose death is waited for, is dead."""
        return [] if self._freezing is None else self.clients.writer_fds()

    # -------------------------------------------------------------------- ledger and entering

    def _write_ledger(self, effect: e.WriteLedger) -> None:
        self.shares.write(effect.ledger)
        ledger = effect.ledger
        seq = 0 if ledger.outcome is None else ledger.outcome.seq + 1
        coming = SnapshotId(ledger.generation, seq, ledger.nonce)
        states = [slot.state for slot in ledger.slots if slot.id == coming]
        self._reach("smp.written", coming, state=(states or ["none"])[0], settled=ledger.settled)

    def _reach(self, point: str, identity: SnapshotId, **facts: object) -> None:
        """A point where a test may let this host fail."""
        reach(point, host=self.host, generation=identity.generation, seq=identity.seq, **facts)

    def _freeze(self, effect: e.Freeze) -> None:
        self._freezing = effect.generation
        self._room_bytes = 0
        self._plan = None
        self.recall = None
        self.jobs.cancel()
        self.shares.drop_rebuilt()
        self.peers.forget()
        self._reader = self.network.reader()
        for client in self.clients.seated("rank", "helper"):
            client.channel.close()

    # -------------------------------------------------------------------- peers

    def _send(self, effect: e.Send) -> None:
        generation = self.core.keeper.generation
        if generation is None:
            return
        calm = self.core.is_calm(time.monotonic())
        self.peers.say(control_address(effect.address), effect.body, generation, calm=calm)
        self._reach(
            "smp.sent",
            self.core.keeper.next_id,
            body=type(effect.body).__name__,
            settled=getattr(effect.body, "settled", ""),
        )

    def _send_manifest(self, effect: e.SendManifest) -> None:
        slot = self.ledger.slots[effect.slot]
        try:
            manifest = self.shares.manifest(effect.slot, slot)
        except JaxftError as error:
            self._snapshot_failed(slot.id, f"the manifest in its slot is damaged: {error}")
            return
        self._send(e.Send(effect.address, ManifestNotice(manifest=manifest, wanted=effect.wanted)))

    def _snapshot_failed(self, identity: SnapshotId | None, reason: str) -> None:
        if identity is not None:
            _log.error("snapshot %s: %s", identity, reason)
            self._events.append(e.GrantFailed(identity, reason))

    # -------------------------------------------------------------------- a snapshot's way

    def _grant(self, effect: e.Grant) -> None:
        """Makes room in a job (touching memory takes time), then tells the ranks."""
        arena = self.shares.slots[effect.slot]
        nbytes = self.slot_bytes(effect.nbytes, effect.given)

        def room(cancel: threading.Event) -> None:
            self._make_room(effect.slot, nbytes)

        def done(result: None, error: BaseException | None) -> None:
            if error is not None:
                self.happen(e.GrantFailed(effect.id, f"no memory for the snapshot: {error}"))
                return
            self._reach("smp.granted", effect.id)
            for rank, base, _ in effect.bases:
                client = self.clients.rank(rank)
                if client is not None and effect.id == self.core.keeper.next_id:
                    client.tell(
                        p.Granted(
                            seq=effect.id.seq,
                            slot=effect.slot,
                            base=base,
                            size_bytes=arena.size_bytes,
                        )
                    )

        self.jobs.start(("grant", effect.id), room, done)

    def _make_room(self, number: int, nbytes: int) -> None:
        """Grows a slot and makes its memory exist; one thread at a time."""
        arena = self.shares.slots[number]
        with self._room:
            before = arena.size_bytes
            if nbytes > before:
                check_fits(nbytes - before, self._left_bytes(), f"slot {number}")
                arena.ensure(nbytes)
                arena.touch(before, nbytes - before)

    def slot_bytes(self, segment_bytes: int, given_bytes: int = 0) -> int:
        """What a slot needs for a segment of this size: the segment, its manifest, its parity and
        the group's manifests (the manifests are estimated; a slot grows if they are larger). Of
        `given_bytes` of it devices have made the parity, which is among them."""
        generation, index = self.core.keeper.generation, self.core.keeper.index
        if generation is None or index is None:
            return segment_bytes
        group = generation.group_of(index)
        parity = -(-(segment_bytes - given_bytes) * group.parity // group.data)
        return segment_bytes + parity + len(group.hosts) * (segment_bytes // 1024 + (1 << 18))

    def group_code(self) -> str:
        """ "K+M" of this host's group, which may have less parity than the job's code."""
        generation, index = self.core.keeper.generation, self.core.keeper.index
        if generation is None or index is None:
            return ""
        group = generation.group_of(index)
        return f"{group.data}+{group.parity}"

    def reserve(self, nbytes: int) -> str:
        """Is there memory for two slots with parts of this size? Returns what is wrong.

        If nothing is, the memory is made to exist once all is restored, so that no snapshot waits
        for it.
        """
        generation, index = self.core.keeper.generation, self.core.keeper.index
        if generation is not None and index is not None:
            nbytes *= generation.hosts[index].ranks
        wanted = self.slot_bytes(nbytes)
        growth = sum(max(0, wanted - slot.size_bytes) for slot in self.shares.slots)
        try:
            check_fits(
                growth,
                self._left_bytes(),
                f"host {self.host}: two snapshot slots of {wanted / 2**20:.1f} MiB for "
                f"{nbytes / 2**20:.1f} MiB of state",
            )
        except MemoryLimitError as error:
            return str(error)

        self._room_bytes = wanted if growth else 0
        if self.ledger.settled:
            self._ready_slots()
        return ""

    def _ready_slots(self) -> None:
        """Makes the memory that was reserved exist; not before a restore is through with memory
        and processors."""
        wanted, self._room_bytes = self._room_bytes, 0

        def room(cancel: threading.Event) -> None:
            for number in range(len(self.shares.slots)):
                if not cancel.is_set():
                    self._make_room(number, wanted)

        def done(result: None, error: BaseException | None) -> None:
            # The snapshot that does not get its memory will say so itself.
            if error is not None:
                _log.warning("memory for the slots could not be made ready: %s", error)

        if wanted:
            self.jobs.start("reserve", room, done)

    def _left_bytes(self) -> int:
        """How much more memory the slots may take."""
        left = available_bytes() - SPARE_BYTES
        if self.memory_bytes_max is not None:
            held = sum(slot.size_bytes for slot in self.shares.slots)
            left = min(left, self.memory_bytes_max - held)
        return max(0, left)

    def part_staged(self, rank: int, message: p.Staged) -> None:
        self._leaves[rank] = msgspec.msgpack.decode(message.leaves, type=tuple[Leaf, ...])
        self.happen(e.PartStaged(rank, message.seq, message.part))

    def _seal(self, effect: e.Seal) -> None:
        generation = self.core.keeper.generation
        assert generation is not None
        leaves = self._leaves[effect.parts[0].rank]
        template = Manifest(
            id=effect.id,
            step=effect.step,
            host=effect.host,
            world=World.of(generation),
            plan=effect.plan,
            leaves=leaves,
            parts=(),
            length=0,
            lanes=(),
        )
        manifest = whole_manifest(template, effect.parts)
        try:
            blob = self.shares.seal_segment(effect.slot, manifest)
        except MemoryLimitError as error:
            self._events.append(e.GrantFailed(effect.id, str(error)))
            return
        self._reach("smp.sealed", effect.id)
        self._events.append(e.SegmentSealed(effect.id, manifest.length, blob))

    def _code(self, effect: e.Code) -> None:
        """Computes the share's parity. An old snapshot's group is asked for its manifests first."""
        slot = effect.record
        plan = self._plan if self._plan is not None and self._plan.chosen == effect.id else None
        reader = self._reader

        def work(cancel: threading.Event) -> tuple[int, int, GroupBlob]:
            manifests = {manifest.host: manifest for manifest in effect.manifests}
            if not manifests and plan is not None:
                manifests = Recall(plan, self.network, cancel).manifests()
            own = self.shares.manifest(effect.slot, slot)
            manifests[own.host] = own
            layout = GroupLayout(slot.world.group_of(own.host), manifests)
            nbytes = layout.region_bytes(own.host)
            offset, parity = self.shares.place_parity(effect.slot, slot, nbytes)
            self._reach("smp.coding", effect.id)
            sources = Sources(
                id=effect.id,
                layout=layout,
                addresses={host: bulk_address(address) for host, address in effect.addresses},
                reader=reader,
                cancel=cancel,
                names=slot.world.hosts,
                pace=self.pace,
            )
            check_given(sources, own.host, self.shares.slots[effect.slot].view(0, own.length))
            sums = encode_share(sources, own.host, parity)
            mates = [host for host in layout.group.hosts if host != own.host]
            group = GroupBlob(tuple(manifests[host] for host in mates), sums)
            return offset, nbytes, group

        def done(result: tuple[int, int, GroupBlob] | None, error: BaseException | None) -> None:
            if error is not None or result is None:
                why = str(error) or repr(error)
                reason = "stopped" if isinstance(error, ReadCancelled) else f"no parity: {why}"
                self.happen(e.CodingFailed(effect.id, reason))
                return
            self._coded(effect, *result)

        self.jobs.start(("code", effect.id), work, done, low=True)

    def _coded(self, effect: e.Code, offset: int, nbytes: int, group: GroupBlob) -> None:
        number = self.core.keeper.slot_of(effect.id)
        if number != effect.slot:
            self.happen(e.CodingFailed(effect.id, "its slot was given away"))
            return
        blob = self.shares.seal_group(effect.slot, offset + nbytes, group)
        parity = msgspec.structs.replace(blob, offset=offset, length=nbytes, checksum=0)
        self._reach("smp.coded", effect.id)
        self.happen(e.CodingDone(effect.id, parity, blob))

    def _stop_coding(self, effect: e.StopCoding) -> None:
        self.jobs.cancel(("code", effect.id))

    # -------------------------------------------------------------------- restoring

    def _rebuild(self, effect: e.Rebuild) -> None:
        """Rebuilds the segments that the plan gives to this host, one job each."""
        plan = effect.plan
        self.jobs.cancel("rebuild")
        self.shares.drop_rebuilt()  # of an earlier plan, and perhaps never whole
        mine = [one.host for one in plan.segments if one.rebuilt and one.address == self.address]
        left = set(mine)

        def begin(host: int) -> None:
            def work(cancel: threading.Event) -> None:
                reach(
                    "smp.rebuilding",
                    host=self.host,
                    generation=self.ledger.generation,
                    attempt=plan.attempt,
                )
                Recall(plan, self.network, cancel, self.address, self.shares).rebuild(host)

            def done(result: None, error: BaseException | None) -> None:
                if self._plan is None or self._plan.attempt != plan.attempt:
                    return
                if error is not None:
                    damaged: frozenset[Damage] = getattr(error, "damaged", frozenset())
                    # Never empty: that would read as no failure.
                    reason = str(error) or repr(error)
                    self.happen(e.RebuildFailed(plan.attempt, reason, tuple(sorted(damaged))))
                    return
                self.shares.publish(self.ledger)
                left.discard(host)
                self._tell_agent("rebuilt", {"segment": plan.world.hosts[host]})
                if not left:
                    self.happen(e.Rebuilt(plan.attempt))

            self.jobs.start("rebuild", work, done)

        for host in mine:
            begin(host)

    def _release_rebuilt(self, effect: e.ReleaseRebuilt) -> None:
        self.shares.drop_rebuilt()
        self.shares.publish(self.ledger)

    def _tell_plan(self, effect: e.TellPlan) -> None:
        if self._plan != effect.plan:
            self.jobs.cancel("fetch", "manifests")
        self._plan = effect.plan
        self.recall = None
        self.clients.tell(self.plan_message(effect.plan), "rank")

    def plan_message(self, plan: Plan) -> p.PlanTold:
        own = self._own_share(plan.chosen)
        if own is not None and any(one.host == own[1] and one.rebuilt for one in plan.segments):
            own = None  # What is rebuilt has damage in its slot.
        return p.PlanTold(plan=plan, own=own, lineage=self.ledger.lineage)

    def persist_message(self, order: PersistOrder) -> p.PersistTold:
        own = self._own_share(order.id)
        return p.PersistTold(order=order, own=own, lineage=self.ledger.lineage)

    def _own_share(self, identity: SnapshotId | None) -> tuple[int, int] | None:
        """(slot, place in the snapshot's world) of what this host holds of it."""
        number = None if identity is None else self.core.keeper.slot_of(identity)
        if number is None or not self.ledger.slots[number].readable:
            return None
        return number, self.ledger.slots[number].host

    @property
    def plan_known(self) -> bool:
        """Has the root said what this generation restores?"""
        return self._plan is not None

    def knows(self, identity: SnapshotId) -> bool:
        """Is this the plan's snapshot, or one of this generation?"""
        if self._plan is not None and self._plan.chosen == identity:
            return True
        generation = self.core.keeper.generation
        return generation is not None and generation.number == identity.generation

    def recall_for(self, identity: SnapshotId) -> Recall:
        """Reads snapshot `identity`: the plan's, or one of this generation (for a persist)."""
        if self.recall is None or self.recall.id != identity:
            plan = self._plan
            if plan is None or plan.chosen != identity:
                plan = self.running_plan(identity)
            self.recall = Recall(plan, self.network, threading.Event(), self.address, self.shares)
        return self.recall

    def running_plan(self, identity: SnapshotId) -> Plan:
        """A committed snapshot of this generation: every share is where it was made."""
        generation = self.core.keeper.generation
        if generation is None or generation.number != identity.generation:
            raise JaxftError(f"snapshot {identity} is not of this generation")
        places = tuple((i, member.address) for i, member in enumerate(generation.hosts))
        return Plan(
            attempt=0,
            chosen=identity,
            step=0,
            world=World.of(generation),
            segments=tuple(Segment(host, address) for host, address in places),
            shares=places,
            source="own",
        )

    # -------------------------------------------------------------------- this host's processes

    def _tell_settled(self, effect: e.TellSettled) -> None:
        directive = effect.directive
        self.clients.tell(p.SettledTold(base=directive.base, interval=directive.interval), "rank")
        self._ready_slots()

    def _tell_staged(self, effect: e.TellStaged) -> None:
        self.clients.tell(p.StagedTold(seq=effect.seq), "rank")

    def _tell_outcome(self, effect: e.TellOutcome) -> None:
        reach(
            "smp.outcome",
            host=self.host,
            generation=self.ledger.generation,
            seq=effect.outcome.seq,
        )
        self.clients.tell(p.OutcomeTold(outcome=effect.outcome), "rank")

    def _tell_held(self, effect: e.TellHeld) -> None:
        self.clients.tell(p.HeldTold(reason=effect.reason), "rank")

    def _tell_turn(self, effect: e.TellTurn) -> None:
        self.clients.tell(p.TurnTold(turn=effect.turn), "agent", "rank")

    def _tell_persist(self, effect: e.TellPersist) -> None:
        self.clients.tell(self.persist_message(effect.order), "agent", "rank", "helper")

    def _declare_fault(self, effect: e.DeclareFault) -> None:
        _log.error("host %s: %s", effect.host, effect.reason)
        told = p.FaultTold(host=effect.host, reason=effect.reason, kind=effect.kind)
        self.clients.tell(told, "agent")

    def wrote(self, step: int) -> None:
        """The ranks have a checkpoint on storage, without any helper."""
        self.diary.wrote(step)
        generation = self.ledger.generation
        self._tell_agent("persisted", {"generation": generation, "step": step, "result": "written"})

    def _announce(self, effect: e.Announce) -> None:
        self._tell_agent(effect.kind, dict(effect.detail))

    def _tell_agent(self, kind: str, detail: dict[str, str | int | float]) -> None:
        self.clients.tell(p.Announced(kind=kind, detail=detail), "agent")


def describe_slot(slot: Slot) -> dict[str, str | int | float]:
    """A slot for a status page."""
    return {
        "state": slot.state,
        "snapshot": str(slot.id) if slot.id is not None else "",
        "step": slot.step,
        "bytes": slot.length,
    }
