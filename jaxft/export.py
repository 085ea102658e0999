"""From a committed snapshot to a checkpoint on storage: what is copied, and how it is written.

Every host's persist helper calls both functions, in one JAX world with a process for each host.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft.bucket import Bucket, directory_at
from jaxft.checkpoint import BYTES, TREE, Record
from jaxft.device.assembly import Stored, Table, Targets, match
from jaxft.device.leaves import decode_literal, element, stored_shape
from jaxft.group.manifest import Leaf, Manifest, SnapshotId
from jaxft.group.messages import Lineage
from jaxft.orbax_tree import StoredLeaf, names, nest, place
from jaxft.sums import write_sums


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


class Copied(NamedTuple):
    """A snapshot, or one process's share of it, that was copied out of memory: see `write`."""

    record: Record
    values: dict[int, Any]
    empty: list[Leaf]


def copy(
    identity: SnapshotId,
    job: str,
    lineage: tuple[Lineage, ...],
    manifests: Mapping[int, Manifest],
    assemble: Callable[[Targets], dict[str, Any]],
    mesh: Mesh,
) -> Copied:
    """Copies a snapshot out of memory.

    Args:
        identity: the snapshot.
        job: its job's name.
        lineage: what the checkpoint is to say of the generations before it.
        manifests: of all its segments, by place.
        assemble: brings the arrays of the targets, checked.
        mesh: see `copies`.
    """
    leaves = manifests[0].leaves
    stored = place([leaf for leaf in leaves if leaf.kind != "empty"])
    arrays = assemble(copies(manifests.values(), stored, mesh))
    extras = {part.rank: part.extras for manifest in manifests.values() for part in manifest.parts}
    record = Record(
        id=identity,
        job=job,
        step=manifests[0].step,
        lineage=lineage,
        leaves=stored,
        extras=extras,
    )
    values = {int(name): array for name, array in arrays.items()}
    return Copied(record, values, [leaf for leaf in leaves if leaf.kind == "empty"])


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
    directory: str | os.PathLike[str],
    record: Record,
    values: Mapping[int, Any],
    empty: Sequence[Leaf],
    *,
    keep: int | None,
    may_commit: Callable[[], None],
    writer: str,
) -> None:
    """Writes a checkpoint; every process of the JAX world calls it.

    Args:
        directory: of the checkpoints, a path or a URL.
        record: what the checkpoint is; its number is given here.
        values: for each leaf of the record that is not only there, by number, its array: of its
            own dtype for the tree, of its bytes (uint8, one dimension more) for what is stored as
            bytes.
        empty: the tree's empty nodes.
        keep: how many checkpoints stay; None: all that there are, also an older one of its step.
        may_commit: called in process 0 when all is written and nothing is visible yet; raises if
            this checkpoint is not to be.
        writer: a name that no other writer has, the same in every process; see `checkpoint`.

    Raises:
        JaxftError: something else has its step, which is not to be replaced.
    """
    import orbax.checkpoint as ocp

    target = directory_at(directory)
    written = target.writing(record.id, writer)
    is_first = jax.process_index() == 0
    if is_first:
        written, number = target.begin(record, writer)
        record = msgspec.structs.replace(record, number=number)
    items = {}
    tree = orbax_tree(record, values, empty)
    if tree is not None:
        items[TREE] = ocp.args.StandardSave(tree)
    beside = {str(n): values[n] for n, one in enumerate(record.leaves) if one.where == "bytes"}
    if beside:
        items[BYTES] = ocp.args.StandardSave(beside)
    handlers = {
        TREE: ocp.StandardCheckpointHandler(),
        BYTES: ocp.StandardCheckpointHandler(),
    }
    try:
        if items:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
                checkpointer.save(written, args=ocp.args.Composite(**items))
            if is_first:
                for name in items:
                    on_one_device(written / name)
        elif is_first:  # there is nothing but scalars: the record has them all
            written.mkdir(exist_ok=True)
        if not isinstance(target, Bucket) and items:
            write_sums(written, jax.process_index())
            multihost_utils.sync_global_devices("jaxft:sums")
        if is_first:
            may_commit()
    except BaseException:
        if is_first:  # a disk that is full is not to stay so
            target.discard(written)
        raise
    if is_first:
        target.commit(written, record, replaces=keep is not None)
        if keep is not None:
            target.retain(record, keep)


def on_one_device(item: Path) -> None:
    """Has Orbax put on one device what it is not told a place for. Its file of shardings names the
    devices of this world of helpers, and where these are not there it refuses to restore."""
    import orbax.checkpoint as ocp

    file = item / "_sharding"
    try:
        named = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):  # an Orbax that has no such file, or another kind
        return
    mesh = Mesh(np.array(jax.devices()[:1]), ("host",))
    whole = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    said = ocp.metadata.NamedShardingMetadata.from_jax_sharding(whole).to_serialized_string()
    file.write_text(json.dumps(dict.fromkeys(named, said)))


_EMPTY: dict[str, Callable[[], Any]] = {"dict": dict, "list": list, "tuple": tuple}


def orbax_tree(record: Record, values: Mapping[int, Any], empty: Sequence[Leaf]) -> Any:
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
