"""A script whose every step is a collective of all ranks, in numbers that come out the same in any
world: `python trainer.py BASE EVERY [--size N] [--step-s S] [--checkpoints DIRECTORY --persist N]`.

It goes on until the step that the file BASE/last names, and ends with the status that the file
BASE/exit does. It writes what it does, one JSON object a line, to BASE/rank-RANK. `digest` is of
the whole state after the step; `expected` says what it is. `began_s` and `at_s` are when the step
began and when its digest was known, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 3840  # as many elements for each of one to six hosts, and of eight
STEP_S = 0.02
_FACTOR, _MODULUS = 1664525, 1 << 32


def digests(size: int = SIZE) -> Iterator[int]:
    """The digests of the states, of which the first is after no step.

    Element i of each state is a * i + b: a step multiplies both by a factor, and adds the sum of
    all elements to b. So a digest, the sum of (i + 1) times element i, takes no array.
    """
    ones = size * (size - 1) // 2  # the sum of i, for i below the size
    squares = size * (size - 1) * (2 * size - 1) // 6
    a, b = 1, 0
    while True:
        yield (a * (squares + ones) + b * (ones + size)) % _MODULUS
        a, b = a * _FACTOR % _MODULUS, (b * _FACTOR + a * ones + b * size) % _MODULUS


def expected(steps: int, size: int = SIZE) -> list[int]:
    """The first so many of them."""
    return list(itertools.islice(digests(size), steps))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("every", type=int)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--step-s", type=float, default=STEP_S)
    parser.add_argument("--checkpoints", default="")
    parser.add_argument("--persist", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxft

    given = _arguments()
    base: Path = given.base
    said = (base / f"rank-{os.environ['JAXFT_RANK']}").open("a", buffering=1)

    def say(**facts: Any) -> None:
        facts = {"generation": int(os.environ["JAXFT_GENERATION"]), **facts}
        said.write(json.dumps(facts | {"at_s": time.monotonic()}) + "\n")

    def last() -> int:
        path = base / "last"
        return int(path.read_text() or "0") if path.exists() else 1 << 60

    def obey() -> None:
        order = base / "exit"
        if order.exists():
            status = int(order.read_text())
            order.unlink()
            sys.exit(status)

    def digest(state: Any) -> int:
        return int(digested(state).addressable_data(0))

    jaxft.initialize()
    sharding = NamedSharding(jaxft.make_mesh({"data": -1}), P("data"))  # type: ignore[no-untyped-call]
    first = np.arange(given.size, dtype=np.uint32)
    state = {"w": jax.make_array_from_callback(first.shape, sharding, lambda at: first[at])}
    train = jax.jit(lambda state: {"w": state["w"] * jnp.uint32(_FACTOR) + jnp.sum(state["w"])})
    digested = jax.jit(
        lambda state: jnp.sum(state["w"] * (jnp.arange(given.size, dtype=jnp.uint32) + 1))
    )
    step = 0
    fallback = None
    if given.checkpoints:
        fallback = jaxft.OrbaxFallback(given.checkpoints, every=given.persist)
    with jaxft.Snapshotter(every=given.every, fallback=fallback) as snapshotter:
        restored = snapshotter.restore(state)
        if restored is not None:
            state, step = restored.state, restored.step
            say(restored=step, digest=digest(state))
        while step < last():
            time.sleep(given.step_s)
            obey()
            began_s = time.monotonic()
            step += 1
            state = train(state)
            snapshotter.save(step, state)
            say(step=step, digest=digest(state), latest=snapshotter.latest, began_s=began_s)


if __name__ == "__main__":
    main()
