"""Assembly: which bytes of a snapshot belong where in a tree of arrays.

Nothing here knows where the bytes come from: `match` finds out what belongs where, `needs` says
which bytes this process has to have, and `reads` in which order `placing.assemble` asks for them.

The rules:
- Leaves are found by path. Shape, dtype and kind must be the target's; nothing is cast or padded. A
  Python number, or an array or scalar of NumPy's, in the target takes the array that was saved in
  its place, if a jitted step can have made that of it.
- The target's mesh may be any: what a device needs is looked up by index, not by rank or device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.device.boxes import Box, count, intersect, whole
from jaxft.device.leaves import describe, element, flatten, show, stored_shape
from jaxft.device.shards import device_boxes
from jaxft.errors import RestoreError, TreeMismatch
from jaxft.group.manifest import CHUNK, Leaf, Manifest, Path

NAMED_MAX = 5


@dataclass(frozen=True)
class Stored:
    """A box of a leaf that `rank` saved on a host: `nbytes` at `offset` of its segment."""

    host: int
    offset: int
    nbytes: int
    box: Box
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the bytes of a snapshot's leaves are, in all segments.

    Attributes:
        leaves: the leaves, as the first host's manifest describes them.
        stored: for each leaf, its boxes on all hosts.
        part_ends: for each host, the (base, end) of its parts, which reads are not extended over.
    """

    leaves: tuple[Leaf, ...]
    stored: tuple[tuple[Stored, ...], ...]
    part_ends: dict[int, tuple[tuple[int, int], ...]]

    @classmethod
    def of(cls, manifests: Iterable[Manifest], rank: int = 0) -> Table:
        """Reads the manifests of all hosts of one snapshot, as `rank` restores it: of what every
        process had to itself its own, or the first one's where there was no such rank."""
        ordered = sorted(manifests, key=lambda manifest: manifest.host)
        leaves = tuple(leaf for leaf in ordered[0].leaves if leaf.kind != "empty")
        stored: list[list[Stored]] = [[] for _ in leaves]
        for manifest in ordered:
            for part in manifest.parts:
                for piece in part.ranges:
                    place = part.base + piece.offset
                    box = (piece.start, piece.stop)
                    stored[piece.leaf].append(
                        Stored(manifest.host, place, piece.nbytes, box, part.rank)
                    )
        return cls(
            leaves=leaves,
            stored=tuple(_one_of_each(pieces, rank) for pieces in stored),
            part_ends={
                manifest.host: tuple(
                    (part.base, part.base + part.length) for part in manifest.parts
                )
                for manifest in ordered
            },
        )


def _one_of_each(pieces: Sequence[Stored], rank: int) -> tuple[Stored, ...]:
    """One piece for each box, that of `rank` where it has one."""
    kept: dict[Box, Stored] = {}
    for piece in pieces:
        if piece.box not in kept or piece.rank == rank:
            kept[piece.box] = piece
    return tuple(kept.values())


@dataclass(frozen=True)
class Source:
    """Bytes to be read for a box: whole rows `box` of a stored box."""

    host: int
    offset: int
    nbytes: int
    box: Box


@dataclass(frozen=True)
class Fill:
    """A box that this process needs, and where its elements come from."""

    box: Box
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Target:
    """One leaf to be restored: what it is in the snapshot, and what `like` wants it to be."""

    leaf: Leaf
    like: Any
    fills: tuple[Fill, ...]


@dataclass(frozen=True)
class Targets:
    """A whole tree to be restored, matched with a snapshot."""

    targets: tuple[Target, ...]
    treedef: jax.tree_util.PyTreeDef
    part_ends: dict[int, tuple[tuple[int, int], ...]]


def match(like: Any, table: Table, *, strict: bool = True) -> Targets:
    """Finds every leaf of `like` in the snapshot, and the bytes that this process needs of it.

    Args:
        like: a tree of arrays or `ShapeDtypeStruct`s with shardings on the mesh of now, NumPy
            arrays and literals.
        table: the snapshot.
        strict: False ignores leaves of the snapshot that `like` does not have.

    Raises:
        TreeMismatch: a leaf that is missing, too many, or of another shape, dtype or kind.
        RestoreError: the snapshot's manifests do not cover a leaf.
    """
    pairs, treedef = pair(like, table.leaves, strict=strict)
    targets = []
    for number, value in pairs:
        leaf = table.leaves[number]
        targets.append(Target(leaf, value, _fills(leaf, value, table.stored[number])))
    return Targets(tuple(targets), treedef, table.part_ends)


def pair(
    like: Any, leaves: Sequence[Leaf], *, strict: bool = True
) -> tuple[list[tuple[int, Any]], jax.tree_util.PyTreeDef]:
    """Finds every leaf of `like` among those that were saved: (its number there, the target).

    Raises:
        TreeMismatch: as `match`.
    """
    with_path, treedef = flatten(like)
    numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
    _check_paths([path for path, _ in with_path], numbers, strict)
    pairs = []
    for path, value in with_path:
        wanted = _as_after_a_step(value, leaves[numbers[path]])
        _check_leaf(leaves[numbers[path]], describe(path, wanted))
        pairs.append((numbers[path], wanted))
    return pairs, treedef


def _as_after_a_step(like: Any, found: Leaf) -> Any:
    """A Python number in the target, or what is NumPy's, stands for the array that a jitted step
    made of it (Linen's `TrainState.create` has the int 0 for its `step`): what was saved comes
    back, where JAX puts such a number."""
    if found.kind != "array":
        return like
    if type(like) is np.ndarray or isinstance(like, np.generic):
        if like.dtype.kind in "SUmM":  # never an array of JAX's
            return like
        shape, dtype = like.shape, jax.dtypes.canonicalize_dtype(like.dtype)
    else:
        kind = {bool: np.bool_, int: np.integer, float: np.floating}.get(type(like))
        if kind is None or found.shape != () or not jnp.issubdtype(element(found), kind):
            return like
        shape, dtype = (), element(found)
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        shape, dtype, weak_type=found.weak_type
    )


def _check_paths(wanted: Sequence[Path], numbers: dict[Path, int], strict: bool) -> None:
    missing = [path for path in wanted if path not in numbers]
    extra = sorted(numbers.keys() - set(wanted), key=numbers.__getitem__) if strict else []
    check_same(list(map(show, missing)), list(map(show, extra)), "the snapshot")


def check_same(missing: Sequence[str], extra: Sequence[str], saved: str) -> None:
    """Raises TreeMismatch where the target's leaves are not those that were saved.

    Args:
        missing: names of leaves that only the target has.
        extra: names of leaves that only `saved` has.
        saved: "the snapshot", for example.
    """
    sides = ((saved, "the target", missing), ("the target", saved, extra))
    problems = [
        f"{one} lacks {len(some)} of {other}: {', '.join(some[:NAMED_MAX])}"
        f"{', ...' if some[NAMED_MAX:] else ''}"
        for one, other, some in sides
        if some
    ]
    if problems:
        raise TreeMismatch(
            f"the target's leaves are not those of {saved}: {'; '.join(problems)}. Restore into a "
            "tree of the same structure as the one that was saved"
        )


def _check_leaf(found: Leaf, expected: Leaf) -> None:
    name = show(found.path)
    for what in ("kind", "dtype", "impl", "shape"):
        wanted, have = getattr(expected, what), getattr(found, what)
        if wanted != have:
            raise TreeMismatch(
                f"leaf {name}: the target expects {_summary(expected)}, the snapshot has "
                f"{_summary(found)}: another {what}. Nothing is cast, cut or padded; make the "
                "target match, or convert after restoring"
            )
    if found.kind == "array" and jax.dtypes.canonicalize_dtype(element(found)) != element(found):
        raise TreeMismatch(
            f"leaf {name} is {found.dtype}, which JAX would make "
            f"{jax.dtypes.canonicalize_dtype(element(found)).name}: set jax_enable_x64"
        )


def _summary(leaf: Leaf) -> str:
    if leaf.kind == "literal":
        return f"a literal {leaf.dtype}"
    dtype = f"key<{leaf.impl}>" if leaf.kind == "key" else leaf.dtype
    return f"{leaf.kind} {dtype}{list(leaf.shape)}"


def is_uncommitted(like: Any) -> bool:
    """Whether this target leaves it to JAX where the array is."""
    return like.sharding is None or not getattr(like, "committed", True)


def _fills(leaf: Leaf, like: Any, stored: Sequence[Stored]) -> tuple[Fill, ...]:
    if leaf.kind == "literal":
        return ()
    edges = np.array([piece.box for piece in stored], np.int64)
    edges = edges.reshape(len(stored), 2, len(stored_shape(leaf)))
    fills = []
    for box in _wanted(leaf, like):
        # Worlds are large: only the few boxes that overlap are looked at one by one.
        overlap = ((edges[:, 0] < box[1]) & (edges[:, 1] > box[0])).all(axis=1)
        near = [stored[number] for number in np.flatnonzero(overlap).tolist()]
        fills.append(Fill(box, _sources(leaf, box, near)))
    return tuple(fills)


def _wanted(leaf: Leaf, like: Any) -> list[Box]:
    """The distinct boxes of a leaf that this process needs."""
    if leaf.kind == "numpy" or is_uncommitted(like):
        return [whole(stored_shape(leaf))]
    here = like.sharding.addressable_devices
    boxes = device_boxes(like.sharding, leaf).items()
    wanted = sorted({box for device, box in boxes if device in here})
    if not wanted:
        raise TreeMismatch(
            f"leaf {show(leaf.path)}: the target's sharding has no device of this process "
            f"({jax.process_index()}): {like.sharding}. Give it one over the whole mesh"
        )
    return wanted


def _sources(leaf: Leaf, needed: Box, stored: Sequence[Stored]) -> tuple[Source, ...]:
    """The rows of stored boxes that hold a box, in order. Each element is stored once: counting is
    proof."""
    sources = []
    covered = 0
    for piece in stored:
        common = intersect(piece.box, needed)
        if common is not None:
            covered += count(common)
            sources.append(_rows_with(piece, common, element(leaf).itemsize))
    if covered != count(needed):
        raise RestoreError(
            f"leaf {show(leaf.path)}: the snapshot's manifests cover {covered} of the "
            f"{count(needed)} elements of {needed}; a host's manifest is missing or damaged"
        )
    return tuple(sorted(sources, key=lambda source: source.box))


def _rows_with(piece: Stored, common: Box, itemsize: int) -> Source:
    """The whole rows of a stored box that have all of `common`."""
    start, stop = piece.box
    if not start:
        return Source(piece.host, piece.offset, piece.nbytes, piece.box)
    row = count(((0, *start[1:]), (1, *stop[1:]))) * itemsize
    first, last = common[0][0], common[1][0]
    box = ((first, *start[1:]), (last, *stop[1:]))
    offset = piece.offset + (first - start[0]) * row
    return Source(piece.host, offset, (last - first) * row, box)


def needs(targets: Targets) -> dict[int, list[tuple[int, int]]]:
    """The bytes that this process needs, by host.

    Returns:
        For each host index, ascending (offset, bytes) pieces of its segment that do not overlap.
        They are extended to whole CHUNKs of a part, so that each can be checked.
    """
    wanted: dict[int, list[tuple[int, int]]] = {}
    for target in targets.targets:
        for fill in target.fills:
            for source in fill.sources:
                piece = _whole_chunks(source, targets.part_ends[source.host])
                wanted.setdefault(source.host, []).append(piece)
    return {
        host: [(start, end - start) for start, end in _join(pieces)]
        for host, pieces in sorted(wanted.items())
    }


def _whole_chunks(source: Source, parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    part_end = next(end for base, end in parts if base <= source.offset < end)
    start = source.offset // CHUNK * CHUNK
    end = -(-(source.offset + source.nbytes) // CHUNK) * CHUNK
    return start, min(end, part_end)


def _join(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins (start, end) pieces that overlap or touch."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def reads(targets: Targets) -> Iterator[tuple[int, int, int]]:
    """(host index, offset in its segment, bytes) of every piece, in the order they are used in."""
    for target in targets.targets:
        for fill in target.fills:
            for source in fill.sources:
                yield source.host, source.offset, source.nbytes
