"""A small training job, run as a rank of a world by `jax_world.Ranks`. What happens goes, as one
JSON object a line, to the file that the argument names.

The argument is JSON: `out` (the file), `steps` (train up to this step), `every` (steps, or the
options of an `Auto`), `devices`, `wrap` ("": it calls `save`; "all": it wraps its step; or "not 1":
the same, and rank 1 has no twin), and `parity`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from jaxft.wrapped import twins

optimizer = optax.adamw(1e-2)


def listening(port: int) -> list[str]:
    """The addresses, as /proc/net/tcp has them, at which anybody listens on this port."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.append(local.rpartition(":")[0])
    return found


def init(mesh: Mesh) -> dict[str, Any]:
    """State that is sharded, partly replicated and replicated, with sizes that no world divides.

    Made by NumPy: what is compiled costs every process seconds.
    """
    specs = {
        "in": P(None, "model"),  # partly replicated
        "out": P("model", None),
        "table": P("data", "model"),  # sharded
        "bias": P(),  # replicated, in 15 rows
        "scale": P(),
    }
    shapes = {"in": (13, 64), "out": (64, 7), "table": (24, 500), "bias": (15, 3553), "scale": (7,)}
    noise = np.random.default_rng(0)
    params = {name: noise.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    opt = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(optimizer.init, params)
    )

    def place(path: Any, leaf: Any) -> jax.Array:
        names = [getattr(key, "key", None) for key in path]
        spec = next((specs[name] for name in names if name in specs), P())
        return jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, spec), lambda index: leaf[index]
        )

    state = {"params": params, "opt": opt, "key": np.array([0, 7], "u4")}
    placed = jax.tree_util.tree_map_with_path(place, state)
    return {**placed, "key": jax.random.wrap_key_data(placed["key"])}


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["in"])
    logits = hidden @ params["out"] * params["scale"]
    regular = jnp.mean(params["table"] ** 2) + jnp.mean(params["bias"] ** 2)
    return jnp.mean((logits - x[:, :7]) ** 2) + regular


def make_step(shardings: Any) -> Any:
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        grads = jax.grad(loss)(state["params"], x)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}

    return step


def batch(mesh: Mesh, position: int) -> jax.Array:
    """The examples at this position of the data."""
    x = np.random.default_rng(position).normal(size=(24, 13)).astype("f4")
    return jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, P("data")), lambda index: x[index]
    )


def make_digest(mesh: Mesh) -> Any:
    """A digest of the whole state's bytes, whatever its shardings."""
    everywhere = NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def gather(state: Any) -> Any:
        return {**state, "key": jax.random.key_data(state["key"])}

    def digest(state: Any) -> str:
        found = hashlib.sha256()
        for leaf in jax.tree.leaves(gather(state)):
            found.update(np.asarray(leaf.addressable_data(0)).tobytes())
        return found.hexdigest()[:16]

    return digest


def train_wrapped(
    snapshotter: jaxft.Snapshotter,
    step_fn: Any,
    state: Any,
    start: int,
    options: dict[str, Any],
    say: Any,
) -> None:
    """The same training, where the step takes the snapshots."""
    rank = jax.process_index()
    compiled: list[int] = []
    compile_twin = twins.LoweredTwin.compile

    def counted(lowered: Any) -> Any:
        compiled.append(1)
        return compile_twin(lowered)

    twins.LoweredTwin.compile = counted  # type: ignore[method-assign]
    wrapped = jaxft.wrap(step_fn, snapshotter)
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    digest = make_digest(mesh)
    if options["wrap"] == "not 1":
        twins.AGREE_S = 0.2
        if rank == 1:
            wrapped._twins.refuse("this is a test")
    for step in range(start + 1, options["steps"] + 1):
        position = 24 * (step - 1)
        extras = {"rank": rank, "position": position}
        state = wrapped(state, batch(mesh, position), jaxft_step=step - 1, jaxft_extras=extras)
        assert wrapped.receipt is not None
        receipt = wrapped.receipt
        say(
            "stepped",
            step=step,
            digest=digest(state),
            skipped=receipt.skipped,
            parity=receipt.parity,
        )
    made = len(wrapped._twins._twins)
    say("done", latest=snapshotter.latest, twins=made, compiled=len(compiled))


def main() -> None:
    options = json.loads(sys.argv[1])
    out = os.open(options["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(event: str, **facts: Any) -> None:
        os.write(out, (json.dumps({"event": event, **facts}) + "\n").encode())

    jax.config.update("jax_num_cpu_devices", options["devices"])
    jaxft.initialize()
    rank = jax.process_index()
    port = int(os.environ["JAXFT_COORDINATOR"].rpartition(":")[2])
    mesh = jaxft.make_mesh({"data": -1, "model": 2})
    state = init(mesh)
    say("started", processes=jax.process_count(), mesh=mesh.shape, listening=listening(port))
    digest = make_digest(mesh)
    step_fn = make_step(jax.tree.map(lambda leaf: leaf.sharding, state))
    start = position = 0
    every = options["every"]
    every = jaxft.Auto(**every) if isinstance(every, dict) else every
    parity = options["parity"]
    with jaxft.Snapshotter(every=every, parity=parity, timeout_s=60.0) as snapshotter:
        owned = snapshotter._plans.get(state).ranges
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves({**state, "key": np.zeros(2, "u4")}))
        say("planned", owned=sum(one.nbytes for one in owned), whole=whole)
        restored = snapshotter.restore(state)
        if restored is not None:
            state, start = restored.state, restored.step
            position = restored.extras["position"]
            say(
                "restored",
                step=start,
                source=restored.source,
                digest=digest(state),
                extras=restored.extras,
                by_rank=restored.extras_by_rank,
            )
        if options["wrap"]:
            train_wrapped(snapshotter, step_fn, state, start, options, say)
            return
        for step in range(start + 1, options["steps"] + 1):
            state = step_fn(state, batch(mesh, position))
            position += 24
            receipt = snapshotter.save(step, state, {"rank": rank, "position": position})
            say("stepped", step=step, digest=digest(state), skipped=receipt.skipped)
    say("done", latest=snapshotter.latest)


if __name__ == "__main__":
    main()
