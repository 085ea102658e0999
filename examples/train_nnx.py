"""Flax NNX on hosts that come and go: a byte-level model whose state, dropout's random streams
included, survives crashes, and whose training is the same in a world that shrinks and grows.

python examples/train_nnx.py
jaxft run --local-hosts 2 -- python examples/train_nnx.py --steps 20
jaxft run --store etcd://HOST:2379 --hosts 3:4 -- python examples/train_nnx.py   # on every host

Kill a host of four, and three go on; start it again, and four do. Each step trains on the same rows
(see `global_batch`), so the final state is that of a run that nothing has happened to but for
rounding: after 300 steps all its numbers are within 1e-5 of that one's. (With Adam's usual `eps` of
1e-8 they are within 1e-2: then a gradient that is nothing but rounding moves a number, too.)
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from global_batch import GlobalBatches
from jax.sharding import NamedSharding, PartitionSpec

import jaxft

TEXT = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)
ROWS, LENGTH = 32, 16


class Windows:
    """Every LENGTH + 1 bytes of the text, each window beginning LENGTH bytes after the last."""

    def __len__(self):
        return (len(TEXT) - 1) // LENGTH

    def __getitem__(self, index):
        return TEXT[index * LENGTH : (index + 1) * LENGTH + 1].astype(np.int32)


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
    return model, nnx.Optimizer(model, optax.adam(3e-3, eps=1e-4), wrt=nnx.Param)


def loss_of(model, tokens, weights):
    """The mean over the rows that count."""
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
    return jnp.sum(losses * weights) / ROWS


def write(path, state):
    """The final state as NumPy arrays by name, keys of random streams aside."""
    arrays = {}
    for key, leaf in jax.tree.leaves_with_path(state):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            arrays[jax.tree_util.keystr(key)] = np.asarray(leaf)
    np.savez(path, **arrays)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--step-s", type=float, default=0, help="so that there is time to watch")
    parser.add_argument("--out", help="a file for the final state, .npz")
    options = parser.parse_args()

    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1})
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    batches = GlobalBatches(Windows(), rows=ROWS)
    graph, shapes = nnx.split(nnx.eval_shape(create))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), shapes)

    @jax.jit(donate_argnums=0, out_shardings=(everywhere, everywhere))
    def train_step(state, tokens, weights):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens, weights)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    with jaxft.Snapshotter(every=options.every) as snapshotter:
        restored = snapshotter.restore(like)
        if restored:
            state, step = restored.state, restored.step
            print(f"going on from step {step}, on {len(jax.devices())} devices", flush=True)
        else:
            state, step = jax.jit(lambda: nnx.state(create()), out_shardings=everywhere)(), 0
        while step < options.steps:
            state, loss = train_step(state, *batches.at(step, by_rows))
            step += 1
            snapshotter.save(step, state)
            if step % 10 == 0 and jax.process_index() == 0:
                print(f"step {step}: loss {float(loss):.3f}", flush=True)
            time.sleep(options.step_s)
    if options.out and jax.process_index() == 0:
        write(options.out, state)


if __name__ == "__main__":
    main()
