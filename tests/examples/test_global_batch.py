"""The examples' data: the same global batches, in the same order, in a world of any size."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = np.arange(50 * 3).reshape(50, 3)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("global_batch")


def by_rows(devices: int, model: int = 1) -> NamedSharding:
    axes = {"data": -1, "model": model}
    return NamedSharding(jaxft.make_mesh(axes, devices=jax.devices()[:devices]), P("data"))


@pytest.mark.parametrize(("devices", "model"), [(1, 1), (3, 1), (4, 1), (8, 2), (5, 1)])
def test_a_batch_is_the_same_on_any_number_of_devices(
    pipeline: Any, devices: int, model: int
) -> None:
    batches = pipeline.GlobalBatches(SOURCE, rows=8, seed=3)
    parts = devices // model
    for step in (0, 1, 7, 12):
        batch, weights = batches.at(step, by_rows(devices, model))
        assert batch.shape == (-(-8 // parts) * parts, 3)
        assert np.array_equal(np.asarray(weights), np.arange(len(weights)) < 8)
        assert np.array_equal(np.asarray(batch)[:8], SOURCE[batches.places(step)])
        # What pads it is a row like any other, so that nothing that is computed of it is odd.
        assert np.isin(np.asarray(batch)[8:], SOURCE).all()


def test_every_row_comes_once_an_epoch_and_epochs_differ(pipeline: Any) -> None:
    batches = pipeline.GlobalBatches(SOURCE, rows=8)
    places = np.concatenate([batches.places(step) for step in range(25)])  # four epochs of 50
    epochs = places.reshape(4, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    # From any step on, without those before; the seed alone makes the order.
    again = pipeline.GlobalBatches(SOURCE, rows=8)
    assert np.array_equal(again.places(20), batches.places(20))
    other = pipeline.GlobalBatches(SOURCE, rows=8, seed=1)
    assert not np.array_equal(other.places(0), batches.places(0))


def test_only_rows_of_its_own_devices_are_read(pipeline: Any) -> None:
    read: list[int] = []

    class Source:
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
            read.append(index)
            return np.asarray(SOURCE[index])

    batches = pipeline.GlobalBatches(Source(), rows=8)
    read.clear()
    batch, _ = batches.at(0, by_rows(4))
    assert sorted(read) == sorted(batches.places(0))
    assert batch.sharding.spec == P("data")
