"""A rank of any world: `python trainer.py BASE`. Every step is a collective of all ranks.

Checkpoints are in BASE/checkpoints; after the first one none is due before the job is told to end.

It goes on until the step that the file BASE/last names, and writes what it does, one JSON object a
line, to BASE/rank-RANK. Element i of the state after n steps is n * 1000 + i.
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
# So many fit any world of up to six devices.
SIZE = 60


def main() -> None:
    base = Path(sys.argv[1])
    said = (base / f"rank-{os.environ['JAXFT_RANK']}").open("a", buffering=1)

    def say(**facts: Any) -> None:
        said.write(json.dumps({"generation": int(os.environ["JAXFT_GENERATION"]), **facts}) + "\n")

    def last() -> int:
        path = base / "last"
        return int(path.read_text()) if path.exists() else 1 << 60

    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1})
    sharding = NamedSharding(mesh, P("data"))
    first = np.arange(SIZE, dtype=np.int32)
    state = {"w": jax.make_array_from_callback((SIZE,), sharding, lambda at: first[at])}
    # Never trained, and put on all devices from a local array.
    state["frozen"] = jax.device_put(jnp.arange(3.0), NamedSharding(mesh, P()))
    # The sum of all elements is what it is: no rank gets further without the others.
    train = jax.jit(lambda state: {**state, "w": state["w"] + 1000 + 0 * jnp.sum(state["w"])})
    step = 0
    fallback = jaxft.OrbaxFallback(str(base / "checkpoints"), every=1_000_000)
    with jaxft.Snapshotter(every=3, fallback=fallback) as snapshotter:
        restored = snapshotter.restore(state)
        if restored is not None:
            state, step = restored.state, restored.step
            shards = state["w"].addressable_shards
            assert (state["frozen"].addressable_data(0) == jnp.arange(3.0)).all()
            right = all((each.data == first[each.index] + 1000 * step).all() for each in shards)
            say(restored=step, source=restored.source, right=bool(right))
        while step < last():
            time.sleep(STEP_S)
            step += 1
            state = train(state)
            snapshotter.save(step, state)
            say(step=step, latest=snapshotter.latest)


if __name__ == "__main__":
    main()
