"""`save_stall` and `staged`: what the training thread pays, and when a crash costs nothing.

One host, four devices. Each save is of the new arrays of a step, and begins when the snapshot
before it is decided: a stall that comes of saving faster than can be protected is not the question
here. The limit of `staged` copies the bytes of the same arrays into memory that has its pages.
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import NamedTuple

from bench.baseline_orbax import OrbaxPeer
from bench.lone import WAIT_S, open_snapshotter, own_run_dir
from bench.measure import Report, copy_all, settle, touched
from bench.rows import Row, at_most, median, percentile, row
from bench.sizes import Sizes
from bench.states import State, four_devices, large_state, ready, step, views
from jaxft import Snapshotter

# What is in memory at once: states, Orbax's files and copies, and slots.
SETTLED_STATES = 6


class Taken(NamedTuple):
    """One save: in the training thread, and until its bytes were staged."""

    stall_s: float
    staged_s: float


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The rows, from `saves` saves with Orbax's and a memcpy between them."""
    settle(SETTLED_STATES * sizes.state_bytes)
    state = large_state(four_devices(), sizes.state_bytes)
    target = touched(sum(view.size for view in views(state)))
    stalls, staged, blocks, copies = [], [], [], []
    with (
        contextlib.closing(OrbaxPeer()) as peer,
        own_run_dir(),
        open_snapshotter(fresh=True) as snapshotter,
    ):
        for number in range(2):  # slots get their pages, programs are compiled
            state, _ = _save(snapshotter, state, number)
        peer.save(state)
        every = max(1, sizes.saves // sizes.rounds)
        for number in range(sizes.saves):
            state, taken = _save(snapshotter, state, number + 2)
            stalls.append(taken.stall_s)
            staged.append(taken.staged_s)
            copies.append(copy_all(views(state), target))
            if number % every == every - 1:
                state = ready(step(state))
                blocks.append(peer.save(state).blocked_s)
            report(number + 1, sizes.saves, "save")
    block_ms, copy_ms = 1e3 * median(blocks), 1e3 * median(copies)
    stall_ms, p99_ms = 1e3 * median(stalls), 1e3 * percentile(stalls, 99)
    return [
        row("save_stall", "ms", stall_ms, at_most(1 / 50, "peer"), peer=block_ms),
        row("save_stall[p99]", "ms", p99_ms, at_most(1 / 20, "peer"), peer=block_ms),
        row("staged", "ms", 1e3 * median(staged), at_most(1.35, "limit"), limit=copy_ms),
    ]


def _save(snapshotter: Snapshotter, state: State, number: int) -> tuple[State, Taken]:
    """A step, and the save of what came of it."""
    state = ready(step(state))
    gc.collect()
    began_s = time.perf_counter()
    receipt = snapshotter.save(number, state)
    stall_s = time.perf_counter() - began_s
    receipt.staged.result(WAIT_S)
    staged_s = time.perf_counter() - began_s
    receipt.protected.result(WAIT_S)
    return state, Taken(stall_s, staged_s)
