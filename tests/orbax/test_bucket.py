"""A manager whose directory is in a bucket."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as plain
import pytest
from etils import epath

import jaxft.orbax as ocp
from jaxft.orbax.exported import stored
from jaxft.orbax.storage import JOB, job_of
from tests.buckets import serving
from tests.orbax.test_manager import Make, restore, save, state


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def place(served: str) -> Any:
    return epath.Path(served) / secrets.token_hex(4)


def on_storage(place: Any) -> list[int]:
    with plain.CheckpointManager(place) as manager:
        return sorted(manager.all_steps())


def test_steps_are_in_memory_and_in_the_bucket(make: Make, place: Any) -> None:
    manager = make(place, save_interval_steps=2, max_to_keep=3)
    for step in range(6):
        assert save(manager, step) is (step % 2 == 0)
    manager.wait_until_finished()
    assert manager.all_steps() == [0, 2, 4, 5]
    assert on_storage(place) == [0, 2, 4]
    assert [entry.id.seq for entry in stored(str(place)) if entry.id] == [0, 2, 4]

    manager = make(place, save_interval_steps=2, max_to_keep=3)
    assert (manager.latest_step(), restore(manager, 2)) == (5, 2)
    manager.save(3, args=ocp.args.StandardSave(state(33)))
    assert manager.all_steps() == [0, 2, 3]
    assert on_storage(place) == [0, 2]
    [left] = [one.name for one in place.iterdir() if one.name.startswith("jaxft-left-4-")]
    assert (place / left / "commit_success.txt").exists()
    manager.save(4, args=ocp.args.StandardSave(state(44)))
    manager.wait_until_finished()
    assert not [one for one in place.iterdir() if one.name.startswith("jaxft-left-")]

    manager = make(place, save_interval_steps=2, max_to_keep=3)
    assert (manager.latest_step(), restore(manager, None)) == (4, 44)
    save(manager, 5)
    manager.delete(5)
    manager = make(place, save_interval_steps=2, max_to_keep=3)
    assert restore(manager, 4) == 44
    save(manager, 5)
    manager.close()
    assert on_storage(place) == [2, 4, 5]


def test_a_bucket_is_a_job(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(place)
    assert job is not None
    assert job_of(place) == job
    (place / JOB).unlink()
    assert job_of(place) != job
    assert [one.name for one in place.iterdir()] == [JOB]
