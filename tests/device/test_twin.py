"""The twin computes what the step computes, and gives the owned bytes of what it was given."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.demo import data, model
from jaxft.device.calls import Call
from jaxft.device.mesh import make_mesh
from jaxft.device.shards import Plan, make_plan
from jaxft.device.transfer import StagedLeaves, Staging
from jaxft.device.twin import LoweredTwin, NotTaken, Outputs, Twin
from tests.device.snapshots import as_seen_by, processes, stage

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def put(shape: tuple[int, ...], *spec: Any) -> jax.Array:
    host = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.device_put(host, NamedSharding(MESH, P(*spec)))


def step_of(**options: Any) -> Any:
    return jax.jit(
        lambda state, x: (jax.tree.map(lambda leaf: leaf * 0.5 + x, state), x * 2), **options
    )


def lowered(step: Any, plan: Plan, state: Any, *others: Any) -> tuple[LoweredTwin, Call]:
    call = Call(step, (state, *others), {})
    outputs = Outputs.of(jax.jit(lambda *given: step(*given))(state, *others))
    return LoweredTwin(call, outputs, plan, jax.tree.leaves(state)), call


def twin_of(step: Any, plan: Plan, state: Any, *others: Any) -> tuple[Twin, Call]:
    made, call = lowered(step, plan, state, *others)
    return made.twin(made.compile()), call


def run(
    made: LoweredTwin, call: Call, values: list[Any], staging: Staging = "view"
) -> tuple[StagedLeaves, Any]:
    twin = made.twin(made.compile())
    return twin.run(call, twin.hold(values, staging))


def part(staged: Any, plan: Plan) -> bytes:
    dest = np.full(plan.length, 0x5A, np.uint8)
    staged.copy_into(dest)
    return dest.tobytes()


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_each_process_of_a_world_gets_what_it_owns_case_20(count: int) -> None:
    """One process plays each of several: it runs all devices' parts and takes its own."""
    state = {
        "everywhere": put((331, 61)),
        "partly": put((404, 101), "a"),
        "spread": put((800, 80), ("a", "b")),
        "columns": put((37, 4000), None, "b"),
        "few": put((3, 30_000)),
        "small": put((7,)),
        "scalar": put(()),
    }
    step = step_of()
    programs = set()
    for index in range(count):
        plan = make_plan(as_seen_by(state, index, count), processes(index, count))
        made, call = lowered(step, plan, state, 0.25)
        programs.add(made.text)
        staged, outputs = run(made, call, jax.tree.leaves(state))
        assert part(staged, plan) == part(stage(plan, state, "view"), plan)
        expected = step(state, 0.25)
        for have, want in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
            assert np.asarray(have).tobytes() == np.asarray(want).tobytes()
    assert len(programs) == 1, "all processes run the same program"


def test_the_device_needs_no_more_memory_than_the_owned_bytes() -> None:
    """On CPU the host's memory is the device's: what the program gives is counted as its output."""

    def loss_of(state: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ state["w"])) + sum(map(jnp.sum, state.values()))

    def update(state: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state, x)
        return jax.tree.map(lambda leaf, g: leaf - 0.1 * g, state, gradients), loss

    state = {"w": put((1024, 256)), "m": put((1024, 256), ("a", "b")), "v": put((512, 400), "a")}
    step = jax.jit(update, donate_argnums=0)
    plan = make_plan(state)
    x = jnp.ones((8, 1024))
    made, _ = lowered(step, plan, state, x)
    twin = made.compile().memory_analysis()
    bare = step.lower(state, x).compile().memory_analysis()
    owned_bytes = plan.length // len(jax.devices())  # of each device
    assert twin.temp_size_in_bytes - bare.temp_size_in_bytes <= owned_bytes
    given_bytes = twin.output_size_in_bytes - bare.output_size_in_bytes
    assert owned_bytes <= given_bytes <= owned_bytes + 4096
    assert twin.alias_size_in_bytes == bare.alias_size_in_bytes > 0


def test_what_stands_for_arrays_gives_the_same_program() -> None:
    state = {"w": put((331, 61)), "m": put((64, 8), "a"), "n": put(())}
    x = put((1,))
    step = step_of(donate_argnums=0)
    made, _ = lowered(step, make_plan(state), state, x)

    def stand_in(array: jax.Array) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    outputs = Outputs.of(jax.tree.map(stand_in, jax.jit(lambda *all: step(*all))(state, x)))
    given = jax.tree.map(stand_in, (state, x))
    values = jax.tree.leaves(given[0])
    abstract = LoweredTwin(Call(step, given, {}), outputs, make_plan(given[0]), values)
    assert abstract.text == made.text
    abstract.twin(abstract.compile())


def test_each_leaf_is_behind_a_barrier_of_its_own() -> None:
    state = {"w": put((64, 8)), "m": put((64, 8), "a"), "n": put(())}
    made, _ = lowered(step_of(), make_plan(state), state, 0.25)
    assert len(re.findall(r"stablehlo\.optimization_barrier", made.text)) == 3


def test_what_the_step_donates_the_twin_donates() -> None:
    state = {"w": put((64, 8)), "m": put((64, 8), "a")}
    kept = {"k": put((64, 8))}
    step = jax.jit(
        lambda state, kept: jax.tree.map(lambda leaf: leaf + kept["k"].sum(), state),
        donate_argnums=0,
    )
    plan = make_plan((state, kept))
    call = Call(step, (state, kept), {})
    expected = jax.jit(lambda *given: step(*given))(state, kept)
    values = jax.tree.leaves((state, kept))
    made = LoweredTwin(call, Outputs.of(expected), plan, values)
    staged, outputs = run(made, call, values)
    assert [leaf.is_deleted() for leaf in values] == [True, True, False]
    want = np.asarray(expected["w"])
    assert np.asarray(outputs["w"]).tobytes() == want.tobytes()
    staged.release()


@pytest.mark.parametrize("committed", [True, False])
def test_outputs_are_committed_as_the_steps_own_are(committed: bool) -> None:
    x = jnp.arange(8.0)
    state = {"x": jax.device_put(x, jax.devices()[0]) if committed else x}
    plan = make_plan(state)
    step = step_of()
    call = Call(step, (state, 1.0), {})
    made = LoweredTwin(call, Outputs.of(step(state, 1.0)), plan, [state["x"]])
    _, (outputs, _) = run(made, call, [state["x"]])
    assert outputs["x"].committed == committed


def test_leaves_on_other_devices_are_staged_beside() -> None:
    """A key of one device, an array in another order of the devices, a NumPy array, a number."""
    turned = Mesh(np.array(jax.devices()[::-1]), ("t",))
    state = {
        "in": put((40, 8), "a"),
        "one": jax.device_put(np.ones(5), jax.devices()[3]),
        "sub": jax.device_put(np.ones(6), NamedSharding(Mesh(jax.devices()[2:4], ("s",)), P("s"))),
        "turned": jax.device_put(np.arange(16.0), NamedSharding(turned, P("t"))),
        "numpy": np.arange(3),
        "number": 5,
    }
    step = jax.jit(lambda leaf: leaf * 2)
    plan = make_plan(state)
    call = Call(step, (state["in"],), {})
    values = jax.tree.leaves(state)
    made = LoweredTwin(call, Outputs.of(step(state["in"])), plan, values)
    for staging in ("view", "pinned_host"):
        staged, _ = run(made, call, values, staging)  # type: ignore[arg-type]
        assert part(staged, plan) == part(stage(plan, state, "view"), plan)


def test_a_state_that_is_no_argument_has_no_twin() -> None:
    state = {"x": put((8,))}
    step = jax.jit(lambda x: x + 1)
    other = put((8,))
    call = Call(step, (other,), {})
    with pytest.raises(ValueError, match="no array of the state is an argument"):
        LoweredTwin(call, Outputs.of(step(other)), make_plan(state), [state["x"]])


def test_arguments_that_it_was_not_compiled_for_run_nothing() -> None:
    state = {"x": put((8,))}
    step = step_of(donate_argnums=0)
    twin, _ = twin_of(step, make_plan(state), state, 1.0)
    other = {"x": put((16,))}
    with pytest.raises(NotTaken, match="TypeError"):
        twin.run(Call(step, (other, 1.0), {}), twin.hold([state["x"]], "view"))
    assert not other["x"].is_deleted()


# ------------------------------------------------------------------------ calls


def test_calls_that_look_the_same_have_one_signature() -> None:
    step = jax.jit(lambda x, n, *, mode, y: x * n, static_argnums=1, static_argnames="mode")
    x = jnp.ones(3)
    same = [
        Call(step, (x, 2), {"mode": "a", "y": 1.0}),
        Call(step, (x + 1, 2), {"mode": "a", "y": 5.0}),
    ]
    assert same[0].signature == same[1].signature
    assert len(same[0].leaves) == 2
    others = [
        Call(step, (x, 3), {"mode": "a", "y": 1.0}),
        Call(step, (x, 2), {"mode": "b", "y": 1.0}),
        Call(step, (x, 2), {"mode": "a", "y": 1}),
        Call(step, (jnp.ones(4), 2), {"mode": "a", "y": 1.0}),
        Call(step, (jax.device_put(x, jax.devices()[0]), 2), {"mode": "a", "y": 1.0}),
        Call(jax.jit(lambda x: x), (x,), {}),
    ]
    assert len({same[0].signature, *(other.signature for other in others)}) == 7


def test_static_arguments_by_a_negative_position() -> None:
    step = jax.jit(lambda x, n: x * n, static_argnums=-1, donate_argnums=0)
    call = Call(step, (jnp.ones(3), 2), {})
    assert [len(call.leaves), call.trace().donated] == [1, (0,)]


def test_a_step_that_asks_for_the_places_of_its_outputs_rounds_the_same() -> None:
    """Adam's moments are spread over more devices than the parameters, so XLA moves them within the
    step. Called as a function within the twin, this step gives parameters with other last bits."""
    mesh = make_mesh({"data": -1, "model": 2})
    like = model.abstract(mesh)
    step = model.compiled_step(like)
    rows = model.fit(mesh, (8, model.LENGTH + 1), "data")
    text = data.load_text()
    tokens = data.batch(text, seed=0, step=1, rows=8, length=model.LENGTH)
    batch = jax.make_array_from_callback(tokens.shape, rows, tokens.__getitem__)
    state, other = (model.first_state(like, 0) for _ in range(2))
    expected = step(other, batch)
    plan, values = make_plan(state), jax.tree.leaves(state)
    before = part(stage(plan, jax.tree.map(jnp.copy, state), "view"), plan)
    call = Call(step, (state, batch), {})
    made = LoweredTwin(call, Outputs.of(expected), plan, values)
    staged, outputs = run(made, call, values)
    assert part(staged, plan) == before
    for have, want in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert np.asarray(have).tobytes() == np.asarray(want).tobytes()


def test_what_is_given_never_takes_the_memory_of_a_leaf_that_looks_like_it() -> None:
    """Unsigned leaves look like their own bits: XLA gave them to the output in the host's memory,
    and the program could not be run."""
    looks = {
        "u1": ((1024, 512), ("a", "b")),
        "u2": ((64, 24), ("a",)),
        "u4": ((64, 64), ("a",)),
        "f4": ((128, 640), ()),  # whose rows on each device are like the next one's on each
        "I": ((128, 640), (("a", "b"),)),
    }
    state = {name: put(shape, *spec).astype(name) for name, (shape, spec) in looks.items()}

    def step(state: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), state)

    plan, values = make_plan(state), jax.tree.leaves(state)
    expected = jax.jit(step)(state)
    before = part(stage(plan, state, "view"), plan)
    call = Call(jax.jit(step, donate_argnums=0), (state,), {})
    made = LoweredTwin(call, Outputs.of(expected), plan, values)
    staged, outputs = run(made, call, values)
    assert part(staged, plan) == before
    assert all(leaf.is_deleted() for leaf in values)
    for have, want in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert np.asarray(have).tobytes() == np.asarray(want).tobytes()


def test_what_the_step_passes_on_or_cannot_use_is_not_donated() -> None:
    """Its memory is as large as what is given of it: XLA would use it for that."""
    state = {
        "x": put((64, 8), "a"),
        "passed on": put((64, 8), "a").view(jnp.uint32),
        "dropped": put((64, 8), "a").view(jnp.uint32),
    }

    def step(state: Any) -> Any:
        return {"x": state["x"] + 1, "passed on": state["passed on"]}

    plan, values = make_plan(state), jax.tree.leaves(state)
    expected = jax.jit(step)(state)
    before = part(stage(plan, state, "view"), plan)
    jitted = jax.jit(step, donate_argnums=0)
    call = Call(jitted, (state,), {})
    made = LoweredTwin(call, Outputs.of(expected), plan, values)
    twin = made.twin(made.compile())
    staged, outputs = twin.run(call, twin.hold(values, "view"))
    assert part(staged, plan) == before
    assert state["x"].is_deleted()
    for have, want in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert np.asarray(have).tobytes() == np.asarray(want).tobytes()
