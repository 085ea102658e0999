"""Persist helpers that write to a bucket, and how they die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from etils import epath

import tests.device.conftest  # noqa: F401 (eight devices)
from jaxft import OrbaxFallback
from tests.buckets import serving
from tests.multiprocess.persisting import Host, World, expected, hosts_in, plainly


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts_in(tmp_path, "h0", "h1") as made:
        yield made


# In this order, as a helper first ends what the one before it has begun: it would copy that.
IN_A_BUCKET = {"persist.writing": 1, "checkpoint.copied": 0, "checkpoint.whole": 0}


def test_a_helper_killed_while_it_writes_to_a_bucket_loses_no_checkpoint(
    hosts: list[Host],
) -> None:
    """Nor does the one that it was about to write get lost, once its record is there."""
    with serving() as url:
        directory = f"{url}/checkpoints"
        fallback = OrbaxFallback(directory)
        world = World(hosts, directory)
        try:
            step = last = world.written(1)
            for point, place in IN_A_BUCKET.items():
                step = world.struck(step + 1, point, place)
                steps = [entry.step for entry in fallback.entries()]
                assert steps[-1] == (last if point == "persist.writing" else step), point
                assert plainly(directory, last) == expected(last)
            after = world.written(step + 1)
            # The one before was whole, and has got its step's name.
            assert [entry.step for entry in fallback.entries()] == [step, after]
            assert {path.name for path in epath.Path(directory).iterdir()} == {
                str(step),
                str(after),
            }
            for one in (step, after):
                assert plainly(directory, one) == expected(one)
        finally:
            world.close()
