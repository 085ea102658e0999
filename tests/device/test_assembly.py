"""What is restored is the state that was saved, on whatever devices there are now, or an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.device import placing
from jaxft.device.assembly import Table, match, needs, reads
from jaxft.device.mesh import make_mesh
from jaxft.device.placing import assemble
from jaxft.device.shards import make_plan
from jaxft.errors import RestoreError, TreeMismatch
from jaxft.group.manifest import CHUNK
from tests.device.snapshots import as_seen_by, assert_same, processes, raw, take, take_one


@pytest.fixture(autouse=True, params=["small leaves compiled", "small leaves filled"])
def small_leaves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways onto the devices, for leaves that are small enough for a test."""
    if request.param == "small leaves compiled":
        monkeypatch.setattr(placing, "COPIED_BYTES", 0)
    return request.param


def state_on(mesh: Mesh) -> dict[str, Any]:
    """A tree with everything: sharded, replicated, partly replicated, local, keys, host leaves."""

    def put(spec: P, *shape: int) -> jax.Array:
        noise = np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
        return jax.device_put(noise, NamedSharding(mesh, spec))

    return {
        "rows": put(P("data"), 48, 700),
        "both": put(P("data", "model"), 48, 64),
        "columns": put(P(None, "model"), 301, 640),
        "copies": put(P(), 77, 1000),
        "vector": put(P("model"), 64),
        "scalar": put(P()),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(7), 16), NamedSharding(mesh, P("data"))
        ),
        "step": jnp.int32(12),
        "host": np.arange(12.0).reshape(3, 4),
        "name": "run",
    }


@pytest.mark.parametrize("count", [1, 4])
def test_eight_devices_to_two_to_one_case_19(count: int) -> None:
    eight = make_mesh({"data": -1, "model": 2})
    state = state_on(eight)
    two = make_mesh({"data": -1, "model": 2}, devices=jax.devices()[:2])
    one = make_mesh({"data": -1, "model": 1}, devices=jax.devices()[3:4])
    for mesh in (two, one, eight, make_mesh({"data": 2, "model": -1})):
        like = state_on(mesh)
        restored = take(state, count).restore(jax.tree.map(_zeroed, like))
        assert_same(restored, like)
        state = restored
        count = 1


def _zeroed(leaf: Any) -> Any:
    """Something else of the same description, so that nothing is right by accident."""
    if isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        zeros = jnp.zeros_like(leaf)
        return jax.device_put(zeros, leaf.sharding) if leaf.committed else zeros
    return leaf


def test_restored_arrays_are_nobody_elses_case_3() -> None:
    """The reader overwrites its buffers once the tree is there."""
    state = state_on(make_mesh({"data": -1, "model": 2}))
    restored = take(state, 2).restore(state)
    assert_same(restored, state)


def test_restored_state_may_be_donated_case_3() -> None:
    state = state_on(make_mesh({"data": -1, "model": 2}))
    arrays = {name: state[name] for name in ("rows", "copies", "step")}
    snapshot = take(arrays)
    restored = snapshot.restore(arrays)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    want = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))(arrays)
    assert_same(step(restored), want)
    assert_same(snapshot.restore(arrays), arrays)


def test_the_first_step_takes_over_the_memory_of_what_a_program_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "COPIED_BYTES", 0)
    mesh = make_mesh({"data": -1, "model": 2})
    state = state_on(mesh)
    arrays = {name: state[name] for name in ("rows", "both", "columns", "copies", "vector")}
    restored = take(arrays).restore(arrays)
    before = {name: _pointers(leaf) for name, leaf in restored.items()}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    assert {name: _pointers(leaf) for name, leaf in step(restored).items()} == before


def _pointers(leaf: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def test_reads_are_in_the_order_of_use() -> None:
    state = state_on(make_mesh({"data": -1, "model": 2}))
    snapshot = take(state, 2)
    targets = match(state, snapshot.table)
    asked: list[tuple[int, int, int]] = []

    def read(host: int, offset: int, nbytes: int) -> np.ndarray:
        asked.append((host, offset, nbytes))
        return snapshot.segments[host][offset : offset + nbytes]

    assert_same(assemble(targets, read), state)
    assert asked == list(reads(targets))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_restoring_within_set_mesh_case_23(axis_type: AxisType) -> None:
    mesh = make_mesh({"data": -1, "model": 2}, axis_types=axis_type)
    state = state_on(mesh)
    snapshot = take(state, 2)
    with jax.set_mesh(mesh):
        restored = snapshot.restore(state)
        assert_same(restored, state)
        assert jax.typeof(restored["rows"]) == jax.typeof(state["rows"])
        total = jax.jit(lambda tree: tree["rows"].sum() + tree["step"])(
            {name: restored[name] for name in ("rows", "step")}
        )
    assert np.isfinite(float(total))


def test_uncommitted_leaves_do_not_pin_a_restored_step() -> None:
    mesh = make_mesh({"data": -1})
    params = {"w": jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("data")))}
    optimizer = optax.adam(1e-3)
    state = {"params": params, "opt": optimizer.init(params), "key": jax.random.key(0)}
    restored = take(state, 2).restore(state)

    @jax.jit
    def step(state: dict[str, Any]) -> dict[str, Any]:
        noise = jax.random.normal(state["key"], (16, 4))
        updates, opt = optimizer.update({"w": noise}, state["opt"], state["params"])
        return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}

    assert raw(step(restored)["params"]["w"]) == raw(step(state)["params"]["w"])


def test_structs_as_targets() -> None:
    mesh = make_mesh({"data": -1})
    state = {
        "w": jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P("data"))),
        "step": jnp.int32(5),
    }
    like = {
        "w": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P())),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    restored = take(state).restore(like)
    assert restored["w"].sharding == like["w"].sharding
    assert not restored["step"].committed
    assert raw(restored["w"]) == raw(state["w"])
    assert int(restored["step"]) == 5


SAVED = {"a": {"w": jnp.ones((4, 3))}, "n": np.ones(2), "k": jax.random.key(0), "lr": 0.1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"w": jnp.ones((4, 4))}}, r"leaf \['a'\]\['w'\].*\[4, 4\].*\[4, 3\].*another shape"),
        ({"a": {"w": jnp.ones((4, 3), jnp.int32)}}, r"\['a'\]\['w'\].*int32.*float32.*dtype"),
        ({"a": {"w": np.ones((4, 4))}}, r"\['a'\]\['w'\].*\[4, 4\].*\[4, 3\].*another shape"),
        ({"a": {"w": np.ones((4, 3), "f2")}}, r"\['a'\]\['w'\].*float16.*float32.*another dtype"),
        ({"a": {"w": np.full((4, 3), "x")}}, r"\['a'\]\['w'\].*numpy <U1.*array float32.*kind"),
        ({"n": jnp.ones(2)}, r"leaf \['n'\].*array float32\[2\].*numpy float64\[2\].*kind"),
        ({"n": np.ones(3)}, r"leaf \['n'\].*numpy float64\[3\].*\[2\]"),
        ({"k": jax.random.key(0, impl="rbg")}, r"leaf \['k'\].*key<rbg>.*key<threefry2x32>"),
        ({"k": jnp.zeros(2, jnp.uint32)}, r"leaf \['k'\].*array uint32\[2\].*key"),
        ({"lr": 1}, r"leaf \['lr'\].*a literal int.*a literal float"),
        ({"lr": jnp.float32(0.1)}, r"leaf \['lr'\].*array float32\[\].*a literal float"),
        ({"more": 1}, r"snapshot lacks 1 of the target: \['more'\]"),
        ({"a": {}}, r"target lacks 1 of the snapshot: \['a'\]\['w'\]"),
        ({"a": {"v": jnp.ones((4, 3))}}, r"lacks 1 .*\['v'\]; the target lacks 1 .*\['w'\]"),
    ],
)
def test_targets_that_do_not_match_are_named_case_17(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TreeMismatch, match=message):
        take(SAVED).restore({**SAVED, **change})


def test_many_missing_leaves_are_counted_and_a_few_named_case_17() -> None:
    with pytest.raises(TreeMismatch, match=r"lacks 20 of the target: (\[\d+\], ){5}\.\.\."):
        take({}).restore(dict.fromkeys(range(20), 1))


def test_leaves_of_the_snapshot_may_be_left_out_when_asked() -> None:
    like = {"n": np.zeros(2)}
    assert_same(take(SAVED).restore(like, strict=False), {"n": SAVED["n"]})
    with pytest.raises(TreeMismatch, match="lacks 1 of the target"):
        take(SAVED).restore({"x": 1}, strict=False)


def test_manifests_that_do_not_cover_a_leaf_are_refused() -> None:
    mesh = make_mesh({"data": -1})
    state = {"w": jax.device_put(jnp.ones((800, 300)), NamedSharding(mesh, P("data")))}
    snapshot = take(state, 4)
    with pytest.raises(RestoreError, match=r"leaf \['w'\].*cover 180000 of the 240000"):
        match(
            {"w": jax.ShapeDtypeStruct((800, 300), jnp.float32)}, Table.of(snapshot.manifests[:3])
        )


def test_needs_are_whole_chunks_of_what_is_needed_only() -> None:
    mesh = make_mesh({"data": -1})
    state = {
        "w": jax.device_put(jnp.ones((8, 1_000_000)), NamedSharding(mesh, P("data"))),
        "small": jnp.ones(3),
    }
    snapshot = take(state, 4)
    everything = needs(match(state, snapshot.table))
    lengths = [manifest.parts[0].length for manifest in snapshot.manifests]
    assert everything == {host: [(0, length)] for host, length in enumerate(lengths)}
    small = needs(match({"small": state["small"]}, snapshot.table, strict=False))
    ((host, ((offset, nbytes),)),) = small.items()
    assert offset % CHUNK == 0
    assert nbytes <= CHUNK
    assert (offset + nbytes) % CHUNK == 0 or offset + nbytes == lengths[host]


def test_a_number_in_the_target_takes_the_array_that_a_step_made_of_it():
    saved = {"step": jnp.int32(3), "scale": jnp.float32(0.5), "x": jnp.arange(4.0)}
    restored = take(saved).restore({"step": 0, "scale": 1.0, "x": jnp.zeros(4)})
    assert restored["step"] == 3
    assert restored["step"].dtype == jnp.int32
    assert restored["scale"] == 0.5
    with pytest.raises(TreeMismatch, match="step"):
        take(saved).restore({"step": 0.0, "scale": 1.0, "x": jnp.zeros(4)})
    with pytest.raises(TreeMismatch, match="x"):
        take(saved).restore({"step": 0, "scale": 1.0, "x": 0.0})


@pytest.mark.parametrize("is_small", [False, True])
def test_numpy_in_the_target_takes_the_array_that_a_step_made_of_it(is_small: bool) -> None:
    """A script makes its state with NumPy, and gives the same again after a crash."""
    count = 3 if is_small else 300
    first = {
        "params": np.linspace(0, 1, 64 * count).reshape(
            64, count
        ),  # float64, of which JAX has half
        "half": np.ones((64, 3), jnp.bfloat16),
        "step": np.int32(0),
        "array": np.array(0, np.int64),
        "seen": np.bool_(False),
    }
    mesh = make_mesh({"data": -1})
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * leaf + leaf, state))
    saved = step(first)
    saved["params"] = jax.device_put(saved["params"], NamedSharding(mesh, P("data")))
    restored = take(saved, 4).restore(first)
    assert_same(restored, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), saved))
    assert_same(step(restored), step(jax.device_get(saved)))
    assert_same(take(first).restore(first), first)  # before the first step it is NumPy's own


def test_what_each_process_has_to_itself_comes_back_to_it():
    snapshots = []
    for index in range(4):
        tree = as_seen_by({"mine": jnp.full(5, float(index)), "host": np.full(3, index)}, index, 4)
        plan = make_plan(tree, processes(index, 4))
        snapshots.append(take_one(index, plan, tree, "view"))
    manifests = [manifest for manifest, _ in snapshots]
    like = {"mine": jnp.zeros(5), "host": np.zeros(3, int)}
    for rank, theirs in ((0, 0), (2, 2), (7, 0)):
        targets = match(like, Table.of(manifests, rank))
        back = assemble(targets, lambda host, at, size: snapshots[host][1][at : at + size])
        assert back["mine"].tolist() == [float(theirs)] * 5
        assert back["host"].tolist() == [theirs] * 3
