"""A plain script that nobody launched: trains, and dies or fails where it is told to."""

from __future__ import annotations

import os
import signal
import sys

import jax
import jax.numpy as jnp

import jaxft

STEPS = 6
START = {"x": jnp.arange(1000.0), "n": jnp.int32(0)}


@jax.jit
def train_step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"x": state["x"] * 1.5 + state["n"], "n": state["n"] + 1}


def train(job: str, fate: str, at: int) -> None:
    """Trains to the end, unless `fate` strikes after step `at`."""
    state, start = START, 0
    fallback = None
    if "CHECKPOINTS" in os.environ:
        fallback = jaxft.OrbaxFallback(os.environ["CHECKPOINTS"], every=1000)
    with jaxft.Snapshotter(every=1, job=job, fallback=fallback) as snapshotter:
        restored = snapshotter.restore(state)
        if restored is not None:
            state, start = restored.state, restored.step
            print(*(f"because {reason}" for reason in restored.reasons), sep="\n", flush=True)
        print("from", start, restored.source if restored is not None else "none", flush=True)
        for step in range(start, STEPS):
            state = train_step(state)
            snapshotter.save(step + 1, state).protected.result(30)
            if step + 1 == at and fate == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if step + 1 == at and fate == "fail":
                raise RuntimeError("the loss is not a number")
            if step + 1 == at and fate == "wait":
                print("waiting", flush=True)
                sys.stdin.readline()
    print("sum", float(state["x"].sum()).hex(), flush=True)


def main() -> None:
    job, fates = sys.argv[1], sys.argv[2:]
    for fate in fates:
        name, _, at = fate.partition("@")
        try:
            train(job, name, int(at or 0))
        except RuntimeError as error:
            print("failed:", error, flush=True)
        except jaxft.JobInUse as error:
            print("in use:", error, flush=True)
            sys.exit(3)


if __name__ == "__main__":
    main()
