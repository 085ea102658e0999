"""The demo's state is partly sharded, partly replicated, and learns."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxft.demo import data, model


def _mesh(width: int) -> Mesh:
    devices = np.array(jax.devices()[: width * 2]).reshape(width, 2)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _copies(leaf: jax.ShapeDtypeStruct) -> int:
    """How many devices of the eight hold each element."""
    assert leaf.sharding is not None
    parts = leaf.size // max(1, int(np.prod(leaf.sharding.shard_shape(leaf.shape))))
    return 8 // parts


def test_parameters_and_moments_are_partly_replicated_and_partly_sharded() -> None:
    like = model.abstract(_mesh(4))
    assert {_copies(leaf) for leaf in jax.tree.leaves(like.params)} == {4, 8}
    assert {_copies(leaf) for leaf in jax.tree.leaves(like.optimizer)} == {1, 2, 8}


def test_any_world_has_a_layout() -> None:
    for width in (1, 2, 3, 4):
        like = model.abstract(_mesh(width))
        for leaf in jax.tree.leaves(like):
            leaf.sharding.shard_shape(leaf.shape)
        assert model.fit(_mesh(width), (24, 5), "data").shard_shape((24, 5)) == (24 // width, 5)
        assert model.fit(_mesh(width), (25, 5), "data").shard_shape((25, 5)) == (25, 5)


def test_a_few_steps_learn_something() -> None:
    like = model.abstract(_mesh(2))
    state, step = model.first_state(like, 0), model.compiled_step(like)
    text = data.load_text(50_000)
    losses = []
    for number in range(1, 9):
        tokens = data.batch(text, seed=0, step=number, rows=8, length=model.LENGTH)
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1.0
    assert int(state.step) == 8
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, like
    )
