"""Ranks that are in a phase when they are told to end, or fail: `python phases.py BASE PHASE`.

Five steps are trained and saved; then BASE/there is made, and

    compile   a step is traced for a minute
    evaluate  nothing is saved for a minute
    train     steps go on
    crash     the sixth step raises, each time
    small     as train
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxft

MINUTE_S = 60.0


def main() -> None:
    base, phase = Path(sys.argv[1]), sys.argv[2]
    jaxft.initialize()
    state, step = {"w": jnp.zeros(1 << 18)}, 0

    @jax.jit
    def train(state):  # type: ignore[no-untyped-def]
        return {"w": state["w"] + 1}

    @jax.jit
    def another(state):  # type: ignore[no-untyped-def]
        time.sleep(MINUTE_S)
        return state

    fallback = jaxft.OrbaxFallback(base / "checkpoints", every=10**6)
    with jaxft.Snapshotter(every=1, fallback=fallback) as snapshotter:
        restored = snapshotter.restore(state)
        if restored is not None:
            state, step = restored.state, restored.step
        while True:
            state, step = train(state), step + 1
            if step > 5:
                (base / "there").touch()
            if step > 5 and phase == "crash":
                raise ValueError(f"the data of step {step} cannot be read")
            if step > 5 and phase == "evaluate":
                time.sleep(MINUTE_S)
            if step > 5 and phase == "compile":
                state = another(state)
            receipt = snapshotter.save(step, state)
            if receipt.skipped is None:
                receipt.protected.result(MINUTE_S)


if __name__ == "__main__":
    main()
