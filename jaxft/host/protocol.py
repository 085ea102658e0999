"""What an SMP and the processes of its own host say to each other over the local channel.

Clients: the agent, the ranks, and persist helpers. Every client begins with `Hello` and is answered
by `Welcome`, which carries the memory's descriptors in the order of `Welcome.fds`. What a client
asks for is answered by state that is pushed to it; a client that reconnects (the SMP was started
again) says `Hello` and repeats what is still open.
"""

from __future__ import annotations

import msgspec

from jaxft.group.account import Account
from jaxft.group.manifest import Part, SnapshotId
from jaxft.group.messages import (
    Damage,
    Lineage,
    Measured,
    Outcome,
    PersistOrder,
    Plan,
    RankOptions,
    Turn,
)
from jaxft.group.world import Generation, Group

# The exit status of an SMP that another process keeps from listening.
CANNOT_LISTEN = 3

# ------------------------------------------------------------------------------ client -> SMP


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """`role` is "agent", "rank" or "helper". Ranks and helpers name the generation they belong to;
    one of another generation is refused. The agent's may come with an eventfd, its *pulse*, which
    the SMP counts up with each turn of its loop, several times within `silence_s`."""

    role: str
    pid: int
    generation: int = 0
    nonce: str = ""
    rank: int = -1
    options: RankOptions | None = None


class Enter(msgspec.Struct, frozen=True, kw_only=True, tag="enter"):
    """Agent: take part in this generation; its earlier ranks are dead."""

    generation: Generation


class SnapshotNow(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot_now"):
    """Agent: take a snapshot though none is due. What becomes of it is told by `TurnTold`."""

    reason: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Agent: end, and let the memory go."""


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """Rank: no thread of mine writes into a slot any more. My process may live on. The SMP closes
    the connection when it has taken note."""


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    """Rank: plan `attempt` is restored here ("verified"), or not wanted ("skipped")."""

    attempt: int
    how: str


class RestoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag="restore_failed"):
    """Rank: plan `attempt` cannot be restored here."""

    attempt: int
    reason: str
    damaged: tuple[Damage, ...] = ()


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start` to `stop` of the segment of `host` (a place in the snapshot's world); both are
    multiples of CHUNK, or `stop` is the end of a part."""

    host: int
    start: int
    stop: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Rank, helper: bring these extents of snapshot `id` into memory that I can map, checked."""

    number: int
    id: SnapshotId
    extents: tuple[Extent, ...]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Rank, helper: what `Fetch` brought is no longer needed."""

    number: int


class WantManifests(msgspec.Struct, frozen=True, kw_only=True, tag="want_manifests"):
    """Rank, helper: send the manifests of all segments of snapshot `id`."""

    id: SnapshotId


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Rank: my part of a snapshot is `nbytes` long. Is there memory for it?"""

    nbytes: int


class WantSlot(msgspec.Struct, frozen=True, kw_only=True, tag="want_slot"):
    """Rank: this is the call of `save`, its `call`th, that is snapshot `seq`. Of its `nbytes`,
    `given` are parity that its devices have made, and what that protects."""

    seq: int
    step: int
    plan: str
    nbytes: int
    step_s: float = 0.0
    call: int = 0
    measured: Measured = Measured()
    given: int = 0


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """Rank: my part is in the slot. `leaves` is the encoded table of leaves."""

    seq: int
    part: Part
    leaves: bytes


class StagingFailed(msgspec.Struct, frozen=True, kw_only=True, tag="staging_failed"):
    seq: int
    reason: str


class Missed(msgspec.Struct, frozen=True, kw_only=True, tag="missed"):
    """Rank: I let the call of `save` pass at which snapshot `seq` was due, so it has no part of me;
    I was at `step`, in my `call`th call, when I found out."""

    seq: int
    step: int
    reason: str
    call: int = 0


class LastCall(msgspec.Struct, frozen=True, kw_only=True, tag="last_call"):
    """Rank: the answer to turn `number`. My last call of `save` was number `call`, and I wait in
    the next one until I know what becomes of it."""

    number: int
    call: int


class HelperState(msgspec.Struct, frozen=True, kw_only=True, tag="helper_state"):
    """Helper, or the agent for a helper that died: how far persist `number` is."""

    number: int
    state: str
    coordinator: str = ""
    detail: str = ""


class Wrote(msgspec.Struct, frozen=True, kw_only=True, tag="wrote"):
    """Rank 0, where ranks write to storage themselves: step `step` is the newest one there (-1:
    none) of what the job goes on from."""

    step: int


class Inspect(msgspec.Struct, frozen=True, kw_only=True, tag="inspect"):
    """Anyone: describe yourself (for status pages and tests)."""


class InspectPeer(msgspec.Struct, frozen=True, kw_only=True, tag="inspect_peer"):
    """Anyone: have `host`, of your generation, describe itself; who has no key cannot ask it."""

    host: str


ClientMessage = (
    Hello
    | Enter
    | SnapshotNow
    | Stop
    | Bye
    | Restored
    | RestoreFailed
    | Fetch
    | Release
    | WantManifests
    | Reserve
    | WantSlot
    | Staged
    | StagingFailed
    | Missed
    | LastCall
    | HelperState
    | Wrote
    | Inspect
    | InspectPeer
)

# ------------------------------------------------------------------------------ SMP -> client


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """`fds` names the descriptors that come with it: "ledger", "slot0", "slot1". `address` is where
    peers reach this SMP, `newest` the newest snapshot it holds, `options` what its ranks want,
    `code` what its group has in this generation ("K+M"; "" before the first one). `writers`, told
    to an agent, are the processes that live and may write into a slot. `trust` is the name of what
    this SMP and its peers on other machines know each other by ("": it has none). `groups` are this
    generation's, `ranks` how many of them each of its hosts has."""

    host: str
    pid: int
    arena: str
    address: str
    generation: int
    fds: tuple[str, ...]
    slot_sizes: tuple[int, int]
    newest: SnapshotId | None = None
    options: RankOptions | None = None
    code: str = ""
    writers: tuple[int, ...] = ()
    trust: str = ""
    groups: tuple[Group, ...] = ()
    ranks: tuple[int, ...] = ()


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """To ranks and helpers: this SMP was told to end, and its memory goes."""

    reason: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """To a client that has no business here; the connection ends after it."""

    reason: str


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """There is memory for it; or `error` says what is missing and what to do."""

    error: str = ""


class PlanTold(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """Restore this. `own` is (slot, place in the snapshot's world) of the chosen snapshot's share
    on this host, or None; `lineage` is what this host knows."""

    plan: Plan
    own: tuple[int, int] | None = None
    lineage: tuple[Lineage, ...] = ()


class ManifestsTold(msgspec.Struct, frozen=True, kw_only=True, tag="manifests"):
    """The encoded manifests of all segments of `id`, by place; or why there are none."""

    id: SnapshotId
    manifests: tuple[bytes, ...] = ()
    damaged: tuple[Damage, ...] = ()
    error: str = ""


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """The extents of `Fetch` number `number` lie at `offsets` of the memory whose descriptor comes
    with this; or what is damaged, or why they cannot be had. With `made_at` it is the memory of a
    whole segment that is still being made: there lies a byte for each of its chunks, 1 once the
    chunk is there, and nothing of it has been checked for the reader."""

    number: int
    offsets: tuple[int, ...] = ()
    made_at: int | None = None
    size_bytes: int = 0
    damaged: tuple[Damage, ...] = ()
    error: str = ""


class SettledTold(msgspec.Struct, frozen=True, kw_only=True, tag="settled"):
    """Everybody has restored; save may begin. `interval` is the steps from snapshot 0 to 1."""

    base: SnapshotId | None
    interval: int


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    """Write snapshot `seq` to `base` of `slot`, which is `size_bytes` long now."""

    seq: int
    slot: int
    base: int
    size_bytes: int


class StagedTold(msgspec.Struct, frozen=True, kw_only=True, tag="staged_told"):
    """The segment of snapshot `seq` is whole: a crash of the ranks loses nothing of it."""

    seq: int


class OutcomeTold(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    outcome: Outcome


class HeldTold(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """No snapshot can be decided for now, and why: nobody is to wait for one. "": they can."""

    reason: str


class TurnTold(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """To ranks and the agent: the root's word on a snapshot out of turn. Number 0 is this SMP's own
    answer to `SnapshotNow`: there can be none."""

    turn: Turn


class PersistTold(msgspec.Struct, frozen=True, kw_only=True, tag="persist"):
    """The root's word on a persist. `own` is (slot, place in the world) of this host's share of
    `order.id`, or None; `lineage` goes into the checkpoint."""

    order: PersistOrder
    own: tuple[int, int] | None = None
    lineage: tuple[Lineage, ...] = ()


class FaultTold(msgspec.Struct, frozen=True, kw_only=True, tag="fault"):
    """To the agent: this world cannot go on. `kind` is that of the fault (`records.Fault`)."""

    host: str
    reason: str
    kind: str = "smp_report"


class Announced(msgspec.Struct, frozen=True, kw_only=True, tag="announced"):
    """To the agent: something a person wants to know."""

    kind: str
    detail: dict[str, str | int | float]


class RankLeft(msgspec.Struct, frozen=True, kw_only=True, tag="rank_left"):
    """To the agent: process `pid`, a rank that it has not started, writes no more. It may live."""

    pid: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True, tag="inspection"):
    """The answer to `Inspect`: as JSON-like values, and all that is known."""

    values: dict[str, str | int | float | list[dict[str, str | int | float]]]
    account: Account


class PeerInspection(msgspec.Struct, frozen=True, kw_only=True, tag="peer_inspection"):
    """The answer to `InspectPeer`; without an account, `why` there is none."""

    host: str
    account: Account | None = None
    why: str = ""


ServerMessage = (
    Welcome
    | Ended
    | Refused
    | Reserved
    | PlanTold
    | ManifestsTold
    | Fetched
    | SettledTold
    | Granted
    | StagedTold
    | OutcomeTold
    | HeldTold
    | TurnTold
    | PersistTold
    | FaultTold
    | Announced
    | RankLeft
    | Inspection
    | PeerInspection
)


def encode(message: ClientMessage | ServerMessage) -> bytes:
    return msgspec.msgpack.encode(message)


_CLIENT: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_SERVER: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


def decode_client(payload: bytes) -> ClientMessage:
    """What a client said. Raises msgspec.MsgspecError if it is none of these."""
    return _CLIENT.decode(payload)


def decode_server(payload: bytes) -> ServerMessage:
    """What the SMP said. Raises msgspec.MsgspecError if it is none of these."""
    return _SERVER.decode(payload)
