"""The plan: each byte has one owner in the world, and everybody is of one mind about it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.device.boxes import count, cut_rows, intersect, sides
from jaxft.device.leaves import element, stored_shape
from jaxft.device.shards import SMALL_BYTES, Plan, PlanCache, make_plan
from jaxft.errors import ConfigError
from jaxft.group.manifest import ALIGN
from tests.device.snapshots import as_seen_by, assert_same, processes, raw, take

BIG = SMALL_BYTES // 4  # rows of one float32 that are more than small in a shard of an eighth


def struct(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def mesh_of(*shape: int, axes: str = "ab") -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), tuple(axes[: len(shape)]))


def plans_of(tree: Any, world: int) -> list[Plan]:
    return [
        make_plan(as_seen_by(tree, index, world), processes(index, world)) for index in range(world)
    ]


def assert_owned_once(plans: list[Plan], *own: str) -> None:
    """Every element of every leaf is in exactly one range of one process; of the leaves called
    `own`, which each process has to itself, in one of every process."""
    for number, leaf in enumerate(plans[0].leaves):
        if leaf.kind == "literal":
            continue
        times = np.zeros(stored_shape(leaf), np.uint8)
        for plan in plans:
            for owned in plan.ranges:
                if owned.leaf == number:
                    box = (owned.start, owned.stop)
                    assert owned.nbytes == count(box) * element(leaf).itemsize
                    times[tuple(map(slice, owned.start, owned.stop))] += 1
        copies = len(plans) if leaf.path[0][1] in own else 1
        assert (times == copies).all(), leaf.path


def assert_well_laid(plan: Plan) -> None:
    end = 0
    for owned in plan.ranges:
        assert owned.offset % ALIGN == 0
        assert end <= owned.offset < end + ALIGN
        end = owned.offset + owned.nbytes
    assert plan.length == end


def test_each_byte_is_stored_once_in_all_case_20() -> None:
    mesh = mesh_of(4, 2)
    tree = {
        "sharded": struct(mesh, P("a", "b"), 64, 64),
        "replicated": struct(mesh, P(), 300, 100),
        "partly": struct(mesh, P(None, "a"), 300, 400),
        "both axes": struct(mesh, P(("a", "b")), 800, 100),
        "small": struct(mesh, P(), 10),
        "scalar": struct(mesh, P(), dtype=jnp.int32),
        "local": jnp.arange(100_000),
        "step": jnp.int32(0),
        "numpy": np.zeros((3, 4)),
        "empty": struct(mesh, P(), 0, 5),
        "key": jax.random.split(jax.random.key(0), 3),
        "name": "x",
    }
    own = ("local", "step", "numpy", "key")
    sizes = {
        leaf.path[0][1]: element(leaf).itemsize
        * count(((0,) * len(stored_shape(leaf)), stored_shape(leaf)))
        for leaf in make_plan(tree, processes(0, 1)).leaves
        if leaf.kind != "literal"
    }
    for world in (1, 2, 4, 8):
        plans = plans_of(tree, world)
        assert len({plan.digest for plan in plans}) == 1
        total = sum(size * (world if name in own else 1) for name, size in sizes.items())
        assert sum(r.nbytes for plan in plans for r in plan.ranges) == total
        assert_owned_once(plans, *own)
        for plan in plans:
            assert_well_laid(plan)


def test_replicated_state_costs_each_process_its_share() -> None:
    mesh = mesh_of(8)
    tree = [struct(mesh, P(), 1024, 256) for _ in range(4)]
    lengths = [plan.length for plan in plans_of(tree, 4)]
    assert lengths == [1024 * 256 * 4] * 4


def test_small_leaves_take_turns_over_processes() -> None:
    mesh = mesh_of(8)
    tree = []
    for _ in range(32):  # a large leaf between small ones does not make all turns even
        tree += [struct(mesh, P(), 1024), struct(mesh, P(), 1024, 256)]
    for plan in plans_of(tree, 4):
        small = [r for r in plan.ranges if r.nbytes == 4096]
        assert len(small) == 8


def test_few_rows_fall_on_others_each_time_case_21() -> None:
    mesh = mesh_of(8)
    tree = [struct(mesh, P(), 3, 100_000) for _ in range(8)]
    plans = plans_of(tree, 8)
    assert_owned_once(plans)
    assert {len(plan.ranges) for plan in plans} == {3}


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_rows_that_no_number_of_ranks_divides_case_21(world: int) -> None:
    mesh = mesh_of(8)
    tree = {
        rows: jax.device_put(
            np.random.default_rng(rows).normal(size=(rows, 5003)).astype(np.float32),
            NamedSharding(mesh, P()),
        )
        for rows in (1, 7, 13, 101)
    }
    assert_owned_once(plans_of(tree, world))
    assert_same(take(tree, world).restore(tree), tree)


def test_ranges_of_one_device_are_neighbours() -> None:
    mesh = mesh_of(4, 2)
    tree = [struct(mesh, P("a"), 64, 4096), struct(mesh, P(), 800, 100), np.zeros(3)]
    devices = [owned.device for owned in make_plan(tree, processes(0, 1)).owned]
    assert devices == sorted(devices, key=lambda device: device.id if device else 99)
    assert devices[-1] is None


def test_structs_plan_like_arrays() -> None:
    mesh = mesh_of(4, 2)
    tree = {
        "w": jax.device_put(jnp.zeros((400, 300)), NamedSharding(mesh, P("a"))),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("a"))),
        "step": jnp.int32(0),
    }
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding if x.committed else None
        ),
        tree,
    )
    array_plans, struct_plans = plans_of(tree, 2), plans_of(shapes, 2)
    for one, other in zip(array_plans, struct_plans, strict=True):
        assert one.ranges == other.ranges
        assert (one.digest, one.length) == (other.digest, other.length)


def test_local_leaves_do_not_tell_processes_apart() -> None:
    tree = {"step": jnp.int32(3), "key": jax.random.key(0), "lr": np.ones(2)}
    plans = plans_of(tree, 4)
    assert len({plan.digest for plan in plans}) == 1
    assert_owned_once(plans, "step", "key", "lr")


def test_where_a_process_has_its_own_copy_does_not_change_the_others_turns() -> None:
    """Process 0 has `local` on both of its devices, process 1 on one."""
    mesh = mesh_of(8)
    shapes = {f"w{n}": struct(mesh, P(), 1024) for n in range(9)}
    pair = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("a",)), P("a"))
    local = jnp.zeros((40_000,))
    trees = [
        {"a": jax.device_put(local, pair), **shapes},
        *({"a": jax.device_put(local, jax.devices()[2 * n]), **shapes} for n in (1, 2, 3)),
    ]
    plans = [make_plan(tree, processes(index, 4)) for index, tree in enumerate(trees)]
    assert len({plan.digest for plan in plans}) == 1
    assert_owned_once(plans, "a")


def test_digests_tell_trees_and_placements_apart() -> None:
    mesh = mesh_of(8)
    trees = [
        {"w": struct(mesh, P(), 64, 8)},
        {"v": struct(mesh, P(), 64, 8)},
        {"w": struct(mesh, P("a"), 64, 8)},
        {"w": struct(mesh, P(), 64, 9)},
        {"w": struct(mesh, P(), 64, 8, dtype=jnp.int32)},
        {"w": struct(Mesh(np.array(jax.devices())[::-1], ("a",)), P("a"), 64, 8)},
        {"w": np.zeros((64, 8), np.float32)},
        {"w": struct(mesh, P(), 64, 8), "x": 1},
        {"w": struct(mesh, P(), 64, 8), "x": 1.0},
        {"a": struct(mesh, P(), 8), "b": struct(mesh, P("a"), 8), "c": struct(mesh, P(), 8)},
        {"a": struct(mesh, P(), 8), "b": struct(mesh, P("a"), 8), "c": struct(mesh, P("a"), 8)},
    ]
    digests = [make_plan(tree, processes(0, 2)).digest for tree in trees]
    assert len(set(digests)) == len(trees)
    assert make_plan(trees[0], processes(0, 4)).digest != digests[0]
    assert all(len(digest) == 32 for digest in digests)


def test_a_leaf_without_a_shard_here_is_refused_by_name() -> None:
    own = Mesh(np.array(jax.devices()[:2]), ("a",))
    tree = {"stage 0": {"w": struct(own, P("a"), 64)}}
    with pytest.raises(ConfigError, match=r"leaf \['stage 0'\]\['w'\] has no shard on process 1"):
        make_plan(tree, processes(1, 4))


def test_sub_meshes_and_other_device_orders() -> None:
    devices = np.array(jax.devices())
    tree = {
        "half": jax.device_put(jnp.arange(64.0), NamedSharding(Mesh(devices[:4], ("a",)), P("a"))),
        "backwards": jax.device_put(
            jnp.arange(160_000.0).reshape(40, -1), NamedSharding(Mesh(devices[::-1], ("a",)), P())
        ),
        "one": jax.device_put(jnp.arange(3.0), devices[5]),
    }
    for staging in ("view", "pinned_host"):
        assert_same(take(tree, staging=staging).restore(tree), tree)


def test_a_changed_tree_or_sharding_is_planned_anew_case_7() -> None:
    mesh = mesh_of(8)
    first = {"w": jax.device_put(jnp.arange(800.0).reshape(80, 10), NamedSharding(mesh, P()))}
    more = {**first, "extra": jnp.ones(3)}
    sharded = {"w": jax.device_put(first["w"], NamedSharding(mesh, P("a")))}
    cache = PlanCache()
    plans = [cache.get(tree) for tree in (first, more, sharded)]
    assert len({plan.ranges for plan in plans}) == 3
    again = jax.tree.map(lambda x: x + 1, (first, more, sharded))
    assert [cache.get(tree) for tree in again] == plans
    for tree in (first, more, sharded):
        assert_same(take(tree).restore(tree), tree)


def test_the_cache_knows_what_a_step_makes_and_tells_the_slightest_change() -> None:
    mesh = mesh_of(8)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    first = step({"w": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P())), "n": 1.0})
    first["rng"] = np.zeros(2)
    cache = PlanCache()
    plan = cache.get(first)
    changes = [
        {"w": jax.device_put(first["w"], NamedSharding(mesh, P("a")))},
        {"w": first["w"].astype(jnp.int32)},
        {"n": jnp.float32(1)},  # not weakly typed any more
        {"rng": np.zeros(3)},
        {"rng": np.zeros(2, np.float32)},
        {"rng": 0.0},
    ]
    for change in changes:
        other = cache.get({**first, **change})
        assert other is not plan
        assert cache.get({**first, **change}) is other
        assert cache.get({**first, **step({"w": first["w"], "n": 1.0})}) is plan


def test_the_cache_tells_kinds_of_leaves_apart_and_stays_small() -> None:
    cache = PlanCache(size=4)
    leaves = [1, 1.0, "a", np.int32(1), np.zeros(2), jnp.zeros(2), jnp.asarray(1), jnp.int32(1)]
    leaves += [jax.random.key(0), jax.random.key(0, impl="rbg"), np.zeros(3), np.float32(1)]
    plans = [cache.get([leaf]) for leaf in leaves]
    assert len({plan.digest for plan in plans}) == len(leaves)
    assert cache.get([leaves[-1]]) is plans[-1]
    assert cache.get([leaves[0]]) is not plans[0]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=3),
    rows=st.sampled_from([1, 4000]),
    spec=st.sampled_from([P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))]),
    world=st.sampled_from([1, 2, 4, 8]),
)
def test_any_shape_is_owned_once(shape: list[int], rows: int, spec: P, world: int) -> None:
    """Whatever the shape, the sharding and the world, each byte has one owner."""
    mesh = mesh_of(4, 2)
    if len(spec) > len(shape):
        spec = P()
    sizes = {"a": 4, "b": 2, ("a", "b"): 8, None: 1}
    for number, axis in enumerate(spec):
        shape[number] *= sizes[axis]
    leaves = [struct(mesh, spec, *shape), struct(mesh, P(), *shape, rows)]
    plans = plans_of(leaves, world)
    assert_owned_once(plans)
    for plan in plans:
        assert_well_laid(plan)


@given(st.integers(0, 5), st.integers(0, 30), st.integers(1, 9))
def test_rows_are_cut_evenly(first: int, rows: int, parts: int) -> None:
    boxes = cut_rows(((first, 2), (first + rows, 7)), parts)
    sizes = [sides(box)[0] for box in boxes]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert all(intersect(a, b) is None for a in boxes for b in boxes if a is not b)


def test_keys_sharded_over_devices_are_cut_by_key() -> None:
    keys = jax.random.split(jax.random.key(1), 16)
    tree = {"k": jax.device_put(keys, NamedSharding(mesh_of(8), P("a")))}
    plans = plans_of(tree, 2)
    assert_owned_once(plans)
    assert {r.stop[1] for plan in plans for r in plan.ranges} == {2}
    assert raw(take(tree, 2).restore(tree)["k"]) == raw(keys)
