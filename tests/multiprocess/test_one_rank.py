"""The whole way of a snapshot, with a real snapshot process and this process as the rank."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from jaxft.device.transfer import Staging
from tests.device.snapshots import assert_same, raw
from tests.device.test_leaves import DTYPES, every_pattern
from tests.multiprocess.jax_world import WAIT_S, until
from tests.multiprocess.lone import Lone, read_back

STAGINGS: list[Staging] = ["view", "pinned_host", "device"]


def put(mesh: Mesh, spec: P, value: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, spec))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def training_state(axis_type: AxisType = AxisType.Auto) -> dict[str, Any]:
    mesh = jaxft.make_mesh({"data": -1, "model": 2}, axis_types=axis_type)
    return {
        "rows": put(mesh, P("data"), noise(64, 500)),
        "both": put(mesh, P("data", "model"), noise(64, 64)),
        "columns": put(mesh, P(None, "model"), noise(301, 64)),
        "copies": put(mesh, P(), noise(77, 1000)),
        "half": put(mesh, P("model"), jnp.ones((8, 3), jnp.bfloat16)),
        "key": jax.random.key(3),
        "step": jnp.int32(0),
    }


def advance(state: dict[str, Any]) -> dict[str, Any]:
    key, _ = jax.random.split(state["key"])
    moved = {name: x * 1.25 + 1 for name, x in state.items() if name not in ("key", "step")}
    return {**moved, "key": key, "step": state["step"] + 1}


train_step = jax.jit(advance, donate_argnums=0)
plain_step = jax.jit(advance)


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


# ------------------------------------------------------------------------ snapshots and donation


@pytest.mark.parametrize("staging", STAGINGS)
def test_200_donating_steps_never_reach_a_snapshot_case_1(lone: Lone, staging: Staging) -> None:
    state, twin = training_state(), training_state()
    with lone.open(every=1, staging=staging) as snapshotter:
        assert snapshotter.restore(state) is None
        for step in range(200):
            receipt = snapshotter.save(step, state, {"step": step})
            state = train_step(state)
            assert receipt.skipped is None
            if step % 10 == 9:
                assert_same(read_back(snapshotter, receipt, twin), twin)
            twin = plain_step(twin)
    with lone.open() as snapshotter:
        restored = snapshotter.restore(state)
        assert restored is not None
        assert (restored.step, restored.extras, restored.source) == (199, {"step": 199}, "own")
        assert int(restored.state["step"]) == 199
        assert_same(train_step(restored.state), state)


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_numpy_leaf_may_change_when_save_has_returned_case_2(
    lone: Lone, staging: Staging
) -> None:
    tree = {"host": np.arange(300_000.0), "x": jnp.ones(3), "lr": 0.5}
    extras = {"seen": [1, 2]}
    before = {**tree, "host": tree["host"].copy()}
    with lone.open(every=1, staging=staging) as snapshotter:
        receipt = snapshotter.save(1, tree, extras)
        tree["host"][:] = -1
        tree["lr"] = 0.25
        extras["seen"].append(3)
        receipt.protected.result(WAIT_S)
    with lone.open() as snapshotter:
        restored = snapshotter.restore(tree)
        assert restored is not None
        assert_same(restored.state, before)
        assert restored.extras == {"seen": [1, 2]}


def test_restored_arrays_outlive_their_slot_case_3(lone: Lone) -> None:
    state = training_state()
    with lone.open(every=1) as snapshotter:
        snapshotter.save(1, state)
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(state)
        assert restored is not None
        other = state
        for step in range(2, 6):  # both slots, twice
            other = plain_step(other)
            snapshotter.save(step, other).protected.result(WAIT_S)
        assert_same(restored.state, state)
    assert_same(restored.state, state)


def test_a_failing_leaf_fails_the_snapshot_only_case_4(lone: Lone) -> None:
    state = training_state()
    faults = "stage.half:seq=1=raise"
    with lone.open(every=1, faults=faults) as snapshotter:
        snapshotter.save(1, state).protected.result(WAIT_S)
        failing = snapshotter.save(2, state)
        for future in (failing.staged, failing.protected, failing.persisted):
            with pytest.raises(jaxft.StagingError, match=r"host h0, step 2: leaf \['\w+'\]"):
                future.result(WAIT_S)
        state = train_step(state)
        after = snapshotter.save(3, state)
        assert isinstance(after.last_failure, jaxft.StagingError)
        after.protected.result(WAIT_S)
        assert snapshotter.latest == 3
        assert snapshotter.save(4, state).last_failure is None


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_donated_leaf_fails_the_snapshot_at_once_case_4(lone: Lone, staging: Staging) -> None:
    state = training_state()
    with lone.open(every=1, staging=staging) as snapshotter:
        snapshotter.save(1, state).protected.result(WAIT_S)
        gone = {**state, "both": jnp.copy(state["both"])}
        gone["both"].delete()
        failing = snapshotter.save(2, gone)
        for future in (failing.staged, failing.protected, failing.persisted):
            assert future.done()
            with pytest.raises(jaxft.StagingError, match=r"host h0, step 2: .*\['both'\].*deleted"):
                future.result()
        snapshotter.save(3, state).protected.result(WAIT_S)


def test_close_does_not_swallow_the_last_failure_case_8(lone: Lone) -> None:
    snapshotter = lone.open(every=1, faults="stage.half:seq=1=raise")
    state = training_state()
    snapshotter.save(1, state).protected.result(WAIT_S)
    snapshotter.save(2, state)
    with pytest.raises(jaxft.StagingError, match="step 2"):
        snapshotter.close()
    snapshotter.close()


def test_200_saves_leave_nothing_behind_case_5(lone: Lone) -> None:
    mesh = jaxft.make_mesh({"data": -1})
    state = {"x": put(mesh, P("data"), noise(4096, 1024)), "y": put(mesh, P(), noise(64, 64))}
    step_fn = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    processes = [psutil.Process(), psutil.Process(lone.host.process.pid)]

    def usage() -> list[tuple[int, int, int]]:
        return [(one.memory_info().rss, one.num_fds(), one.num_threads()) for one in processes]

    with lone.open(every=1) as snapshotter:
        for step in range(200):
            snapshotter.save(step, state).protected.result(WAIT_S)
            state = step_fn(state)
            if step == 10:
                early = usage()
        late = usage()
    for (rss, fds, threads), (rss_late, fds_late, threads_late) in zip(early, late, strict=True):
        assert rss_late - rss < 8 << 20
        assert fds_late <= fds
        assert threads_late <= threads + 4  # pools start theirs when they first need them


def test_the_step_after_a_snapshot_reuses_its_buffers_case_6(lone: Lone) -> None:
    state = training_state()
    with lone.open(every=1) as snapshotter:
        for step in range(5):
            receipt = snapshotter.save(step, state)
            state = train_step(state)  # allocates: the snapshot still has the old buffers
            receipt.protected.result(WAIT_S)
            until(lambda: snapshotter._filler.is_idle, "the snapshot's bytes are let go")
            held = pointers(state["rows"])
            state = train_step(state)
            assert pointers(state["rows"]) == held


def test_another_leaf_and_another_sharding_case_7(lone: Lone) -> None:
    state = training_state()
    mesh = jaxft.make_mesh({"data": -1, "model": 4})
    wider = {**state, "more": put(mesh, P("model"), noise(64, 9))}
    moved = {**wider, "rows": put(mesh, P("model", "data"), noise(64, 500))}
    with lone.open(every=1) as snapshotter:
        for step, tree in enumerate((state, wider, moved, state)):
            receipt = snapshotter.save(step, tree)
            assert_same(read_back(snapshotter, receipt, tree), tree)
        snapshotter.save(4, moved)
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(moved)
        assert restored is not None
        assert_same(restored.state, moved)


# ------------------------------------------------------------------------ leaves and structure


class Empty(NamedTuple):
    pass


@flax.struct.dataclass
class Everything:
    params: Any
    optimizer: Any
    tag: str = flax.struct.field(pytree_node=False, default="kept")


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None


def a_tree_with_everything() -> Everything:
    mesh = jaxft.make_mesh({"data": -1, "model": 2})
    shared = put(mesh, P("data"), noise(16, 3))
    optimizer = optax.MultiSteps(
        optax.masked(optax.adamw(1e-3), {"w": True, "b": False}), every_k_schedule=2
    )
    params = {"w": put(mesh, P("data", "model"), noise(16, 8)), "b": put(mesh, P(), noise(8))}
    _, nnx_state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    tree = {
        **{f"dtype {name}": jnp.asarray(every_pattern(name)) for name in DTYPES},
        "keys": put(mesh, P("data"), jax.random.split(jax.random.key(7), 16)),
        "rbg": jax.random.key(1, impl="rbg"),
        "a.b": jnp.ones(3),
        "a": {"b": jnp.zeros(3)},
        "a/b": jnp.full(3, 2.0, jnp.float32),
        "numbers": {1: jnp.float32(1), -2: jnp.float32(2)},
        "": jnp.float32(7),
        "sizes": [jnp.zeros((0, 3)), jnp.float32(-0.0), jnp.ones((1, 1))],
        "nothing": [None, {}, (), Empty()],
        "literals": [3, 2**70, -0.0, float("inf"), True, "text", b"bytes", np.float16(0.1)],
        "twice": [shared, shared],
        "host": np.arange(12.0).reshape(3, 4)[:, ::2],
        "nnx": nnx_state,
        "equinox": Layer(jnp.ones((2, 2)), None),
        "weak": jnp.asarray(1.5),
    }
    return Everything(params={"model": params, "rest": tree}, optimizer=optimizer.init(params))


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_tree_with_everything_case_9_10_11_12_13_14_15(lone: Lone, staging: Staging) -> None:
    tree = a_tree_with_everything()
    with lone.open(every=1, staging=staging) as snapshotter:
        assert snapshotter.restore(tree) is None
        snapshotter.save(1, tree).protected.result(WAIT_S)
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(tree)
        assert restored is not None
        assert_same(restored.state, tree)
        for have, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(tree), strict=True):
            assert getattr(have, "weak_type", None) == getattr(want, "weak_type", None)
            if not hasattr(want, "shape"):
                assert have == want
        key = restored.state.params["rest"]["rbg"]
        assert raw(jax.random.bits(key, (4,))) == raw(
            jax.random.bits(jax.random.key(1, impl="rbg"), (4,))
        )


def test_a_target_of_structs_case_10(lone: Lone) -> None:
    mesh = jaxft.make_mesh({"data": -1})
    everywhere = NamedSharding(mesh, P())
    init = jax.jit(lambda key: {"key": key, "x": jnp.ones(8)}, out_shardings=everywhere)
    state = init(jax.random.key(5))
    with lone.open(every=1) as snapshotter:
        snapshotter.save(1, state)
    like = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=everywhere),
        jax.eval_shape(init, jax.random.key(5)),
    )
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(like)
        assert restored is not None
        assert_same(restored.state, state)


def test_trees_without_bytes(lone: Lone) -> None:
    for tree in ({}, {"n": 3}, {"empty": jnp.zeros((0, 4))}):
        lone.begin_anew()
        with lone.open(every=1) as snapshotter:
            snapshotter.save(1, tree, "x").protected.result(WAIT_S)
        with lone.open(every=1) as snapshotter:
            restored = snapshotter.restore(tree)
            assert restored is not None
            assert restored.extras == "x"
            assert_same(restored.state, tree)


def test_a_target_that_does_not_match_is_named_and_may_be_mended_case_17(lone: Lone) -> None:
    state = training_state()
    with lone.open(every=1) as snapshotter:
        snapshotter.save(1, state)
    with lone.open(every=1) as snapshotter:
        changes: dict[str, Any] = {
            r"leaf \['copies'\]: .*float32\[77, 999\].*float32\[77, 1000\]": jnp.ones((77, 999)),
            r"leaf \['copies'\]: .*bfloat16.*float32.*another dtype": jnp.ones(
                (77, 1000), jnp.bfloat16
            ),
        }
        for message, leaf in changes.items():
            with pytest.raises(jaxft.TreeMismatch, match=message):
                snapshotter.restore({**state, "copies": leaf})
        with pytest.raises(jaxft.TreeMismatch, match=r"lacks 1 of the target: \['new'\]"):
            snapshotter.restore({**state, "new": jnp.ones(1)})
        fewer = {name: leaf for name, leaf in state.items() if name != "half"}
        with pytest.raises(jaxft.TreeMismatch, match=r"lacks 1 of the snapshot: \['half'\]"):
            snapshotter.restore(fewer)
        restored = snapshotter.restore(fewer, strict=False)
        assert restored is not None
        assert_same(restored.state, fewer)


def test_extras_are_of_their_own_step_case_18(lone: Lone) -> None:
    state = {"n": jnp.int32(0)}
    extras = {"iterator": b"\x00\xff", "lr": 0.1, "nan": float("nan"), "seen": [1, None, {"a": 2}]}
    with lone.open(every=1) as snapshotter:
        for step in range(1, 6):
            state = {"n": jnp.int32(step)}
            receipt = snapshotter.save(step, state, {**extras, "step": step})
        receipt.protected.result(WAIT_S)
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(state)
        assert restored is not None
        assert restored.step == restored.extras["step"] == int(restored.state["n"]) == 5
        assert restored.extras["nan"] != restored.extras["nan"]
        assert {**restored.extras, "nan": 0} == {**extras, "nan": 0, "step": 5}
        assert restored.extras_by_rank[0]["step"] == 5


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("staging", STAGINGS)
def test_within_set_mesh_case_23(lone: Lone, staging: Staging, axis_type: AxisType) -> None:
    state = training_state(axis_type)
    with jax.set_mesh(state["rows"].sharding.mesh):
        with lone.open(every=1, staging=staging) as snapshotter:
            snapshotter.restore(state)
            snapshotter.save(1, state).protected.result(WAIT_S)
        with lone.open(every=1, staging=staging) as snapshotter:
            restored = snapshotter.restore(state)
            assert restored is not None
            assert_same(restored.state, state)
            assert_same(plain_step(restored.state), plain_step(state))


# ------------------------------------------------------------------------ going back


def test_saving_lower_steps_after_going_back_case_30(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    def at(value: int) -> dict[str, Any]:
        return {"x": jnp.full(8, value)}

    with lone.open(every=1) as snapshotter:
        for step in range(1, 9):
            snapshotter.save(step, at(step))
    with lone.open(every=1) as snapshotter:  # begins again without restoring
        for step in range(1, 4):
            assert snapshotter.save(step, at(100 + step)).skipped is None
    assert "save was called before restore" in caplog.text
    caplog.clear()
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(at(0))
        assert restored is not None
        assert (restored.step, int(restored.state["x"][0])) == (3, 103)
    with lone.open(every=1, fresh=True) as snapshotter:
        assert snapshotter.restore(at(0)) is None
        snapshotter.save(2, at(200)).protected.result(WAIT_S)
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(at(0))
        assert restored is not None
        assert (restored.step, int(restored.state["x"][0])) == (2, 200)
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
