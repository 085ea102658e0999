"""`auto`: how much of its budget `Auto` uses: training with it, against training without snapshots.

One process trains on one core, and the other core is the snapshots'. Stretches with snapshots and
without take turns, and each is compared with its two neighbours, since a shared machine changes its
speed all the time. A stretch with snapshots goes from the begin of one to the begin of a later one,
so that it has whole snapshots and whole intervals. Where an interval is longer than STRETCH_STEPS
it is cut there: the snapshot has ended by then, and what is left of the interval are skipped calls,
whose time is known. The snapshot begun last may end before a stretch without is timed. In such a
stretch the script just does not call `save`, so what skipped calls take is in the figure too.
`Auto` sees steps that were jumped over.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxft
from bench.lone import JOB, WAIT_S, own_run_dir
from bench.measure import Report
from bench.rows import Row, at_least, at_most, median, row
from bench.sizes import Sizes
from bench.states import State, large_state

BUDGETS = (0.01, 0.03, 0.10)

# Snapshots until the interval is what it will be, and how many of the last of them tell it.
SETTLING = 30
SETTLED = 12

STRETCH_STEPS = 24
SIDE = 384
PRODUCTS = 40


class Stretch(NamedTuple):
    """Consecutive steps of training; then so many that took `more_s` longer than others."""

    wall_s: float
    steps: int
    more_s: float = 0.0
    more_steps: int = 0


class Training:
    """A loop that waits for every step, as one does that looks at its loss."""

    def __init__(self, state: State) -> None:
        self.step = 0
        self.state = state
        self._weights = jnp.eye(SIDE, dtype=jnp.float32)

    def advance(self) -> None:
        self.state, self._weights = _train_step(self.state, self._weights)
        self._weights.block_until_ready()
        self.step += 1

    def without(self, steps: int) -> Stretch:
        began_s = time.perf_counter()
        for _ in range(steps):
            self.advance()
        return Stretch(time.perf_counter() - began_s, steps)

    def with_snapshots(self, snapshotter: jaxft.Snapshotter, interval: int) -> Stretch:
        """From a call that begins a snapshot to a later one that does, or for STRETCH_STEPS and as
        many skipped calls as are left of the interval."""
        while True:
            first, began_s = self.step, time.perf_counter()
            receipt = snapshotter.save(self.step, self.state)
            if receipt.id is not None:
                break
            self.advance()
        skips_s: list[float] = []
        while True:
            self.advance()
            ended_s = time.perf_counter()
            again = snapshotter.save(self.step, self.state)
            steps = self.step - first
            if again.id is not None:
                receipt = again
                if steps >= STRETCH_STEPS:
                    break
            else:
                skips_s.append(again.stall_s)
                if steps >= STRETCH_STEPS < interval and receipt.protected.done():
                    break
        left = max(0, interval - steps) if skips_s else 0
        stretch = Stretch(ended_s - began_s, steps, left * median(skips_s or [0.0]), left)
        self._land(snapshotter, receipt)
        return stretch

    def _land(self, snapshotter: jaxft.Snapshotter, receipt: jaxft.Receipt) -> None:
        """Trains on until nothing of the snapshot is left, or the next one has begun and ended."""
        left = 2
        while left:
            left -= receipt.protected.done()
            self.advance()
            again = snapshotter.save(self.step, self.state)
            if again.id is not None:
                again.protected.result(WAIT_S)
                return


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """Percent of wall time that snapshots add, for each budget, and the interval it came to."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1), ("data", "model"))
    training = Training(large_state(mesh, sizes.small_host_bytes // 4))
    rows: list[Row] = []
    rounds = sizes.saves // 2
    for number, budget in enumerate(BUDGETS):

        def show(done: int, number: int = number) -> None:
            report(number * rounds + done, len(BUDGETS) * rounds, "auto")

        with own_run_dir():
            rows += _measure(training, budget, rounds, show)
    return rows


def _measure(
    training: Training, budget: float, rounds: int, show: Callable[[int], None]
) -> list[Row]:
    every = jaxft.Auto(overhead=budget)
    overheads = []
    with jaxft.Snapshotter(every=every, job=JOB, fresh=True) as snapshotter:
        interval = _settle(training, snapshotter)
        before = training.without(STRETCH_STEPS)
        for number in range(rounds):
            stretch = training.with_snapshots(snapshotter, interval)
            after = training.without(STRETCH_STEPS)
            usual_s = (before.wall_s + after.wall_s) / (before.steps + after.steps)
            added_s = stretch.wall_s - stretch.steps * usual_s + stretch.more_s
            steps = stretch.steps + stretch.more_steps
            overheads.append(100 * added_s / (steps * usual_s))
            before = after
            show(number + 1)
    percent = 100 * budget
    bounds = [at_most(4 / 3, "limit")]
    if interval > 1:
        bounds.append(at_least(2 / 3, "limit"))
    name = f"auto[{percent:g}%]"
    return [
        row(name, "%", median(overheads), *bounds, limit=percent),
        row(f"auto[{percent:g}%, interval]", "steps", interval),
    ]


def _settle(training: Training, snapshotter: jaxft.Snapshotter) -> int:
    """Trains until the interval is what it will be, and returns it."""
    begun: list[int] = []
    while len(begun) < SETTLING:
        training.advance()
        if snapshotter.save(training.step, training.state).id is not None:
            begun.append(training.step)
    last = begun[-SETTLED:]
    return int(median([after - before for before, after in itertools.pairwise(last)]))


@functools.partial(jax.jit, donate_argnums=0)
def _train_step(state: State, weights: jax.Array) -> tuple[State, jax.Array]:
    """Computes for longer than it touches the state."""

    def product(_: int, weights: jax.Array) -> jax.Array:
        return jnp.tanh(weights @ weights)

    weights = jax.lax.fori_loop(0, PRODUCTS, product, weights)
    return jax.tree.map(lambda leaf: leaf * 1.0001 + weights[0, 0], state), weights
