"""The layout of a part: which of a process's pieces of leaves lie where in its part.

Pieces lie by device, so that the bytes of one device are next to each other; what one device has
for itself, and NumPy arrays, come last, wherever they are. Within a device, small leaves of one
kind come first, in batches: `gather` takes a batch from its devices as one array, and it goes into
the part as one piece. What is on device lanes lies before all of it, as `lanes` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from jax import Device
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxft.device.boxes import Box
from jaxft.device.leaves import SUB_BYTE_BITS
from jaxft.device.memory import is_usual
from jaxft.group.manifest import ALIGN, Leaf, Range, align

if TYPE_CHECKING:
    from jaxft.device.lanes import Lanes

# How many leaves a batch has. What needs a compiled program needs few different ones then, and the
# same for a tree that has a few leaves more. Fewer leaves than the smallest are taken one by one.
# Twice as many as the largest would take thrice as long to compile, and gain nothing.
BATCH_SIZES = (512, 128, 16)


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """A range that this process saves: rows `rows` of the shard of a leaf that `device` holds.

    `device` is None for a NumPy leaf, and for a struct without a sharding; `shard` is the box of
    the shard, in the leaf's stored elements. `rows` is None where the whole shard is owned.
    """

    range: Range
    device: Device | None
    shard: Box
    rows: tuple[int, int] | None


class Piece(NamedTuple):
    """A box that this process owns of every leaf of a kind whose turn it is.

    `area` orders the part: what a device has for itself comes last.
    """

    area: tuple[bool, int]
    device: Device | None
    shard: Box
    box: Box
    rows: tuple[int, int] | None
    nbytes: int

    def of(self, leaf: int, offset: int) -> Owned:
        """The range of one leaf, with its place in the part."""
        placed = Range(leaf, self.box[0], self.box[1], offset, self.nbytes)
        return Owned(range=placed, device=self.device, shard=self.shard, rows=self.rows)


class BatchKind(msgspec.Struct, frozen=True):
    """What all leaves of a batch are, and how many: all that a compiled program depends on."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Any
    count: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one device's shards of a batch give: ranges of one size next to each other in the part.

    Attributes:
        piece: what is owned of each leaf.
        leaves: the leaves' numbers.
        members: their places within the batch.
        offset: of the first range in the part.
        stride: bytes from one range to the next.
    """

    piece: Piece
    leaves: tuple[int, ...]
    members: tuple[int, ...]
    offset: int
    stride: int

    @property
    def nbytes(self) -> int:
        """From the first byte to the last."""
        return (len(self.leaves) - 1) * self.stride + self.piece.nbytes

    def owned(self) -> Iterator[Owned]:
        """Its ranges one by one."""
        for number, leaf in enumerate(self.leaves):
            yield self.piece.of(leaf, self.offset + number * self.stride)


class Batch(msgspec.Struct, frozen=True):
    """Small leaves of one kind, by number, and where this process's ranges of them go."""

    kind: BatchKind
    leaves: tuple[int, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Shard:
    """One distinct shard of a leaf, and the devices that hold it, process by process.

    `in_turn` has the same devices, one of each process and then the next of each, so that turns go
    round the processes. Both are (None,) where it is the host that holds it.
    """

    box: Box
    holders: tuple[Device | None, ...]
    in_turn: tuple[Device | None, ...]


@dataclass(eq=False)
class Kind:
    """What leaves with the same description have in common.

    Attributes:
        leaf: one of them.
        value: the same one, or what stands for it.
        shards: its shards; none where there are no bytes.
        turns: whose turn it is, "small" or "rows"; "" where every process has it to itself.
        small: whether one owner takes a whole shard.
        period: after how many turns it is the same again.
        number: of its placement in the digest.
        pieces: what this process owns of a leaf, by turn.
        members: the leaves of this kind that this process has a part of, and what of each.
    """

    leaf: Leaf
    value: Any
    shards: list[Shard] = field(default_factory=list)
    turns: str = ""
    small: bool = False
    period: int = 1
    number: int = -1
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    members: list[tuple[int, list[Piece]]] = field(default_factory=list)


class Layout:
    """Gives every piece its offset in the part: by device, then batch, then leaf, then place in
    the leaf."""

    def __init__(self, kinds: Iterable[Kind], lanes: Lanes | None = None) -> None:
        self.singles: list[Owned] = []
        self.end = 0 if lanes is None else lanes.end
        batches: list[tuple[BatchKind, tuple[int, ...]]] = []
        runs: dict[int, list[Run]] = {}
        together: dict[tuple[bool, int], list[tuple[int, Piece, list[int]]]] = {}
        alone: dict[tuple[bool, int], list[tuple[int, Piece]]] = {}
        for kind in kinds:
            rest = kind.members
            for described, members in _batches_of(kind):
                rest = rest[len(members) :]
                for piece, places in _by_piece(members):
                    together.setdefault(piece.area, []).append((len(batches), piece, places))
                batches.append((described, tuple([leaf for leaf, _ in members])))
            for leaf, pieces in rest:
                for piece in pieces:
                    alone.setdefault(piece.area, []).append((leaf, piece))
        for area in sorted({*together, *alone}):
            for number, piece, places in together.get(area, ()):
                run = self._run(piece, batches[number][1], places)
                runs.setdefault(number, []).append(run)
            # Sorting keeps the boxes of a leaf in order.
            for leaf, piece in sorted(alone.get(area, ()), key=itemgetter(0)):
                offset = None if lanes is None else lanes.offset(leaf, piece.device)
                if offset is None:
                    offset = self._room(piece.nbytes)
                self.singles.append(piece.of(leaf, offset))
        self.batches = [
            Batch(described, leaves, tuple(runs[number]))
            for number, (described, leaves) in enumerate(batches)
        ]

    def _room(self, nbytes: int) -> int:
        offset = align(self.end, ALIGN)
        self.end = offset + nbytes
        return offset

    def _run(self, piece: Piece, leaves: tuple[int, ...], places: list[int]) -> Run:
        stride = align(piece.nbytes, ALIGN)
        return Run(
            piece=piece,
            leaves=tuple([leaves[place] for place in places]),
            members=tuple(places),
            offset=self._room((len(places) - 1) * stride + piece.nbytes),
            stride=stride,
        )


_Members = list[tuple[int, list[Piece]]]


def _by_piece(members: _Members) -> list[tuple[Piece, list[int]]]:
    """The same piece of some of a batch's leaves, and their places in the batch."""
    found: dict[int, tuple[Piece, list[int]]] = {}
    for place, (_, pieces) in enumerate(members):
        for piece in pieces:
            # A kind has one such object for each device and turn; turns differ in the device only.
            device = -1 if piece.device is None else piece.device.id
            if device not in found:
                found[device] = (piece, [])
            found[device][1].append(place)
    return list(found.values())


def _batches_of(kind: Kind) -> Iterator[tuple[BatchKind, _Members]]:
    """The first leaves of a kind, in batches; those that are left over are too few."""
    at, members = 0, kind.members
    if len(members) < BATCH_SIZES[-1] or not _goes_in_batches(kind):
        return
    leaf, value = kind.leaf, kind.value
    for size in BATCH_SIZES:
        while len(members) - at >= size:
            yield (
                BatchKind(leaf.shape, value.dtype, leaf.weak_type, value.sharding, size),
                members[at : at + size],
            )
            at += size


def _goes_in_batches(kind: Kind) -> bool:
    """Whether leaves of this kind are small arrays in a place that a program of this process alone
    reaches. (A process that is not alone runs the same programs as the others, except where each
    runs its own part of one by itself, as on CPU.)"""
    if not kind.small or kind.leaf.kind != "array" or kind.leaf.dtype in SUB_BYTE_BITS:
        return False
    sharding = kind.value.sharding
    if sharding is None:
        return True
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        return False
    device: Device = next(iter(sharding.device_set))
    return is_usual(sharding) and (device.platform == "cpu" or sharding.is_fully_addressable)
