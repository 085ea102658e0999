"""The same calls of Orbax's manager and of jaxft's have the same outcome.

jaxft's takes a snapshot here when storage does (`every` is large), so that steps agree too; what it
does with more of them is in `test_manager`.
"""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft.orbax
from jaxft.device.mesh import make_mesh
from tests.multiprocess.lone import Lone

Open = Callable[..., Any]
Options = ocp.CheckpointManagerOptions


@pytest.fixture(params=["orbax", "jaxft"])
def open_manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens a manager of either kind; one that is open is closed first."""
    opened: list[Any] = []
    lone: Lone | None = None
    if request.param == "jaxft":
        lone = request.getfixturevalue("lone")

    def open_manager(options: Any = None, **more: Any) -> Any:
        for manager in opened:
            manager.close()
        opened.clear()
        directory = tmp_path / "run"
        if lone is None:
            opened.append(ocp.CheckpointManager(directory, options=options, **more))
        else:
            lone.enter()
            manager = jaxft.orbax.CheckpointManager(
                directory, options=options, every=1000, timeout_s=20, **more
            )
            opened.append(manager)
        return opened[-1]

    yield open_manager
    for manager in opened:
        manager.close()


@jax.tree_util.register_dataclass
@dataclass
class Params:
    kernel: Any
    bias: Any


def some_state(number: int = 0) -> Any:
    mesh = make_mesh({"a": 8})
    rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    return {
        "params": Params(
            jax.device_put(jnp.arange(16.0).reshape(8, 2) + number, rows),
            jax.device_put(jnp.full(2, number, jnp.bfloat16), whole),
        ),
        "opt": (jax.device_put(jnp.arange(8, dtype=jnp.int32), rows), None, {}),
        "host": np.arange(3) + number,
        "step": number,
    }


def facts(tree: Any) -> Any:
    """Structure, types, shardings and bytes, to be compared."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return "jax", str(leaf.dtype), leaf.sharding, np.asarray(leaf).tobytes()
        if isinstance(leaf, np.ndarray):
            return "numpy", str(leaf.dtype), leaf.tobytes()
        return type(leaf).__name__, leaf

    return jax.tree.map(of, tree, is_leaf=lambda leaf: leaf is None)


def save(manager: Any, step: int, tree: Any, **more: Any) -> bool:
    return bool(manager.save(step, args=ocp.args.StandardSave(tree), **more))


# -------------------------------------------------------------------- what is there


def parameters(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def test_every_public_member_is_there_and_takes_what_orbaxs_takes() -> None:
    ours, theirs = jaxft.orbax.CheckpointManager, ocp.CheckpointManager
    assert set(public(theirs)) <= set(public(ours))
    for name in [*public(theirs), "__init__", "__enter__", "__exit__"]:
        method = getattr(theirs, name)
        if not inspect.isfunction(method) or name == "__exit__":
            continue
        wanted, found = parameters(method), parameters(getattr(ours, name))
        assert found[: len(wanted)] == wanted, name
    assert ocp.AbstractCheckpointManager in ours.__mro__


def test_every_other_name_is_orbaxs() -> None:
    for name in dir(ocp):
        if name not in ("CheckpointManager", "__doc__", "__name__") and not (
            name.startswith("__") and name != "__version__"
        ):
            assert getattr(jaxft.orbax, name) is getattr(ocp, name), name
            assert name in dir(jaxft.orbax)
    assert jaxft.orbax.args.StandardSave is ocp.args.StandardSave
    namespace: dict[str, Any] = {}
    exec("from jaxft.orbax import *", namespace)
    assert namespace["CheckpointManager"] is jaxft.orbax.CheckpointManager
    assert namespace["utils"] is ocp.utils
    with pytest.raises(AttributeError, match="nor has orbax"):
        _ = jaxft.orbax.CheckpontManager


# -------------------------------------------------------------------- trees


def test_a_tree_comes_back_without_a_target(open_manager: Open) -> None:
    state = some_state(3)
    manager = open_manager()
    assert save(manager, 3, state)
    manager.wait_until_finished()
    expected = {
        **state,
        "params": {"kernel": state["params"].kernel, "bias": state["params"].bias},
        "opt": list(state["opt"]),
    }
    assert facts(manager.restore(3)) == facts(expected)
    assert facts(manager.restore(3, args=ocp.args.StandardRestore())) == facts(expected)
    again = open_manager()
    assert facts(again.restore(3, args=ocp.args.StandardRestore())) == facts(expected)
    assert again.latest_step() == 3


def test_a_tree_comes_back_as_its_target_says(open_manager: Open) -> None:
    state = some_state(4)
    manager = open_manager()
    save(manager, 4, state)
    manager.wait_until_finished()
    mesh = make_mesh({"b": 4, "c": 2})
    cut = NamedSharding(mesh, P("b", "c"))
    target = {
        "params": Params(
            jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=NamedSharding(mesh, P("c"))),
            jax.ShapeDtypeStruct((2,), jnp.bfloat16),
        ),
        "opt": (np.zeros(8, np.int64), None, {}),
        "host": jax.ShapeDtypeStruct((3,), np.int32),
        "step": 0,
    }
    kernel = state["params"].kernel.astype(jnp.bfloat16)
    expected = {
        "params": Params(
            jax.device_put(kernel, NamedSharding(mesh, P("c"))),
            state["params"].bias,
        ),
        "opt": (np.arange(8, dtype=np.int64), None, {}),
        "host": state["host"].astype(np.int32),
        "step": 4,
    }
    args = ocp.args.StandardRestore(target)
    assert facts(manager.restore(4, args=args)) == facts(expected)
    again = open_manager()
    assert facts(again.restore(None, args=args)) == facts(expected)
    target["params"] = Params(jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=cut), np.zeros(2))
    restored = again.restore(4, args=ocp.args.StandardRestore(target))
    assert restored["params"].kernel.sharding == cut
    np.testing.assert_array_equal(restored["params"].kernel, state["params"].kernel)


def test_pytree_arguments(open_manager: Open) -> None:
    state = some_state(5)
    manager = open_manager()
    manager.save(5, args=ocp.args.PyTreeSave(state))
    manager.wait_until_finished()
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(target, restore_args=arguments)
    assert facts(manager.restore(5, args=args)) == facts(state)
    target["opt"] = (ocp.PLACEHOLDER, None, {})
    args = ocp.args.PyTreeRestore(target, restore_args=arguments)
    assert facts(manager.restore(5, args=args)) == facts({**state, "opt": target["opt"]})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's
def test_a_target_that_does_not_match_is_refused(open_manager: Open) -> None:
    state = some_state()
    manager = open_manager()
    save(manager, 0, state)
    manager.wait_until_finished()
    lacks = {name: value for name, value in state.items() if name != "opt"}
    short = Params(jax.ShapeDtypeStruct((8, 3), jnp.float32), state["params"].bias)
    for target in (lacks, {**state, "more": np.zeros(1)}, {**state, "params": short}):
        with pytest.raises(ValueError):
            manager.restore(0, args=ocp.args.StandardRestore(target))
    assert facts(manager.restore(0, args=ocp.args.StandardRestore(state))) == facts(state)
    gc.collect()


# -------------------------------------------------------------------- items


def test_items_with_names(open_manager: Open) -> None:
    state, config = some_state(2), {"lr": 0.1, "names": ["a", "b"], "1": None}
    manager = open_manager()
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        ema=ocp.args.StandardSave({"w": jnp.ones(4)}),
        config=ocp.args.JsonSave(config),
    )
    manager.save(2, args=args)
    manager.wait_until_finished()
    everything = manager.restore(2)
    assert set(everything.keys()) == {"state", "ema", "config"}
    assert everything.config == config
    wanted = {
        "state": ocp.args.StandardRestore(state),
        "config": ocp.args.JsonRestore(),
    }
    for again in (False, True):
        one = open_manager() if again else manager
        some = one.restore(2, args=ocp.args.Composite(**wanted))
        assert set(some.keys()) == {"state", "config"}
        assert facts(some.state) == facts(state)
        assert some["config"] == config
        ema = ocp.args.StandardRestore({"w": jnp.zeros(4)})
        rest = one.restore(2, args=ocp.args.Composite(ema=ema))
        np.testing.assert_array_equal(rest.ema["w"], np.ones(4))
        with pytest.raises(ValueError):
            one.restore(2, args=ocp.args.StandardRestore(state))


def test_items_that_are_no_trees_go_to_storage(open_manager: Open) -> None:
    manager = open_manager()
    key = jax.random.key(3)
    args = ocp.args.Composite(
        array=ocp.args.ArraySave(jnp.arange(3.0)), key=ocp.args.JaxRandomKeySave(key)
    )
    assert manager.save(0, args=args)
    manager.wait_until_finished()
    assert manager.all_steps() == [0]
    here = ocp.ArrayRestoreArgs(sharding=key.sharding)
    wanted = ocp.args.Composite(
        array=ocp.args.ArrayRestore(restore_args=here),
        key=ocp.args.JaxRandomKeyRestore(restore_args=here),
    )
    restored = manager.restore(0, args=wanted)
    np.testing.assert_array_equal(restored.array, np.arange(3.0))
    assert (jax.random.key_data(restored.key) == jax.random.key_data(key)).all()
    assert open_manager().latest_step() == 0


# -------------------------------------------------------------------- steps


def test_the_interval_and_what_is_kept(open_manager: Open) -> None:
    manager = open_manager(Options(save_interval_steps=2, max_to_keep=2))
    state = {"w": jnp.ones(4)}
    assert (manager.latest_step(), manager.all_steps()) == (None, [])
    for step, is_due in enumerate([True, False, True, False, True, False]):
        assert manager.should_save(step) is is_due
        assert save(manager, step, state) is is_due
    manager.wait_until_finished()
    assert manager.is_saving_in_progress() is False
    assert manager.check_for_errors() is None
    assert (manager.latest_step(), manager.best_step(), manager.all_steps()) == (4, 4, [2, 4])
    assert not save(manager, 4, state)
    assert not save(manager, 2, state)
    assert save(manager, 5, state, force=True)
    with pytest.raises(ValueError, match="already exists"):
        save(manager, 5, state, force=True)
    again = open_manager(Options(save_interval_steps=2, max_to_keep=2))
    assert again.all_steps() == [4, 5]
    assert save(again, 6, state)


@pytest.mark.parametrize(
    "options",
    [
        {"save_interval_steps": 10, "save_on_steps": [3, 7]},
        {"should_save_fn": lambda step, last: last is None or step - last >= 4},
        {"save_decision_policy": ocp.checkpoint_managers.SpecificStepsPolicy([1, 5])},
        {
            "save_interval_steps": 3,
            "preservation_policy": ocp.checkpoint_managers.EveryNSteps(6),
        },
        {"save_interval_steps": 2, "max_to_keep": 1, "keep_period": 4},
        {"step_prefix": "at", "step_format_fixed_length": 4, "save_interval_steps": 4},
        {"enable_async_checkpointing": False, "save_interval_steps": 5},
    ],
    ids=lambda options: "+".join(options),
)
def test_policies_are_orbaxs(options: dict[str, Any], tmp_path: Path, lone: Lone) -> None:
    """Both write the same steps under the same names."""
    lone.enter()
    found = []
    for name, kind in (("theirs", ocp.CheckpointManager), ("ours", jaxft.orbax.CheckpointManager)):
        more = {"every": 1000} if name == "ours" else {}
        with kind(tmp_path / name, options=Options(**options), **more) as manager:
            for step in range(9):
                save(manager, step, {"w": jnp.full(4, step)})
            manager.wait_until_finished()
        steps = {path.name for path in (tmp_path / name).iterdir() if path.is_dir()}
        plain = ocp.CheckpointManager(
            tmp_path / name,
            options=Options(**{k: v for k, v in options.items() if k.startswith("step")}),
        )
        restored = [
            plain.restore(step, args=ocp.args.StandardRestore({"w": jnp.zeros(4, int)}))
            for step in plain.all_steps()
        ]
        found.append((steps, [int(one["w"][0]) for one in restored]))
    assert found[0] == found[1]
    assert found[0][0]


def test_metrics_and_the_best_step(open_manager: Open) -> None:
    options = {"max_to_keep": 2, "best_fn": lambda metrics: metrics["accuracy"]}
    manager = open_manager(Options(**options))
    for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.5]):
        save(manager, step, {"w": jnp.ones(4)}, metrics={"accuracy": accuracy})
    manager.wait_until_finished()
    for again in (False, True):
        one = open_manager(Options(**options)) if again else manager
        assert one.best_step() == 1
        assert set(one.all_steps()) >= {1, 3}
        assert one.metrics(1) == {"accuracy": 0.9}
        assert one.metadata(1).metrics == {"accuracy": 0.9}
        assert one.metrics(77) is None


def test_metadata(open_manager: Open) -> None:
    manager = open_manager(metadata={"model": "tiny"})
    state = some_state()
    save(manager, 0, state, custom_metadata={"note": "first"})
    manager.wait_until_finished()
    assert manager.metadata().custom_metadata == {"model": "tiny"}
    assert manager.metadata(0).custom_metadata == {"note": "first"}
    for item in (manager.item_metadata(0), manager.metadata(0).item_metadata):
        kernel = item["params"]["kernel"]
        assert (kernel.shape, kernel.dtype) == ((8, 2), jnp.float32)
        assert kernel.sharding.to_jax_sharding() == state["params"].kernel.sharding


def test_what_is_not_there(open_manager: Open) -> None:
    manager = open_manager()
    with pytest.raises(FileNotFoundError):
        manager.restore(None)
    save(manager, 0, {"w": jnp.ones(4)})
    manager.wait_until_finished()
    calls = (
        lambda: manager.restore(7),
        lambda: manager.delete(7),
        lambda: manager.metadata(7),
        lambda: manager.item_metadata(7),
    )
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call()
    with pytest.raises(ValueError):
        manager.item_metadata(None)
    with pytest.raises(ValueError, match="Must provide `args`"):
        manager.save(1)
    composite = ocp.args.Composite(state=ocp.args.StandardSave({"w": jnp.ones(4)}))
    with pytest.raises(ValueError, match="Composite"):
        manager.save(1, args=composite)
    assert manager.reached_preemption(1) is False


def test_deleting_and_reloading(open_manager: Open, tmp_path: Path) -> None:
    manager = open_manager()
    for step in range(3):
        save(manager, step, {"w": jnp.full(4, step)})
    manager.wait_until_finished()
    assert manager.directory == tmp_path / "run"
    manager.delete(1)
    manager.delete(2)
    assert (manager.all_steps(), manager.latest_step()) == ([0], 0)
    manager.reload()
    assert manager.all_steps() == [0]
    assert not (tmp_path / "run" / "2").exists()
    assert save(manager, 2, {"w": jnp.full(4, 22)})
    manager.wait_until_finished()
    assert manager.restore(2)["w"][0] == 22


def test_a_read_only_manager_and_another_directory(open_manager: Open, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "other") as other:
        save(other, 5, {"w": jnp.full(4, 5)})
    manager = open_manager(Options(read_only=True))
    assert manager.should_save(1) is False
    assert save(manager, 1, {"w": jnp.ones(4)}) is False
    args = ocp.args.StandardRestore({"w": jnp.zeros(4)})
    restored = manager.restore(None, directory=tmp_path / "other", args=args)
    assert restored["w"][0] == 5


def test_both_write_the_same_files(tmp_path: Path, lone: Lone) -> None:
    """So an unchanged script goes on where a changed one was, and the other way round."""
    lone.enter()
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(some_state()), config=ocp.args.JsonSave({"a": 1})
    )
    listed = []
    for name, kind in (("theirs", ocp.CheckpointManager), ("ours", jaxft.orbax.CheckpointManager)):
        with kind(tmp_path / name) as manager:
            manager.save(0, args=args)
        step = tmp_path / name / "0"
        listed.append({str(path.relative_to(step)) for path in step.glob("*")})
        metadata = json.loads((step / "_CHECKPOINT_METADATA").read_text())
        assert set(metadata["item_handlers"]) == {"state", "config"}
    assert listed[0] == listed[1]
