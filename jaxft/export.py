"""From a committed snapshot to a checkpoint on storage: what is copied, and how it is written.

Every host's persist helper calls both functions, in one JAX world with a process for each host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft.checkpoint import (
    BYTES,
    RECORD,
    RECORD_FILE,
    TREE,
    Directory,
    Record,
    StoredLeaf,
    names,
    nest,
)
from jaxft.device.assembly import Stored, Table, Targets, match
from jaxft.device.leaves import decode_literal, element, stored_shape
from jaxft.group.manifest import Leaf, Manifest


def copies(manifests: Iterable[Manifest], stored: Sequence[StoredLeaf], mesh: Mesh) -> Targets:
    """What to copy out of a snapshot: a dict of arrays by the leaf's number, as a string.

    Args:
        manifests: of all hosts.
        stored: where each leaf goes. What goes to Orbax's tree is copied as it is; what is stored
            as bytes becomes uint8 and gets one dimension more.
        mesh: of one axis with a device for each host; arrays are cut over it where they can be.
    """
    table = Table.of(manifests)
    like: dict[str, jax.ShapeDtypeStruct] = {}
    leaves, places = [], []
    for number, one in enumerate(stored):
        if one.leaf.kind == "literal" or one.where == "record":
            continue
        leaf, boxes = one.leaf, table.stored[number]
        if one.where == "bytes":
            boxes = tuple(_in_bytes(leaf, piece) for piece in boxes)
            leaf = _as_bytes(leaf)
        name = str(number)
        kind = "key" if leaf.kind == "key" else "array"
        leaves.append(Leaf((("k", name),), kind, leaf.shape, leaf.dtype, leaf.impl))
        places.append(boxes)
        sharding = _spread(leaf.shape, mesh)
        like[name] = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, _dtype(leaf), sharding=sharding
        )
    return match(like, Table(leaves=tuple(leaves), stored=tuple(places), part_ends=table.part_ends))


def _as_bytes(leaf: Leaf) -> Leaf:
    shape = (*stored_shape(leaf), element(leaf).itemsize)
    return Leaf(leaf.path, "array", shape, "uint8")


def _in_bytes(leaf: Leaf, piece: Stored) -> Stored:
    """The same stored box, counted in bytes."""
    start, stop = piece.box
    return dataclasses.replace(piece, box=((*start, 0), (*stop, element(leaf).itemsize)))


def _dtype(leaf: Leaf) -> Any:
    """The dtype of an array of this leaf in JAX."""
    if leaf.kind == "key":
        return jax.eval_shape(lambda: jax.random.key(0, impl=leaf.impl)).dtype
    return element(leaf)


def _spread(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Cuts the first dimension of which every host can have an equal part."""
    cut = next((axis for axis, size in enumerate(shape) if size % mesh.devices.size == 0), None)
    spec = () if cut is None else (*[None] * cut, *mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]


def write(
    directory: Path,
    record: Record,
    values: Mapping[int, Any],
    empty: Sequence[Leaf],
    *,
    keep: int,
    may_commit: Callable[[], None],
) -> None:
    """Writes a checkpoint; every process of the JAX world calls it.

    Args:
        directory: of the checkpoints.
        record: what the checkpoint is; its number is given here.
        values: for each leaf of the record that is not only there, by number, its array: of its
            own dtype for the tree, of its bytes (uint8, one dimension more) for what is stored as
            bytes.
        empty: the tree's empty nodes.
        keep: how many checkpoints stay.
        may_commit: called in process 0 when all is written and nothing is visible yet; raises if
            this checkpoint is not to be.
    """
    import orbax.checkpoint as ocp

    target = Directory(directory)
    written = target.writing(record.id)
    is_first = jax.process_index() == 0
    if is_first:
        written, number = target.begin(record.id)
        record = msgspec.structs.replace(record, number=number)
    items = {RECORD: ocp.args.JsonSave(msgspec.to_builtins(record, str_keys=True))}
    tree = _orbax_tree(record, values, empty)
    if tree is not None:
        items[TREE] = ocp.args.StandardSave(tree)
    beside = {str(n): values[n] for n, one in enumerate(record.leaves) if one.where == "bytes"}
    if beside:
        items[BYTES] = ocp.args.StandardSave(beside)
    handlers = {
        RECORD: ocp.JsonCheckpointHandler(filename=RECORD_FILE),
        TREE: ocp.StandardCheckpointHandler(),
        BYTES: ocp.StandardCheckpointHandler(),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
        checkpointer.save(written, args=ocp.args.Composite(**items))
    if is_first:
        may_commit()
        target.commit(written, record.step)
        target.retain(record, keep)


_EMPTY: dict[str, Callable[[], Any]] = {"dict": dict, "list": list, "tuple": tuple}


def _orbax_tree(record: Record, values: Mapping[int, Any], empty: Sequence[Leaf]) -> Any:
    """What Orbax is given to save; None if it has no leaf."""
    pairs = [
        (one.leaf.path, decode_literal(one.leaf) if one.leaf.kind == "literal" else values[n])
        for n, one in enumerate(record.leaves)
        if one.where == "tree"
    ]
    if not pairs:
        return None
    taken = {names(path) for path, _ in pairs}
    pairs += [
        (leaf.path, _EMPTY.get(leaf.dtype, lambda: None)())
        for leaf in empty
        if names(leaf.path) not in taken
    ]
    return nest(pairs)
