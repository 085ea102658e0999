"""Scripts that read more, less or something else than what they would go on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as plain
import pytest

import jaxft.orbax as ocp
from jaxft.orbax.storage import JOB, job_of
from tests.multiprocess.lone import Lone

Make = Callable[..., Any]


def state(number: int) -> Any:
    return {"w": jnp.full(4, number + 0.1), "n": number}


def save(manager: Any, step: int) -> bool:
    return bool(manager.save(step, args=ocp.args.StandardSave(state(step))))


def is_state(restored: Any, number: int) -> bool:
    return bool(jax.tree.all(jax.tree.map(np.array_equal, restored, state(number))))


def put_on_storage(make: Make, step: int, args: Any) -> None:
    """Memory does not have it."""
    manager = make(faults="stage.granted:seq=0=raise")
    manager.save(step, args=args)
    manager.wait_until_finished()


def w_as(dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((4,), dtype)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
    "args",
    [
        plain.args.StandardRestore({"w": w_as(jnp.bfloat16), "n": 0}),
        plain.args.PyTreeRestore({"n": 0}, partial_restore=True),
        plain.args.PyTreeRestore({"w": w_as(jnp.float32), "n": plain.PLACEHOLDER}),
    ],
    ids=["of another dtype", "in part", "with placeholders"],
)
def test_what_one_script_reads_of_a_step_is_not_what_the_next_one_gets(
    make: Make, args: Any
) -> None:
    put_on_storage(make, 3, ocp.args.StandardSave(state(3)))
    make().restore(3, args=args)  # and the script is killed
    manager = make()
    assert manager.latest_step() == 3
    assert is_state(manager.restore(3, args=ocp.args.StandardRestore(state(0))), 3)
    assert is_state(manager.restore(3), 3)
    assert not save(manager, 3)
    save(manager, 4)
    manager = make()
    assert manager.all_steps() == [3, 4]
    assert is_state(manager.restore(4), 4)


def test_what_one_script_leaves_out_of_a_composite_the_next_one_gets(make: Make) -> None:
    one, two = ocp.args.StandardSave(state(1)), ocp.args.StandardSave(state(2))
    text = ocp.args.JsonSave({"a": 1})
    put_on_storage(make, 0, ocp.args.Composite(one=one, two=two, text=text))
    read = make().restore(0, args=ocp.args.Composite(one=ocp.args.StandardRestore(state(0))))
    assert set(read.keys()) == {"one"}
    read = make().restore(0)
    assert set(read.keys()) == {"one", "two", "text"}
    assert is_state(read.two, 2)


def test_reading_an_older_step_is_not_going_back(make: Make, tmp_path: Path) -> None:
    """A script that evaluates the best step so far, and goes on."""
    manager = make()
    for step in range(4):
        save(manager, step)
    manager.wait_until_finished()
    assert is_state(manager.restore(1), 1)
    assert save(manager, 4)
    manager.wait_until_finished()
    assert manager.all_steps() == [0, 1, 2, 3, 4]
    assert is_state(make().restore(None), 4)
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert unchanged.all_steps() == [0, 1, 2, 3, 4]


def test_what_an_item_has_is_known_where_memory_gave_it(make: Make) -> None:
    manager = make()
    save(manager, 0)
    manager.wait_until_finished()
    manager = make()
    manager.restore(0)
    assert manager.item_metadata(0)["w"].shape == (4,)
    assert manager.metadata(0).commit_timestamp_nsecs


def test_what_memory_cannot_keep_goes_to_storage_alone(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Orbax says itself what it cannot write."""
    manager = make(save_interval_steps=2)
    save(manager, 0)
    args = ocp.args.StandardSave({"w": jnp.ones(2), "odd": Path("x")})
    assert not manager.save(1, args=args)
    with pytest.raises(ValueError, match="Unsupported type"):
        manager.save(2, args=args)
    assert save(manager, 4)
    manager.wait_until_finished()
    assert caplog.text.count("is not kept in memory, and goes to storage") == 1
    assert is_state(make().restore(None), 4)


def test_a_directory_that_cannot_be_written_to_can_be_read(
    lone: Lone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that is read-only, or full."""
    with plain.CheckpointManager(tmp_path) as unchanged:
        save(unchanged, 0)
    for key in [key for key in os.environ if key.startswith("JAXFT_")]:
        monkeypatch.delenv(key)
    (tmp_path / JOB).mkdir()
    with ocp.CheckpointManager(tmp_path) as manager:
        assert is_state(manager.restore(0), 0)
        assert "nothing of it is kept in memory" in caplog.text
        assert save(manager, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", JOB]


def test_a_job_file_that_a_full_disk_left_is_written_again(tmp_path: Path) -> None:
    root = ocp.path.step.epath.Path(tmp_path)
    (tmp_path / JOB).touch()
    job = job_of(root)
    assert job
    assert job_of(root) == job
    assert [path.name for path in tmp_path.iterdir()] == [JOB]


def test_scripts_that_begin_at_once_are_one_job(tmp_path: Path) -> None:
    root = ocp.path.step.epath.Path(tmp_path / "new")
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(job_of, [root] * 8))) == 1


def test_a_deleted_step_does_not_come_back_with_the_next_start(make: Make) -> None:
    """As where the loss is no number, and whoever starts scripts again does so."""
    manager = make(save_interval_steps=2)
    for step in range(4):
        save(manager, step)
    manager.wait_until_finished()
    manager.delete(3)
    for _ in range(2):
        manager = make(save_interval_steps=2)
        assert (manager.latest_step(), manager.all_steps()) == (2, [0, 2])
        assert is_state(manager.restore(None), 2)
    manager.save(3, args=ocp.args.StandardSave(state(33)))
    manager = make(save_interval_steps=2)
    assert manager.latest_step() == 3
    assert is_state(manager.restore(None), 33)
    manager.delete(3)
    manager.delete(2)
    manager = make(save_interval_steps=2)
    assert (manager.latest_step(), manager.all_steps()) == (0, [0])
