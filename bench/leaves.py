"""`leaves`: what `save` costs the training thread where the state is many small leaves.

The first save of a tree also makes its plan; `leaves[new]` is the median over trees that were not
seen before, which differ in one leaf's name. Orbax takes seconds for such a tree, so it is asked
seldom.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from bench.baseline_orbax import OrbaxPeer
from bench.lone import WAIT_S, open_snapshotter, own_run_dir
from bench.measure import Report
from bench.rows import Row, at_most, median, row
from bench.sizes import Sizes
from bench.states import four_devices, small_leaves, step_small
from jaxft import Snapshotter

CACHED_PER_ROUND = 5
WARM_UP = 3
LEAF_MS_MAX = 5e-3


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The rows of a tree whose plan is known, of one that is new, and of the first one of all."""
    groups = small_leaves(four_devices(), sizes.leaf_count)
    cached: list[float] = []
    new: list[float] = []
    blocks: list[float] = []
    number = 0
    with (
        contextlib.closing(OrbaxPeer()) as peer,
        own_run_dir(),
        open_snapshotter(fresh=True) as snapshotter,
    ):
        first_s = _save(snapshotter, 0, {"leaves": groups})
        for _ in range(WARM_UP):  # programs are compiled
            groups = step_small(groups)
            number += 1
            _save(snapshotter, number, {"leaves": groups})
        for round_number in range(sizes.leaf_rounds):
            name = f"leaves{round_number}"
            for turn in range(1 + CACHED_PER_ROUND):
                groups = step_small(groups)
                number += 1
                stall_s = _save(snapshotter, number, {name: groups})
                (cached if turn else new).append(stall_s)
            groups = step_small(groups)
            blocks.append(peer.save({"leaves": groups}).blocked_s)
            report(round_number + 1, sizes.leaf_rounds, "leaves")
    block_ms = 1e3 * median(blocks)
    ceiling = at_most(LEAF_MS_MAX * sizes.leaf_count, "itself")
    bound = at_most(1 / 50, "peer")
    return [
        row("leaves", "ms", 1e3 * median(cached), ceiling, bound, peer=block_ms),
        row("leaves[new]", "ms", 1e3 * median(new), bound, peer=block_ms),
        row("leaves[first]", "ms", 1e3 * first_s, peer=block_ms),
    ]


def _save(snapshotter: Snapshotter, number: int, state: Any) -> float:
    """Saves, waits for the outcome, and gives what the training thread paid."""
    began_s = time.perf_counter()
    receipt = snapshotter.save(number, state)
    stall_s = time.perf_counter() - began_s
    receipt.protected.result(WAIT_S)
    return stall_s
