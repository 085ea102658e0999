"""A rank that nobody of jaxft's has started: `python crew.py BASE STORE COORDINATOR RANK RANKS`.

The job is the one that JOB names, or "crew". Checkpoints, of which none but the first is due, are
in CHECKPOINTS, if that is said; with MANAGED, which names a directory, an Orbax manager's.

Every step is a collective of all ranks. It goes on until the step that the file BASE/last names,
and writes what it does, one JSON object a line, to BASE/rank-RANK. Element i of the state after n
steps is n * 1000 + i.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
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
EVERY = 3

State = dict[str, jax.Array]
Save = Callable[[int, State], int | None]
Kept = Iterator[tuple[int, State, Save]]


@contextlib.contextmanager
def by_snapshotter(state: State, store: str, say: Callable[..., None]) -> Kept:
    """Where to go on, and what saves and says which is the newest."""
    step, fallback = 0, None
    if "CHECKPOINTS" in os.environ:
        fallback = jaxft.OrbaxFallback(os.environ["CHECKPOINTS"], every=1_000_000)
    job = os.environ.get("JOB", "crew")
    with jaxft.Snapshotter(every=EVERY, store=store, job=job, fallback=fallback) as snapshotter:
        say(host=snapshotter.env.host, generation=snapshotter.env.generation)
        restored = snapshotter.restore(state)
        if restored is not None:
            state, step = restored.state, restored.step
            say(source=restored.source)

        def save(step: int, state: State) -> int | None:
            snapshotter.save(step, state)
            return snapshotter.latest

        yield step, state, save


@contextlib.contextmanager
def by_manager(state: State, store: str, say: Callable[..., None]) -> Kept:
    """The same by a manager, in the directory MANAGED, where it puts every 1000th step."""
    from jaxft import orbax as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=1000)
    directory = os.environ["MANAGED"]
    with ocp.CheckpointManager(directory, options=options, every=EVERY, store=store) as manager:
        step = manager.latest_step()
        stored = [int(one.name) for one in manager.directory.iterdir() if one.name.isdigit()]
        say(on_storage=stored)
        if step is not None:
            state = manager.restore(step, args=ocp.args.StandardRestore(state))

        def save(step: int, state: State) -> int | None:
            manager.save(step, args=ocp.args.StandardSave(state))
            newest: int | None = manager.latest_step()
            return newest

        yield step or 0, state, save


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
    keeper = by_manager if "MANAGED" in os.environ else by_snapshotter
    with keeper(state, store, say) as (step, state, save):
        if step:
            shards = state["w"].addressable_shards
            right = all((each.data == first[each.index] + 1000 * step).all() for each in shards)
            say(restored=step, right=bool(right))
        while step < last():
            time.sleep(STEP_S)
            step += 1
            state = train(state)
            say(step=step, latest=save(step, state))
    say(finished=True)


if __name__ == "__main__":
    main()
