"""Flax Linen's TrainState, and a data pipeline of one's own: predicts the next byte of a text.

python examples/train_linen.py
jaxft run --local-hosts 2 -- python examples/train_linen.py --steps 20

It survives crashes. Where the pipeline is after each step goes into the snapshot as extras, so it
goes on from there; every process has the same position, in any world.
"""

import argparse
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from global_batch import spread
from jax.sharding import NamedSharding, PartitionSpec

import jaxft

TEXT = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)
ROWS, LENGTH = 32, 16


class Model(nn.Module):
    """Predicts a byte from the LENGTH bytes before it."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 16)(tokens).reshape(tokens.shape[0], -1)
        return nn.Dense(256)(nn.relu(nn.Dense(64)(x)))


MODEL, OPTIMIZER = Model(), optax.adam(3e-3)


def create():
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def train_step(state, tokens, weights):
    def loss_of(params):
        logits = state.apply_fn(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
        return jnp.sum(losses * weights) / ROWS

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    options = parser.parse_args()

    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1})
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), jax.eval_shape(create))
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=everywhere)

    with jaxft.Snapshotter(every=options.every) as snapshotter:
        restored = snapshotter.restore(like)
        if restored:
            state, step, position = restored.state, restored.step, restored.extras["position"]
            print(f"going on from step {step}, byte {position} of the text", flush=True)
        else:
            state, step, position = jax.jit(create, out_shardings=everywhere)(), 0, 0
        while step < options.steps:
            starts = (position + LENGTH * np.arange(ROWS)) % (len(TEXT) - LENGTH)
            tokens = TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
            state, loss = step_fn(state, *spread(tokens.__getitem__, tokens.shape, by_rows))
            step, position = step + 1, position + ROWS * LENGTH
            snapshotter.save(step, state, extras={"position": position})
            if step % 10 == 0 and jax.process_index() == 0:
                print(f"step {step}: loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
