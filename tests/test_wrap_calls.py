"""Calls of a wrapped step that look alike and are not, and what number each of them has."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import pytest

import jaxft
from tests.multiprocess.lone import Lone, read_back
from tests.test_wrap import bits, refused, shape_of, twins_of


def checked(snapshotter: Any, wrapped: Any, state: Any, *args: Any) -> Any:
    """Calls it, and sees that the snapshot is of the state that it was given."""
    given, like = bits(state), shape_of(state)
    outputs = wrapped(state, *args)
    assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
    return outputs


def test_leaves_that_are_one_array_in_some_calls(lone: Lone) -> None:
    """A target that is set to the weights, also by the call for which a twin is made."""
    step = jax.jit(lambda state, x: {"target": state["target"], "w": state["w"] * 1.01 + x})
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        state = {"w": jnp.arange(64.0), "target": jnp.ones(64)}
        for call in range(8):
            if call % 3 == 1:
                state = {**state, "target": state["w"]}
            state = checked(snapshotter, wrapped, state, 0.5)
        assert twins_of(wrapped) == 1


@pytest.mark.parametrize("is_first", [False, True])
def test_an_argument_that_is_the_state_in_some_calls(lone: Lone, is_first: bool) -> None:
    def step(state: Any, other: Any) -> Any:
        return jax.tree.map(lambda a, b: a * 1.01 + b, state, other)

    place = 1 if is_first else 0
    jitted = jax.jit(lambda *args: step(args[place], args[1 - place]))
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jitted, snapshotter, state=place)
        state, other = {"w": jnp.arange(64.0)}, {"w": jnp.ones(64)}
        for call in range(8):
            if call % 3 == 1:
                other = state
            given, like = bits(state), shape_of(state)
            arguments = (other, state) if is_first else (state, other)
            outputs = wrapped(*arguments)
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
            assert bits(outputs) == bits(jitted(*arguments))
            state = outputs
        assert twins_of(wrapped) >= 1


def test_static_arguments_that_are_equal_and_of_other_types(lone: Lone) -> None:
    def scaled(state: Any, scale: Any) -> Any:
        return state * scale + (0 if isinstance(scale, int) else 0.5)

    step, bare = (jax.jit(scaled, static_argnums=1) for _ in range(2))
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        state = jnp.arange(3)
        for scale in (1, 1, 1.0, 1.0, True):
            mine, own = wrapped(state, scale), bare(state, scale)
            assert (mine.dtype, mine.tolist()) == (own.dtype, own.tolist())


@pytest.mark.parametrize("commits", [False, True])
def test_a_leaf_that_comes_from_another_device(
    lone: Lone, commits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with jax.default_device(jax.devices()[1]):
        backbone = jnp.arange(100.0)
    head = jnp.ones(100)
    if commits:
        head = jax.device_put(head, jax.devices()[0])
    step = jax.jit(lambda state: {**state, "head": state["head"] * 1.01 + state["backbone"]})
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for _ in range(4):
            head = checked(snapshotter, wrapped, {"backbone": backbone, "head": head})["head"]
        assert wrapped.has_twin
    assert refused(caplog) == []


def test_a_default_device_that_is_another_one(lone: Lone) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 1.01, state))
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        with jax.default_device(jax.devices()[3]):
            for _ in range(4):
                checked(snapshotter, wrapped, {"w": jnp.arange(64.0)})
            state = {"w": jax.device_put(jnp.arange(64.0), jax.devices()[0])}
            for _ in range(3):
                checked(snapshotter, wrapped, state)


def test_calls_are_counted_over_all_wrapped_steps(lone: Lone) -> None:
    def made(snapshotter: Any) -> Any:
        return jaxft.wrap(jax.jit(lambda state: state + 1), snapshotter)

    with lone.open(every=1) as snapshotter:
        state = jnp.zeros(3)
        first, second = made(snapshotter), made(snapshotter)
        for step in (first, first, second, first, second, made(snapshotter), made(snapshotter)):
            number = int(state[0])
            state = step(state)
            assert (step.receipt.step, step.receipt.id is not None) == (number, True)
        snapshotter.save(7, state)
        again = made(snapshotter)
        again(state)
        assert again.receipt.step == 7


@flax.struct.dataclass
class Accumulating:
    w: Any
    step: Any


def test_a_state_whose_step_does_not_grow_in_each_call(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers after a restart are those that the calls would have had without one."""
    jitted = jax.jit(
        lambda state: Accumulating(state.w + 1, state.step + (state.w[0] % 4 == 3).astype(int))
    )

    def run(state: Accumulating, calls: int) -> tuple[list[int], Accumulating]:
        numbers = []
        with lone.open(every=1) as snapshotter:
            restored = snapshotter.restore(state)
            if restored is not None:
                state = restored.state
                assert restored.step == int(state.w[0])
            wrapped = jaxft.wrap(jitted, snapshotter)
            for _ in range(calls):
                state = wrapped(state)
                numbers.append(wrapped.receipt.step)
            wrapped.receipt.protected.result(30)
        return numbers, state

    first = Accumulating(jnp.zeros(3), jnp.int32(0))
    assert run(first, 7)[0] == list(range(7))
    lone.enter()
    assert run(first, 3)[0] == [6, 7, 8]
    assert "does not grow in each call" in caplog.text
