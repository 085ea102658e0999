"""One host's side of the protocol: two slots, and what may be done with them when.

Rules
- A slot is granted only if the generation has settled, the last snapshot's outcome is known here,
  every rank of the host has asked, no coding runs in it, and it holds neither the newest committed
  snapshot (before the first commit: the one the generation goes on from) nor a pinned one.
- The ledger says that a slot's bytes mean nothing before the first of them is written, that a
  segment is whole after its manifest is written, that a share is whole after its parity is.
- Entering a generation: grants stop, coding stops, old ranks are seen dead; only then does the
  host say what it holds.
- Before its first grant a host has the generation's lineage record in its ledger.
- A host that has not heard the root for a while holds its own snapshots: its ranks do not wait.
- Everything here can be made again from the ledger, the ranks, the group and the root: an SMP that
  is killed and started on its memory goes on where it was.
"""

from __future__ import annotations

import math

import msgspec

from jaxft.group import events as e
from jaxft.group.interval import dearest
from jaxft.group.manifest import CHUNK, Manifest, Part, SnapshotId, align
from jaxft.group.messages import (
    Damage,
    Directive,
    Ledger,
    Lineage,
    ManifestAck,
    ManifestNotice,
    Outcome,
    PersistState,
    Plan,
    RankOptions,
    Report,
    Slot,
    Status,
    Turn,
    TurnAnswer,
    TurnWish,
)
from jaxft.group.timing import RESEND_S, Timing
from jaxft.group.world import Generation, World

LINEAGE_MAX = 64
# For so long a slot is kept for a process that reads it after it has said so: it may be gone.
HOLD_S = 15.0
# A directive is answered, if the last status is older than this.
ANSWER_S = RESEND_S / 2


class Keeper:
    """The state of one host. `handle` takes an event and returns what is to be done.

    Args:
        timing: a root that has not been heard for `silence_s` is out of reach.
    """

    def __init__(self, host: str, ledger: Ledger, timing: Timing) -> None:
        self.host = host
        self.timing = timing
        self._awake_s = float("-inf")
        self.ledger = ledger
        self.generation: Generation | None = None
        self.frozen = False
        self._entering: Generation | None = None
        self._holds: dict[int, tuple[SnapshotId, float]] = {}
        self._version = ledger.boots << 32
        self._forget_generation()

    def _forget_generation(self) -> None:
        self.directive = Directive(version=-1)
        self.options: dict[int, RankOptions] = {}
        self._restored: dict[int, str] = {}
        self._said: dict[int, e.RankRestored | e.RankFailed] = {}
        self._finished = False
        self._damaged: frozenset[Damage] = frozenset()
        self._failure = ""
        self._persist: PersistState | None = None
        self._coding: SnapshotId | None = None
        self._code_plan_attempt = 0
        self._root_heard_s: float | None = None
        self._held = ""
        self._told_person = False
        self._wish: TurnWish | None = None
        self._last_calls: dict[int, int] = {}
        self._sent_status: Status | None = None
        self._sent_at_s = float("-inf")
        self.is_calm = False
        self._forget_snapshot()

    def _forget_snapshot(self) -> None:
        """Makes ready for the snapshot after the last known outcome."""
        self._asks: dict[int, e.SlotWanted] = {}
        self._granted = False
        self._sealing = False
        self._parts: dict[int, Part] = {}
        self._peer_manifests: dict[SnapshotId, dict[int, Manifest]] = getattr(
            self, "_peer_manifests", {}
        )
        self._acked: set[int] = set()
        self._notices_at_s = float("-inf")
        self._snapshot_failure = ""
        self._missed_step = self._missed_call = 0

    # -------------------------------------------------------------------- what it knows

    @property
    def index(self) -> int | None:
        """This host's place in the world; None for a holder."""
        return None if self.generation is None else self.generation.index_of(self.host)

    @property
    def held(self) -> str:
        """Why no snapshot can be decided for now, "" while they can."""
        return self._held

    @property
    def next_seq(self) -> int:
        return 0 if self.ledger.outcome is None else self.ledger.outcome.seq + 1

    @property
    def next_id(self) -> SnapshotId:
        return SnapshotId(self.ledger.generation, self.next_seq, self.ledger.nonce)

    @property
    def pinned(self) -> set[SnapshotId]:
        """What no grant may touch."""
        pins: set[SnapshotId] = set()
        outcome = self.ledger.outcome
        if outcome is not None and outcome.committed is not None:
            pins.add(outcome.committed)
        elif self.ledger.settled and self.ledger.lineage[-1].base is not None:
            pins.add(self.ledger.lineage[-1].base)
        pins.update(held for held, until_s in self._holds.values() if self._awake_s < until_s)
        order = self.ledger.persist
        if order is not None and order.pinned and order.id is not None:
            pins.add(order.id)
        if outcome is not None and outcome.persist and not self._persist_heard(outcome):
            pins.add(SnapshotId(self.ledger.generation, outcome.seq, self.ledger.nonce))
        return pins

    def _persist_heard(self, outcome: Outcome) -> bool:
        """Has the root said yet whether the persisted snapshot of this outcome is still pinned?"""
        order = self.ledger.persist
        return order is not None and order.id is not None and order.id.seq >= outcome.seq

    def slot_of(self, identity: SnapshotId) -> int | None:
        for number, slot in enumerate(self.ledger.slots):
            if slot.id == identity:
                return number
        return None

    def status(self) -> Status:
        """What the root is told."""
        settled = self.ledger.settled and self.frozen
        ranks = self._rank_numbers()
        hows = {self._restored.get(rank, "") for rank in ranks}
        restored = hows.pop() if len(hows) == 1 else ("mixed" if "" not in hows else "")
        if not ranks:
            restored = "verified"
        plan, order = self.directive.plan, self.ledger.persist
        return Status(
            version=self._version,
            heard=self.directive.version,
            frozen=self.frozen,
            ledger=None if settled or not self.frozen else self.ledger,
            options=next(iter(self.options.values()), None),
            attempt=0 if plan is None else plan.attempt,
            finished=self._finished,
            restored=restored,
            failure=self._failure,
            damaged=tuple(sorted(self._damaged)),
            settled=settled,
            outcome_seq=-1 if self.ledger.outcome is None else self.ledger.outcome.seq,
            report=self._report(),
            persist=self._persist,
            persist_ended=order.number if order is not None and order.result else 0,
            wish=self._wish,
            answer=self._turn_answer(),
        )

    def _rank_numbers(self) -> list[int]:
        index = self.index
        if self.generation is None or index is None:
            return []
        first = self.generation.first_rank(index)
        return list(range(first, first + self.generation.hosts[index].ranks))

    def _report(self) -> Report | None:
        number = self.slot_of(self.next_id)
        slot = None if number is None else self.ledger.slots[number]
        if not self._asks and (slot is None or not slot.readable) and not self._snapshot_failure:
            return None
        ask = next(iter(self._asks.values()), None)
        staged = slot is not None and slot.readable
        steps = [one.step for one in self._asks.values()] or [0 if slot is None else slot.step]
        return Report(
            seq=self.next_seq,
            step=max(*steps, self._missed_step),
            plan=ask.plan if ask is not None else (slot.plan if slot is not None else ""),
            staged=staged,
            coded=slot is not None and slot.state == "coded",
            failure=self._snapshot_failure,
            step_s=ask.step_s if ask is not None else 0.0,
            measured=dearest(one.measured for one in self._asks.values()),
            call=max([self._missed_call, *(one.call for one in self._asks.values())]),
        )

    # -------------------------------------------------------------------- what happens

    def handle(self, event: e.Event, now_s: float) -> list[e.Effect]:
        """Takes one event at monotonic time `now_s` and returns the effects, in order."""
        self._wake(now_s)
        if self.is_calm and isinstance(event, e.Heard) and event.body is self.directive:
            return self._told_again(now_s)
        effects = self._react(event, now_s)
        effects += self._advance(now_s)
        effects += self._mind_root(now_s)
        effects += self._say(now_s, event)
        return effects

    @property
    def due_s(self) -> float:
        """While it is calm: when time has to pass here, if nothing else happens before."""
        if self.generation is None or not self.frozen:
            return math.inf
        due_s = self._sent_at_s + self._pause_s
        # A holder has no ranks to tell that the root is out of reach.
        if self._root_heard_s is None or self.index is None:
            return due_s
        return min(due_s, self._root_heard_s + self.timing.silence_s)

    @property
    def _pause_s(self) -> float:
        """How long it says nothing, if nothing changes and the root says nothing."""
        return self.timing.turn_s if self.is_calm else RESEND_S

    def _wake(self, now_s: float) -> None:
        """A host that was stopped itself for a while has not missed the root in that time."""
        gap_s, self._awake_s = now_s - self._awake_s, now_s
        if self._root_heard_s is not None and gap_s > self.timing.pause_s:
            self._root_heard_s += gap_s

    def _react(self, event: e.Event, now_s: float) -> list[e.Effect]:
        match event:
            case e.EnterWanted(generation):
                return self._enter(generation)
            case e.Frozen(number):
                return self._froze(number)
            case e.SlotSpoiled(number, _):
                self._set_slot(number, Slot())
                return [e.WriteLedger(self.ledger)]
            case e.Heard(sender, body):
                return self._heard(sender, body, now_s)
            case e.RankJoined(rank, options):
                return self._rank_joined(rank, options)
            case e.RankRestored() | e.RankFailed():
                self._said[event.rank] = event
                self._tried(event)
            case e.RebuildFailed():
                self._tried(event)
            case e.SlotWanted():
                return self._slot_wanted(event)
            case e.PartStaged(rank, seq, part):
                # Not only once granted: after a restart of the SMP, a rank that had its slot says
                # this before the other ranks of the host have asked again.
                if seq == self.next_seq and rank in self._asks:
                    self._parts[rank] = part
            case e.StagingFailed(_, seq, reason):
                if seq == self.next_seq:
                    self._snapshot_failure = self._snapshot_failure or reason
            case e.HoldWanted(who, identity):
                self._holds = {one: hold for one, hold in self._holds.items() if now_s < hold[1]}
                self._holds[who] = (identity, now_s + HOLD_S)
            case e.HoldOver(who):
                self._holds.pop(who, None)
            case e.TurnWanted(reason):
                return self._turn_wanted(reason)
            case e.TurnAnswered(rank, number, call):
                if self.ledger.turn is not None and number == self.ledger.turn.number:
                    self._last_calls[rank] = call
            case e.SnapshotMissed(rank, seq, step, reason, call):
                if seq == self.next_seq:
                    missed = f"rank {rank} let step {step} pass: {reason}"
                    self._snapshot_failure = self._snapshot_failure or missed
                    self._missed_step = max(self._missed_step, step)
                    self._missed_call = max(self._missed_call, call)
            case e.GrantFailed(identity, reason):
                if identity == self.next_id:
                    self._snapshot_failure = self._snapshot_failure or reason
            case e.SegmentSealed():
                return self._sealed(event)
            case e.CodingDone():
                return self._coded(event)
            case e.CodingFailed(identity, reason):
                return self._coding_failed(identity, reason)
            case e.PersistProgressed(state):
                if self._persist is None or state.number >= self._persist.number:
                    self._persist = state
            case _:
                pass
        return []

    # -------------------------------------------------------------------- entering

    def _enter(self, generation: Generation) -> list[e.Effect]:
        current = self.ledger.generation
        if generation.number < current or (
            generation.number == current and generation.nonce != self.ledger.nonce
        ):
            return []
        if self._entering is not None and generation.number < self._entering.number:
            return []
        if self.ledger.arena not in _arenas(generation, self.host):
            return []
        if self.generation is not None and self.generation.number == generation.number:
            return []
        self.frozen = False
        self.generation = None
        self._entering = generation
        if generation.number == current:
            return self._resume(generation)
        return [e.Freeze(generation.number)]

    def _resume(self, generation: Generation) -> list[e.Effect]:
        """The SMP was started again within the generation: its ranks live and are not touched."""
        self._entering = None
        self.generation = generation
        self._peer_manifests = {}
        self._forget_generation()
        self.frozen = True
        return []

    def _froze(self, number: int) -> list[e.Effect]:
        if self._entering is None or self._entering.number != number:
            return []
        self.generation, self._entering = self._entering, None
        self._peer_manifests = {}
        self._forget_generation()
        self.frozen = True
        self.ledger = msgspec.structs.replace(
            self.ledger,
            generation=number,
            nonce=self.generation.nonce,
            outcome=None,
            before=None,
            interval=1,
            persist=None,
            turn=None,
        )
        return [e.WriteLedger(self.ledger)]

    # -------------------------------------------------------------------- messages

    def _heard(self, sender: str, body: object, now_s: float) -> list[e.Effect]:
        if self.generation is None or not self.frozen:
            return []
        match body:
            case Directive():
                if sender == self.generation.hosts[0].host:
                    self._root_heard_s = now_s
                    return self._directed(body)
            case ManifestNotice(manifest=manifest, wanted=wanted):
                return self._noticed(sender, manifest, wanted)
            case ManifestAck(id=identity):
                index = self.generation.index_of(sender)
                if identity == self.next_id and index is not None:
                    self._acked.add(index)
        return []

    def _directed(self, directive: Directive) -> list[e.Effect]:
        old = self.directive
        if directive.version <= old.version:
            return []
        if directive.version >> 32 != old.version >> 32:
            # A root that has just been started: it waits for what this host has to say.
            self._sent_status = None
        self.directive = directive
        effects: list[e.Effect] = []
        if directive.plan is not None and directive.plan != old.plan and not directive.settled:
            effects += self._planned(directive.plan)
        if directive.settled and not self.ledger.settled:
            effects += self._settle(directive)
        elif directive.settled and not old.settled:
            effects.append(e.TellSettled(directive))
        if directive.outcome is not None and directive.outcome.seq >= self.next_seq:
            effects += self.learn(directive.outcome)
        if directive.turn is not None and directive.turn != self.ledger.turn:
            effects += self._turn_told(directive.turn)
        if directive.persist is not None and directive.persist != self.ledger.persist:
            self.ledger = msgspec.structs.replace(self.ledger, persist=directive.persist)
            effects.append(e.WriteLedger(self.ledger))
        if directive.persist is not None and directive.persist != old.persist:
            effects.append(e.TellPersist(directive.persist))
        return effects

    def _planned(self, plan: Plan) -> list[e.Effect]:
        self._restored = {}
        self._damaged = frozenset()
        self._failure = ""
        self._finished = self._whole(plan)
        # Ranks say to an SMP that was started again what came of the plan before it knows the plan.
        for said in self._said.values():
            self._tried(said)
        effects: list[e.Effect] = []
        if any(segment.rebuilt for segment in plan.segments):
            effects.append(e.Rebuild(plan))
        effects.append(e.TellPlan(plan))
        return effects

    def _tried(self, event: e.RankRestored | e.RankFailed | e.RebuildFailed) -> None:
        """What came of a plan; only of the newest one it counts."""
        if self.directive.plan is None or event.attempt != self.directive.plan.attempt:
            return
        if isinstance(event, e.RankRestored):
            self._restored[event.rank] = event.how
            return
        self._damaged |= frozenset(event.damaged)
        # Never empty: that would read as no failure.
        self._failure = self._failure or event.reason or "it did not say why"

    def _whole(self, plan: Plan) -> bool:
        """Is what this host holds of the chosen snapshot coded (or is there nothing to code)?"""
        if not plan.finish or plan.chosen is None:
            return True
        number = self.slot_of(plan.chosen)
        return number is None or self.ledger.slots[number].state != "staged"

    def _settle(self, directive: Directive) -> list[e.Effect]:
        record = Lineage(self.ledger.generation, directive.base)
        self.ledger = msgspec.structs.replace(
            self.ledger,
            lineage=(*self.ledger.lineage, record)[-LINEAGE_MAX:],
            interval=directive.interval,
        )
        return [e.WriteLedger(self.ledger), e.ReleaseRebuilt(), e.TellSettled(directive)]

    def learn(self, outcome: Outcome) -> list[e.Effect]:
        """An outcome, into the ledger before anybody is told."""
        if outcome.seq < self.next_seq:
            return []
        identity = SnapshotId(self.ledger.generation, outcome.seq, self.ledger.nonce)
        committed = outcome.committed if outcome.committed is not None else self.ledger.committed
        self.ledger = msgspec.structs.replace(
            self.ledger,
            outcome=outcome,
            before=self.ledger.outcome,
            committed=committed,
            decided=identity,
        )
        effects: list[e.Effect] = [e.WriteLedger(self.ledger)]
        if self._coding == identity:
            effects.append(e.StopCoding(identity))
        effects.append(e.TellOutcome(outcome))
        self._forget_snapshot()
        for known in [one for one in self._peer_manifests if one < self.next_id]:
            del self._peer_manifests[known]
        return effects

    def _noticed(self, sender: str, manifest: Manifest, wanted: bool) -> list[e.Effect]:
        generation = self.generation
        if generation is None or self.index is None:
            return []
        index = generation.index_of(sender)
        if (
            index is None
            or manifest.host != index
            or index not in generation.group_of(self.index).hosts
            or manifest.id.generation != generation.number
        ):
            return []
        address = generation.hosts[index].address
        effects: list[e.Effect] = []
        if manifest.id >= self.next_id:
            self._peer_manifests.setdefault(manifest.id, {})[index] = manifest
            effects.append(e.Send(address, ManifestAck(id=manifest.id)))
        number = self.slot_of(manifest.id)
        if wanted and number is not None and self.ledger.slots[number].readable:
            effects.append(e.SendManifest(address, number, False))
        return effects

    # -------------------------------------------------------------------- ranks

    def _rank_joined(self, rank: int, options: RankOptions) -> list[e.Effect]:
        self.options[rank] = options
        effects: list[e.Effect] = []
        if self.ledger.settled and self.frozen:
            settled = Directive(
                version=self.directive.version,
                settled=True,
                base=self.ledger.lineage[-1].base,
                interval=self.ledger.interval,
            )
            effects.append(e.TellSettled(settled))
            known = (self.ledger.before, self.ledger.outcome)
            effects += [e.TellOutcome(outcome) for outcome in known if outcome is not None]
            if self.ledger.persist is not None:
                effects.append(e.TellPersist(self.ledger.persist))
            # Whatever an SMP said that died meanwhile.
            effects.append(e.TellHeld(self._held))
            if self.ledger.turn is not None:
                effects.append(e.TellTurn(self.ledger.turn))
        elif self.directive.plan is not None:
            effects.append(e.TellPlan(self.directive.plan))
        return effects

    def _slot_wanted(self, ask: e.SlotWanted) -> list[e.Effect]:
        if not self.ledger.settled or ask.seq != self.next_seq:
            return []
        number = self.slot_of(self.next_id)
        if number is not None and self.ledger.slots[number].readable:
            self._asks[ask.rank] = ask
            return [e.TellStaged(ask.seq)]
        if ask.rank in self._asks and self._granted and not self._sealing:
            self._granted = False
            self._parts.pop(ask.rank, None)
        self._asks[ask.rank] = ask
        for other in self._asks.values():
            if (other.step, other.plan) != (ask.step, ask.plan):
                self._snapshot_failure = (
                    f"rank {other.rank} saved step {other.step} and rank {ask.rank} step "
                    f"{ask.step}, or their trees differ"
                )
        return []

    # -------------------------------------------------------------------- the snapshot's way

    def _advance(self, now_s: float) -> list[e.Effect]:
        """Does what has become possible."""
        if self.generation is None or not self.frozen:
            return []
        effects = self._finish_old()
        effects += self._grant()
        effects += self._seal()
        effects += self._notify(now_s)
        effects += self._code()
        return effects

    def _finish_old(self) -> list[e.Effect]:
        """Finishes the coding of the snapshot this generation goes on from, in its old group."""
        plan = self.directive.plan
        if plan is None or self._finished or self._coding is not None or self.ledger.settled:
            return []
        if plan.chosen is None or self._code_plan_attempt == plan.attempt:
            return []
        number = self.slot_of(plan.chosen)
        if number is None:
            return []
        self._coding = plan.chosen
        self._code_plan_attempt = plan.attempt
        return [e.Code(plan.chosen, number, self.ledger.slots[number], plan.shares)]

    def _grant(self) -> list[e.Effect]:
        if self._granted or self._snapshot_failure or not self.ledger.settled or self.index is None:
            return []
        ranks = self._rank_numbers()
        if not ranks or any(rank not in self._asks for rank in ranks):
            return []
        number = self._free_slot()
        if number is None or self._has_segment(number):
            return []
        ask = self._asks[ranks[0]]
        record = Slot(
            state="writing",
            id=self.next_id,
            step=ask.step,
            plan=ask.plan,
            host=self.index,
            world=World.of(self.generation) if self.generation else World((), ()),
        )
        self._set_slot(number, record)
        self._granted = True
        bases, base, given = [], 0, 0
        for rank in ranks:
            given += self._asks[rank].given
            bases.append((rank, base, self._asks[rank].nbytes))
            base = align(base + self._asks[rank].nbytes, CHUNK)
        return [
            e.WriteLedger(self.ledger),
            e.Grant(self.next_id, number, base, tuple(bases), given),
        ]

    def _has_segment(self, number: int) -> bool:
        """Is the next snapshot's segment whole already? (The SMP was started again after that.)"""
        slot = self.ledger.slots[number]
        return slot.id == self.next_id and slot.readable

    def _free_slot(self) -> int | None:
        """The slot for the next snapshot: the one it already has, else an unpinned one."""
        own = self.slot_of(self.next_id)
        if own is not None:
            return own
        pins = self.pinned
        free = [
            number
            for number, slot in enumerate(self.ledger.slots)
            if slot.id not in pins and (slot.id is None or slot.id != self._coding)
        ]
        slots = self.ledger.slots
        return min(free, key=lambda number: _age(slots[number]), default=None)

    def _set_slot(self, number: int, slot: Slot) -> None:
        slots = list(self.ledger.slots)
        slots[number] = slot
        self.ledger = msgspec.structs.replace(self.ledger, slots=(slots[0], slots[1]))

    def _seal(self) -> list[e.Effect]:
        ranks = self._rank_numbers()
        if not self._granted or self._sealing or any(rank not in self._parts for rank in ranks):
            return []
        number = self.slot_of(self.next_id)
        if number is None or self.index is None:
            return []
        self._sealing = True
        ask = self._asks[ranks[0]]
        parts = tuple(self._parts[rank] for rank in ranks)
        return [e.Seal(self.next_id, number, ask.step, ask.plan, self.index, parts)]

    def _sealed(self, event: e.SegmentSealed) -> list[e.Effect]:
        number = self.slot_of(event.id)
        if number is None or event.id != self.next_id:
            return []
        slot = msgspec.structs.replace(
            self.ledger.slots[number], state="staged", length=event.length, own=event.own
        )
        if slot.world.group_of(slot.host).parity == 0:
            slot = msgspec.structs.replace(slot, state="coded")
        self._set_slot(number, slot)
        return [e.WriteLedger(self.ledger), e.TellStaged(event.id.seq)]

    def _group_mates(self) -> list[int]:
        if self.generation is None or self.index is None:
            return []
        group = self.generation.group_of(self.index)
        if group.parity == 0:
            return []
        return [host for host in group.hosts if host != self.index]

    def _notify(self, now_s: float) -> list[e.Effect]:
        """Tells the group this segment's manifest until each has it and has given its own."""
        number = self.slot_of(self.next_id)
        if number is None or not self.ledger.slots[number].readable or self.generation is None:
            return []
        if now_s - self._notices_at_s < RESEND_S:
            return []
        self._notices_at_s = now_s
        have = self._peer_manifests.get(self.next_id, {})
        coded = self.ledger.slots[number].state == "coded"
        effects: list[e.Effect] = []
        for mate in self._group_mates():
            wanted = mate not in have and not coded
            if mate not in self._acked or wanted:
                address = self.generation.hosts[mate].address
                effects.append(e.SendManifest(address, number, wanted))
        return effects

    def _code(self) -> list[e.Effect]:
        if self._coding is not None or self._snapshot_failure or self.generation is None:
            return []
        number = self.slot_of(self.next_id)
        if number is None or self.ledger.slots[number].state != "staged":
            return []
        mates = self._group_mates()
        have = self._peer_manifests.get(self.next_id, {})
        if any(mate not in have for mate in mates):
            return []
        self._coding = self.next_id
        addresses = tuple((mate, self.generation.hosts[mate].address) for mate in mates)
        manifests = tuple(have[mate] for mate in mates)
        return [e.Code(self.next_id, number, self.ledger.slots[number], addresses, manifests)]

    def _coded(self, event: e.CodingDone) -> list[e.Effect]:
        if self._coding == event.id:
            self._coding = None
        number = self.slot_of(event.id)
        if number is None or self.ledger.slots[number].state != "staged":
            return []
        slot = msgspec.structs.replace(
            self.ledger.slots[number], state="coded", parity=event.parity, group=event.group
        )
        self._set_slot(number, slot)
        if self.directive.plan is not None and self.directive.plan.chosen == event.id:
            self._finished = True
        return [e.WriteLedger(self.ledger)]

    def _coding_failed(self, identity: SnapshotId, reason: str) -> list[e.Effect]:
        if self._coding == identity:
            self._coding = None
        plan = self.directive.plan
        if identity == self.next_id:
            self._snapshot_failure = self._snapshot_failure or reason
        elif plan is not None and plan.chosen == identity and not self._finished:
            # Whatever the reason, the snapshot cannot be finished: the root has to plan again.
            self._failure = self._failure or reason
            self._damaged |= {
                Damage.unfinished(slot.host) for slot in self.ledger.slots if slot.id == identity
            }
        return []

    # -------------------------------------------------------------------- out of turn

    def _turn_wanted(self, reason: str) -> list[e.Effect]:
        """A wish is told to the root until a turn has come of it; said again, it is the same."""
        if not self.ledger.settled or not self.frozen or self.index is None:
            return [e.TellTurn(Turn(number=0, result="no world of this host has settled"))]
        last = self.ledger.turn
        number = 1 if last is None else last.number + bool(last.result)
        self._wish = TurnWish(number=number, reason=reason)
        return []

    def _turn_told(self, turn: Turn) -> list[e.Effect]:
        """The root's word, into the ledger before anybody is told: a root that is started again has
        to find in its ledger which call it has named."""
        if self.ledger.turn is None or turn.number != self.ledger.turn.number:
            self._last_calls = {}
        if turn.result and self._wish is not None and self._wish.number <= turn.number:
            self._wish = None
        self.ledger = msgspec.structs.replace(self.ledger, turn=turn)
        return [e.WriteLedger(self.ledger), e.TellTurn(turn)]

    def _turn_answer(self) -> TurnAnswer | None:
        """For all ranks of this host, once each of them has answered."""
        turn, ranks = self.ledger.turn, self._rank_numbers()
        if turn is None or turn.result or any(rank not in self._last_calls for rank in ranks):
            return None
        return TurnAnswer(number=turn.number, call=max(self._last_calls.values(), default=0))

    # -------------------------------------------------------------------- held

    def _mind_root(self, now_s: float) -> list[e.Effect]:
        """Tells the ranks when snapshots are held and when no longer, and a person too: one of the
        root's host, and one of a host that does not hear it."""
        if self.generation is None or not self.frozen or self.index is None:
            return []
        if self._root_heard_s is None:
            self._root_heard_s = now_s
        out_of_reach = now_s - self._root_heard_s > self.timing.silence_s
        reason = self._out_of_reach() if out_of_reach else self.directive.held
        if reason == self._held or not self.ledger.settled:
            return []
        effects: list[e.Effect] = [e.TellHeld(reason)]
        if reason and not self._told_person and (out_of_reach or self.index == 0):
            self._told_person = True
            effects.append(e.Announce("held", {"host": self.host, "reason": reason}))
        elif not reason and self._told_person:
            self._told_person = False
            effects.append(e.Announce("held_over", {"host": self.host}))
        self._held = reason
        return effects

    def _out_of_reach(self) -> str:
        assert self.generation is not None
        root = self.generation.hosts[0].host
        return (
            f"the SMP of host {self.host} has not heard that of {root}, the root, for "
            f"{self.timing.silence_s:g} s: look whether that lives, and at the network between the "
            "two"
        )

    # -------------------------------------------------------------------- telling the root

    def _told_again(self, now_s: float) -> list[e.Effect]:
        """The root shows that it lives, with what it has said before, while nothing is under way.
        Most turns of an idle host are this one, and find cold caches: nothing is touched that is
        not needed for an answer."""
        self._root_heard_s = now_s
        return self._repeat(now_s) if now_s - self._sent_at_s >= ANSWER_S else []

    def _repeat(self, now_s: float) -> list[e.Effect]:
        """Sends the last status, for the first time or once more."""
        if self.generation is None or self._sent_status is None:
            return []
        self._sent_at_s = now_s
        return [e.Send(self.generation.hosts[0].address, self._sent_status)]

    def _say(self, now_s: float, event: e.Event) -> list[e.Effect]:
        """Sends the status when it has changed, as an answer to the root, and now and then as a
        sign of life; only one that has changed has a new version."""
        if self.generation is None or not self.frozen:
            self.is_calm = self._entering is None
            return []
        status = self.status()
        self.is_calm = self._is_calm(status)
        last = self._sent_status
        changed = last is None or msgspec.structs.replace(status, version=last.version) != last
        silent_s = now_s - self._sent_at_s
        ticked = isinstance(event, e.Ticked) and silent_s >= self._pause_s
        asked = isinstance(event, e.Heard) and isinstance(event.body, Directive)
        if changed:
            self._version += 1
            self._sent_status = msgspec.structs.replace(status, version=self._version)
        elif not (ticked or (asked and silent_s >= ANSWER_S)):
            return []
        return self._repeat(now_s)

    def _is_calm(self, status: Status) -> bool:
        """Is nothing under way here, no restore, snapshot, turn or persist, and nothing amiss?"""
        order, turn = self.ledger.persist, self.ledger.turn
        return (
            status.settled
            and not self._held
            and status.report is None
            and status.wish is None
            and (turn is None or bool(turn.result))
            and (order is None or bool(order.result))
        )


def _age(slot: Slot) -> tuple[bool, SnapshotId]:
    """Empty slots first, then the older snapshot."""
    return (slot.id is not None, slot.id or SnapshotId(0, 0))


def _arenas(generation: Generation, host: str) -> list[str]:
    """The memory with which a host takes part; memory that is newer is no part of it."""
    members = (*generation.hosts, *generation.holders)
    return [member.arena for member in members if member.host == host]
