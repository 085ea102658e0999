"""The training script whose recovery is measured: `python bench/recovery_train.py BYTES WAY`.

An ordinary script with BYTES of state, which all ranks share. WAY is who keeps its state:

    jaxft     `jaxft.Snapshotter`, under `jaxft run`
    wrapped   the same, by a step that `jaxft.wrap` has made
    orbax     Orbax's checkpoint manager, in a plain restart loop (`bench.recovery_loop`)

It writes what it has come to into the event log that JAXFT_EVENTS names, and trains until it is
told to end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxft.status.events import EventLog

LAYERS = 12
WIDTH = 256
BATCH = 60
ROWS = 60  # of each of the leaves that are spread: worlds of up to six ranks divide it
EVERY = 5
KEPT = 1

State = dict[str, Any]
Save = Callable[[int, State], None]

generation = int(os.environ.get("JAXFT_GENERATION") or os.environ["BENCH_GENERATION"])
rank = int(os.environ.get("JAXFT_RANK") or os.environ["BENCH_RANK"])
log = EventLog(Path(os.environ["JAXFT_EVENTS"]), host=f"rank{rank}", role="script")


def come_to(what: str, **fields: Any) -> None:
    """What this rank has come to."""
    log.emit(what, generation=generation, rank=rank, **fields)


come_to("begun")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

import jaxft  # noqa: E402
from bench.states import ready, set_devices  # noqa: E402


def meet(way: str) -> None:
    """All ranks know each other after it."""
    set_devices(1)
    if way != "orbax":
        jaxft.initialize()
        return
    ranks = int(os.environ["BENCH_RANKS"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    if ranks > 1:
        jax.distributed.initialize(os.environ["BENCH_COORDINATOR"], ranks, rank)


def build(mesh: Mesh, nbytes: int) -> State:
    """Layers with two moments each, the same on every device, and the rest of the bytes spread."""
    everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    random = np.random.default_rng(0)

    def leaf() -> jax.Array:
        value = random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        return jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])

    layers = {f"layer{number}": leaf() for number in range(LAYERS)}
    moments = {f"{name}.{moment}": leaf() for name in layers for moment in ("mu", "nu")}
    rest = spread(mesh, nbytes)
    return ready({"layers": layers, "moments": moments, "rest": rest})


def spread(mesh: Mesh, nbytes: int) -> list[jax.Array]:
    """Leaves of a few MiB over all devices, made as fast as memory can be copied."""
    count = max(1, nbytes // (4 * ROWS * WIDTH * WIDTH))
    tile = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32)
    place = NamedSharding(mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]

    def piece(index: Any) -> np.ndarray[Any, Any]:
        return np.repeat(tile[None], len(range(*index[0].indices(ROWS))), axis=0)

    return [jax.make_array_from_callback((ROWS, WIDTH, WIDTH), place, piece) for _ in range(count)]


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    """A step of Adam through all layers; the rest is moved a little."""

    def loss_of(layers: dict[str, jax.Array]) -> jax.Array:
        x = batch
        for weight in layers.values():
            x = x + jnp.tanh((x - x.mean(-1, keepdims=True)) @ weight)
        return jnp.mean(x**2)

    loss, slopes = jax.value_and_grad(loss_of)(state["layers"])
    layers, moments = dict(state["layers"]), dict(state["moments"])
    for name, slope in slopes.items():
        mu = moments[f"{name}.mu"] = 0.9 * moments[f"{name}.mu"] + 0.1 * slope
        nu = moments[f"{name}.nu"] = 0.99 * jnp.abs(moments[f"{name}.nu"]) + 0.01 * slope**2
        layers[name] = layers[name] - 1e-4 * mu / (jnp.sqrt(nu) + 1e-6)
    rest = jax.tree.map(lambda leaf: leaf * (1 - 1e-6), state["rest"])
    return {"layers": layers, "moments": moments, "rest": rest}, loss


@contextlib.contextmanager
def kept_by_jaxft(state: State, *, wraps: bool) -> Iterator[tuple[int, State, Any, Save]]:
    """Where to go on, what the step is, and what saves."""
    with jaxft.Snapshotter(every=EVERY) as snapshotter:
        restored = snapshotter.restore(state)
        start, state = (0, state) if restored is None else (restored.step, restored.state)
        if wraps:
            wrapped = jaxft.wrap(train_step, snapshotter)
            yield start, state, wrapped, lambda step, state: None
        else:
            yield start, state, train_step, lambda step, state: _saved(snapshotter, step, state)


def _saved(snapshotter: jaxft.Snapshotter, step: int, state: State) -> None:
    snapshotter.save(step, state)


@contextlib.contextmanager
def kept_by_orbax(state: State) -> Iterator[tuple[int, State, Any, Save]]:
    """The same with Orbax, used as its documentation says."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, save_interval_steps=EVERY)
    with ocp.CheckpointManager(Path(os.environ["BENCH_CHECKPOINTS"]), options=options) as manager:
        start = manager.latest_step()
        if start is not None:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))

        def save(step: int, state: State) -> None:
            if manager.save(step, args=ocp.args.StandardSave(state)):
                come_to("saving", step=step)
            newest = manager.latest_step()
            if newest is not None and not manager.is_saving_in_progress():
                come_to("committed", step=newest)

        yield start or 0, state, train_step, save


def main(nbytes: int, way: str) -> None:
    """Trains, and says what it has come to."""
    come_to("imported")
    meet(way)
    mesh = jaxft.make_mesh({"data": -1}, axis_types=AxisType.Auto)
    come_to("met")
    state = build(mesh, nbytes)
    come_to("built")
    keeper = (
        kept_by_orbax(state) if way == "orbax" else kept_by_jaxft(state, wraps=way == "wrapped")
    )
    place = NamedSharding(mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]
    ones = np.ones((BATCH, WIDTH), np.float32)
    batch = jax.make_array_from_callback(ones.shape, place, lambda index: ones[index])
    with keeper as (step, state, take, save):
        come_to("restored", step=step)
        while True:
            state, loss = take(state, batch)
            ready(loss)
            step += 1
            come_to("step", step=step)
            save(step, state)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
