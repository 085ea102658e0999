"""Flax NNX: a byte-level model whose state, dropout's random streams included, survives crashes.

python examples/train_nnx.py
jaxft run --local-hosts 2 -- python examples/train_nnx.py --steps 20
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxft

TEXT = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)
ROWS, LENGTH = 32, 16


class Model(nnx.Module):
    """Predicts a byte from the LENGTH bytes before it."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 16, rngs=rngs)
        self.hidden = nnx.Linear(LENGTH * 16, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens).reshape(tokens.shape[0], -1)
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def create():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    options = parser.parse_args()

    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1})
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    graph, shapes = nnx.split(nnx.eval_shape(create))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), shapes)

    @jax.jit(donate_argnums=0, out_shardings=(everywhere, everywhere))
    def train_step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    with jaxft.Snapshotter(every=options.every) as snapshotter:
        restored = snapshotter.restore(like)
        if restored:
            state, step, position = restored.state, restored.step, restored.extras["position"]
            print(f"going on from step {step}, byte {position} of the text", flush=True)
        else:
            state = jax.jit(lambda: nnx.state(create()), out_shardings=everywhere)()
            step = position = 0
        while step < options.steps:
            starts = (position + LENGTH * np.arange(ROWS)) % (len(TEXT) - LENGTH)
            tokens = TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
            batch = jax.make_array_from_callback(tokens.shape, by_rows, tokens.__getitem__)
            state, loss = train_step(state, batch)
            step, position = step + 1, position + ROWS * LENGTH
            snapshotter.save(step, state, extras={"position": position})
            if step % 10 == 0 and jax.process_index() == 0:
                print(f"step {step}: loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
