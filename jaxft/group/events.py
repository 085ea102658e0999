"""What happens to a host, and what it does about it.

Events are in the past tense, effects are imperatives. A core's `handle(event, now_s)` returns
effects; whoever performs them keeps their order and performs each before the next one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jaxft.group.manifest import Manifest, Part, SnapshotId
from jaxft.group.messages import (
    Blob,
    Body,
    Damage,
    Directive,
    Ledger,
    Measured,
    Outcome,
    PersistOrder,
    PersistState,
    Plan,
    RankOptions,
    Slot,
    Turn,
)
from jaxft.group.world import Generation


class _Value(msgspec.Struct, frozen=True):
    """An event or an effect."""


# ------------------------------------------------------------------------------ events


class Ticked(_Value, frozen=True):
    """Time has passed."""


class EnterWanted(_Value, frozen=True):
    """The agent: take part in this generation. It has killed the old ranks."""

    generation: Generation


class Frozen(_Value, frozen=True):
    """No old rank lives, no old coding runs: nothing of an older generation writes any more."""

    generation: int


class SlotSpoiled(_Value, frozen=True):
    """The manifests in this slot are damaged: it holds nothing that can be used."""

    slot: int
    reason: str


class Heard(_Value, frozen=True):
    """A message of this generation from `sender` (a host's name)."""

    sender: str
    body: Body


class RankJoined(_Value, frozen=True):
    """A rank of this host connected (again)."""

    rank: int
    options: RankOptions


class RankRestored(_Value, frozen=True):
    """A rank has restored plan `attempt` ("verified"), or did not want to ("skipped")."""

    rank: int
    attempt: int
    how: str


class RankFailed(_Value, frozen=True):
    """A rank could not restore plan `attempt`: damaged fragments, or another reason."""

    rank: int
    attempt: int
    reason: str
    damaged: tuple[Damage, ...] = ()


class SlotWanted(_Value, frozen=True):
    """A rank has reached the call of `save` that is snapshot `seq`. Of its bytes, `given` are
    parity that its devices have made, and what that protects."""

    rank: int
    seq: int
    step: int
    plan: str
    nbytes: int
    step_s: float = 0.0
    call: int = 0
    measured: Measured = Measured()
    given: int = 0


class PartStaged(_Value, frozen=True):
    """A rank's bytes are in the slot, with their checksums. Only rank parts with leaves count."""

    rank: int
    seq: int
    part: Part


class StagingFailed(_Value, frozen=True):
    rank: int
    seq: int
    reason: str


class SnapshotMissed(_Value, frozen=True):
    """A rank has let the call of `save` pass at which snapshot `seq` was due; it was at `step` when
    it found out."""

    rank: int
    seq: int
    step: int
    reason: str
    call: int = 0


class HoldWanted(_Value, frozen=True):
    """A process that is known as `who` reads a snapshot: its slot is not to be granted for a
    while, see `keeper.HOLD_S`."""

    who: int
    id: SnapshotId


class HoldOver(_Value, frozen=True):
    """It reads no more, or is gone."""

    who: int


class TurnWanted(_Value, frozen=True):
    """The agent: a snapshot is wanted though none is due."""

    reason: str


class TurnAnswered(_Value, frozen=True):
    """A rank's last call of `save` was number `call`; it does not end the next one before it knows
    what becomes of turn `number`."""

    rank: int
    number: int
    call: int


class GrantFailed(_Value, frozen=True):
    """The slot is of no use to this snapshot: it could not be made large enough, or the manifest in
    it is damaged. Says nothing about coding, which may still run in it."""

    id: SnapshotId
    reason: str


class SegmentSealed(_Value, frozen=True):
    """The manifest lies in the slot beside the segment."""

    id: SnapshotId
    length: int
    own: Blob


class CodingDone(_Value, frozen=True):
    """All parity of this share lies in the slot, with the group's manifests."""

    id: SnapshotId
    parity: Blob
    group: Blob


class CodingFailed(_Value, frozen=True):
    """Coding ended without its parity; also the answer to `StopCoding`."""

    id: SnapshotId
    reason: str


class Rebuilt(_Value, frozen=True):
    """The missing segments that plan `attempt` gave to this host are whole again."""

    attempt: int


class RebuildFailed(_Value, frozen=True):
    attempt: int
    reason: str
    damaged: tuple[Damage, ...] = ()


class PersistProgressed(_Value, frozen=True):
    """The helper of this host got further."""

    state: PersistState


# ------------------------------------------------------------------------------ effects


class WriteLedger(_Value, frozen=True):
    """Before anything that follows."""

    ledger: Ledger


class Freeze(_Value, frozen=True):
    """Stop all coding and rebuilding, see every old rank dead, then say `Frozen`."""

    generation: int


class Send(_Value, frozen=True):
    """To the SMP at `address`."""

    address: str
    body: Body


class SendManifest(_Value, frozen=True):
    """Tell the SMP at `address` the manifest of the segment in `slot`."""

    address: str
    slot: int
    wanted: bool


class Grant(_Value, frozen=True):
    """Make `slot` hold `nbytes`, then let each rank write at its base. The ledger says already
    that the slot means nothing. `bases` are (rank, base, length). `given` of these bytes need no
    more parity."""

    id: SnapshotId
    slot: int
    nbytes: int
    bases: tuple[tuple[int, int, int], ...]
    given: int = 0


class Seal(_Value, frozen=True):
    """Write the manifest of these parts into the slot, then say `SegmentSealed`."""

    id: SnapshotId
    slot: int
    step: int
    plan: str
    host: int
    parts: tuple[Part, ...]


class Code(_Value, frozen=True):
    """Compute this share's parity. `manifests` of the other members, `addresses` to pull from by
    place in the snapshot's world."""

    id: SnapshotId
    slot: int
    record: Slot
    addresses: tuple[tuple[int, str], ...]
    manifests: tuple[Manifest, ...] = ()


class StopCoding(_Value, frozen=True):
    id: SnapshotId


class Rebuild(_Value, frozen=True):
    """Rebuild the segments that the plan gives to this host into memory of their own."""

    plan: Plan


class ReleaseRebuilt(_Value, frozen=True):
    """Nobody needs rebuilt segments any more."""


class TellPlan(_Value, frozen=True):
    """To this host's ranks: restore this."""

    plan: Plan


class TellSettled(_Value, frozen=True):
    """To this host's ranks: everybody has restored; snapshots may be taken from `next_seq` on."""

    directive: Directive


class TellStaged(_Value, frozen=True):
    """To this host's ranks: the segment of snapshot `seq` is whole in the SMP."""

    seq: int


class TellOutcome(_Value, frozen=True):
    """To this host's ranks."""

    outcome: Outcome


class TellHeld(_Value, frozen=True):
    """To this host's ranks: no snapshot can be decided for now, and why; "": they can again."""

    reason: str


class TellTurn(_Value, frozen=True):
    """To this host's ranks and the agent."""

    turn: Turn


class TellPersist(_Value, frozen=True):
    """To the agent, this host's helper and its ranks."""

    order: PersistOrder


class Decide(_Value, frozen=True):
    """The root's decision: into its own ledger before anybody hears of it."""

    outcome: Outcome


class DeclareFault(_Value, frozen=True):
    """To the agent: this world cannot go on. `kind` is that of the fault (`records.Fault`)."""

    host: str
    reason: str
    kind: str = "smp_report"


class Announce(_Value, frozen=True):
    """To the agent: something a person wants to know. `kind` is the event's name."""

    kind: str
    detail: Mapping[str, str | int | float]


Event = (
    Ticked
    | EnterWanted
    | Frozen
    | SlotSpoiled
    | Heard
    | RankJoined
    | RankRestored
    | RankFailed
    | SlotWanted
    | PartStaged
    | StagingFailed
    | SnapshotMissed
    | HoldWanted
    | HoldOver
    | TurnWanted
    | TurnAnswered
    | GrantFailed
    | SegmentSealed
    | CodingDone
    | CodingFailed
    | Rebuilt
    | RebuildFailed
    | PersistProgressed
)
Effect = (
    WriteLedger
    | Freeze
    | Send
    | SendManifest
    | Grant
    | Seal
    | Code
    | StopCoding
    | Rebuild
    | ReleaseRebuilt
    | TellPlan
    | TellSettled
    | TellStaged
    | TellOutcome
    | TellHeld
    | TellTurn
    | TellPersist
    | Decide
    | DeclareFault
    | Announce
)
