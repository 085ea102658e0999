"""A script whose every step is a collective of all ranks, in numbers that come out the same in any
world: `python trainer.py BASE EVERY`.

It goes on until the step that the file BASE/last names, and writes what it does, one JSON object a
line, to BASE/rank-RANK. `digest` is of the whole state after the step; `expected` says what it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 4096
STEP_S = 0.02


def expected(steps: int) -> list[int]:
    """The digests of the first states, of which the first is after no step."""
    state = np.arange(SIZE, dtype=np.uint32)
    places = np.arange(1, SIZE + 1, dtype=np.uint32)
    digests = []
    for _ in range(steps):
        digests.append(int(np.sum(state * places, dtype=np.uint32)))
        state = state * np.uint32(1664525) + np.sum(state, dtype=np.uint32)
    return digests


def main() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxft

    base, every = Path(sys.argv[1]), int(sys.argv[2])
    said = (base / f"rank-{os.environ['JAXFT_RANK']}").open("a", buffering=1)

    def say(**facts: Any) -> None:
        said.write(json.dumps({"generation": int(os.environ["JAXFT_GENERATION"]), **facts}) + "\n")

    def last() -> int:
        path = base / "last"
        return int(path.read_text() or "0") if path.exists() else 1 << 60

    def digest(state: Any) -> int:
        return int(digested(state).addressable_data(0))

    jaxft.initialize()
    sharding = NamedSharding(jaxft.make_mesh({"data": -1}), P("data"))  # type: ignore[no-untyped-call]
    first = np.arange(SIZE, dtype=np.uint32)
    state = {"w": jax.make_array_from_callback(first.shape, sharding, lambda at: first[at])}
    train = jax.jit(lambda state: {"w": state["w"] * jnp.uint32(1664525) + jnp.sum(state["w"])})
    digested = jax.jit(lambda state: jnp.sum(state["w"] * (jnp.arange(SIZE, dtype=jnp.uint32) + 1)))
    step = 0
    with jaxft.Snapshotter(every=every) as snapshotter:
        restored = snapshotter.restore(state)
        if restored is not None:
            state, step = restored.state, restored.step
            say(restored=step, digest=digest(state))
        while step < last():
            time.sleep(STEP_S)
            step += 1
            state = train(state)
            snapshotter.save(step, state)
            say(step=step, digest=digest(state), latest=snapshotter.latest)


if __name__ == "__main__":
    main()
