"""What every rank of the demo runs: a training script as a user would write it.

What is only here for the demo: each step's loss and the digest of the state go to the event log, so
that two runs can be compared bit for bit, as does what `save` cost; and at a step where the demo
wants to kill something, the rank says so and waits for a word.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxft
from jaxft import config
from jaxft.demo import data, model
from jaxft.demo.digest import shard_digests
from jaxft.status.events import EventLog

HOLD_MAX_S = 120.0
PROTECT_MAX_S = 60.0
DEVICES_PER_RANK = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains for `--steps` steps, from the newest snapshot if there is one."""
    options = _options(arguments)
    jax.config.update("jax_num_cpu_devices", DEVICES_PER_RANK)  # type: ignore[no-untyped-call]
    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1, "model": 2})
    text = data.load_text()
    like = model.abstract(mesh)
    shape = (options.rows, model.LENGTH + 1)
    rows = model.fit(mesh, shape, "data")
    log = DemoLog(options)

    with jaxft.Snapshotter(
        every=options.every, parity=options.parity, fallback=_fallback(options)
    ) as snapshotter:
        restored = snapshotter.restore(like)
        if restored is None:
            first, state = 0, model.first_state(like, options.seed)
            _protect_start(snapshotter, state)
            log.saved(0, state)
        else:
            first, state = restored.extras["batches"], restored.state
            log.restored(restored)
        train_step = model.compiled_step(like)
        wrapped = jaxft.wrap(train_step, snapshotter) if options.wrap else None
        for step in range(first + 1, options.steps + 1):
            tokens = data.batch(
                text, seed=options.seed, step=step, rows=options.rows, length=model.LENGTH
            )
            batch = jax.make_array_from_callback(shape, rows, tokens.__getitem__)
            if wrapped is not None:  # a snapshot is of the state that the step is given
                log.saved(step - 1, state)
                state, loss = wrapped(state, batch, jaxft_extras={"batches": step - 1})
                log.step(step, loss)
                log.stalled(step, wrapped.receipt)
            else:
                state, loss = train_step(state, batch)
                log.step(step, loss)
                receipt = snapshotter.save(step, state, extras={"batches": step})
                log.stalled(step, receipt)
                if receipt.skipped is None:
                    log.saved(step, state)
            log.hold(step)
        log.final(options.steps, state)


class DemoLog:
    """Tells the demo's controller, and a person, how the training goes."""

    def __init__(self, options: argparse.Namespace) -> None:
        here = config.RankEnv.from_environ()
        self._host = here.host if here else "local"
        self._generation = here.generation if here else 0
        self._options = options
        self._events = EventLog(config.events_dir(), host=self._host, role="rank")
        self._speaks = jax.process_index() == 0

    def step(self, step: int, loss: jax.Array) -> None:
        value = float(np.asarray(loss.addressable_data(0)))
        self._emit("step", step=step, loss=value, bits=value.hex())
        self._say(f"step {step}: loss {value:.4f}")

    def restored(self, restored: Any) -> None:
        self._say(f"restored step {restored.step} from {restored.source}")
        if self._options.digests:
            self._digest("restored", restored.step, restored.state, restored.id)

    def stalled(self, step: int, receipt: jaxft.Receipt | None) -> None:
        if receipt is not None and receipt.skipped is None:
            self._emit("stall", step=step, stall_s=receipt.stall_s, parity=receipt.parity)

    def saved(self, step: int, state: model.State) -> None:
        if self._options.digests:
            self._digest("saved", step, state)

    def final(self, step: int, state: model.State) -> None:
        self._emit("final", step=step, digest=shard_digests(state))
        self._say(f"done after {step} steps")

    def hold(self, step: int) -> None:
        """Waits, once, where this host is to fail."""
        go = Path(self._options.hold_dir) / f"go-{step}"
        if f"{step}:{self._host}" not in self._options.hold or go.exists():
            return
        self._emit("holding", step=step)
        deadline = time.monotonic() + HOLD_MAX_S
        while not go.exists() and time.monotonic() < deadline:
            time.sleep(0.002)

    def _digest(self, when: str, step: int, state: model.State, of: Any = None) -> None:
        self._emit(
            "digest",
            when=when,
            step=step,
            of=None if of is None else of.generation,
            digest=shard_digests(state),
        )

    def _emit(self, event: str, **fields: object) -> None:
        self._events.emit(event, generation=self._generation, **fields)

    def _say(self, line: str) -> None:
        if self._speaks:
            print(line, flush=True)


def _protect_start(snapshotter: jaxft.Snapshotter, state: model.State) -> None:
    """From the first step on there is something to go on from."""
    receipt = snapshotter.save(0, state, extras={"batches": 0})
    receipt.protected.result(timeout=PROTECT_MAX_S)


def _fallback(options: argparse.Namespace) -> jaxft.OrbaxFallback | None:
    if not options.fallback:
        return None
    return jaxft.OrbaxFallback(options.fallback, every=options.steps)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxft.demo.train", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=2, help="steps between snapshots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=24, help="rows of a batch of the whole world")
    parser.add_argument("--wrap", action="store_true", help="save with jaxft.wrap")
    parser.add_argument("--parity", default="host", help="who computes it: host, or device")
    parser.add_argument(
        "--fallback", default="", help="directory of Orbax checkpoints, one a generation"
    )
    parser.add_argument("--digests", action="store_true", help="log a digest with every snapshot")
    parser.add_argument("--hold", action="append", default=[], help="STEP:HOST that is to wait")
    parser.add_argument("--hold-dir", default=".", help="where it looks for the file go-STEP")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
