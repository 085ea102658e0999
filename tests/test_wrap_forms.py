"""Steps of all forms are wrapped, and what users do to them changes no bit and no snapshot."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from jaxft.wrapped import twins
from tests.multiprocess.jax_world import WAIT_S
from tests.multiprocess.lone import Lone, read_back
from tests.test_wrap import bits, copied, mesh_of, refused, replicated, shape_of, train, twins_of


def update(state: Any, x: Any) -> Any:
    return {"w": jnp.tanh(state["w"] * 1.01 + x), "n": state["n"] + 1}, x * 2


def first_state() -> Any:
    return {"w": jnp.full((64, 64), 0.1), "n": jnp.int32(0)}


class Trainer:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def jitted(self, state: Any, x: Any) -> Any:
        return update(state, x * self.scale)

    def plain(self, state: Any, x: Any) -> Any:
        return update(state, x * self.scale)

    __call__ = jitted


def scaled(scale: float, state: Any, x: Any, *, more: float = 0.0) -> Any:
    return update(state, x * scale + more)


FORMS: dict[str, Callable[[], Any]] = {
    "jitted method": lambda: Trainer().jitted,
    "jitted __call__": Trainer,
    "partial": lambda: functools.partial(jax.jit(scaled, donate_argnums=1), 2.0),
    "partial of a static argument": lambda: functools.partial(
        jax.jit(scaled, static_argnums=0, donate_argnums=1), 2.0
    ),
    "partial by name": lambda: functools.partial(
        jax.jit(scaled, donate_argnums=1, static_argnames="more"), 2.0, more=0.5
    ),
    "plain method": lambda: Trainer().plain,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_what_it_calls(lone: Lone, form: str, caplog: pytest.LogCaptureFixture) -> None:
    step, other = FORMS[form](), FORMS[form]()
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        train(
            snapshotter,
            wrapped,
            jax.jit(other) if form == "plain method" else other,
            first_state(),
            0.5,
            steps=4,
        )
        assert twins_of(wrapped) == 1
        state = first_state()
        wrapped(state, 0.5)
        assert state["w"].is_deleted() == (form != "plain method")
    assert refused(caplog) == []


class Model(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((8, 8)))


def fit(scale: float, model: Model, x: Any) -> Any:
    model.w[...] = jnp.tanh(model.w[...] + x * scale)
    return x


@pytest.mark.parametrize("kind", ["a partial", "without a graph"])
def test_other_steps_of_flax_nnx(lone: Lone, kind: str) -> None:
    def made() -> Any:
        if kind == "a partial":
            return functools.partial(nnx.jit(fit, donate_argnums=1), 0.5)
        return nnx.jit(functools.partial(fit, 0.5), graph=False, donate_argnums=0)

    model, reference, other = Model(), Model(), made()
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(made(), snapshotter)
        for _ in range(4):
            given, like = bits(nnx.state(model)), shape_of(nnx.state(model))
            wrapped(model, 0.1)
            other(reference, 0.1)
            assert bits(nnx.state(model)) == bits(nnx.state(reference))
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
        assert twins_of(wrapped) == 1


def fit_model(model: Model, x: Any) -> Any:
    model.w[...] = model.w[...] * 1.01 + x.mean()
    return model.w[...].sum()


def cached(step: Any, *arguments: Any) -> Any:
    with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
        return nnx.cached_partial(step, *arguments)


def by_mean(state: Any, x: Any) -> Any:
    return update(state, x.mean())


MODEL = Model()

HOLDING: dict[str, Callable[[], Any]] = {
    "arrays": lambda: functools.partial(jax.jit(by_mean), first_state()),
    "arrays in a closure": lambda: (lambda state: jax.jit(lambda x: by_mean(state, x)))(
        first_state()
    ),
    "a module": lambda: functools.partial(nnx.jit(fit_model), Model()),
    "a module in a closure": lambda: (lambda model: lambda x: nnx.jit(fit_model)(model, x))(
        Model()
    ),
    "a global module": lambda: lambda x: nnx.jit(fit_model)(MODEL, x),
    "a module in a cache": lambda: cached(
        nnx.jit(fit_model, graph=True, graph_updates=True), Model()
    ),
}


@pytest.mark.parametrize("what", HOLDING)
@pytest.mark.parametrize("is_due", [True, False])
def test_a_step_that_holds_its_state_is_refused(lone: Lone, what: str, is_due: bool) -> None:
    """The argument 0 is the batch then, and no snapshot of that is kept."""
    with lone.open(every=1 if is_due else 10) as snapshotter:
        if not is_due:
            snapshotter.save(0, jnp.ones((3, 5))).protected.result(WAIT_S)
        before = snapshotter.latest
        wrapped = jaxft.wrap(HOLDING[what](), snapshotter)
        with pytest.raises(jaxft.ConfigError, match=r"state=0: .* is not saved.*state=\(0, 1\)"):
            wrapped(jnp.ones((3, 5)))
        assert snapshotter.latest == before
        assert MODEL.w[...].shape == (8, 8)  # tracing has not taken it apart
        with contextlib.suppress(jaxft.SnapshotError):
            snapshotter.close()


def test_a_batch_in_place_of_the_state_is_told(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(lambda x, state: by_mean(state, x)), snapshotter)
        for _ in range(3):
            wrapped(jnp.ones((3, 5)), first_state())
    (warning,) = refused(caplog)
    assert "state=0: nothing of it" in warning


def test_modules_that_a_step_holds_beside_its_state_are_told(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    def distil(teacher: Model, state: Any, x: Any) -> Any:
        return by_mean(state, x + teacher.w[...].mean())

    def distil_module(teacher: Model, student: Model, x: Any) -> Any:
        return fit_model(student, x + teacher.w[...].mean())

    with lone.open(every=1) as snapshotter:
        for step, state in ((distil, first_state()), (distil_module, Model())):
            wrapped = jaxft.wrap(functools.partial(nnx.jit(step), Model()), snapshotter)
            for _ in range(3):
                wrapped(state, jnp.ones(3))
            assert wrapped.has_twin
            (warning,) = refused(caplog)
            assert "the step holds nnx modules" in warning
            caplog.clear()


def test_a_state_that_is_changed_in_place_is_one(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    def step(state: Any, x: Any) -> None:
        state["w"] = state["w"] * float(x)

    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for _ in range(3):
            wrapped(state := {"w": jnp.ones((3, 3))}, 2.0)
            assert state["w"][0, 0] == 2.0
    (warning,) = refused(caplog)
    assert "it cannot be jitted" in warning


def test_a_plain_function_around_one_that_donates_is_told_so(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    inner = jax.jit(update, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(lambda state, x: inner(state, x), snapshotter)
        train(snapshotter, wrapped, inner, first_state(), 0.5, steps=3)
    (warning,) = refused(caplog)
    assert "say wrap(..., donate_argnums=...)" in warning


def test_a_wrapped_step_is_not_wrapped_and_not_traced(lone: Lone) -> None:
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(update), snapshotter)
        with pytest.raises(jaxft.ConfigError, match="it is wrapped already"):
            jaxft.wrap(wrapped, snapshotter)
        over_batch = jax.vmap(lambda x: wrapped(first_state(), x))
        ways: list[Callable[..., Any]] = [
            jax.jit(wrapped),
            functools.partial(jax.eval_shape, wrapped),
            lambda state, x: jax.lax.scan(lambda state, x: wrapped(state, x), state, jnp.ones(3)),
            lambda state, x: over_batch(jnp.ones(3)),
            lambda state, x: jax.grad(lambda x: wrapped(state, x)[1])(x),
        ]
        for _ in range(2):  # before its first call, and after some
            for around in ways:
                with pytest.raises(jaxft.ConfigError, match="called within jit"):
                    around(first_state(), 0.5)
            train(snapshotter, wrapped, jax.jit(update), first_state(), 0.5, steps=3)


def test_two_wrapped_steps_take_turns(lone: Lone) -> None:
    """As a step of a generator and one of a discriminator do."""
    halve = jax.jit(lambda state: ({**state, "w": state["w"] * 0.5}, 0.0), donate_argnums=0)
    step = jax.jit(update, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        first, second = jaxft.wrap(step, snapshotter), jaxft.wrap(halve, snapshotter)
        state, other = first_state(), first_state()
        for number in range(8):
            given, like = bits(state), shape_of(state)
            wrapped = (first, second)[number % 2]
            more = () if number % 2 else (0.5,)
            state, _ = wrapped(state, *more, jaxft_step=number)
            other, _ = (step, halve)[number % 2](other, *more)
            assert bits(state) == bits(other)
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
        assert (twins_of(first), twins_of(second)) == (1, 1)


# ------------------------------------------------------------------------ states


def grow(state: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 2 + 1, state)


def test_a_state_that_changes_on_the_way_case_7(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    """Its structure, a dtype, a sharding, a shape; the fifth kind of call has no twin any more."""
    changes: dict[int, Callable[[Any], Any]] = {
        3: lambda state: {**state, "b": jnp.zeros(7)},
        6: lambda state: {**state, "w": state["w"].astype(jnp.bfloat16)},
        9: lambda state: {name: replicated(leaf) for name, leaf in state.items()},
        12: lambda state: {**state, "w": state["w"][:40]},
    }
    step = jax.jit(grow, donate_argnums=0)
    state = {"w": jnp.ones((64, 64))}
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for number in range(15):
            state = changes.get(number, lambda state: state)(state)
            given, like = bits(state), shape_of(state)
            expected = bits(jax.jit(grow)(state))
            state = wrapped(state)
            assert bits(state) == expected
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
            assert wrapped.has_twin == (number < 12 and number % 3 > 0)
    (warning,) = refused(caplog)
    assert "called in more than 4 ways" in warning


@flax.struct.dataclass
class Moded:
    w: Any
    mode: str = flax.struct.field(pytree_node=False)


ODD: dict[str, Callable[[], Any]] = {
    "weak types": lambda: {"float": jnp.asarray(1.0), "int": jnp.asarray(1)},
    "Python's numbers": lambda: {"float": 1.0, "int": 1},
    "NumPy at first": lambda: {"w": np.ones((40, 40), np.float32), "n": np.int32(1)},
    "no elements": lambda: replicated_all({"none": np.zeros((0, 3)), "one": np.ones((1, 1))}),
    "static fields": lambda: Moded(jnp.ones(8), "a mode"),
    "a key in a list": lambda: [jnp.ones(3), ({},), None],
}


def replicated_all(tree: Any) -> Any:
    return jax.tree.map(replicated, tree)


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_state_case_11(lone: Lone, kind: str) -> None:
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(grow, donate_argnums=0), snapshotter)
        other = jax.jit(grow, donate_argnums=0)
        state = ODD[kind]()
        mine, theirs = copied(state), copied(state)
        for _ in range(4):
            given, like = bits(mine), shape_of(mine)
            mine, theirs = wrapped(mine), other(theirs)
            assert bits(mine) == bits(theirs)
            weak = [[one.weak_type for one in jax.tree.leaves(tree)] for tree in (mine, theirs)]
            assert weak[0] == weak[1]
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
        assert twins_of(wrapped) == 1


def test_a_state_of_numpy_is_restored_into_what_the_script_begins_with(lone: Lone) -> None:
    bare = jax.jit(grow)
    for begun in (0, 3):
        state = {"w": np.ones((40, 40)), "n": np.int32(1), "count": 1}
        with lone.open(every=1) as snapshotter:
            restored = snapshotter.restore(state)
            assert (restored is None) == (begun == 0)
            if restored is not None:
                state = restored.state
                assert restored.step == begun
            wrapped = jaxft.wrap(jax.jit(grow), snapshotter)
            for number in range(begun, 4):
                expected = bits(bare(state))
                state = wrapped(state)
                assert bits(state) == expected
                assert wrapped.receipt is not None
                assert wrapped.receipt.step == number
                if wrapped.receipt.skipped is None:  # what was restored is saved already
                    wrapped.receipt.protected.result(WAIT_S)


@pytest.mark.parametrize("kind", ["nothing", "no elements", "NumPy"])
def test_a_state_without_arrays_of_the_program(
    lone: Lone, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"nothing": {}, "no elements": jnp.zeros((0, 3)), "NumPy": np.ones(3, np.float32)}[kind]
    step = jax.jit(lambda state, x: x + sum(map(jnp.sum, jax.tree.leaves(state))))
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for _ in range(4):
            assert bits(wrapped(state, 1.0)) == bits(step(state, 1.0))
            assert wrapped.receipt is not None
            found = read_back(snapshotter, wrapped.receipt, state)
            assert bits(found) == bits(state)
    *told, warning = refused(caplog)
    assert "no array of the state is an argument" in warning
    assert ["nothing of it is among" in one for one in told] == [True] * (kind != "nothing")


def test_a_leaf_that_the_step_moves_is_staged_where_it_lies(lone: Lone) -> None:
    """An array that is committed nowhere, which the step spreads over devices in each call."""
    spread = NamedSharding(mesh_of(), P("a"))
    frozen = jnp.asarray(np.random.default_rng(0).normal(size=(640, 64)).astype("f4"))
    jitted = functools.partial(jax.jit, in_shardings=spread, out_shardings=spread)
    step: Any = jitted(lambda state: {**state, "w": state["w"] * 1.5 + state["frozen"]})
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        w = jax.device_put(jnp.ones((640, 64)), spread)
        for _ in range(4):
            state = {"w": w, "frozen": frozen}
            given, like = bits(state), shape_of(state)
            outputs = wrapped(state)
            assert bits(outputs) == bits(step(state))
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given
            w = outputs["w"]
        assert twins_of(wrapped) == 1


def test_a_state_within_a_dict_says_its_step_without_being_waited_for(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    kind: Any = type(jnp.int32(0))
    as_int = kind.__int__

    def counted(value: Any) -> int:
        read.append(value)
        return int(as_int(value))

    monkeypatch.setattr(kind, "__int__", counted)
    state = TrainState(
        step=jnp.int32(5),
        apply_fn=None,  # type: ignore[arg-type]
        params=jnp.ones(3),
        tx=None,  # type: ignore[arg-type]
        opt_state=(),
    )
    step = jax.jit(lambda state: {"new": [state.replace(step=state.step + 1)], "loss": 1.0})
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        for number in range(5, 9):
            (state,) = wrapped(state)["new"]
            assert wrapped.receipt is not None
            assert wrapped.receipt.step == number
            wrapped.receipt.protected.result(WAIT_S)
    assert len(read) == 1


# ------------------------------------------------------------------------ what is around


def test_what_is_set_around_a_call_is_part_of_its_program(lone: Lone) -> None:
    """The text of the step is the same, and what it computes is not."""
    step = jax.jit(lambda w: jnp.tanh(w @ w * 0.01))
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        w = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)).astype("f4"))
        for number in range(8):
            with jax.default_matmul_precision("BF16_BF16_F32" if number % 2 else "float32"):
                expected = step(w)
                w = wrapped(w)
            assert bits(w) == bits(expected)
        assert twins_of(wrapped) == 2


def test_a_step_that_is_debugged_runs_by_itself(lone: Lone) -> None:
    @jax.jit
    def step(x: Any) -> Any:
        return jnp.log(x - 1) * 30

    ways: dict[str, Callable[[], Any]] = {
        "disable_jit": jax.disable_jit,
        "debug_nans": jax.debug_nans,
        "nothing": contextlib.nullcontext,
    }
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        x = jnp.linspace(50, 60, 1000)
        for _ in range(3):
            for name, way in ways.items():
                given = bits(x)
                with way():
                    found, expected = wrapped(x), step(x)
                assert bits(found) == bits(expected)
                assert wrapped.receipt is not None
                assert bits(read_back(snapshotter, wrapped.receipt, shape_of(x))) == given
                assert wrapped.has_twin <= (name == "nothing")
        assert wrapped.has_twin
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            wrapped(jnp.zeros(1000))
        assert bits(wrapped(x)) == bits(step(x))


def test_within_checking_leaks(lone: Lone) -> None:
    with jax.checking_leaks(), lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(update, donate_argnums=0), snapshotter)
        train(snapshotter, wrapped, jax.jit(update), first_state(), 0.5, steps=3)
        assert twins_of(wrapped) == 1


@pytest.mark.filterwarnings("ignore:.*pmap.*")
def test_steps_of_shard_map_and_pmap(lone: Lone) -> None:
    mesh, spec = mesh_of(), P("a", "b")

    def each(w: Any) -> Any:
        return w * 1.1 + jax.lax.psum(w.sum(), ("a", "b")) * 1e-6

    def by_pmap(w: Any) -> Any:
        return w * 1.5 + jax.lax.pmean(w, "i")

    w = np.random.default_rng(0).normal(size=(64, 64)).astype("f4")
    mapped = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(jax.jit(mapped, donate_argnums=0), snapshotter)
        place = NamedSharding(mesh, spec)
        train(snapshotter, wrapped, jax.jit(mapped), jax.device_put(w, place), steps=3)
        assert twins_of(wrapped) == 1
        bare = jax.pmap(by_pmap, axis_name="i")
        wrapped = jaxft.wrap(jax.pmap(by_pmap, axis_name="i"), snapshotter)
        x = other = bare(w[:8])
        for number in range(3):
            given, like = bits(x), shape_of(x)
            x, other = wrapped(x, jaxft_step=3 + number), bare(other)
            assert bits(x) == bits(other)
            assert wrapped.receipt is not None
            assert bits(read_back(snapshotter, wrapped.receipt, like)) == given


# ------------------------------------------------------------------------ what goes wrong


def test_a_state_that_was_donated_before_is_the_callers_error(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    step = jax.jit(update, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        state = gone = first_state()
        for _ in range(3):
            gone = state
            state, _ = wrapped(state, 0.5)
        for call in (step, wrapped):
            with pytest.raises((RuntimeError, ValueError), match="deleted"):
                call(gone, 0.5)
        for _ in range(2):  # the first is called by the same number, whose snapshot has failed
            state, _ = wrapped(state, 0.5)
        assert wrapped.has_twin
        assert wrapped.receipt is not None
        wrapped.receipt.protected.result(WAIT_S)
    assert refused(caplog) == []


def test_ordered_callbacks_have_no_twin(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:
    said = []

    @jax.jit
    def step(x: Any) -> Any:
        io_callback(lambda total: said.append(float(total)), None, x.sum(), ordered=True)
        return x + 1

    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        x = jnp.zeros(2)
        for _ in range(4):
            x = wrapped(x)
            assert wrapped.receipt is not None
            wrapped.receipt.protected.result(WAIT_S)
        jax.effects_barrier()
    assert said == [0.0, 2.0, 4.0, 6.0]
    (warning,) = refused(caplog)
    assert "it has ordered callbacks" in warning


def test_a_twin_that_does_not_fit_is_not_run(
    lone: Lone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that is full is no reason for training to end."""
    monkeypatch.setattr(twins, "missing_bytes", lambda compiled, devices: 7)
    step = jax.jit(update, donate_argnums=0)
    with lone.open(every=1) as snapshotter:
        wrapped = jaxft.wrap(step, snapshotter)
        train(snapshotter, wrapped, jax.jit(update), first_state(), 0.5, steps=3)
        assert not wrapped.has_twin
    (warning,) = refused(caplog)
    assert "it wants 7 bytes more of device memory than are free" in warning
