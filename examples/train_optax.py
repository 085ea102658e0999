"""Plain JAX and Optax, and data that is drawn: fits a noisy function with a small network.

python examples/train_optax.py
jaxft run --local-hosts 2 -- python examples/train_optax.py --steps 20

It survives crashes, and no number is drawn twice: the noise's key is part of the state, and the
state of NumPy's generator goes into the snapshot as extras. Every process draws the whole global
batch and puts its rows on its devices, so all have the same generator, in any world.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from global_batch import spread
from jax.sharding import NamedSharding, PartitionSpec

import jaxft

ROWS, WIDTH = 64, 32
OPTIMIZER = optax.adam(1e-2)


def create(key):
    key, first, last = jax.random.split(key, 3)
    params = {
        "first": {"w": jax.random.normal(first, (1, WIDTH)), "b": jnp.zeros(WIDTH)},
        "last": {"w": jax.random.normal(last, (WIDTH, 1)) / WIDTH, "b": jnp.zeros(1)},
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params), "noise": key}


def train_step(state, x, weights):
    """Fits sin(x) with noise."""
    key, noise = jax.random.split(state["noise"])
    y = jnp.sin(x) + 0.1 * jax.random.normal(noise, x.shape)

    def loss_of(params):
        hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
        errors = (hidden @ params["last"]["w"] + params["last"]["b"] - y) ** 2
        return jnp.sum(errors[:, 0] * weights) / ROWS

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer, "noise": key}, loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    options = parser.parse_args()

    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1})
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    init = jax.jit(lambda: create(jax.random.key(0)), out_shardings=everywhere)
    like = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), jax.eval_shape(init))
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=everywhere)
    data = np.random.default_rng(0)

    with jaxft.Snapshotter(every=options.every) as snapshotter:
        restored = snapshotter.restore(like)
        if restored:
            state, step = restored.state, restored.step
            data.bit_generator.state = json.loads(restored.extras["data"])
            print(f"going on from step {step}", flush=True)
        else:
            state, step = init(), 0
        while step < options.steps:
            x = data.uniform(-3, 3, (ROWS, 1)).astype(np.float32)
            state, loss = step_fn(state, *spread(x.__getitem__, x.shape, by_rows))
            step += 1
            snapshotter.save(step, state, extras={"data": json.dumps(data.bit_generator.state)})
            if step % 10 == 0 and jax.process_index() == 0:
                print(f"step {step}: loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
