"""What jaxft's manager does beyond Orbax's: steps in memory between those on storage, and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as plain
import pytest

import jaxft
import jaxft.orbax as ocp
from jaxft.errors import ConfigError, NothingRecoverable, SnapshotError
from jaxft.group.recovery import choose
from jaxft.host import protocol as p
from jaxft.orbax.storage import JOB, job_of
from jaxft.restorer import Restored
from tests.multiprocess.lone import WAIT_S, Lone

Make = Callable[..., Any]


def state(number: int) -> Any:
    return {"w": jnp.full(4, number), "opt": (jnp.arange(3.0) + number, {}), "n": number}


def save(manager: Any, step: int, **more: Any) -> bool:
    return bool(manager.save(step, args=ocp.args.StandardSave(state(step)), **more))


def restore(manager: Any, step: int | None) -> int:
    """Restores a step; the number of the state that it was."""
    restored = manager.restore(step, args=ocp.args.StandardRestore(state(0)))
    number = int(restored["n"])
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, state(number)))
    return number


def on_storage(directory: Path) -> list[int]:
    with plain.CheckpointManager(directory) as manager:
        return sorted(manager.all_steps())


def test_the_newest_step_is_in_memory(make: Make, tmp_path: Path) -> None:
    manager = make(save_interval_steps=4, max_to_keep=1)
    assert manager.latest_step() is None
    for step in range(7):
        assert manager.should_save(step)
        assert save(manager, step) is (step % 4 == 0)  # what goes to storage, as Orbax says it
        assert manager.latest_step() == step
    manager.wait_until_finished()
    assert manager.all_steps() == [4, 6]
    assert (manager.latest_step(), manager.best_step()) == (6, 6)
    assert on_storage(tmp_path / "run") == [4]
    assert restore(manager, 6) == 6
    assert restore(manager, 4) == 4
    with pytest.raises(FileNotFoundError, match=r"step 5 .*\[4, 6\]"):
        manager.restore(5)
    manager = make(save_interval_steps=4, max_to_keep=1)
    assert (manager.latest_step(), manager.all_steps()) == (6, [4, 6])
    assert restore(manager, None) == 6
    assert restore(manager, 6) == 6
    assert not save(manager, 7)
    assert save(manager, 8)
    manager.wait_until_finished()
    assert on_storage(tmp_path / "run") == [8]
    save(manager, 9)
    manager.close()  # memory goes with it
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert unchanged.all_steps() == [9]
        assert restore(unchanged, 9) == 9
    assert manager.all_steps() == [9]
    assert restore(manager, None) == 9


def test_everything_of_a_step_is_in_memory(make: Make) -> None:
    config = {"lr": 0.1, "t": (1, 2)}
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state(1)),
        ema=ocp.args.PyTreeSave({"w": jnp.ones(4)}),
        config=ocp.args.JsonSave(config),
    )
    options = {"save_interval_steps": 1000}
    manager = make(**options)
    manager.save(0, args=args)
    told = {"metrics": {"loss": 0.5}, "custom_metadata": {"note": "x"}}
    assert not manager.save(1, args=args, **told)
    for again in (False, True):
        one = make(**options) if again else manager
        assert one.all_steps() == [0, 1]
        assert one.metrics(1) == {"loss": 0.5}
        assert one.metadata(1).custom_metadata == {"note": "x"}
        tree = one.item_metadata(1)["state"].tree
        assert (tree["w"].shape, tree["w"].dtype) == ((4,), jnp.int32)
        assert tree["opt"][1] == {}
    assert one is not manager
    some = one.restore(1, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
    assert some.config == {"lr": 0.1, "t": [1, 2]}
    # What nobody has asked for yet is still there after another crash.
    again = make(**options)
    everything = again.restore(1)
    assert set(everything.keys()) == {"state", "ema", "config"}
    assert everything.state["n"] == 1
    assert everything.state["opt"][1] == {}
    np.testing.assert_array_equal(everything.ema["w"], np.ones(4))
    part = ocp.args.PyTreeRestore({"n": 0}, partial_restore=True)
    with pytest.raises(ConfigError, match="partial_restore"):
        again.restore(1, args=ocp.args.Composite(state=part))
    with pytest.raises(ConfigError, match='item "more"'):
        again.restore(1, args=ocp.args.Composite(more=ocp.args.StandardRestore()))
    assert again.restore(0, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config["lr"]


def test_steps_come_again_after_a_rollback_case_30(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make(save_interval_steps=2, max_to_keep=3)
    for step in range(6):
        save(manager, step)
    manager.wait_until_finished()
    assert on_storage(tmp_path / "run") == [0, 2, 4]
    manager = make(save_interval_steps=2, max_to_keep=3)
    assert restore(manager, 2) == 2
    assert manager.latest_step() == 5
    manager.save(3, args=ocp.args.StandardSave(state(33)))
    assert "step 4 was left for an older one" in caplog.text
    assert manager.all_steps() == [0, 2, 3]
    assert manager.save(4, args=ocp.args.StandardSave(state(44)))
    manager.wait_until_finished()
    assert (manager.latest_step(), restore(manager, 4)) == (4, 44)
    assert not list((tmp_path / "run").glob("jaxft-left-*"))
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert unchanged.restore(4, args=plain.args.StandardRestore())["n"] == 44
    manager = make(save_interval_steps=2, max_to_keep=3)
    assert (manager.latest_step(), restore(manager, None)) == (4, 44)


def test_going_back_within_a_run(make: Make, tmp_path: Path) -> None:
    """As after a loss that is no number: the last step goes, the one before is restored."""
    manager = make(save_interval_steps=2, every=100)
    for step in range(5):
        save(manager, step)
    manager.wait_until_finished()
    manager.delete(4)
    assert manager.latest_step() == 2
    assert restore(manager, None) == 2
    manager.save(3, args=ocp.args.StandardSave(state(33)))  # the future is not the newest
    manager.wait_until_finished()
    assert manager.all_steps() == [0, 2, 3]
    manager = make(save_interval_steps=2, every=100)
    assert (manager.latest_step(), restore(manager, None)) == (3, 33)


def test_nothing_is_left_behind_that_was_not_asked_for(
    make: Make, lone: Lone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that begins anew where an older one has been, as with Orbax."""
    manager = make(save_interval_steps=10)
    save(manager, 10)
    lone.begin_anew()
    manager = make(save_interval_steps=2)
    assert (manager.latest_step(), manager.all_steps()) == (None, [10])
    for step in range(5):
        assert not save(manager, step)
    manager.wait_until_finished()
    assert on_storage(tmp_path / "run") == [10]
    manager = make(save_interval_steps=2)
    assert restore(manager, None) == 4
    assert restore(manager, 10) == 10
    assert not manager.save(10, args=ocp.args.StandardSave(state(77)))
    assert caplog.text.count("storage has step 10, and Orbax writes none up to it") == 2
    assert save(manager, 12)
    manager.wait_until_finished()
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert unchanged.all_steps() == [10, 12]
        assert unchanged.restore(10, args=plain.args.StandardRestore())["n"] == 10


def test_storage_is_the_newest_where_memory_has_failed(make: Make, tmp_path: Path) -> None:
    manager = make(save_interval_steps=2, faults="stage.granted:seq=2=raise")
    for step in range(3):
        save(manager, step)
    manager.wait_until_finished()  # step 2 is on storage, so nothing is wrong
    assert manager.all_steps() == [0, 1, 2]
    manager = make(save_interval_steps=2)
    assert (manager.latest_step(), restore(manager, None)) == (2, 2)


def test_a_snapshot_that_failed_is_told(make: Make) -> None:
    manager = make(save_interval_steps=100, faults="stage.granted:seq=1=raise")
    save(manager, 0)
    save(manager, 1)
    with pytest.raises(SnapshotError, match="step 1"):
        manager.wait_until_finished()
    manager.check_for_errors()  # it has been said
    assert manager.latest_step() == 0
    assert restore(manager, 0) == 0


def test_the_agent_knows_what_storage_lacks(make: Make, lone: Lone, tmp_path: Path) -> None:
    """So before a job ends it writes what is in memory only, and nothing else."""

    def announced(kind: str) -> list[Any]:
        heard = [one for one in list(lone.host.heard) if isinstance(one, p.Announced)]
        told = [one.detail for one in heard if one.kind == kind]
        return [detail for detail in told if detail["generation"] == lone.generation]

    def until_stored(*steps: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while (found := [one["step"] for one in announced("persisted")]) != list(steps):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.01)

    manager = make(save_interval_steps=2)
    for step in range(4):
        save(manager, step)
    settled = announced("settled")[-1]
    assert (settled["directory"], settled["keep"]) == (str(tmp_path / "run"), 0)
    until_stored(0)  # Orbax has begun to write the next
    manager.wait_until_finished()
    until_stored(0, 2)
    assert restore(manager, 0) == 0
    save(manager, 1)
    until_stored(0, 2, 0)


def test_arrays_may_be_donated_after_save_and_not_before(make: Make) -> None:
    manager = make(save_interval_steps=100)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    arrays = {"w": jnp.zeros(1 << 18), "small": [jnp.zeros(3) for _ in range(200)]}
    for number in range(3):
        manager.save(number, args=ocp.args.StandardSave(arrays))
        arrays = step(arrays)
    manager.save(3, args=ocp.args.StandardSave(arrays))
    for leaf in jax.tree.leaves(arrays):
        leaf.delete()
    manager.wait_until_finished()
    restored = manager.restore(3)
    assert all((leaf == 3).all() for leaf in jax.tree.leaves(restored))
    with pytest.raises(SnapshotError, match=r"step 4: leaf .* has been deleted"):
        manager.save(4, args=ocp.args.StandardSave(arrays))
    manager.wait_until_finished()  # it has been said
    assert manager.latest_step() == 3


def test_what_memory_does_not_hold_is_the_newest_on_storage(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make()
    save(manager, 0)
    args = ocp.args.ArraySave(jnp.arange(3.0))
    manager = make()
    assert manager.latest_step() == 0
    assert manager.save(1, args=args)
    assert manager.latest_step() == 1
    assert caplog.text.count("is not kept in memory, and goes to storage") == 1
    manager.wait_until_finished()
    assert make().latest_step() == 1


def test_the_second_manager_of_a_process_is_orbaxs_alone(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make()
    with ocp.CheckpointManager(tmp_path / "other") as other:
        assert save(other, 0)
        assert not save(other, 0)
    assert on_storage(tmp_path / "other") == [0]
    assert "nothing of it is kept in memory: this process has had a manager" in caplog.text
    assert save(manager, 0)
    assert restore(manager, 0) == 0


def test_a_snapshotters_snapshot_and_a_managers(make: Make, lone: Lone, tmp_path: Path) -> None:
    with lone.open(every=1) as snapshotter:
        snapshotter.save(5, state(5), {"mine": 1}).protected.result(WAIT_S)
    manager = make()
    assert (manager.latest_step(), restore(manager, None)) == (5, 5)
    save(manager, 6)
    manager.close()
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(state(0))
        assert isinstance(restored, Restored)
        assert (restored.step, restored.state["n"]) == (6, 6)


def test_what_helpers_cannot_write_is_refused(lone: Lone, tmp_path: Path) -> None:
    lone.enter()
    options = ocp.CheckpointManagerOptions(step_prefix="at", keep_period=4)
    with pytest.raises(ConfigError, match="keep_period, step_prefix"):
        ocp.CheckpointManager(tmp_path / "run", options=options, helpers=True)
    with ocp.CheckpointManager(tmp_path / "run", helpers=True, every=1) as manager:
        composite = ocp.args.Composite(state=ocp.args.StandardSave(state(0)))
        with pytest.raises(ConfigError, match="one item without a name"):
            manager.save(0, args=composite)
        assert save(manager, 0)
        manager.wait_until_finished()
        assert on_storage(tmp_path / "run") == []
    assert on_storage(tmp_path / "run") == [0]


def test_a_directory_is_a_job(tmp_path: Path) -> None:
    one, two = ocp.path.step.epath.Path(tmp_path / "one!"), ocp.path.step.epath.Path(tmp_path / "2")
    job = job_of(one)
    assert job.startswith("one--")
    assert job_of(one) == job
    assert job_of(two) != job
    (tmp_path / "one!" / JOB).unlink()
    assert job_of(one) != job


def test_interface_of_the_snapshotter(lone: Lone) -> None:
    """A forced call is due; `skip` and `is_due` say what a call would be."""
    with lone.open(every=10) as snapshotter:
        assert snapshotter.is_due(0)
        assert snapshotter.skip(0) is None
        assert snapshotter.save(0, state(0)).id is not None
        assert not snapshotter.is_due(3)
        assert snapshotter.save(1, state(1)).skipped is not None
        skipped = snapshotter.skip(2)
        assert skipped is not None
        assert skipped.skipped == "the next snapshot is due at step 10"
        forced = snapshotter.save(3, state(3), force=True)
        forced.protected.result(WAIT_S)
        assert snapshotter.save(12, state(12)).skipped == "the next snapshot is due at step 13"
        assert snapshotter.latest == 3


def test_everything_is_put_on_storage_before_memory_goes(make: Make, tmp_path: Path) -> None:
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(state(1)), config=ocp.args.JsonSave({"a": 1})
    )
    manager = make(save_interval_steps=10)
    manager.save(0, args=args)
    manager.save(1, args=args, custom_metadata={"note": "x"})
    manager = make(save_interval_steps=10)
    manager.close()  # nobody has restored anything
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert unchanged.all_steps() == [0, 1]
        assert unchanged.metadata(1).custom_metadata["note"] == "x"
        wanted = plain.args.StandardRestore(state(0))
        restored = unchanged.restore(
            1, args=plain.args.Composite(state=wanted, config=plain.args.JsonRestore())
        )
        assert restored.config == {"a": 1}
        assert jax.tree.all(jax.tree.map(np.array_equal, restored.state, state(1)))
    manager = make(save_interval_steps=10)
    assert manager.latest_step() == 1


def fail(manager: Any) -> None:
    try:
        raise ValueError("the loss is no number")
    finally:
        manager.close()


def fail_within(manager: Any) -> None:
    with manager:
        raise ValueError("the loss is no number")


@pytest.mark.parametrize("end", [fail, fail_within])
def test_a_script_that_fails_keeps_its_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Any], None]
) -> None:
    manager = make(save_interval_steps=10)
    save(manager, 0)
    save(manager, 1)
    told: list[bool] = []
    close = manager._memory.snapshotter.close

    def told_close(*, timeout_s: float, failing: bool) -> None:
        told.append(failing)
        close(timeout_s=timeout_s, failing=failing)

    monkeypatch.setattr(manager._memory.snapshotter, "close", told_close)
    with pytest.raises(ValueError, match="no number"):
        end(manager)
    assert told == [True]
    assert on_storage(tmp_path / "run") == [0]
    assert make(save_interval_steps=10).latest_step() == 1


def test_lost_memory_is_not_silent(make: Make, lone: Lone, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()
    memory = manager._memory
    plan = memory.plan
    lost = jaxft.group.messages.Plan(attempt=9, newest_known=memory.identity(None)[0])
    told = memory.snapshotter.client.plan
    monkeypatch.setattr(memory.snapshotter.client, "plan", type(told)(plan=lost))
    with pytest.raises(NothingRecoverable, match="has no step"):
        manager.latest_step()
    monkeypatch.undo()
    assert plan.newest_known is None
    assert manager.latest_step() is None


def test_plain_orbax_has_gone_on(make: Make, tmp_path: Path) -> None:
    """Above the steps of a manager whose memory is gone: the newest step is plain Orbax's."""
    manager = make(save_interval_steps=4)
    for step in range(7):
        save(manager, step)
    manager.close()
    assert [one.id is None for one in manager._storage.entries()] == [False] * 3
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert restore(unchanged, None) == 6
        save(unchanged, 9)
    manager = make(save_interval_steps=4)
    found = choose([], attempt=1, storage=manager._storage.entries())
    assert (found.source, found.step) == ("orbax", 9)
    assert restore(manager, 9) == 9
    save(manager, 12)
    manager.wait_until_finished()
    entries = manager._storage.entries()
    assert [one.step for one in entries if one.id is not None] == [0, 4, 6, 12]


def test_a_step_that_is_none_is_refused_and_spoils_nothing(make: Make) -> None:
    """Orbax's manager writes a step of text, and cannot compare it with any other from then on."""
    manager = make()
    for wrong in ("7", -1, 1.5, None):
        with pytest.raises(ConfigError, match="a step is an integer from 0"):
            manager.save(wrong, args=ocp.args.StandardSave(state(1)), force=True)
    assert manager.save(np.int64(1), args=ocp.args.StandardSave(state(1)), force=True)
    manager.wait_until_finished()
    assert manager.all_steps() == [1]
    assert restore(manager, 1) == 1
