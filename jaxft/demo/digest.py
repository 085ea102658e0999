"""A digest of a tree's content that does not depend on how the tree is sharded.

Each element is hashed with its leaf's path and its place in the whole leaf, and the hashes are
added up. So the digest of a tree is the sum of the digests of its distinct shards, wherever their
boundaries are, and each process contributes the shards it can see. Shards that several devices hold
(replicas) must have the same digest: all of them are looked at.

The hash of an element is the finalizer of splitmix64 (Steele, Lea, Flood 2014) in two lanes with
different salts; it is made to find wrong bytes, not to withstand somebody who chooses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


class ReplicasDiffer(ValueError):
    """Two devices hold different bytes for the same part of a leaf."""


def shard_digests(tree: Any) -> dict[str, str]:
    """The digests of all shards on this process's devices, by leaf and box of the whole leaf.

    Raises:
        ReplicasDiffer: devices of this process disagree.
    """
    import jax

    found: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            starts = [
                part.indices(size)[0] for part, size in zip(shard.index, leaf.shape, strict=True)
            ]
            box = ",".join(f"{a}:{a + n}" for a, n in zip(starts, data.shape, strict=True))
            _add(found, f"{name}[{box}]", _box_digest(name, data, starts, leaf.shape))
    return found


def combine(parts: Iterable[Mapping[str, str]]) -> str:
    """The digest of the whole tree, from what `shard_digests` gave on every process.

    Raises:
        ReplicasDiffer: processes disagree on a shard.
    """
    found: dict[str, str] = {}
    for part in parts:
        for name, digest in part.items():
            _add(found, name, digest)
    lanes = [sum(int(digest[at : at + 16], 16) for digest in found.values()) for at in (0, 16)]
    return "".join(f"{lane & _MASK:016x}" for lane in lanes)


def _add(found: dict[str, str], name: str, digest: str) -> None:
    if found.setdefault(name, digest) != digest:
        raise ReplicasDiffer(f"replicas of {name} differ: {found[name]} and {digest}")


def _box_digest(name: str, data: NDArray[Any], starts: list[int], shape: tuple[int, ...]) -> str:
    """The digest of the box `data` that begins at `starts` of the leaf `name` of `shape`."""
    places: NDArray[np.uint64] = np.zeros(data.shape, np.uint64)
    for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
        along = np.arange(start, start + data.shape[axis], dtype=np.uint64)
        places = places * np.uint64(size) + along.reshape([-1] + [1] * (data.ndim - axis - 1))
    places = places.reshape(-1)
    bits = np.ascontiguousarray(data).reshape(-1).view(f"u{data.itemsize}").astype(np.uint64)
    lanes = []
    for lane in range(2):
        salt = xxhash.xxh3_64_intdigest(f"{name}{shape}{data.dtype}".encode(), seed=lane)
        lanes.append(int(_mix(_mix(places ^ np.uint64(salt)) ^ bits).sum(dtype=np.uint64)))
    return "".join(f"{lane:016x}" for lane in lanes)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
