"""Random runs of the production cores: every seed keeps the invariants and makes progress.

JAXFT_SIM_SEEDS says how many seeds there are; a failure prints its seed and the story of its run.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.random_runs import run_seed

CHUNK = 100
SEEDS = int(os.environ.get("JAXFT_SIM_SEEDS", "2000"))


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds_keep_the_invariants(first: int) -> None:
    for seed in range(first, min(first + CHUNK, SEEDS)):
        run_seed(seed)


def test_a_seed_gives_the_same_run_again() -> None:
    assert run_seed(7).story() == run_seed(7).story()
