"""A wrapped step computes what the step computes, bit for bit, and takes snapshots on the way."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from jaxft.device import transfer
from jaxft.device.leaves import SUB_BYTE_BITS
from jaxft.wrapped import twins
from jaxft.wrapping import WrappedStep
from tests.device.snapshots import assert_same, raw
from tests.device.test_leaves import DTYPES, every_pattern
from tests.multiprocess.jax_world import WAIT_S
from tests.multiprocess.lone import Lone, read_back


def mesh_of(*axis_types: AxisType) -> Mesh:
    types = axis_types or (AxisType.Auto,) * 2
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=types)


def copied(tree: Any) -> Any:
    """The same arrays, in places of their own."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
        return jnp.copy(leaf) if not leaf.committed else jax.jit(jnp.copy)(leaf)

    return jax.tree.map(copy, tree)


def bits(tree: Any) -> list[bytes]:
    return [raw(leaf) for leaf in jax.tree.leaves(tree)]


def shape_of(tree: Any) -> Any:
    """What restores the tree, without its bytes."""

    def struct(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, tree)


def twins_of(wrapped: WrappedStep) -> int:
    return len(wrapped._twins._twins)


def train(
    snapshotter: jaxft.Snapshotter,
    wrapped: Callable[..., Any],
    step: Callable[..., Any],
    state: Any,
    *others: Any,
    steps: int = 6,
) -> None:
    """Trains with both, and compares all that they give and what each snapshot holds."""
    mine, theirs = copied(state), copied(state)
    receipt: Any = None
    for _ in range(steps):
        given = bits(mine)
        like = shape_of(mine)
        result = wrapped(mine, *copied(others))
        expected = step(theirs, *copied(others))
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        assert bits(result) == bits(expected)
        for have, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert have.sharding == want.sharding
            assert have.committed == want.committed
        receipt = wrapped.receipt  # type: ignore[attr-defined]
        if receipt.skipped is None:
            assert bits(read_back(snapshotter, receipt, like)) == given
        mine, theirs = (result[0], expected[0]) if isinstance(result, tuple) else (result, expected)
    receipt.protected.result(WAIT_S)


# ------------------------------------------------------------------------ kinds of steps


def update(state: Any, batch: Any) -> Any:
    """Numbers that show a changed order of rounding."""

    def loss_of(w: Any) -> Any:
        return jnp.sum(jnp.tanh(batch @ w["a"]) @ w["b"]) / 3

    loss, gradients = jax.value_and_grad(loss_of)(state["w"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], gradients)
    w = jax.tree.map(lambda w, m: w - 0.01 * m, state["w"], m)
    return {"w": w, "m": m, "n": state["n"] + 1}, loss


def first_state(place: Any = lambda leaf: leaf) -> Any:
    rng = np.random.default_rng(0)
    w = {name: rng.normal(size=(64, 64)).astype(np.float32) for name in "ab"}
    m = {name: np.zeros_like(value) for name, value in w.items()}
    state = {"w": w, "m": m, "n": np.int32(0)}
    return jax.tree.map(lambda leaf: place(jnp.asarray(leaf)), state)


def sharded(leaf: Any) -> Any:
    spec = P("a", "b") if leaf.ndim else P()
    return jax.device_put(leaf, NamedSharding(mesh_of(), spec))


def replicated(leaf: Any) -> Any:
    return jax.device_put(leaf, NamedSharding(mesh_of(), P()))


BATCH = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)


@pytest.mark.parametrize("donates", [True, False])
@pytest.mark.parametrize("place", [jnp.asarray, replicated, sharded])
def test_a_jitted_step(lone: Lone, place: Any, donates: bool) -> None:
    jitted = functools.partial(jax.jit, donate_argnums=0 if donates else ())
    step, other = (jitted(lambda *arguments: update(*arguments)) for _ in range(2))
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        train(snapshotter, wrapped, other, first_state(place), jnp.asarray(BATCH))
        assert twins_of(wrapped) == 1
        # The twin's outputs do not make the step compile anew.
        assert step._cache_size() == other._cache_size()


def test_what_is_not_due_is_the_step_itself(lone: Lone) -> None:
    calls: list[int] = []
    with lone.open(every=100) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(update), snapshotter)
        state = first_state()
        for _ in range(4):
            state, _ = wrapped(state, BATCH)
        inner = wrapped._step
        wrapped._step = lambda *arguments: calls.append(len(arguments)) or inner(*arguments)
        for _ in range(3):
            state, _ = wrapped(state, BATCH)
        assert wrapped.receipt is not None
        assert wrapped.receipt.skipped == "the next snapshot is due at step 100"
    assert calls == [2, 2, 2]
    assert twins_of(wrapped) == 0


def test_a_plain_function_that_traces_is_jitted(lone: Lone) -> None:
    other = jax.jit(update, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(update, snapshotter, donate_argnums=0)
        state = first_state()
        train(snapshotter, wrapped, other, state, jnp.asarray(BATCH))
        assert twins_of(wrapped) == 1
        wrapped(state, jnp.asarray(BATCH))
        assert state["w"]["a"].is_deleted()


def test_static_arguments_and_an_aux_output(lone: Lone) -> None:
    def step(state: Any, batch: Any, width: int, *, mode: str, scale: float) -> Any:
        state, loss = update(state, batch[:width])
        return state, {"loss": loss * scale, mode: (loss, None)}

    static = {"static_argnums": 2, "static_argnames": "mode", "donate_argnums": 0}
    jitted = jax.jit(step, **static)  # type: ignore[call-overload]
    with lone.open(every=1) as snapshotter:
        for wrapped in (
            jaxft.wrap(jitted, snapshotter),
            jaxft.wrap(step, snapshotter, **static),  # type: ignore[arg-type]
        ):
            state = first_state()
            other = first_state()
            for number in range(8):
                width = 4 + number // 4
                state, aux = wrapped(state, BATCH, width, mode="x", scale=0.5 + number)
                other, expected = jitted(other, BATCH, width, mode="x", scale=0.5 + number)
                assert jax.tree.structure(aux) == jax.tree.structure(expected)
                assert bits((state, aux)) == bits((other, expected))
            assert twins_of(wrapped) == 2  # one for each width


def test_several_arguments_are_the_state(lone: Lone) -> None:
    optimizer = optax.adam(1e-2)

    def step(params: Any, batch: Any, *, moments: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    jitted = jax.jit(step, donate_argnames=("params", "moments"))
    params, like = jnp.ones((64, 64)), jnp.ones((64, 64))
    moments, other = optimizer.init(params), optimizer.init(like)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jitted, snapshotter, state=(0, "moments"))
        for _ in range(5):
            given, shape = bits((params, moments)), shape_of((params, moments))
            params, moments, loss = wrapped(params, BATCH, moments=moments)
            like, other, expected = jitted(like, BATCH, moments=other)
            assert bits((params, moments, loss)) == bits((like, other, expected))
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, shape)) == given
        assert twins_of(wrapped) == 1


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.two = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(self.dropout(nnx.relu(self.norm(self.one(x)))))


def net() -> tuple[Net, Any]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def fit_net(model: Any, optimizer: Any, batch: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.parametrize("kind", ["donates", "keeps", "plain"])
def test_a_step_of_flax_nnx(lone: Lone, kind: str) -> None:
    other = nnx.jit(fit_net, donate_argnums=(0, 1) if kind == "donates" else ())
    step: Any = fit_net if kind == "plain" else other
    (model, optimizer), reference = net(), net()
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter, state=(0, 1))
        for number in range(6):
            state = nnx.state((model, optimizer))
            given, like = bits(state), shape_of(state)
            loss = wrapped(model, optimizer, BATCH)
            assert bits(loss) == bits(other(*reference, BATCH))
            assert bits(nnx.state((model, optimizer))) == bits(nnx.state(reference))
            assert wrapped.receipt is not None
            assert wrapped.receipt.step == number
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
        assert twins_of(wrapped) == 1


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.relu(nn.Dense(32)(x)))


def test_a_train_state_of_linen_says_its_own_step(lone: Lone) -> None:
    module = Dense()

    def create() -> TrainState:
        params = module.init(jax.random.key(0), BATCH)
        return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-2))

    def step(state: TrainState, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(
            lambda params: jnp.mean(state.apply_fn(params, batch) ** 2)
        )(state.params)
        return state.apply_gradients(grads=gradients), loss

    jitted = jax.jit(step, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jitted, snapshotter)
        state, other = create(), create()  # step is a Python number at first
        steps = []
        for _ in range(5):
            state, loss = wrapped(state, BATCH)
            other, expected = jitted(other, BATCH)
            assert bits((state, loss)) == bits((other, expected))
            assert wrapped.receipt is not None
            steps.append(wrapped.receipt.step)
        jumped = state.replace(step=jnp.asarray(40, jnp.int32))
        wrapped(jumped, BATCH)
        steps.append(wrapped.receipt.step)
        assert steps == [0, 1, 2, 3, 4, 40]
        assert twins_of(wrapped) == 1


# ------------------------------------------------------------------------ leaves


@pytest.mark.parametrize("small", [False, True])
def test_every_dtype_keeps_its_bits_case_9(
    lone: Lone, small: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The step changes none of them but `n`: every bit pattern goes through both versions."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    by_rows, everywhere = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    state: dict[str, Any] = {"n": jax.device_put(jnp.int32(0), everywhere)}
    for name in (name for name in DTYPES if (name in SUB_BYTE_BITS) == small):
        host = every_pattern(name)
        state[name] = jax.device_put(host.reshape(16, -1), by_rows)
        state[f"{name} everywhere"] = jax.device_put(np.tile(host, 2), everywhere)

    def pass_on(state: Any) -> Any:
        return {**state, "n": state["n"] + 1}

    step = jax.jit(pass_on, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        train(snapshotter, wrapped, jax.jit(pass_on, donate_argnums=0), state, steps=4)
        # JAX 0.10 does not take elements of less than a byte for a program compiled ahead of time.
        disagree = ["layouts that disagree" in warning for warning in refused(caplog)]
        assert disagree in ([], [True] * small)
        assert twins_of(wrapped) == 1 - len(disagree)


def test_prng_keys_case_10(lone: Lone) -> None:
    mesh = mesh_of()
    everywhere = NamedSharding(mesh, P())

    def split(state: Any) -> Any:
        return {
            "key": jax.random.split(state["key"])[0],
            "rbg": state["rbg"],
            "keys": state["keys"],
            "x": state["x"] + jax.random.normal(state["key"], (4,)),
        }

    state = {
        "key": jax.random.key(1),
        "rbg": jax.random.key(2, impl="rbg"),
        "keys": jax.random.split(jax.random.key(3), 8),
        "x": jnp.zeros(4),
    }
    state = jax.device_put(state, everywhere)
    state["keys"] = jax.device_put(state["keys"], NamedSharding(mesh, P("a")))
    step = jax.jit(split, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for _ in range(5):
            given = jax.tree.map(jnp.copy, state)
            like = shape_of(state)
            state = wrapped(state)
            assert wrapped.receipt is not None
            assert_same(read_back(snapshotter, wrapped.receipt, like), given)
        assert twins_of(wrapped) == 1


def test_sharded_replicated_and_partly_replicated_case_20(lone: Lone) -> None:
    """Large enough that each of the devices that hold a leaf gives rows of its own."""
    mesh = mesh_of()
    rng = np.random.default_rng(1)

    def put(shape: tuple[int, ...], *spec: Any) -> Any:
        host = rng.normal(size=shape).astype(np.float32)
        return jax.device_put(host, NamedSharding(mesh, P(*spec)))

    state = {
        "everywhere": put((203, 200)),
        "partly": put((400, 402), "a"),
        "columns": put((37, 4000), None, "b"),
        "spread": put((800, 80), ("a", "b")),
        "few rows": put((3, 40_000)),
        "one row": put((1, 40_000)),
        "small": put((5,)),
        "scalar": put(()),
        "empty": put((0, 3)),
    }
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5 + 1, state), donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        other = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5 + 1, state))
        train(snapshotter, wrapped, other, state, steps=4)
        assert twins_of(wrapped) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_within_set_mesh_case_23(lone: Lone, axis_type: AxisType) -> None:
    mesh = mesh_of(axis_type, axis_type)
    with jax.set_mesh(mesh), lone.open(every=1) as snapshotter:
        state = {
            "w": jax.device_put(np.ones((300, 200), np.float32), NamedSharding(mesh, P("a"))),
            "z": jax.device_put(np.ones(8, np.complex64), NamedSharding(mesh, P("b"))),
        }
        step = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5, state), donate_argnums=0)
        wrapped = jaxft.wrap(step, snapshotter)
        other = jax.jit(lambda state: jax.tree.map(lambda x: x * 1.5, state))
        train(snapshotter, wrapped, other, state, steps=4)
        assert twins_of(wrapped) == 1


def test_leaves_that_are_not_in_the_program_case_21(lone: Lone) -> None:
    """NumPy arrays, numbers, and a number of rows that no number of devices divides."""
    mesh = mesh_of()
    state = {
        "w": jax.device_put(np.ones((331, 77), np.float32), NamedSharding(mesh, P())),
        "numpy": np.arange(5.0),
        "number": 7,
        "key": jax.random.key(0),  # committed nowhere: JAX moves it to the mesh in each call
    }

    def step(state: Any) -> Any:
        return state["w"] * 1.5 + state["numpy"][1] + state["number"]

    jitted = jax.jit(step)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jitted, snapshotter)
        for number in range(5):
            expected = jitted(state)
            like = {**shape_of(state), "numpy": np.zeros(5), "number": 0}
            result = wrapped(state)
            assert bits(result) == bits(expected)
            assert wrapped.receipt is not None
            state["numpy"] += 1  # in place, at once
            found = read_back(snapshotter, wrapped.receipt, like)
            assert found["numpy"].tolist() == [number + x for x in range(5)]
            assert found["number"] == 7 + number
            assert bits(found["key"]) == bits(state["key"])
            assert bits(found["w"]) == bits(state["w"])
            state = {**state, "w": result, "number": state["number"] + 1}
        assert twins_of(wrapped) == 1


# ------------------------------------------------------------------------ donation


def test_200_donating_steps_case_1(lone: Lone) -> None:
    """Each is a twin, and nobody waits for it before the next one is there to overwrite it."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    place = NamedSharding(mesh_of(), P("a"))
    state = jax.device_put(np.zeros((64, 64), np.float32), place)
    like = jax.ShapeDtypeStruct(state.shape, state.dtype, sharding=place)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for number in range(203):
            state = wrapped(state)
            if number >= 3:
                assert wrapped.receipt is not None
                found = read_back(snapshotter, wrapped.receipt, like)
                assert (np.asarray(found) == number).all()
        assert twins_of(wrapped) == 1


def test_the_twin_donates_and_so_does_the_step_after_it_case_6(lone: Lone) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    place = NamedSharding(mesh_of(), P("a"))
    state = step(jax.device_put(np.zeros((64, 64), np.float32), place))
    with lone.open(every=2) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for _ in range(6):
            before = state
            state = wrapped(before)
        assert before.is_deleted()
        where = [piece.data.unsafe_buffer_pointer() for piece in state.addressable_shards]
        for _ in range(6):
            state = wrapped(state)
            now = [piece.data.unsafe_buffer_pointer() for piece in state.addressable_shards]
            assert now == where
        assert twins_of(wrapped) == 1


# ------------------------------------------------------------------------ numbers and extras


def test_where_the_number_and_the_extras_come_from(lone: Lone) -> None:
    step = jax.jit(lambda x: x + 1)
    asked: list[int] = []

    def extras(x: Any) -> Any:
        asked.append(1)
        return {"position": int(x)}

    with lone.open(every=2) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter, extras=extras)
        x = jnp.int32(0)
        steps = []
        for said in (None, None, 7, None, None):
            x = wrapped(x) if said is None else wrapped(x, jaxft_step=said, jaxft_extras=[said])
            assert wrapped.receipt is not None
            steps.append(wrapped.receipt.step)
            if wrapped.receipt.skipped is None:
                wrapped.receipt.protected.result(WAIT_S)
        assert steps == [0, 1, 7, 8, 9]
        wrapped.receipt.protected.result(WAIT_S)
    with lone.open(every=2) as snapshotter:
        restored = snapshotter.restore(jnp.int32(0))
        assert restored is not None
        assert (restored.step, restored.extras) == (9, {"position": 4})
        wrapped = jaxft.wrap(step, snapshotter)
        wrapped(restored.state)
        assert wrapped.receipt is not None
        assert wrapped.receipt.step == 9
        by_argument = jaxft.wrap(step, snapshotter, step=lambda x: 100 + int(x))
        by_argument(x)
        assert by_argument.receipt is not None
        assert by_argument.receipt.step == 105


def test_a_budget_counts_the_twin_as_a_step(lone: Lone) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with lone.open(every=jaxft.Auto(overhead=1.0)) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        x = jnp.zeros(8)
        begun = []
        for number in range(45):
            x = wrapped(x)
            assert wrapped.receipt is not None
            if wrapped.receipt.skipped is None:
                wrapped.receipt.protected.result(WAIT_S)
                begun.append(number)
        assert begun[:4] == [0, 10, 20, 30]
        assert snapshotter._due.meter is not None
        assert snapshotter._due.meter.measured().step_s > 0
        assert x.tolist() == [45.0] * 8


# ------------------------------------------------------------------------ where there is no twin


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def assert_staged(
    lone: Lone, caplog: pytest.LogCaptureFixture, step: Any, reason: str, state: Any = None
) -> None:
    """The step is called as it is, snapshots are taken, and one warning says why."""
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        state = {"x": jnp.arange(4.0)} if state is None else state
        for _ in range(5):
            given, like = bits(state), shape_of(state)
            state = wrapped(state)
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
        assert twins_of(wrapped) == 0
    (warning,) = refused(caplog)
    assert "the step has no twin" in warning
    assert reason in warning


def test_a_step_with_host_code(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    losses = []

    def step(state: Any) -> Any:
        losses.append(float(state["x"].sum()))
        return {"x": state["x"] + 1}

    assert_staged(lone, caplog, step, "it cannot be jitted: ConcretizationTypeError")
    assert losses == [6.0, 10.0, 14.0, 18.0, 22.0]


def test_a_step_compiled_ahead_of_time(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    step = jax.jit(lambda state: {"x": state["x"] + 1}, donate_argnums=0)
    compiled = step.lower({"x": jnp.arange(4.0)}).compile()
    assert_staged(lone, caplog, compiled, "it is compiled ahead of time")


def test_a_step_with_compiler_options(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    options = {"xla_cpu_enable_fast_math": False}
    step = jax.jit(lambda state: {"x": state["x"] + 1}, compiler_options=options)
    assert_staged(lone, caplog, step, "compiler_options")


def test_a_version_of_jax_that_does_not_say(
    lone: Lone, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxft.device.calls.are_known", lambda: False)
    step = jax.jit(lambda state: {"x": state["x"] + 1})
    assert_staged(lone, caplog, step, "this version of JAX does not say")


def test_more_leaves_than_the_limit(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
    state = [jnp.float32(number) for number in range(twins.LEAVES_MAX + 1)]
    assert_staged(lone, caplog, step, "1001 leaves, and the limit is 1000", state)


def test_arrays_on_several_sets_of_devices(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    """No one program has them: the step is two."""
    first, second = jax.devices()[:2]
    one = jax.jit(lambda x: x + 1, donate_argnums=0)

    def step(state: Any) -> Any:
        return {"a": one(state["a"]), "b": one(state["b"])}

    state = {"a": jax.device_put(np.ones(3), first), "b": jax.device_put(np.ones(3), second)}
    assert_staged(lone, caplog, step, "it cannot be jitted: ValueError", state)


def test_the_steps_own_error_comes_through(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Exception):
        pass

    def step(x: Any, fail: bool) -> Any:
        if fail:
            raise Mine("of the step")
        return x + 1

    with lone.open(every=1) as snapshotter:
        for wrapped in (
            jaxft.wrap(jax.jit(step, static_argnums=1), snapshotter),
            jaxft.wrap(step, snapshotter, static_argnums=1),
        ):
            x = jnp.arange(3.0)
            for number in range(6):
                if number in (2, 5):
                    with pytest.raises(Mine, match="of the step"):
                        wrapped(x, True)
                x = wrapped(x, False)
            assert x.tolist() == [6.0, 7.0, 8.0]
            with pytest.raises(TypeError, match="missing 1 required positional argument"):
                wrapped(x)
    assert refused(caplog) == []


def test_a_leaf_that_cannot_be_copied_is_in_the_receipt(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(lambda x: x + 1), snapshotter)
        x = wrapped(jnp.zeros(3))
        assert wrapped.receipt is not None
        wrapped.receipt.protected.result(WAIT_S)
        with monkeypatch.context() as patched:

            def fail(*_: Any) -> Any:
                raise jaxft.StagingError("leaf x could not be copied")

            patched.setattr("jaxft.snapshotter.stage_leaves", fail)
            patched.setattr(transfer, "_views_of_some", fail)
            for _ in range(4):
                x = wrapped(x)
                error = wrapped.receipt.protected.exception(WAIT_S)
                assert isinstance(error, jaxft.StagingError)
        x = wrapped(x)
        wrapped.receipt.protected.result(WAIT_S)
        assert x.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": ()}, r"state=\(\)"),
        ({"state": 1.5}, "state=1.5"),
        ({"state": None}, "state=None"),
        ({"state": (0, 0)}, "each once"),
        ({"step": 3}, "step=3"),
        ({"extras": {}}, "extras={}"),
        ({"donate_argnums": 0}, "it where it is jitted"),
    ],
)
def test_options_that_cannot_work(lone: Lone, options: dict[str, Any], message: str) -> None:
    with lone.open() as snapshotter, pytest.raises(jaxft.ConfigError, match=message):
        jaxft.wrap(jax.jit(operator.neg), snapshotter, **options)


@pytest.mark.parametrize("name", ["params", 2, -1])
def test_an_argument_that_is_not_there(lone: Lone, name: int | str) -> None:
    message = r"has no such argument, it has \(state, batch\)"
    step = jax.jit(lambda state, batch: state + batch)
    with lone.open() as snapshotter, pytest.raises(jaxft.ConfigError, match=message):
        jaxft.wrap(step, snapshotter, state=name)


def test_an_argument_that_a_call_lacks(lone: Lone) -> None:
    with lone.open() as snapshotter:
        wrapped = jaxft.wrap(jax.jit(lambda **leaves: leaves), snapshotter, state="params")
        with pytest.raises(jaxft.ConfigError, match="names the argument 'params'"):
            wrapped(other=jnp.ones(2))


@pytest.mark.parametrize("name", [0, "state"])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_state_is_found_either_way(lone: Lone, name: int | str, by_name: bool) -> None:
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(lambda state, batch: state + batch), snapshotter, state=name)
        state = jnp.arange(3.0)
        for _ in range(3):
            given = bits(state)
            state = wrapped(state=state, batch=1.0) if by_name else wrapped(state, 1.0)
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, shape_of(state))) == given


def test_what_is_no_snapshotter() -> None:
    with pytest.raises(jaxft.ConfigError, match="expected a Snapshotter"):
        jaxft.wrap(jax.jit(operator.neg), "train")  # type: ignore[arg-type]


def test_a_twin_with_callbacks_is_run_and_not_kept(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX does not write such a program down."""
    said = []

    def look(total: Any) -> None:
        said.append(float(total))

    @jax.jit
    def step(state: Any) -> Any:
        jax.debug.callback(look, state.sum())
        return state + 1

    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        state = jnp.zeros(2)
        for _ in range(4):
            given = bits(state)
            state = wrapped(state)
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, shape_of(state))) == given
        jax.effects_barrier()
        assert twins_of(wrapped) == 1
    assert sorted(said) == [0.0, 2.0, 4.0, 6.0]
    (warning,) = [one for one in caplog.messages if "could not be kept" in one]
    assert "compiled again by the next start" in warning


class Others:
    """Ranks that answer as they are told to; what this one says is noted."""

    def __init__(self, wrapped: WrappedStep, *nos: str) -> None:
        wrapped._twins._agreement = self  # type: ignore[assignment]
        self.nos = nos
        self.heard: list[tuple[str, int, bool]] = []

    def all_say(self, question: str, number: int, yes: bool, timeout_s: float) -> bool:
        self.heard.append((question, number, yes))
        return yes and question not in self.nos


def test_a_leaf_that_one_rank_cannot_take_is_known_before_any_runs_the_twin(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that rank would run the step while the others run another program."""
    step = jax.jit(lambda state: {**state, "x": state["x"] + 1})
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        others = Others(wrapped)
        state = {"x": jnp.zeros(3), "beside": np.arange(3)}
        for number in range(6):
            with monkeypatch.context() as patched:
                if number in (1, 3):  # at the call that it is made for, and at a later one

                    def fail(*_: Any) -> Any:
                        raise jaxft.StagingError("beside could not be copied")

                    patched.setattr(transfer, "_views_of_some", fail)
                    patched.setattr("jaxft.snapshotter.stage_leaves", fail)
                state = {**state, "x": wrapped(state)["x"]}
            assert wrapped.receipt is not None
            failed = isinstance(wrapped.receipt.protected.exception(WAIT_S), jaxft.StagingError)
            assert (failed, wrapped.has_twin) == (number in (1, 3), number in (2, 4, 5))
        assert state["x"].tolist() == [6.0] * 3
    said = [yes for question, _, yes in others.heard if question == "run"]
    assert said == [False, True, False, True, True]


def not_taken(*_: Any) -> Any:
    raise TypeError("compiled for other arguments")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_alone", [True, False])
def test_arguments_that_jax_does_not_take_on_one_rank_or_on_all(
    lone: Lone, is_first: bool, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone cannot go on: the others are in another program, and wait for it there."""
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(lambda x: x + 1), snapshotter)
        others = Others(wrapped, *["not taken"] * is_alone)
        x = wrapped(jnp.zeros(3))
        if not is_first:
            x = wrapped(wrapped(x))
            assert wrapped.has_twin
            asked = [yes for question, _, yes in others.heard if question == "not taken"]
            assert asked == [False]  # once: a program that was taken is taken again
            (twin,) = wrapped._twins._twins.values()
            monkeypatch.setattr(twin, "compiled", not_taken)
        else:
            made = twins.LoweredTwin.twin

            def unusable(lowered: Any, compiled: Any) -> Any:
                twin = made(lowered, compiled)
                monkeypatch.setattr(twin, "compiled", not_taken)
                return twin

            monkeypatch.setattr(twins.LoweredTwin, "twin", unusable)
            monkeypatch.setattr(twins, "missing_bytes", lambda compiled, devices: 0)
        if is_alone:
            with pytest.raises(jaxft.JaxftError, match="other ranks run it"):
                wrapped(x)
            with contextlib.suppress(jaxft.SnapshotError):
                snapshotter.close()
            return
        before = x.tolist()
        for _ in range(2):
            x = wrapped(x)
            assert not wrapped.has_twin
        assert x.tolist() == [number + 2 for number in before]


def test_other_ranks_that_never_take_part(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(lambda x: x + 1), snapshotter)
        others = Others(wrapped, "build")
        x = jnp.zeros(3)
        for _ in range(10):
            x = wrapped(x)
            assert wrapped.receipt is not None
            wrapped.receipt.protected.result(WAIT_S)
        assert x.tolist() == [10.0] * 3
    # The first call is like none before it, and this rank says no itself.
    asked = [("build", number, number > 0) for number in range(1 + twins.TRIES_MAX)]
    assert others.heard == asked
    (warning,) = refused(caplog)
    assert "the other ranks do not run it" in warning


# ------------------------------------------------------------------------ kept on disk


def test_a_restart_does_not_compile(
    lone: Lone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles: list[int] = []
    compile_twin = twins.LoweredTwin.compile

    def counted(lowered: Any) -> Any:
        compiles.append(1)
        return compile_twin(lowered)

    monkeypatch.setattr(twins.LoweredTwin, "compile", counted)
    for _ in range(2):
        step = jax.jit(update, donate_argnums=0)
        with lone.open(every=1) as snapshotter:
            wrapped = jaxft.wrap(step, snapshotter, cache_dir=tmp_path / "kept")
            train(snapshotter, wrapped, jax.jit(update), first_state(sharded), jnp.asarray(BATCH))
            assert twins_of(wrapped) == 1
    assert len(compiles) == 1
    assert len(list((tmp_path / "kept").iterdir())) == 2  # the twin, and the step itself
