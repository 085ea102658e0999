"""The states that are saved, and the steps that make them anew.

Every step gives new arrays, as training does: what a snapshot costs at the first touch of an array
is part of what is measured.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.measure import Bytes

LEAF_BYTES = 16 << 20
COLUMNS = 1024
GROUP = 500

State = dict[str, Any]
Tree = TypeVar("Tree")


def four_devices() -> Mesh:
    """Two by two CPU devices of this process. Call it before anything else of JAX."""
    set_devices(4)
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))


def set_devices(count: int) -> None:
    """This process uses so many CPU devices."""
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    jax.config.update("jax_num_cpu_devices", count)  # type: ignore[no-untyped-call]


def ready(tree: Tree) -> Tree:
    """The tree, once it is computed."""
    jax.block_until_ready(tree)  # type: ignore[no-untyped-call]
    return tree


def _placed(mesh: Mesh, *axes: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]


def large_state(mesh: Mesh, nbytes: int) -> State:
    """About `nbytes` in leaves of a few MiB: three quarters are sharded over all four devices, a
    quarter over two of them and replicated over the others, and each leaf has a small replicated
    one beside it, as weights have their biases.
    """
    count = max(4, nbytes // LEAF_BYTES)
    rows = max(4, nbytes // count // (4 * COLUMNS) // 4 * 4)
    state: State = {}
    for number in range(count):
        axes = "model" if number % 4 == 0 else ("data", "model")
        state[f"weight{number}"] = _noise(_placed(mesh, axes), (rows, COLUMNS), number)
        state[f"bias{number}"] = _noise(_placed(mesh), (COLUMNS,), number)
    return ready(state)


def spread_state(mesh: Mesh, nbytes: int) -> State:
    """`nbytes` in leaves that are sharded over the only axis of the mesh, over all processes."""
    (axis,) = mesh.axis_names
    per_leaf = max(1, LEAF_BYTES * mesh.size // 4)
    count = max(2, nbytes // per_leaf)
    rows = max(1, nbytes // count // (4 * COLUMNS) // mesh.size) * mesh.size
    sharding = _placed(mesh, axis)
    return {f"weight{number}": _noise(sharding, (rows, COLUMNS), number) for number in range(count)}


def _noise(sharding: NamedSharding, shape: tuple[int, ...], seed: int) -> jax.Array:
    def part(index: Any) -> np.ndarray[Any, Any]:
        sides = [range(*one.indices(size)) for one, size in zip(index, shape, strict=True)]
        random = np.random.default_rng((seed, *(side.start for side in sides)))
        return random.standard_normal([len(side) for side in sides], dtype=np.float32)

    return jax.make_array_from_callback(shape, sharding, part)


@functools.partial(jax.jit, donate_argnums=0)
def step(state: State) -> State:
    """A step that touches everything once, and may reuse its input's memory."""
    moved: State = jax.tree.map(lambda leaf: leaf * 1.0001 + 0.5, state)
    return moved


def small_leaves(mesh: Mesh, count: int) -> list[list[jax.Array]]:
    """Leaves of 64 floats, half of them replicated, in groups that share a compiled step: ten
    thousand in one program would take minutes to compile."""
    everywhere, split = _placed(mesh), _placed(mesh, ("data", "model"))
    values = [
        jax.device_put(np.full(64, number, np.float32), split if number % 2 else everywhere)
        for number in range(count)
    ]
    return [values[at : at + GROUP] for at in range(0, count, GROUP)]


@functools.partial(jax.jit, donate_argnums=0)
def _step_group(leaves: list[jax.Array]) -> list[jax.Array]:
    return [leaf + 1 for leaf in leaves]


def step_small(groups: list[list[jax.Array]]) -> list[list[jax.Array]]:
    """New arrays for all small leaves."""
    return ready([_step_group(group) for group in groups])


def views(state: Any) -> list[Bytes]:
    """Every distinct shard's bytes, without a copy."""
    return [
        np.asarray(shard.data).reshape(-1).view(np.uint8)
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]


def received_bytes(state: Any) -> int:
    """Bytes that the devices of this process hold of a state, replicas counted each."""
    return sum(
        shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards
    )


def pointers(state: Any) -> dict[int, int]:
    """Where the buffers of a state lie -> their bytes."""
    return {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
    }


def structs(state: Any) -> Any:
    """What the state looks like, without its bytes."""

    def describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        )

    return jax.tree.map(describe, state)
