"""A script whose every step is a collective of all ranks.

`python trainer.py BASE EVERY [PERSIST [DIRECTORY]]`. It goes on until the step that the file
BASE/last names, and writes what it does, one JSON object a line, to BASE/rank-RANK. With PERSIST,
snapshots so many steps apart go to BASE/checkpoints, or to DIRECTORY. At the step that the file
BASE/hold names it stays. While there is a file
BASE/evaluate-RANK it is in a phase that it has announced, and the file BASE/hang-RANK makes it hang
in its next step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft

STEP_S = 0.02


def evaluate(base: Path, rank: str) -> None:
    order = base / f"evaluate-{rank}"
    if order.exists():
        with jaxft.long_phase("evaluation"):
            while order.exists():
                time.sleep(STEP_S)


def load(base: Path, rank: str) -> None:
    """The next batch, which may never come."""
    order = base / f"hang-{rank}"
    if order.exists():
        order.unlink()
        time.sleep(600)


def main() -> None:
    base, every = Path(sys.argv[1]), int(sys.argv[2])
    rank = os.environ["JAXFT_RANK"]
    said = (base / f"rank-{rank}").open("a", buffering=1)

    def say(**facts: Any) -> None:
        said.write(json.dumps({"generation": int(os.environ["JAXFT_GENERATION"]), **facts}) + "\n")

    def ordered(name: str) -> int:
        path = base / name
        return int(path.read_text() or "0") if path.exists() else 1 << 60

    jaxft.initialize()
    sharding = NamedSharding(jaxft.make_mesh({"data": -1}), P("data"))
    zeros = np.zeros(4000, np.float32)
    state = {"w": jax.make_array_from_callback(zeros.shape, sharding, lambda at: zeros[at])}
    train = jax.jit(lambda state: {"w": jnp.max(state["w"]) + 1 + 0 * state["w"]})
    step = 0
    fallback = None
    if sys.argv[3:]:
        directory = sys.argv[4] if sys.argv[4:] else base / "checkpoints"
        fallback = jaxft.OrbaxFallback(directory, every=int(sys.argv[3]))
    with jaxft.Snapshotter(every=every, fallback=fallback) as snapshotter:
        restored = snapshotter.restore(state)
        if restored is not None:
            state, step = restored.state, restored.step
            say(restored=step, w=float(state["w"].addressable_data(0)[0]))
        print("rank", rank, "of generation", os.environ["JAXFT_GENERATION"], flush=True)
        while step < ordered("last"):
            time.sleep(STEP_S)
            if step == ordered("hold"):
                continue
            load(base, rank)
            evaluate(base, rank)
            step += 1
            state = train(state)
            receipt = snapshotter.save(step, state)
            w = float(state["w"].addressable_data(0)[0]) if step >= ordered("last") else None
            say(step=step, w=w, latest=snapshotter.latest, begun=receipt.id is not None)


if __name__ == "__main__":
    main()
