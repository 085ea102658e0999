"""Parity that devices exchange is what hosts make of the same bytes, and hosts rebuild from it."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.device import cuts, shards
from jaxft.device.calls import Call
from jaxft.device.leaves import SUB_BYTE_BITS
from jaxft.device.parity import combine, exchange
from jaxft.device.twin import LoweredTwin, Outputs
from jaxft.errors import CodecError
from jaxft.group.codec import decode_matrix
from jaxft.group.manifest import CHUNK
from jaxft.group.world import Code
from jaxft.host.layout import data_spans
from tests.device.parity.test_packing import DTYPES, every_pattern
from tests.device.parity.worlds import Snapshot, World, part_of
from tests.device.snapshots import raw, stage

WHOLE_BYTES = [name for name in DTYPES if name not in SUB_BYTE_BITS]


def mesh_of(world: World, order: Sequence[int], types: Any = AxisType.Auto, **axes: int) -> Mesh:
    """The world's devices in this order."""
    devices = np.array(world.devices)[list(order)]
    shape = tuple(axes.values())
    return Mesh(devices.reshape(shape), tuple(axes), axis_types=(types,) * len(shape))


def put(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: str = "float32") -> jax.Array:
    """An array of any bits."""
    return jax.device_put(every_pattern(dtype, shape), NamedSharding(mesh, P(*spec)))


class Once:
    """A compiled program that all hosts of this process run as one: it is run once, and each device
    is told what its own host would tell it."""

    def __init__(self, compiled: Any, told: list[list[jax.Array]], has_lanes: bool) -> None:
        self.output_shardings = compiled.output_shardings
        self._compiled = compiled
        # All hosts know all of lanes; of other rows only their own, and zeros of the others.
        self._told = [functools.reduce(operator.add, tables) for tables in zip(*told, strict=True)]
        if has_lanes:
            self._told[-1] = told[0][-1]
        self._given: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._given is None:
            leaves = arguments[: len(arguments) - len(self._told)]
            self._given = self._compiled(*leaves, *self._told)
        outputs, held = self._given
        return outputs, list(held)


def same(leaf: jax.Array) -> jax.Array:
    """Moves the bits on by one place, whatever they are."""
    return jnp.roll(leaf, 1, 0)


class Worker:
    """A world that trains: each step, as its twin, also gives a snapshot of what it was given."""

    def __init__(self, world: World, state: Any, compute: Any = same) -> None:
        self.world = world
        self.step = jax.jit(lambda state: jax.tree.map(compute, state), donate_argnums=0)
        self._bare = jax.jit(lambda state: jax.tree.map(compute, state))
        self.plans = [world.plan(state, index) for index in range(world.processes)]
        call, outputs = Call(self.step, (self._arrays(state),), {}), Outputs.of(self.bare(state))
        values = jax.tree.leaves(state)
        self.lowered = [LoweredTwin(call, outputs, plan, values) for plan in self.plans]
        self.compiled = self.lowered[0].compile()
        assert len({one.text for one in self.lowered}) == 1, "all run the same program"
        assert len({plan.digest for plan in self.plans}) == 1

    def _arrays(self, state: Any) -> list[jax.Array]:
        return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]

    def bare(self, state: Any) -> Any:
        return self._bare(self._arrays(state))

    def run(self, state: Any) -> tuple[Snapshot, Snapshot, Any]:
        """The snapshot with the devices' parity, the one of which hosts make all, and the step's
        outputs. The state's memory is the outputs'."""
        staged = [part_of(stage(plan, state, "view")) for plan in self.plans]
        has_lanes = self.plans[0].lanes is not None
        once = Once(self.compiled, [one._told for one in self.lowered], has_lanes)
        taken, outputs = [], None
        call = Call(self.step, (self._arrays(state),), {})
        for one in self.lowered:
            twin = one.twin(once)  # type: ignore[arg-type]
            held, outputs = twin.run(call, twin.hold(jax.tree.leaves(state), "view"))
            taken.append(held)
        parts = [part_of(one) for one in taken]
        for plan, part, other in zip(self.plans, parts, staged, strict=True):
            assert part[: plan.length].tobytes() == other.tobytes()
        by_devices = Snapshot(self.world, self.plans, parts, given=has_lanes)
        by_hosts = Snapshot(self.world, self.plans, staged, given=False)
        by_devices.code()
        by_hosts.code()
        return by_devices, by_hosts, outputs


def compare(by_devices: Snapshot, by_hosts: Snapshot) -> None:
    """All parity is the same, whoever has made it, and devices have made that of all their
    lanes."""
    world = by_hosts.world
    of_process = [*[True] * world.each, False]
    for host in range(world.hosts):
        layout = by_devices.layout(host)
        count = len(layout.lanes)
        made = [layout.parity(host, lane).in_segment for lane in range(count)]
        assert made == of_process * world.ranks
        for lane in range(count):
            expected = by_hosts.parity(host, lane)
            assert not made[lane] or expected.size
            np.testing.assert_array_equal(by_devices.parity(host, lane), expected)


def assert_rebuilt(snapshot: Snapshot, lost: Sequence[int]) -> None:
    """All that is lost comes back from the shares that are left."""
    wanted = {host: snapshot.segments[host].copy() for host in lost}
    for host in lost:
        found = snapshot.rebuild(lost, host)
        for start, stop in data_spans(snapshot.manifests[host]):
            np.testing.assert_array_equal(found[start:stop], wanted[host][start:stop])


def mixed_state(mesh: Mesh) -> dict[str, Any]:
    """Leaves that are on lanes, in all ways, and leaves that are not."""
    first, last = mesh.axis_names[0], mesh.axis_names[-1]
    both = first if first == last else (first, last)
    return {
        "everywhere": put(mesh, (331, 200)),
        "partly": put(mesh, (420, 301), first),
        "spread": put(mesh, (840, 201), both),
        "columns": put(mesh, (37, 8400), None, last),
        "few": put(mesh, (3, 30_000)),
        "small": put(mesh, (7,)),
        "numpy": np.arange(5),
    }


@pytest.mark.parametrize(
    ("world", "order", "axes"),
    [
        (World(Code(data=2, parity=1), 3), (0, 1, 2, 3, 4, 5), {"x": 6}),
        (World(Code(data=3, parity=1), 4), (3, 0, 6, 1, 2, 7, 5, 4), {"a": 4, "b": 2}),
        (World(Code(data=2, parity=2), 4), (7, 6, 5, 4, 3, 2, 1, 0), {"a": 2, "b": 4}),
        (World(Code(data=2, parity=1), 6, each=1), (4, 0, 5, 1, 3, 2), {"a": 3, "b": 2}),
        (World(Code(data=1, parity=1), 2, ranks=2), (0, 4, 1, 5, 2, 6, 3, 7), {"a": 4, "b": 2}),
    ],
    ids=["2+1", "3+1", "2+2", "two groups", "two ranks a host"],
)
def test_devices_make_the_hosts_parity_and_hosts_rebuild_from_it_case_20_21(
    world: World, order: Sequence[int], axes: dict[str, int]
) -> None:
    worker = Worker(world, state := mixed_state(mesh_of(world, order, **axes)))
    by_devices, by_hosts, _ = worker.run(state)
    compare(by_devices, by_hosts)
    by_devices.check()
    losses = list(itertools.combinations(world.groups[0].hosts, world.groups[0].parity))
    assert_rebuilt(by_devices, losses[len(losses) // 2])


def test_devices_decode_what_hosts_have_coded() -> None:
    world = World(Code(data=2, parity=2), 4)
    worker = Worker(world, state := {"w": put(mesh_of(world, range(8), x=8), (331, 200))})
    _, by_hosts, _ = worker.run(state)
    geometry = by_hosts.layout(0).lanes[0]
    for stripe in range(geometry.n):
        fragments = {}
        for index in range(geometry.n):
            host = geometry.holder(stripe, index)
            if index < geometry.k:
                lane = np.zeros(geometry.k * geometry.fragment_bytes, np.uint8)
                lane[: geometry.length] = by_hosts.segments[host][: geometry.length]
                start, nbytes = geometry.data_range(host, stripe)
                fragments[index] = lane[start : start + nbytes]
            else:
                start, nbytes = geometry.parity_range(host, stripe)
                fragments[index] = by_hosts.parity(host, 0)[start : start + nbytes]
        left = [jnp.asarray(fragments[index].view("<u4")) for index in (2, 3)]
        found = combine(decode_matrix(2, 2, have=(2, 3), want=(0, 1)), left)
        for index, words in enumerate(found):
            np.testing.assert_array_equal(np.asarray(words).view(np.uint8), fragments[index])


def test_the_step_donates_and_computes_what_it_did_and_snapshots_are_of_before_case_1_6() -> None:
    """Rounding would show in the numbers, and a late read in the parity."""
    world = World(Code(data=2, parity=1), 3)
    mesh = mesh_of(world, (5, 3, 1, 0, 2, 4), a=3, b=2)
    noise = np.random.default_rng(0).normal(size=(2, 330, 240)).astype("f4")
    values = [
        jax.device_put(leaf, NamedSharding(mesh, P(*spec)))
        for leaf, spec in zip(noise, [(), ("a", "b")], strict=True)
    ]
    worker = Worker(world, values, lambda leaf: jnp.tanh(leaf) * 1.1 + leaf / 3)
    for _ in range(4):
        expected = worker.bare(values)
        by_devices, by_hosts, outputs = worker.run(values)
        compare(by_devices, by_hosts)
        assert all(leaf.is_deleted() for leaf in values)
        assert [raw(leaf) for leaf in outputs] == [raw(leaf) for leaf in expected]
        values = outputs


def test_every_dtype_and_keys_case_9_10() -> None:
    """Of any bits, NaNs of all payloads among them. Elements of less than a byte, and keys, are not
    on lanes: the twin's program is compiled ahead, which JAX 0.10 cannot with the former."""
    world = World(Code(data=3, parity=1), 4)
    mesh = mesh_of(world, (3, 0, 6, 1, 2, 7, 5, 4), a=4, b=2)
    with jax.enable_x64(True):
        names = ["int64", "uint64", "float64", "complex128", *WHOLE_BYTES]
        state: dict[str, Any] = {name: put(mesh, (16, 9001), dtype=name) for name in names}
        state["keys"] = jax.random.split(jax.random.key(7), 5000)
        state["keys"] = jax.device_put(state["keys"], NamedSharding(mesh, P()))
        worker = Worker(world, state)
        lanes = worker.plans[0].lanes
        assert lanes is not None
        assert len(lanes.places) == len(names)
        by_devices, by_hosts, _ = worker.run(state)
    compare(by_devices, by_hosts)
    assert_rebuilt(by_devices, [2])


def test_within_a_set_mesh_and_with_explicit_axes_case_23() -> None:
    world = World(Code(data=2, parity=1), 3)
    mesh = mesh_of(world, (5, 3, 1, 0, 2, 4), AxisType.Explicit, a=3, b=2)
    with jax.set_mesh(mesh):
        state = {"w": put(mesh, (333, 240)), "m": put(mesh, (333, 240), "a", "b")}
        worker = Worker(world, state, lambda leaf: leaf * 2)
        by_devices, by_hosts, _ = worker.run(state)
    compare(by_devices, by_hosts)


_LEAF = st.tuples(
    st.sampled_from(WHOLE_BYTES),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([(), ("a",), ("b",), (None, "b"), ("a", "b"), (("b", "a"),)]),
)


@settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(
    world=st.sampled_from(
        [
            World(Code(data=1, parity=1), 2),
            World(Code(data=1, parity=2), 3, each=1),
            World(Code(data=2, parity=1), 3),
            World(Code(data=3, parity=1), 4),
            World(Code(data=4, parity=2), 6, each=1),
            World(Code(data=6, parity=2), 8, each=1),
        ]
    ),
    leaves=st.lists(_LEAF, min_size=1, max_size=5),
    numbers=st.randoms(use_true_random=False),
)
def test_whatever_is_saved_devices_and_hosts_make_the_same_parity(
    world: World, leaves: list[tuple[str, int, int, tuple[Any, ...]]], numbers: Any
) -> None:
    """Leaves count as large from few bytes on, so that many are on lanes."""
    order = list(range(len(world.devices)))
    numbers.shuffle(order)
    b = numbers.choice([one for one in (1, 2, 4) if len(order) % one == 0])
    mesh = mesh_of(world, order, a=len(order) // b, b=b)
    state: list[Any] = [np.arange(numbers.randrange(9))]
    for dtype, rows, columns, spec in leaves:
        # What is sharded has to be of equal shards; what is not may be of any rows.
        shape = [rows, 8 * columns]
        for place, names in enumerate(spec):
            every = names if isinstance(names, tuple) else [names] if names else []
            shape[place] *= int(np.prod([mesh.shape[name] for name in every]))
        state.append(put(mesh, tuple(shape), *spec, dtype=dtype))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "SMALL_BYTES", 100)
        patched.setattr(cuts, "SMALL_BYTES", 100)
        patched.setattr(exchange, "BUCKET_BYTES", CHUNK)
        worker = Worker(world, state)
        by_devices, by_hosts, _ = worker.run(state)
    if worker.plans[0].lanes is not None:
        compare(by_devices, by_hosts)
    assert_rebuilt(by_devices, world.groups[0].hosts[-world.groups[0].parity :])


def test_no_more_than_the_parity_and_some_buckets_are_in_device_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPU the host's memory is the device's: parity is counted in both."""
    monkeypatch.setattr(exchange, "BUCKET_BYTES", 3 * CHUNK)
    world = World(Code(data=3, parity=1), 4)
    mesh = mesh_of(world, range(8), a=4, b=2)

    def struct(*spec: Any) -> Any:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct((1024, 16384), jnp.bfloat16, sharding=sharding)

    state = {name: struct("a", "b") for name in "wmv"}
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2, state), donate_argnums=0)
    needed = {}
    for with_lanes in (False, True):
        plan = world.plan(state, 0, with_lanes=with_lanes)
        call = Call(step, (state,), {})
        made = LoweredTwin(call, Outputs.of(state), plan, jax.tree.leaves(state))
        needed[with_lanes] = made.compile().memory_analysis().temp_size_in_bytes
    lanes = plan.lanes
    assert lanes is not None
    buckets = exchange.buckets(lanes.geometry)
    assert len(buckets) > 5
    extra = needed[True] - needed[False] - lanes.geometry.parity_bytes
    assert extra <= 2 * lanes.geometry.k * (buckets[0][1] - buckets[0][0])


def test_fragments_are_sent_by_slices_and_each_piece_of_a_leaf_is_taken_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A TPU makes dozens of loops of a gather, and integers of a whole leaf that is taken in
    pieces, if nothing stands between it and each of these."""
    monkeypatch.setattr(exchange, "BUCKET_BYTES", 3 * CHUNK)
    world = World(Code(data=3, parity=1), 4, each=1)
    sharding = NamedSharding(mesh_of(world, range(4), x=4), P())
    state = {"w": jax.ShapeDtypeStruct((4608, 1024), jnp.float32, sharding=sharding)}
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2, state))
    plan = world.plan(state, 0)
    assert plan.lanes is not None
    pieces = plan.lanes.geometry.k * len(exchange.buckets(plan.lanes.geometry))
    assert pieces > 10
    text = LoweredTwin(Call(step, (state,), {}), Outputs.of(state), plan, [state["w"]]).text
    assert "stablehlo.gather" not in text
    assert text.count("stablehlo.optimization_barrier") == pieces + 1
    assert text.count("stablehlo.collective_permute") == pieces * plan.lanes.geometry.m


def test_wrong_parity_of_devices_is_found() -> None:
    world = World(Code(data=2, parity=1), 3)
    worker = Worker(world, state := {"w": put(mesh_of(world, range(6), x=6), (600, 200))})
    snapshot, _, _ = worker.run(state)
    snapshot.check()
    for host in range(3):
        snapshot.parity(host, 0)[::CHUNK] ^= 1
        snapshot.parity(host, 1)[::CHUNK] ^= 1
    with pytest.raises(CodecError, match=r"the devices of h\d have made wrong parity"):
        snapshot.check()
