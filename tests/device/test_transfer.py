"""Staging is safe under donation and mutation, fails by name, and lets go of what it held."""

from __future__ import annotations

import gc
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.device.leaves import show
from jaxft.device.shards import PlanCache, make_plan
from jaxft.device.sources import staging_error
from jaxft.device.transfer import Staging, default_staging
from jaxft.errors import ConfigError, StagingError
from jaxft.group.manifest import CHUNK
from tests.device.snapshots import Snapshot, assert_same, manifest_of, raw, stage, take

STAGINGS: list[Staging] = ["view", "pinned_host", "device"]


def state_on(mesh: Mesh) -> dict[str, Any]:
    def put(spec: P, *shape: int) -> jax.Array:
        noise = np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)
        return jax.device_put(noise, NamedSharding(mesh, spec))

    return {
        "rows": put(P("a"), 64, 100),
        "copies": put(P(), 300, 100),
        "partly": put(P(None, "b"), 30, 64),
        "step": jnp.int32(0),
        "key": jax.random.key(0),
        "half": jax.device_put(jnp.ones((8, 3), jnp.bfloat16), NamedSharding(mesh, P())),
    }


@pytest.fixture(name="mesh")
def a_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def advance(state: dict[str, Any]) -> dict[str, Any]:
    key, _ = jax.random.split(state["key"])
    moved = {name: x * 1.25 + 1 for name, x in state.items() if name not in ("key", "step")}
    return {**moved, "key": key, "step": state["step"] + 1}


@pytest.mark.parametrize("staging", STAGINGS)
def test_200_donating_steps_never_reach_a_snapshot_case_1(mesh: Mesh, staging: Staging) -> None:
    step = jax.jit(advance, donate_argnums=0)
    plain = jax.jit(advance)
    state, twin = state_on(mesh), state_on(mesh)
    cache = PlanCache()
    for _ in range(200):
        plan = cache.get(state)
        staged = stage(plan, state, staging)
        state = step(state)
        segment = np.empty(plan.length, np.uint8)
        checksums = staged.copy_into(segment)
        for owned in plan.ranges:
            cut = tuple(map(slice, owned.start, owned.stop))
            leaf = jax.tree.leaves(twin)[owned.leaf]
            stored = segment[owned.offset : owned.offset + owned.nbytes].tobytes()
            assert stored == raw(_data(leaf)[cut])
        twin = plain(twin)
    snapshot = Snapshot([manifest_of(0, plan, staged.leaves, checksums)], [segment])
    assert int(snapshot.restore(state)["step"]) == 199


def _data(leaf: jax.Array) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


@pytest.mark.parametrize("staging", STAGINGS)
def test_numpy_leaves_may_change_after_stage_case_2(staging: Staging) -> None:
    tree = {"data": np.arange(100_000.0), "x": jnp.ones(3), "lr": 0.5}
    before = tree["data"].copy()
    plan = make_plan(tree)
    staged = stage(plan, tree, staging)
    tree["data"][:] = -1
    tree["lr"] = 0.25
    segment = np.empty(plan.length, np.uint8)
    checksums = staged.copy_into(segment)
    snapshot = Snapshot([manifest_of(0, plan, staged.leaves, checksums)], [segment])
    restored = snapshot.restore(tree)
    assert raw(restored["data"]) == raw(before)
    assert restored["lr"] == 0.5


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_failing_leaf_is_named_and_the_next_snapshot_works_case_4(
    mesh: Mesh, staging: Staging
) -> None:
    state = state_on(mesh)
    plan = make_plan(state)
    staged = stage(plan, state, staging)
    copied: list[int] = []

    def strike(done: int) -> None:
        copied.append(done)
        if len(copied) == 5:
            raise OSError("injected")

    path = show(plan.leaves[plan.owned[4].range.leaf].path)
    with pytest.raises(StagingError, match=rf"leaf {re.escape(path)} .*injected"):
        staged.copy_into(np.empty(plan.length, np.uint8), on_progress=strike)
    assert copied == sorted(copied)
    assert_same(take(state, staging=staging).restore(state), state)


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("name", ["rows", "copies", "partly", "step", "key"])
def test_a_leaf_that_was_donated_already_is_named_case_4(
    mesh: Mesh, staging: Staging, name: str
) -> None:
    state = state_on(mesh)
    cache = PlanCache()
    cache.get(state)
    state[name].delete()
    with pytest.raises(StagingError, match=rf"leaf \['{name}'\].*deleted"):
        stage(cache.get(state), state, staging)


@pytest.mark.parametrize("staging", STAGINGS)
def test_donation_works_again_after_the_copy_case_6(mesh: Mesh, staging: Staging) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    big = step(jax.device_put(jnp.zeros((800, 1000)), NamedSharding(mesh, P("a"))))
    plan = make_plan(big)
    for dropped in (False, True):
        staged = stage(plan, big, staging)
        if dropped:
            del staged
        else:
            staged.copy_into(np.empty(plan.length, np.uint8))
        gc.collect()
        before = _pointers(big)
        big = step(big)
        assert _pointers(big) == before


def _pointers(array: jax.Array) -> list[int]:
    return [array.addressable_data(n).unsafe_buffer_pointer() for n in range(8)]


def test_a_view_keeps_the_buffer_from_the_one_step_it_is_held_in(mesh: Mesh) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    big = step(jax.device_put(jnp.zeros((800, 1000)), NamedSharding(mesh, P("a"))))
    plan = make_plan(big)
    staged = stage(plan, big, "view")
    before = _pointers(big)
    big = step(big)
    assert _pointers(big) != before
    staged.release()
    before = _pointers(big)
    big = step(big)
    assert _pointers(big) == before


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_within_set_mesh_case_23(staging: Staging, axis_type: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    state = state_on(mesh)
    with jax.set_mesh(mesh):
        assert_same(take(state, staging=staging).restore(state), state)


def test_checksums_are_of_every_chunk_and_gaps_are_zero() -> None:
    tree = [jnp.arange(7.0), jnp.arange(200_001.0), np.arange(5, dtype=np.int8), jnp.ones(70_000)]
    plan = make_plan(tree)
    segment = np.full(plan.length + 100, 0xEE, np.uint8)
    checksums = stage(plan, tree, "view").copy_into(segment)
    part = segment[: plan.length]
    want = [xxhash.xxh3_64_intdigest(part[at : at + CHUNK]) for at in range(0, len(part), CHUNK)]
    assert checksums == b"".join(digest.to_bytes(8, "little") for digest in want)
    end = 0
    for owned in plan.ranges:
        assert not part[end : owned.offset].any()
        end = owned.offset + owned.nbytes
    assert (segment[plan.length :] == 0xEE).all()


def test_a_part_without_bytes() -> None:
    tree = {"n": 3, "empty": jnp.zeros(0)}
    plan = make_plan(tree)
    assert plan.length == 0
    assert stage(plan, tree, "view").copy_into(np.empty(0, np.uint8)) == b""
    assert_same(take(tree).restore(tree), tree)


def test_progress_reaches_the_length_of_the_part(mesh: Mesh) -> None:
    state = state_on(mesh)
    plan = make_plan(state)
    seen: list[int] = []
    stage(plan, state, "view").copy_into(np.empty(plan.length, np.uint8), on_progress=seen.append)
    assert len(seen) == len(plan.owned)
    assert seen[-1] == plan.length


def test_state_in_pinned_host_memory(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    tree = {"offloaded": jax.device_put(jnp.arange(800.0).reshape(80, 10), sharding)}
    for staging in STAGINGS:
        restored = take(tree, staging=staging).restore(tree)
        assert_same(restored, tree)
        assert restored["offloaded"].sharding.memory_kind == "pinned_host"


def test_more_leaves_than_one_program_takes() -> None:
    tree = [jnp.full((n % 3 + 1,), n, jnp.float32) for n in range(600)]
    assert_same(take(tree, staging="pinned_host").restore(tree), tree)


def test_structs_have_no_bytes_to_save() -> None:
    tree = {"x": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jnp.ones(2).sharding)}
    with pytest.raises(ConfigError, match=r"leaf \['x'\] is a ShapeDtypeStruct"):
        stage(make_plan(tree), tree, "view")


def test_unknown_staging_is_refused() -> None:
    tree = {"x": jnp.ones(2)}
    with pytest.raises(ConfigError, match="expected one of view, pinned_host, device"):
        stage(make_plan(tree), tree, "disk")  # type: ignore[arg-type]
    assert default_staging() == "view"


def test_what_xla_says_again_and_again_is_said_once() -> None:
    (leaf,) = make_plan({"w": jnp.zeros(2)}).leaves
    again = "INTERNAL: " + 9 * "Error dispatching computation: " + "Gloo failed: Connection closed"
    error = staging_error(leaf, RuntimeError(again))
    assert "RuntimeError: INTERNAL: Error dispatching computation: Gloo failed: Conn" in str(error)
