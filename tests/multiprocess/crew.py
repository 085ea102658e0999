"""A rank that nobody of jaxft's has started: `python crew.py BASE STORE COORDINATOR RANK RANKS`.

The job is the one that JOB names, or "crew". Checkpoints, of which none but the first is due, are
in CHECKPOINTS, if that is said.

Every step is a collective of all ranks. It goes on until the step that the file BASE/last names,
and writes what it does, one JSON object a line, to BASE/rank-RANK. Element i of the state after n
steps is n * 1000 + i.
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
SIZE = 60


def main() -> None:
    base, store, coordinator, rank, ranks = sys.argv[1:]
    said = (Path(base) / f"rank-{rank}").open("a", buffering=1)

    def say(**facts: Any) -> None:
        said.write(json.dumps({"pid": os.getpid(), **facts}) + "\n")

    def last() -> int:
        path = Path(base) / "last"
        return int(path.read_text()) if path.exists() else 1 << 60

    jaxft.initialize()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(ranks), int(rank))
    sharding = NamedSharding(jaxft.make_mesh({"data": -1}), P("data"))
    first = np.arange(SIZE, dtype=np.int32)
    state = {"w": jax.make_array_from_callback((SIZE,), sharding, lambda at: first[at])}
    train = jax.jit(lambda state: {"w": state["w"] + 1000 + 0 * jnp.sum(state["w"])})
    step, fallback = 0, None
    if "CHECKPOINTS" in os.environ:
        fallback = jaxft.OrbaxFallback(os.environ["CHECKPOINTS"], every=1_000_000)
    job = os.environ.get("JOB", "crew")
    with jaxft.Snapshotter(every=3, store=store, job=job, fallback=fallback) as snapshotter:
        say(host=snapshotter.env.host, generation=snapshotter.env.generation)
        restored = snapshotter.restore(state)
        if restored is not None:
            state, step = restored.state, restored.step
            shards = state["w"].addressable_shards
            right = all((each.data == first[each.index] + 1000 * step).all() for each in shards)
            say(restored=step, source=restored.source, right=bool(right))
        while step < last():
            time.sleep(STEP_S)
            step += 1
            state = train(state)
            snapshotter.save(step, state)
            say(step=step, latest=snapshotter.latest)
    say(finished=True)


if __name__ == "__main__":
    main()
