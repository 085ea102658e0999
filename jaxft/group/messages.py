"""What hosts tell each other, and what a host remembers.

The control plane is two kinds of state, each sent again until the other side's state shows that
it arrived, so that a message that is lost, doubled or late changes nothing:

    Status     every host -> the root      what I have, what I have done
    Directive  the root -> every host      what is decided

and one notice among the members of a group, `ManifestNotice`, acknowledged by `ManifestAck`.
Every message travels in an `Envelope` with the generation's number and nonce and the sender's
arena; a message of another generation, or from memory that is not the one the generation was
formed with, has no effect (I4).
"""

from __future__ import annotations

import msgspec

from jaxft.group.manifest import Manifest, SnapshotId
from jaxft.group.world import Generation, World

# ---------------------------------------------------------------- what a host remembers


class Lineage(msgspec.Struct, frozen=True, array_like=True):
    """Generation `generation` went on from `base`: what is older than that generation and newer
    than its base is abandoned."""

    generation: int
    base: SnapshotId | None


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """`length` bytes at `offset` of a slot with xxh3_64 `checksum`."""

    offset: int = 0
    length: int = 0
    checksum: int = 0


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """What one slot holds.

    `state` is "empty"; "writing" (granted: its bytes mean nothing); "staged" (the segment and its
    manifest are whole); "coded" (the whole share: all parity fragments and the group's manifests
    too). `host` is the place of the share's host in `world`, `plan` the digest of the plan of the
    whole snapshot: shares of different plans or steps do not belong together. Layout of a slot:
    the segment at 0, then the manifest blob `own`, then the parity fragments at `parity`, then the
    blob `group` (the other members' manifests and the parity's checksums).
    """

    state: str = "empty"
    id: SnapshotId | None = None
    step: int = 0
    plan: str = ""
    host: int = 0
    world: World = World((), ())
    length: int = 0
    own: Blob = Blob()
    parity: Blob = Blob()
    group: Blob = Blob()

    @property
    def readable(self) -> bool:
        return self.state in ("staged", "coded")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The root's decision on snapshot `seq` of the generation; there is exactly one.

    `committed` is the newest committed snapshot after this decision (itself, if it was
    committed), the one whose slot nobody may touch. `interval` is the number of steps from
    snapshot seq + 1 to seq + 2. `persist`: this snapshot goes to storage, its slot is pinned.
    `turn`: the number of the turn that it was taken for, 0 if for none.
    """

    seq: int
    step: int
    ok: bool
    reason: str = ""
    committed: SnapshotId | None = None
    interval: int = 1
    persist: bool = False
    turn: int = 0


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The root's word on snapshot out of turn `number` (see `group.turn`). While `call` is 0 the
    ranks are asked for the number of their last call of `save`; then `call` is the one at which all
    take a snapshot. `result` is "" while it goes on, then "protected" or why it came to nothing;
    `step` is then the snapshot's."""

    number: int
    reason: str = ""
    call: int = 0
    result: str = ""
    step: int = 0


class TurnWish(msgspec.Struct, frozen=True, kw_only=True):
    """A host wishes a snapshot out of turn, by turn `number` or a later one."""

    number: int
    reason: str


class TurnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """No rank of this host is past call `call` of `save`, and none ends the next one before it
    knows what becomes of turn `number`."""

    number: int
    call: int


class PersistOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The root's word on persist `number`: helpers are wanted while `wanted`; `id` is what they
    write, once it is decided, and `step` its step, before that the least that it may have; `pinned`
    until every helper has its copy; `result` "" while it goes on, then "written" or why not."""

    number: int
    wanted: bool
    id: SnapshotId | None = None
    step: int = 0
    coordinator: str = ""
    pinned: bool = False
    result: str = ""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """All that a host must know after its SMP died and was given its memory back.

    `boots` counts the starts of the SMP on this memory. `generation` is the newest generation
    entered and `nonce` its nonce; `outcome` is the newest outcome known of it and `before` the one
    before that (a rank that was not connected may need both), `interval` the interval from its
    snapshot 0 to 1, `persist` the newest order and `turn` the newest turn known of it. `committed`
    is the newest snapshot this host ever knew to be committed, `decided` the newest whose outcome
    it ever knew: those of that generation that lie between the two were aborted. The last record of
    `lineage` is of `generation` once that has settled; it is written before the first grant.
    """

    arena: str
    boots: int = 0
    generation: int = 0
    nonce: str = ""
    lineage: tuple[Lineage, ...] = ()
    slots: tuple[Slot, Slot] = (Slot(), Slot())
    outcome: Outcome | None = None
    before: Outcome | None = None
    interval: int = 1
    persist: PersistOrder | None = None
    turn: Turn | None = None
    committed: SnapshotId | None = None
    decided: SnapshotId | None = None

    @property
    def settled(self) -> bool:
        """Has the generation entered last settled on what it goes on from?"""
        return bool(self.lineage) and self.lineage[-1].generation == self.generation

    def knows_aborted(self, identity: SnapshotId) -> bool:
        """Has this host heard that the snapshot was aborted?"""
        return (
            self.decided is not None
            and self.decided.generation == identity.generation
            and identity <= self.decided
            and (self.committed is None or self.committed < identity)
        )


# ---------------------------------------------------------------- the plan of a restore


class Damage(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The fragment of stripe `stripe` that `host` (a place in the snapshot's world) should hold in
    `lane` cannot be used. `lane` -1: its whole share cannot."""

    host: int
    lane: int = -1
    stripe: int = -1

    @classmethod
    def unfinished(cls, host: int) -> Damage:
        """The parity that `host` lacks could not be made; its segment is whole all the same."""
        return cls(host, 0, -1)


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Where the segment of `host` (a place in the snapshot's world) is read: from the SMP at
    `address`, out of its slot or, if `rebuilt`, from what it rebuilds."""

    host: int
    address: str
    rebuilt: bool = False


class StorageEntry(msgspec.Struct, frozen=True):
    """A checkpoint on storage. `id` and `lineage` are missing where plain Orbax wrote it.

    `damaged` says why it cannot be read, if it is there and cannot.
    """

    step: int
    id: SnapshotId | None = None
    lineage: tuple[Lineage, ...] = ()
    damaged: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks restore. `chosen` from memory, else `storage` from Orbax, else nothing.

    `shares` are the (place, address) of every host of the snapshot's world whose share is there.
    `finish`: the snapshot was staged everywhere but not yet coded everywhere; its holders code it
    before anything else is granted. `source` is "own", "peer", "rebuilt", "orbax" or "none".
    `unreadable`: it is "none", and storage has checkpoints that count and cannot be read.
    """

    attempt: int
    chosen: SnapshotId | None = None
    step: int = 0
    world: World = World((), ())
    segments: tuple[Segment, ...] = ()
    shares: tuple[tuple[int, str], ...] = ()
    damaged: tuple[Damage, ...] = ()
    finish: bool = False
    storage: StorageEntry | None = None
    source: str = "none"
    reasons: tuple[str, ...] = ()
    newest_known: SnapshotId | None = None
    unreadable: bool = False

    @property
    def base(self) -> SnapshotId | None:
        """The snapshot this generation goes on from, in memory or on storage."""
        if self.chosen is not None:
            return self.chosen
        return self.storage.id if self.storage is not None else None


# ---------------------------------------------------------------- what hosts tell each other


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a host asked for; equal on every rank of the world.

    `every_steps`, `every_s` or the budget `overhead` (a fraction) is the wanted interval.
    `storage` lists what the Orbax directory holds (None: no fallback configured), `persist_every`
    is in steps, `persist_keep` is how many checkpoints stay.
    """

    every_steps: int = 0
    every_s: float = 0.0
    overhead: float = 0.0
    directory: str = ""
    persist_every: int = 0
    persist_keep: int = 2
    storage: tuple[StorageEntry, ...] | None = None

    @property
    def newest_generation(self) -> int:
        """The newest generation that storage knows of, 0 if it knows none."""
        known = (entry.id.generation for entry in self.storage or () if entry.id is not None)
        return max(known, default=0)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What snapshots cost somewhere, in seconds: `cost_s` of the training's time each, `protect_s`
    from `save` to protected, `step_s` an undisturbed step (0: nothing has been measured), `call_s`
    a call of `save` that is not due."""

    cost_s: float = 0.0
    protect_s: float = 0.0
    step_s: float = 0.0
    call_s: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of snapshot `seq`: how far it is.

    `step` and `plan` are what its ranks said, `failure` is why it cannot be ("" if nothing is
    wrong), `step_s` the time a step takes there, `measured` the dearest of its ranks, where the
    interval is a budget, `call` the number of the call of `save` at which they began it.
    """

    seq: int
    step: int = 0
    plan: str = ""
    staged: bool = False
    coded: bool = False
    failure: str = ""
    step_s: float = 0.0
    measured: Measured = Measured()
    call: int = 0


class PersistState(msgspec.Struct, frozen=True, kw_only=True):
    """How far this host's helper is with persist number `number`: "starting", "ready", "copied"
    (the slot is no longer needed), "written", or "failed". `coordinator` is the address at which
    the first host's helper waits for the others."""

    number: int
    state: str
    coordinator: str = ""
    detail: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """A host's whole state, as far as the root needs it. `version` only grows; `heard` is the
    version of the newest directive that the host knows.

    `ledger` is there from the moment the host is frozen (old ranks dead, coding stopped) until it
    knows that the generation has settled. `restored` is "verified" or "skipped" once all its ranks
    have said so for plan `attempt`; `persist_ended` is the newest persist whose result it knows;
    `failure` says why they cannot, `damaged` what they found.
    """

    version: int
    heard: int = -1
    frozen: bool = False
    ledger: Ledger | None = None
    options: RankOptions | None = None
    attempt: int = 0
    finished: bool = False
    restored: str = ""
    failure: str = ""
    damaged: tuple[Damage, ...] = ()
    settled: bool = False
    outcome_seq: int = -1
    report: Report | None = None
    persist: PersistState | None = None
    persist_ended: int = 0
    wish: TurnWish | None = None
    answer: TurnAnswer | None = None


class Directive(msgspec.Struct, frozen=True, kw_only=True, tag="directive"):
    """All that the root has decided so far. `version` only grows.

    `interval` is the number of steps from snapshot 0 to 1. `settled`: every rank has restored and
    a finished coding is done; only now may a slot be granted. `base` is then the snapshot that the
    generation goes on from. `held` says why no snapshot can be decided for now, "" while they can:
    a host does not know the last outcome and is not heard.
    """

    version: int
    plan: Plan | None = None
    settled: bool = False
    base: SnapshotId | None = None
    interval: int = 1
    outcome: Outcome | None = None
    persist: PersistOrder | None = None
    held: str = ""
    turn: Turn | None = None


class ManifestNotice(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """To another member of the group: my segment of this snapshot is staged; `wanted` asks for the
    other's (a restarted SMP has forgotten those it had)."""

    manifest: Manifest
    wanted: bool = False


class ManifestAck(msgspec.Struct, frozen=True, kw_only=True, tag="manifest_ack"):
    id: SnapshotId


class Invite(msgspec.Struct, frozen=True, kw_only=True, tag="invite"):
    """From the root to a holder that has not answered: its agent may be dead, or cut off from
    the store, so that nobody else tells it of this generation."""

    generation: Generation


Body = Status | Directive | ManifestNotice | ManifestAck | Invite


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """`sender` is a host's name, `arena` its SMP's memory."""

    job: str
    generation: int
    nonce: str
    sender: str
    arena: str
    body: Body
