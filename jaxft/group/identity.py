"""What a snapshot is called, and the order of snapshots."""

from __future__ import annotations

import msgspec


class SnapshotId(msgspec.Struct, frozen=True, order=True):
    """A snapshot's identity and order: (generation, seq). The step is a label, never an order."""

    generation: int
    seq: int
    nonce: str = ""

    @classmethod
    def parse(cls, text: str, nonce: str) -> SnapshotId:
        """Reads what `str` gives; the nonce is not in it."""
        generation, _, seq = text.partition(".")
        return cls(int(generation), int(seq), nonce)

    def __str__(self) -> str:
        return f"{self.generation}.{self.seq}"
