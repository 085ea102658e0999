"""A small transformer on bytes, its optimizer, and which axes of the mesh its arrays lie on.

Parameters are split over the mesh's "model" axis and replicated over "data"; Adam's moments are
split over both (ZeRO's first stage), so that each host holds bytes that no other host has. Biases,
norms and counters are replicated everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft.demo.data import VOCABULARY

WIDTH = 96
HEADS = 4
LAYERS = 2
LENGTH = 64


class State(NamedTuple):
    """All that a step changes: its arrays, their shapes, or their shardings."""

    step: Any
    params: Any
    optimizer: Any


def _dense(features: int, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, name=name)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        rows, length, width = x.shape
        heads = _dense(3 * width, "qkv")(nn.RMSNorm(name="norm1")(x))
        q, k, v = jnp.split(heads.reshape(rows, length, HEADS, -1), 3, axis=-1)
        weights = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, weights, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + _dense(width, "out")(mixed)
        return x + _dense(width, "down")(
            nn.relu(_dense(4 * width, "up")(nn.RMSNorm(name="norm2")(x)))
        )


class Transformer(nn.Module):
    """Predicts each next byte: (rows, length) tokens to (rows, length, VOCABULARY) logits."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        position = self.param("position", nn.initializers.zeros, (LENGTH, WIDTH))
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens) + position
        mask = jnp.tril(jnp.ones((length, length), bool))
        for layer in range(LAYERS):
            x = Block(name=f"block{layer}")(x, mask)
        return _dense(VOCABULARY, "logits")(nn.RMSNorm(name="norm")(x))


_MODEL = Transformer()
_OPTIMIZER = optax.adamw(3e-3)


def _shapes() -> State:
    """The state's shapes and types, without computing anything."""

    def init() -> State:
        params = _MODEL.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
        return _begin(params)

    shapes: State = jax.eval_shape(init)
    return shapes


def _begin(params: Any) -> State:
    return State(jnp.zeros((), jnp.int32), params, _OPTIMIZER.init(params))


def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """One step on (rows, LENGTH + 1) tokens: the new state, and the mean loss in nats a byte."""

    def loss_of(params: Any) -> jax.Array:
        logits = _MODEL.apply({"params": params}, tokens[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(each)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    updates, optimizer = _OPTIMIZER.update(gradients, state.optimizer, state.params)
    return State(state.step + 1, optax.apply_updates(state.params, updates), optimizer), loss


def fit(mesh: Mesh, shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
    """Dimension i of `shape` over axis `axes[i]` of the mesh, wherever the axis divides it."""
    spec = [
        axis if axis is not None and size % mesh.shape[axis] == 0 else None
        for size, axis in zip(shape, axes, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]


# The dimension of each matrix that is split over "model", by the name of its layer.
_SPLIT = {"qkv": 1, "up": 1, "logits": 1, "out": 0, "down": 0}


def shardings(mesh: Mesh, state: State) -> State:
    """The sharding of every leaf of `state`, which may be abstract."""

    def layout(path: tuple[Any, ...], leaf: Any, data: str | None) -> NamedSharding:
        names = [getattr(key, "key", None) for key in path]
        split = next((_SPLIT[name] for name in names if name in _SPLIT), None)
        if split is None:
            return fit(mesh, leaf.shape, *([data] if leaf.ndim > 1 else []))
        return fit(mesh, leaf.shape, *(("model", data) if split == 0 else (data, "model")))

    def over(tree: Any, data: str | None) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, x: layout(p, x, data), tree)

    return State(fit(mesh, ()), over(state.params, None), over(state.optimizer, "data"))


def abstract(mesh: Mesh) -> State:
    """The state's shapes, types and shardings on this mesh: what `restore` is to fill."""
    shapes = _shapes()

    def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    filled: State = jax.tree.map(placed, shapes, shardings(mesh, shapes))
    return filled


def first_state(like: State, seed: int) -> State:
    """The state before the first step, laid out like `like`.

    NumPy draws the parameters: it takes no time, while compiling a random generator for each of
    them takes as long as compiling the whole step.
    """
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(0.0, 0.05, leaf.shape) if leaf.ndim > 1 else np.ones(leaf.shape)
        values = values.astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, values.__getitem__)

    params = jax.tree.map(draw, like.params)
    state: State = jax.jit(_begin, out_shardings=_layout(like))(params)
    return state


def _layout(like: State) -> State:
    layout: State = jax.tree.map(lambda leaf: leaf.sharding, like)
    return layout


def compiled_step(like: State) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """`train_step`, jitted; the state it is given is donated."""
    whole = fit(like.step.sharding.mesh, ())
    return jax.jit(train_step, donate_argnums=0, out_shardings=(_layout(like), whole))
