"""Snapshots of one process that plays several: plan, stage, copy, and read back to restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import xxhash

from jaxft.device.assembly import Table, match, needs
from jaxft.device.gather import Gatherer
from jaxft.device.placing import assemble
from jaxft.device.shards import Plan, Processes, make_plan
from jaxft.device.transfer import StagedLeaves, Staging, stage_leaves
from jaxft.group.manifest import CHUNK, Leaf, Manifest, Part, SnapshotId, align
from jaxft.group.world import World

DEVICES = 8


def processes(index: int, count: int) -> Processes:
    """A world of `count` processes that share the eight devices."""
    return Processes(index=index, count=count, of=lambda device: device.id * count // DEVICES)


@dataclass(frozen=True)
class Snapshot:
    """The segments of all hosts and their manifests."""

    manifests: list[Manifest]
    segments: list[np.ndarray]

    @property
    def table(self) -> Table:
        return Table.of(self.manifests)

    @property
    def stored_bytes(self) -> int:
        return sum(r.nbytes for m in self.manifests for part in m.parts for r in part.ranges)

    def restore(self, like: Any, *, strict: bool = True) -> Any:
        """Restores through buffers that are overwritten as soon as the tree is there."""
        targets = match(like, self.table, strict=strict)
        fetched = {
            (host, offset): self._fetch(host, offset, nbytes)
            for host, pieces in needs(targets).items()
            for offset, nbytes in pieces
        }

        def read(host: int, offset: int, nbytes: int) -> np.ndarray:
            for (owner, start), data in fetched.items():
                if owner == host and start <= offset and offset + nbytes <= start + len(data):
                    return data[offset - start : offset - start + nbytes]
            raise AssertionError(f"{nbytes} bytes at {offset} of host {host} were never asked for")

        tree = assemble(targets, read)
        for data in fetched.values():
            data[:] = 0xA5
        return tree

    def _fetch(self, host: int, offset: int, nbytes: int) -> np.ndarray:
        """Whole chunks, each checked."""
        (part,) = self.manifests[host].parts
        assert offset % CHUNK == 0
        assert nbytes % CHUNK == 0 or offset + nbytes == part.base + part.length
        for at in range(offset, offset + nbytes, CHUNK):
            chunk = self.segments[host][at : min(at + CHUNK, part.base + part.length)]
            number = (at - part.base) // CHUNK
            want = int.from_bytes(part.checksums[8 * number : 8 * number + 8], "little")
            assert xxhash.xxh3_64_intdigest(chunk) == want
        return self.segments[host][offset : offset + nbytes].copy()


def as_seen_by(tree: Any, index: int, count: int) -> Any:
    """The tree as one of several processes has it: arrays on one device are on one of its own."""
    own = jax.devices()[index * DEVICES // count]

    def move(leaf: Any) -> Any:
        is_local = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) == 1
        return jax.device_put(leaf, own) if index and is_local else leaf

    return jax.tree.map(move, tree)


def stage(
    plan: Plan, tree: Any, staging: Staging, gatherer: Gatherer | None = None
) -> StagedLeaves:
    """Holds the owned ranges of a tree, which the plan is of."""
    values, treedef = jax.tree.flatten(tree)
    assert treedef == plan.treedef, "the plan is of another tree"
    return stage_leaves(plan, values, staging, gatherer)


def take(tree: Any, count: int = 1, staging: Staging = "view") -> Snapshot:
    """Snapshots a tree with `count` hosts of one process each."""
    trees = [as_seen_by(tree, index, count) for index in range(count)]
    plans = [make_plan(tree, processes(index, count)) for index, tree in enumerate(trees)]
    assert len({plan.digest for plan in plans}) == 1
    manifests, segments = [], []
    for index, (plan, tree) in enumerate(zip(plans, trees, strict=True)):
        manifest, segment = take_one(index, plan, tree, staging)
        manifests.append(manifest)
        segments.append(segment)
    return Snapshot(manifests, segments)


def take_one(index: int, plan: Plan, tree: Any, staging: Staging) -> tuple[Manifest, np.ndarray]:
    staged = stage(plan, tree, staging)
    length = align(plan.length, CHUNK)
    segment = np.full(length, 0x5A, np.uint8)
    checksums = staged.copy_into(segment)
    return manifest_of(index, plan, staged.leaves, checksums), segment


def manifest_of(index: int, plan: Plan, leaves: tuple[Leaf, ...], checksums: bytes) -> Manifest:
    length = align(plan.length, CHUNK)
    part = Part(rank=index, base=0, length=plan.length, ranges=plan.ranges, checksums=checksums)
    return Manifest(
        id=SnapshotId(1, 0),
        step=0,
        host=index,
        world=World((), ()),
        plan=plan.digest,
        leaves=leaves,
        parts=(part,),
        length=length,
        lanes=((0, length),),
    )


def raw(leaf: Any) -> bytes:
    """A leaf's bytes, independent of how the product takes them."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(np.asarray(leaf))
    bits = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}.get(array.dtype.name)
    data = array.reshape(-1).view(np.uint8)
    return (data & ((1 << bits) - 1)).tobytes() if bits else data.tobytes()


def assert_same(restored: Any, original: Any) -> None:
    """Same structure, types, dtypes, shapes and bytes."""
    found, tree = jax.tree_util.tree_flatten(restored)
    expected, tree_expected = jax.tree_util.tree_flatten(original)
    assert tree == tree_expected
    for have, want in zip(found, expected, strict=True):
        assert type(have) is type(want)
        if isinstance(want, (jax.Array, np.ndarray)):
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            assert raw(have) == raw(want)
        if isinstance(want, jax.Array):
            assert have.sharding.is_equivalent_to(want.sharding, want.ndim)
            assert have.committed == want.committed
