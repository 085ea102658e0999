"""What an SMP says of itself to whoever asks how a job is: `Inspect` on its own host, a read of
`ACCOUNT_KEY` from others.

Times are seconds since the epoch by the clock of the SMP's machine, which also says what time it is
there: so ages are right where clocks differ.
"""

from __future__ import annotations

import msgspec

from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Ledger
from jaxft.group.world import Generation

ACCOUNT_KEY = msgspec.msgpack.encode("account")
_LENGTH_BYTES = 4


class Note(msgspec.Struct, frozen=True):
    """Something that went wrong at `at_s`. `kind` is "aborted", "held", "fault", "plan_failed",
    "persist_failed", "slot_damaged" or "rank_gone"."""

    at_s: float
    kind: str
    detail: str


class Committed(msgspec.Struct, frozen=True):
    """Snapshot `id` was heard at `at_s` to be committed."""

    id: SnapshotId
    at_s: float


class Persisted(msgspec.Struct, frozen=True):
    """Step `step` was heard at `at_s` to be on storage."""

    step: int
    at_s: float


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """One SMP.

    `generation` is the one that was entered, None before the first and while one is being entered;
    `agent_pid` is 0 where no agent (or keeper) is connected; `ranks` are (rank, process) of those
    that are. `pinned` are snapshots whose slots are granted to nobody. `held` says why no snapshot
    can be decided, "" while they can. `directory` and `stored` are where checkpoints go and the
    step of the newest one there, "" and -1: none. What is known since this process was started
    only: `entered_s`, `held_s`, `committed`, `persisted`, `notes`. Of the root: `silent`, the hosts
    that it does not hear, for how many seconds, and `helpers`, how far each is with a persist.
    """

    job: str
    host: str
    pid: int
    address: str
    now_s: float
    ledger: Ledger
    trust: str = ""
    generation: Generation | None = None
    settled: bool = False
    is_root: bool = False
    agent_pid: int = 0
    ranks: tuple[tuple[int, int], ...] = ()
    pinned: tuple[SnapshotId, ...] = ()
    held: str = ""
    silent: dict[str, float] = {}
    helpers: dict[str, str] = {}
    directory: str = ""
    stored: int = -1
    entered_s: float | None = None
    held_s: float | None = None
    committed: Committed | None = None
    persisted: Persisted | None = None
    notes: tuple[Note, ...] = ()


def to_block(account: Account, size_bytes: int) -> bytes:
    """The account in exactly `size_bytes`, as a read wants it: its length, little-endian, then
    itself, as much of it as there is room for, then zeros."""
    payload = msgspec.msgpack.encode(account)
    block = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
    return block[:size_bytes].ljust(size_bytes, b"\0")


def from_block(block: bytes) -> Account | int:
    """The account, or how large the block has to be for it.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    whole = _LENGTH_BYTES + int.from_bytes(block[:_LENGTH_BYTES], "little")
    if whole > len(block):
        return whole
    return msgspec.msgpack.decode(block[_LENGTH_BYTES:whole], type=Account)
