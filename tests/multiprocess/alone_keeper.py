"""A plain script whose keeper goes away: it saves when it is told to, and says what came of it."""

from __future__ import annotations

import logging
import os
import sys
import time

import jax.numpy as jnp

import jaxft


def state_of(step: int) -> dict[str, object]:
    return {"x": jnp.full(1000, float(step))}


def save(snapshotter: jaxft.Snapshotter, step: int) -> None:
    """Prints whether the snapshot is protected, or why not, and how long that took."""
    began_s = time.monotonic()
    receipt = snapshotter.save(step, state_of(step))
    try:
        receipt.protected.result(30)
        outcome = "protected"
    except jaxft.SnapshotError as error:
        outcome = f"{type(error).__name__} {error}"
    generation = snapshotter.env.generation
    print(f"{time.monotonic() - began_s:.3f} generation {generation} {outcome}", flush=True)


def close(snapshotter: jaxft.Snapshotter, *, failing: bool) -> None:
    began_s = time.monotonic()
    outcome = "closed"
    try:
        snapshotter.close(failing=failing)
    except jaxft.SnapshotError as error:
        outcome = f"{type(error).__name__} {error}"
    print(f"{time.monotonic() - began_s:.3f} {outcome}", flush=True)


def persist(snapshotter: jaxft.Snapshotter, step: int) -> int:
    """Saves until a snapshot is on storage; the last step."""
    persisted: list[int] = []
    deadline_s = time.monotonic() + 50
    while not persisted and time.monotonic() < deadline_s:
        step += 1
        receipt = snapshotter.save(step, state_of(step))
        receipt.persisted.add_done_callback(
            lambda one: one.exception() or persisted.append(one.result())
        )
        receipt.protected.result(30)
    print("persisted" if persisted else "nothing was persisted", persisted, flush=True)
    return step


def open_one() -> tuple[jaxft.Snapshotter, int]:
    fallback = jaxft.OrbaxFallback(sys.argv[1], every=1) if sys.argv[1:] else None
    snapshotter = jaxft.Snapshotter(every=1, job="j", fallback=fallback)
    restored = snapshotter.restore(state_of(0))
    step = 0 if restored is None else restored.step
    assert restored is None or float(restored.state["x"][0]) == step
    print(f"from {step} {'none' if restored is None else restored.source}", flush=True)
    return snapshotter, step


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        snapshotter, step = open_one()
    except jaxft.JobInUse as error:
        print("in use:", error, flush=True)
        sys.exit(3)
    for line in sys.stdin:
        match line.strip():
            case "save":
                step += 1
                save(snapshotter, step)
            case "persist":
                step = persist(snapshotter, step)
            case "fail":
                close(snapshotter, failing=True)
            case "open":
                snapshotter, step = open_one()
            case "close":
                close(snapshotter, failing=False)
                os._exit(0)


if __name__ == "__main__":
    main()
