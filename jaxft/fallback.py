"""Restoring from checkpoints on storage, for when more is lost than memory gives back.

The rules:
- A checkpoint is an ordinary Orbax checkpoint of `CheckpointManager(directory)`: plain Orbax
  restores it, without jaxft, and what plain Orbax wrote is restored here. See `checkpoint`.
- Nothing is cast, cut or padded, and what Orbax cannot hold is stored beside it, so that a restore
  from storage gives what a restore from memory gives.
- Orbax is imported when it is needed, and not before: it takes more than a second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxft.bucket import directory_at, whole_name
from jaxft.checkpoint import BYTES, TREE, Record
from jaxft.device.assembly import NAMED_MAX, check_same, is_uncommitted, pair
from jaxft.device.leaves import decode_literal, describe, element, flatten, show, stored_shape
from jaxft.device.placing import weaken
from jaxft.errors import ConfigError, RestoreError, TreeMismatch
from jaxft.group.manifest import Leaf
from jaxft.group.messages import StorageEntry
from jaxft.orbax_tree import StoredLeaf, names
from jaxft.sums import check_sums

Names = tuple[str, ...]


@dataclass(frozen=True)
class OrbaxFallback:
    """Where checkpoints go, and come from when memory is not enough.

    Args:
        directory: of the checkpoints, as for `orbax.checkpoint.CheckpointManager`; one that all
            hosts see (a mounted file system; renaming a directory in it must be atomic), or
            gs://BUCKET/PATH (needs `pip install "jaxft[gcs]"`).
        every: steps from one checkpoint to the next, at least.
        keep: how many of jaxft's checkpoints stay.

    Raises:
        ConfigError: a value out of range, or a directory that is no path or bucket, or cannot be
            written to.
    """

    directory: str | os.PathLike[str]
    every: int = field(default=100, kw_only=True)
    keep: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        text = os.fspath(self.directory)
        if not text:
            raise ConfigError("OrbaxFallback: the directory is an empty string")
        for name, value in (("every", self.every), ("keep", self.keep)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"OrbaxFallback: {name} must be an int from 1, found {value!r}")
        object.__setattr__(self, "directory", whole_name(text))
        directory_at(text).check_writable()

    def check_job(self, job: str) -> None:
        """Refuses a directory in which another job's checkpoints are.

        Raises:
            ConfigError: there are.
        """
        directory_at(self.directory).check_job(job)

    def entries(self) -> tuple[StorageEntry, ...]:
        """The checkpoints that are there, by ascending step, also those that are `damaged`.

        Raises:
            RestoreError: the directory cannot be read.
        """
        return tuple(found.entry for found in directory_at(self.directory).all())

    def restore(
        self, entry: StorageEntry, like: Any, *, strict: bool = True
    ) -> tuple[Any, dict[int, Any]]:
        """Restores a checkpoint onto the shardings of `like`; every process calls it.

        Args:
            entry: one of `entries()`.
            like: a tree of arrays or `ShapeDtypeStruct`s on the mesh of now, NumPy arrays and
                literals.
            strict: False ignores leaves of the checkpoint that `like` does not have.

        Returns:
            The tree, and what each rank saved with it (nothing where plain Orbax wrote it).

        Raises:
            TreeMismatch: a leaf that is missing, too many, or of another shape, dtype or kind.
            RestoreError: the checkpoint is not there any more, or not as jaxft wrote it.
        """
        found = directory_at(self.directory).find(entry)
        if found.record is None:
            return _restore_plain(found.path, like, strict), {}
        extras = {
            rank: msgspec.msgpack.decode(data) if data else None
            for rank, data in found.record.extras.items()
        }
        if isinstance(found.path, Path):
            check_sums(found.path, jax.process_index(), jax.process_count())
        return _restore_ours(found.path, found.record, like, strict), extras


# -------------------------------------------------------------------- restoring what jaxft wrote


def _restore_ours(path: Path, record: Record, like: Any, strict: bool) -> Any:
    leaves = record.leaves
    pairs, treedef = pair(like, [stored.leaf for stored in leaves], strict=strict)
    tree: dict[Names, jax.sharding.Sharding | None] = {}
    beside: dict[Names, jax.sharding.Sharding | None] = {}
    for number, value in pairs:
        stored = leaves[number]
        if stored.where == "tree" and stored.leaf.kind != "literal":
            tree[names(stored.leaf.path)] = _sharding(stored.leaf, value)
        elif stored.where == "bytes":
            beside[(str(number),)] = _sharding(stored.leaf, value)
    arrays = {TREE: _read(path / TREE, tree), BYTES: _read(path / BYTES, beside)}
    restored = [_finish(leaves[number], number, value, arrays) for number, value in pairs]
    return jax.tree_util.tree_unflatten(treedef, restored)


def _finish(
    stored: StoredLeaf, number: int, like: Any, arrays: Mapping[str, Mapping[Names, Any]]
) -> Any:
    """A leaf as it was saved, from what Orbax gave back."""
    leaf = stored.leaf
    if leaf.kind == "literal":
        return decode_literal(leaf)
    if stored.where == "tree":
        return _as_target(leaf, like, arrays[TREE][names(leaf.path)])
    if stored.where == "bytes":
        array = _from_bytes(leaf, arrays[BYTES][(str(number),)])
    else:
        array = _without_elements(leaf, like)
    if leaf.kind == "key":
        array = jax.random.wrap_key_data(array, impl=leaf.impl)
    return _as_target(leaf, like, array)


def _sharding(leaf: Leaf, like: Any) -> jax.sharding.Sharding | None:
    """Where Orbax puts an array first. None: it is to be a NumPy array."""
    if leaf.kind == "numpy":
        return None
    if is_uncommitted(like):
        return SingleDeviceSharding(jax.local_devices()[0])
    sharding: jax.sharding.Sharding = like.sharding
    return sharding


def _as_target(leaf: Leaf, like: Any, array: Any) -> Any:
    """Checks what came back, and puts it where the target is."""
    if leaf.kind == "key" and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TreeMismatch(
            f"leaf {show(leaf.path)}: the target expects a PRNG key ({leaf.impl}), the checkpoint "
            f"has {array.dtype}{list(array.shape)}; wrap it after restoring it as that"
        )
    expected = (leaf.shape, like.dtype if leaf.kind == "key" else element(leaf))
    if (tuple(array.shape), array.dtype) != expected:
        raise RestoreError(
            f"leaf {show(leaf.path)}: the checkpoint gave {array.dtype}{list(array.shape)}, "
            f"expected {expected[1]}{list(expected[0])}: it is not as it was written"
        )
    if leaf.kind == "numpy":
        return array
    if is_uncommitted(like):
        array = _uncommitted(leaf, array)
    elif array.sharding != like.sharding:
        array = jax.device_put(array, like.sharding)
    return weaken(array, like) if leaf.weak_type else array


def _uncommitted(leaf: Leaf, array: jax.Array) -> jax.Array:
    if leaf.kind == "key":
        keys: jax.Array = jax.random.wrap_key_data(
            jax.device_put(np.array(jax.random.key_data(array))), impl=leaf.impl
        )
        return keys
    free: jax.Array = jax.device_put(np.array(array))
    return free


def _from_bytes(leaf: Leaf, stored: Any) -> Any:
    """An array of the leaf's own elements from one of their bytes."""
    dtype, shape = element(leaf), stored_shape(leaf)

    def whole(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.array(data, order="C").view(dtype).reshape(data.shape[:-1])

    if isinstance(stored, np.ndarray):
        return whole(stored)
    shards = [
        jax.device_put(
            whole(np.asarray(shard.data)),
            SingleDeviceSharding(shard.device, memory_kind=stored.sharding.memory_kind),
        )
        for shard in stored.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(shape, stored.sharding, shards)


def _without_elements(leaf: Leaf, like: Any) -> Any:
    zeros = np.zeros(stored_shape(leaf), element(leaf))
    sharding = _sharding(leaf, like)
    if sharding is None:
        return zeros
    return jax.make_array_from_callback(zeros.shape, sharding, lambda index: zeros[index])


# -------------------------------------------------------------------- reading with Orbax


def _metadata(item: Path) -> Any:
    """The tree of what an item of a checkpoint has."""
    import orbax.checkpoint as ocp

    # Not a Checkpointer's: that looks for a whole checkpoint's metadata, and warns of its absence.
    return ocp.PyTreeCheckpointHandler().metadata(item).tree


def _names(keys: tuple[Any, ...]) -> Names:
    """The names of a leaf of Orbax's metadata, which consists of dicts and lists."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys)


def _read(
    item: Path, wanted: Mapping[Names, jax.sharding.Sharding | None], scalars: Sequence[Names] = ()
) -> dict[Names, Any]:
    """Reads these leaves of an item: onto a sharding, or as a NumPy array where that is None.

    Args:
        scalars: names of more leaves to read, as whatever they are.
    """
    import orbax.checkpoint as ocp

    if not wanted and not scalars:
        return {}

    def ask(keys: tuple[Any, ...], metadata: Any) -> tuple[Any, Any]:
        name = _names(keys)
        if name in scalars:
            return metadata, ocp.RestoreArgs()
        if name not in wanted:
            return ocp.PLACEHOLDER, ocp.RestoreArgs()
        sharding = wanted[name]
        if sharding is None:
            return metadata, ocp.RestoreArgs(restore_type=np.ndarray)
        return metadata, ocp.ArrayRestoreArgs(sharding=sharding)

    with_path, treedef = jax.tree_util.tree_flatten_with_path(_metadata(item))
    asked = [ask(keys, metadata) for keys, metadata in with_path]
    targets, arguments = (
        jax.tree_util.tree_unflatten(treedef, part) for part in zip(*asked, strict=True)
    )
    # Nobody waits for another rank here: one that finds the checkpoint damaged does not come.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        arguments = ocp.args.PyTreeRestore(item=targets, restore_args=arguments)
        restored = checkpointer.restore(item, args=arguments)
    found = {
        _names(keys): value
        for keys, value in jax.tree_util.tree_flatten_with_path(restored)[0]
        if value is not ocp.PLACEHOLDER
    }
    missing = [name for name in (*wanted, *scalars) if name not in found]
    if missing:
        raise RestoreError(f"{item} lacks {', '.join(map('.'.join, missing[:NAMED_MAX]))}")
    return found


# -------------------------------------------------------------------- what plain Orbax wrote


def _restore_plain(path: Path, like: Any, strict: bool) -> Any:
    item = _plain_item(path)
    metadata = {
        _names(keys): one for keys, one in jax.tree_util.tree_flatten_with_path(_metadata(item))[0]
    }
    with_path, treedef = flatten(like)
    leaves = [describe(leaf_path, value) for leaf_path, value in with_path]
    _check_names(item, leaves, metadata, strict)
    for leaf in leaves:
        _check_plain(leaf, metadata[names(leaf.path)])
    wanted = {
        names(leaf.path): _sharding(leaf, value)
        for leaf, (_, value) in zip(leaves, with_path, strict=True)
        if leaf.kind != "literal"
    }
    scalars = [names(leaf.path) for leaf in leaves if leaf.kind == "literal"]
    found = _read(item, wanted, scalars)
    restored = [
        _plain_scalar(leaf, value, found[names(leaf.path)])
        if leaf.kind == "literal"
        else _as_target(leaf, value, found[names(leaf.path)])
        for leaf, (_, value) in zip(leaves, with_path, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, restored)


def _plain_item(path: Path) -> Path:
    """The item with the state: "default", the only one with a tree, or the checkpoint itself."""
    for item in (path / TREE, path):
        if (item / "_METADATA").exists():
            return item
    trees = sorted(metadata.parent for metadata in path.glob("*/_METADATA"))
    if len(trees) == 1:
        return trees[0]
    having = ", ".join(item.name for item in trees) or "none"
    raise RestoreError(
        f"checkpoint {path} has {len(trees)} items with a tree ({having}): jaxft restores a "
        'checkpoint with one, or with one called "default"'
    )


def _check_names(
    item: Path, leaves: Sequence[Leaf], metadata: Mapping[Names, Any], strict: bool
) -> None:
    expected = {names(leaf.path) for leaf in leaves}
    missing = [show(leaf.path) for leaf in leaves if names(leaf.path) not in metadata]
    extra = [".".join(name) for name in metadata if strict and name not in expected]
    check_same(missing, extra, str(item))


def _check_plain(leaf: Leaf, metadata: Any) -> None:
    if leaf.kind == "literal":
        return
    have = (tuple(metadata.shape), np.dtype(metadata.dtype))
    if have != (stored_shape(leaf), element(leaf)):
        raise TreeMismatch(
            f"leaf {show(leaf.path)}: the target expects {leaf.dtype}{list(stored_shape(leaf))}, "
            f"the checkpoint has {have[1]}{list(have[0])}. Nothing is cast, cut or padded; make "
            "the target match, or convert after restoring"
        )


def _plain_scalar(leaf: Leaf, like: Any, found: Any) -> Any:
    if type(found) is not type(like):
        raise TreeMismatch(
            f"leaf {show(leaf.path)}: the target expects a {leaf.dtype}, the checkpoint has a "
            f"{type(found).__name__}"
        )
    return found
