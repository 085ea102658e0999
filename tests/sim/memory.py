"""Snapshot memory as the simulator sees it: which bytes are really there.

A byte range is a token, an integer that stands for its content: equal tokens are equal bytes, and
the checksum of a range is its token. A segment is a row of pieces (PIECES a rank), piece i of every
member of a group makes stripe i, and each member holds one parity piece of every stripe: the
(place, token) pairs that it was computed from. So a parity that was made from wrong bytes is a
wrong parity, and nothing but what was really read can be got out of it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxft.group.manifest import Manifest, SnapshotId
from jaxft.group.messages import Ledger, Slot

PIECES = 2
DAMAGED = -1

Token = int
Parity = tuple[tuple[int, Token], ...]


@dataclass
class SlotBytes:
    """The content of one slot, whatever its ledger says about it."""

    pieces: dict[int, Token] = field(default_factory=dict)
    manifest: Manifest | None = None
    parity: dict[int, Parity | None] = field(default_factory=dict)
    group: dict[int, Manifest] = field(default_factory=dict)


@dataclass
class Memory:
    """One host's memory: it outlives its SMP, not its host."""

    arena: str
    ledger: Ledger
    slots: tuple[SlotBytes, SlotBytes] = field(default_factory=lambda: (SlotBytes(), SlotBytes()))

    def find(self, identity: SnapshotId) -> tuple[Slot, SlotBytes] | None:
        """The slot that holds a whole segment of this snapshot, as the ledger has it."""
        for record, content in zip(self.ledger.slots, self.slots, strict=True):
            if record.id == identity and record.readable:
                return record, content
        return None


def checks(manifest: Manifest) -> list[Token]:
    """The checksums of a segment's pieces, in order."""
    raw = b"".join(part.checksums for part in manifest.parts)
    return [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8)]


def checksums(tokens: list[Token]) -> bytes:
    return b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)


def damage_found(manifest: Manifest, content: SlotBytes) -> list[int]:
    """The pieces of a segment that are not what its manifest says."""
    return [
        index for index, token in enumerate(checks(manifest)) if content.pieces.get(index) != token
    ]
