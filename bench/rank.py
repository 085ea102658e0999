"""A rank of a measured world: does what it is told over a Unix socket, line by line.

    python -m bench.rank SOCKET BYTES

It is an ordinary script under `jaxft run`: its state is BYTES a host, sharded over all processes.
Its checkpoints go to the directory that BENCH_PERSIST names, if it names one. Each line is JSON:
`{"do": NAME, ...}` in, the answer out. Times are of the monotonic clock, which all processes of a
machine share.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxft
from bench.baseline_orbax import OrbaxPeer
from bench.states import State, ready, set_devices, spread_state, step

WAIT_S = 120.0
PAUSE_S = 0.2
MATRIX = 768
SIDE = 256


class Rank:
    """The answers; each method is one thing that a rank can be told to do."""

    def __init__(self, snapshotter: jaxft.Snapshotter, state: State) -> None:
        self.snapshotter = snapshotter
        self.state = state
        self.calls = 0
        self.peer: OrbaxPeer | None = None
        self.wrapped = jaxft.wrap(train_step, snapshotter)
        self.restored = snapshotter.restore(state)
        if self.restored is not None:
            self.state, self.calls = self.restored.state, self.restored.step

    def hello(self) -> dict[str, Any]:
        """Where this rank stands, and how it came by its state."""
        restored = self.restored and {"s": self.restored.seconds, "source": self.restored.source}
        return {"rank": jax.process_index(), "restored": restored}

    def step(self) -> None:
        """New arrays everywhere."""
        self.state = ready(step(self.state))

    def save(self) -> dict[str, float]:
        """One snapshot, until it is protected."""
        self.calls += 1
        began_s = time.monotonic()
        receipt = self.snapshotter.save(self.calls, self.state)
        receipt.staged.result(WAIT_S)
        staged_s = time.monotonic()
        receipt.protected.result(WAIT_S)
        return {"began": began_s, "staged": staged_s, "protected": time.monotonic()}

    def save_many(self, count: int) -> None:
        """A donating step and a snapshot in turn, as training does."""
        for _ in range(count):
            self.calls += 1
            receipt = self.snapshotter.save(self.calls, self.state)
            self.state = step(self.state)
        receipt.protected.result(WAIT_S)

    def hold_many(self, count: int) -> None:
        """Steps whose input is not donated, since somebody still looks at it: views of all that
        this process has, as a snapshot holds until it is copied."""
        for _ in range(count):
            views = [
                np.asarray(shard.data)
                for leaf in jax.tree.leaves(self.state)
                for shard in leaf.addressable_shards
            ]
            self.state = ready(step(self.state))
            del views

    def open_orbax(self, directory: str) -> None:
        """Makes the peer, in a directory that all ranks share."""
        self.peer = OrbaxPeer(Path(directory))

    def orbax(self) -> dict[str, float]:
        """One checkpoint of Orbax, until it is committed."""
        assert self.peer is not None, "open_orbax comes first"
        began_s = time.monotonic()
        saved = self.peer.save(self.state)
        return {"began": began_s, "protected": time.monotonic(), "stall": saved.blocked_s}

    def protect(self) -> None:
        """Snapshots in both slots, so that their memory is there."""
        for _ in range(2):
            self.save()

    def persist(self) -> dict[str, float]:
        """Snapshots until one goes to storage, and that, from its commit until it is there; and
        which persist that was."""
        while True:
            self.calls += 1
            receipt = self.snapshotter.save(self.calls, self.state)
            receipt.protected.result(WAIT_S)
            began_s = time.monotonic()
            assert receipt.id is not None
            if self.snapshotter.client.outcomes[receipt.id.seq].persist:
                break
            time.sleep(PAUSE_S)
        order = self.snapshotter.client.persist
        assert order is not None
        receipt.persisted.result(WAIT_S)
        ended_s = time.monotonic()
        stall_s = receipt.stall_s
        return {"began": began_s, "protected": ended_s, "stall": stall_s, "number": order.number}

    def train(self, steps: int, how: str) -> dict[str, float]:
        """A training run that saves every step with jaxft, with Orbax, or not at all."""
        batch = jnp.asarray(np.random.default_rng(0).normal(size=(MATRIX, MATRIX)), jnp.float32)
        receipt = None
        began_s = time.monotonic()
        for _ in range(steps):
            self.state = train_step(self.state, batch)
            if how == "jaxft":
                self.calls += 1
                receipt = self.snapshotter.save(self.calls, self.state)
            elif how == "orbax":
                assert self.peer is not None, "open_orbax comes first"
                self.peer.begin(self.state)
        ready(self.state)
        ended_s = time.monotonic()
        if receipt is not None:
            receipt.protected.result(WAIT_S)
        if self.peer is not None:
            self.peer.wait()
        return {"began": began_s, "ended": ended_s}

    def take(self, steps: int, how: str) -> list[float]:
        """Seconds of each of some steps until its outputs are there: with a snapshot through
        `wrap`, with one by `save` before it, or bare. The next step waits until it is protected."""
        batch = jnp.asarray(np.random.default_rng(0).normal(size=(SIDE, SIDE)), jnp.float32)
        taken_s = []
        for _ in range(steps):
            self.calls += 1
            receipt = None
            began_s = time.monotonic()
            if how == "wrap":
                self.state = self.wrapped(self.state, batch, jaxft_step=self.calls)
                receipt = self.wrapped.receipt
            else:
                if how == "save":
                    receipt = self.snapshotter.save(self.calls, self.state)
                self.state = train_step(self.state, batch)
            ready(self.state)
            taken_s.append(time.monotonic() - began_s)
            if receipt is not None:
                receipt.protected.result(WAIT_S)
        return taken_s

    def has_twin(self) -> bool:
        """Whether `wrap` runs a second version of the step, and does not stage before it."""
        return bool(self.wrapped._twins._twins)

    def coded_by(self) -> str:
        """Who codes what `wrap` gives."""
        assert self.wrapped.receipt is not None
        return self.wrapped.receipt.parity


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: jax.Array) -> State:
    """Compute that takes longer than touching the state, and an update of all of it."""

    def forward(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ batch), None

    out, _ = jax.lax.scan(forward, batch, None, length=24)
    rate = 1e-6 * jnp.mean(out)
    moved: State = jax.tree.map(lambda leaf: leaf * (1 - rate) + rate, state)
    return moved


def main(path: str, nbytes: int) -> None:
    """Serves until the other side lets go."""
    set_devices(1)
    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1}, axis_types=AxisType.Auto)
    state = spread_state(mesh, nbytes * jax.process_count())
    directory = os.environ.get("BENCH_PERSIST")
    fallback = jaxft.OrbaxFallback(directory, every=1, keep=1) if directory else None
    with (
        jaxft.Snapshotter(every=1, fallback=fallback) as snapshotter,
        socket.socket(socket.AF_UNIX) as line,
    ):
        rank = Rank(snapshotter, state)
        del state
        line.connect(path)
        with line.makefile("rw") as file:
            file.write(json.dumps(rank.hello()) + "\n")
            file.flush()
            for text in file:
                order = json.loads(text)
                answer = getattr(rank, order.pop("do"))(**order)
                file.write(json.dumps(answer) + "\n")
                file.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
