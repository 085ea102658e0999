"""Processes that read checkpoints: `python readers.py ROLE ARGUMENTS...`, an answer in JSON.

plain DIRECTORY STEP PORT INDEX COUNT       one of so many processes, with nothing but Orbax
rank DIRECTORY STEP PORT INDEX COUNT        the same, with jaxft
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

import jax
import numpy as np


def digest(leaf: object) -> str:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(np.asarray(leaf))
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"


def meshed(count: str, port: str, index: str) -> jax.sharding.Mesh:
    """A mesh of this many processes, of which this is one."""
    if count != "1":
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    return jax.make_mesh((2, jax.device_count() // 2), ("a", "b"))


def targets(mesh: jax.sharding.Mesh) -> dict[str, object]:
    """The state on that mesh, but for what Orbax cannot hold."""

    def target(shape: tuple[int, ...], dtype: object, *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return {
        "w": target((16, 6), np.dtype("float32"), "a", "b"),
        "keys": target((4,), jax.eval_shape(lambda: jax.random.key(0)).dtype, "a"),
        "opt": [target((5,), jax.numpy.bfloat16), None],
        "count": target((), np.dtype("int32")),
        "host": np.zeros(3),
        "step": 0,
    }


def shards_of(state: dict[str, object], *names: str) -> dict[str, list[list[str]]]:
    return {
        name: [[str(shard.index), digest(shard.data)] for shard in state[name].addressable_shards]
        for name in names
    }


def rest_of(state: dict[str, object]) -> dict[str, str]:
    rest = {name: digest(state[name]) for name in ("count", "host", "step")}
    return rest | {"opt": digest(state["opt"][0].addressable_data(0))}


def plain(directory: str, step: str, port: str, index: str, count: str) -> object:
    """What Orbax gives, where there is no jaxft: its manager, and its new interface."""
    assert importlib.util.find_spec("jaxft") is None
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    like = targets(meshed(count, port, index))
    with ocp.CheckpointManager(directory) as manager:
        state = manager.restore(int(step), args=ocp.args.StandardRestore(like))
    new = v1.load(f"{directory}/{step}", like)
    for one in (state, new):
        assert all(one[name].sharding == like[name].sharding for name in ("w", "keys", "count"))
    found = {"shards": shards_of(state, "w", "keys"), "rest": rest_of(state)}
    assert found == {"shards": shards_of(new, "w", "keys"), "rest": rest_of(new)}
    if count != "1":
        jax.distributed.shutdown()
        return found
    with ocp.CheckpointManager(directory) as manager:  # told nothing of the state
        state = manager.restore(int(step))
    assert all(digest(state[name]) == digest(new[name]) for name in ("w", "keys", "count"))
    assert digest(state["opt"][0]) == digest(new["opt"][0])
    assert (state["step"], state["host"].tolist()) == (new["step"], new["host"].tolist())
    return found


def rank(directory: str, step: str, port: str, index: str, count: str) -> object:
    """The bytes of every shard that this process gets, of a state over all processes."""
    from jaxft import OrbaxFallback

    mesh = meshed(count, port, index)
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    e4m3 = jax.ShapeDtypeStruct((8,), np.dtype("float8_e4m3"), sharding=cut)
    like = {**targets(mesh), "e4m3": e4m3, "count": jax.numpy.int32(0)}
    fallback = OrbaxFallback(directory)
    entry = next(entry for entry in fallback.entries() if entry.step == int(step))
    if index == "0":  # nobody waits for a rank that does not come, as it has found damage
        fallback.restore(entry, like)
    state, extras = fallback.restore(entry, like)
    shards = shards_of(state, "w", "e4m3", "keys")
    assert all(state[name].sharding == like[name].sharding for name in shards)
    assert not state["count"].committed
    jax.distributed.shutdown()
    return {"shards": shards, "rest": rest_of(state), "extras": extras}


if __name__ == "__main__":
    role = {"plain": plain, "rank": rank}[sys.argv[1]]
    print(json.dumps(role(*sys.argv[2:])), flush=True)
