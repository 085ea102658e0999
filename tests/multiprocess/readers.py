"""Processes that read checkpoints: `python readers.py ROLE ARGUMENTS...`, an answer in JSON.

plain DIRECTORY STEP                        with nothing but Orbax
rank DIRECTORY STEP PORT INDEX COUNT        one of several processes, with jaxft
"""

from __future__ import annotations

import hashlib
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


def plain(directory: str, step: str) -> object:
    """What Orbax gives for every leaf that it can hold, on one device, where there is no jaxft."""
    sys.modules["jaxft"] = None  # type: ignore[assignment]  # an import of it fails from here on
    import orbax.checkpoint as ocp

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def target(shape: tuple[int, ...], dtype: object) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    like = {
        "w": target((16, 6), np.dtype("float32")),
        "keys": target((4,), jax.eval_shape(lambda: jax.random.key(0)).dtype),
        "opt": [target((5,), jax.numpy.bfloat16), None],
        "count": target((), np.dtype("int32")),
        "host": np.zeros(3),
        "step": 0,
    }
    with ocp.CheckpointManager(directory) as manager:
        tree = manager.restore(int(step), args=ocp.args.StandardRestore(like))
    assert not any(name.startswith("jaxft.") for name in sys.modules)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys): digest(leaf) for keys, leaf in leaves}


def rank(directory: str, step: str, port: str, index: str, count: str) -> object:
    """The bytes of every shard that this process gets, of a state over all processes."""
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxft import OrbaxFallback

    mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"))

    def target(shape: tuple[int, ...], dtype: object, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    like = {
        "w": target((16, 6), np.dtype("float32"), "b", "a"),
        "e4m3": target((8,), np.dtype("float8_e4m3"), "a"),
        "keys": target((4,), key, "b"),
        "opt": [target((5,), np.dtype("bfloat16")), None],
        "count": jax.numpy.int32(0),
        "host": np.zeros(3),
        "step": 0,
    }
    fallback = OrbaxFallback(directory)
    entry = next(entry for entry in fallback.entries() if entry.step == int(step))
    state, extras = fallback.restore(entry, like)
    shards = {
        name: [[str(shard.index), digest(shard.data)] for shard in state[name].addressable_shards]
        for name in ("w", "e4m3", "keys")
    }
    rest = {name: digest(state[name]) for name in ("count", "host", "step")}
    rest["opt"] = digest(state["opt"][0].addressable_data(0))
    assert all(state[name].sharding == like[name].sharding for name in shards)
    assert not state["count"].committed
    jax.distributed.shutdown()
    return {"shards": shards, "rest": rest, "extras": extras}


if __name__ == "__main__":
    role = {"plain": plain, "rank": rank}[sys.argv[1]]
    print(json.dumps(role(*sys.argv[2:])), flush=True)
