"""Small leaves that are gathered in batches have the bytes that they have one by one."""

from __future__ import annotations

import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.device import transfer
from jaxft.device.gather import Gatherer
from jaxft.device.layout import BATCH_SIZES
from jaxft.device.leaves import SUB_BYTE_BITS
from jaxft.device.shards import Plan, PlanCache, make_plan
from jaxft.device.transfer import Staging, gatherer_for
from jaxft.errors import StagingError
from tests.device.snapshots import as_seen_by, processes, raw, stage
from tests.device.test_leaves import DTYPES, every_pattern

STAGINGS: list[Staging] = ["view", "pinned_host", "device"]
FEW = BATCH_SIZES[-1]


def mesh_of(*axis_types: AxisType) -> Mesh:
    types = axis_types or (AxisType.Auto,) * 2
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=types)


def gatherer_of(staging: Staging = "view") -> Gatherer:
    """One that takes every batch, however small."""
    return Gatherer("pinned_host" if staging == "pinned_host" else None)


def part_of(plan: Plan, tree: Any, gatherer: Gatherer | None, staging: Staging = "view") -> bytes:
    part = np.full(plan.length, 0x5A, np.uint8)
    checksums = stage(plan, tree, staging, gatherer).copy_into(part)
    return part.tobytes() + checksums


def assert_gathered_is_the_same(tree: Any, staging: Staging = "view") -> None:
    plan = make_plan(tree)
    gatherer = gatherer_of(staging)
    gatherer.prepare(plan)
    assert plan.batches
    assert all(
        gatherer.gather(b.kind, [jax.tree.leaves(tree)[n] for n in b.leaves]) is not None
        for b in plan.batches
    )
    assert part_of(plan, tree, gatherer, staging) == part_of(plan, tree, None, staging)


def test_every_dtype_keeps_its_bits_case_9() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))  # each more would compile all of it again
    tree = {
        name: [
            jax.device_put(piece.reshape(8, -1), NamedSharding(mesh, P("a")))
            for piece in np.split(every_pattern(name), FEW)
        ]
        for name in DTYPES
        if name not in SUB_BYTE_BITS
    }
    assert_gathered_is_the_same(tree)
    plan = make_plan(tree)
    gatherer = gatherer_of()
    gatherer.prepare(plan)
    part = np.frombuffer(part_of(plan, tree, gatherer), np.uint8)
    leaves = jax.tree.leaves(tree)
    for owned in plan.ranges:
        rows = slice(owned.start[0], owned.stop[0])
        stored = part[owned.offset : owned.offset + owned.nbytes].tobytes()
        assert stored == raw(np.asarray(leaves[owned.leaf])[rows])


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_every_staging_within_set_mesh_case_23(staging: Staging, axis_type: AxisType) -> None:
    mesh = mesh_of(axis_type, axis_type)
    tree = {
        "spread": [
            jax.device_put(np.full((8, 5), n, np.float32), NamedSharding(mesh, P("a", None)))
            for n in range(2 * FEW + 3)
        ],
        "here": [jnp.full(n % 2 + 1, n) for n in range(2 * FEW)],
        "big": jax.device_put(np.ones((800, 100), np.float32), NamedSharding(mesh, P("a"))),
    }
    with jax.set_mesh(mesh):
        assert_gathered_is_the_same(tree, staging)


@pytest.mark.parametrize("staging", STAGINGS)
def test_200_donating_steps_never_reach_a_batch_case_1(staging: Staging) -> None:
    """The steps are dispatched without waiting, and reuse the very buffers that are gathered."""
    mesh = mesh_of()
    shape = (64, 64)

    def state() -> list[jax.Array]:
        value = np.zeros(shape, np.float32)
        return [jax.device_put(value, NamedSharding(mesh, P("a"))) for _ in range(FEW)]

    step = jax.jit(lambda leaves: [leaf + 1 for leaf in leaves], donate_argnums=0)
    leaves = step(state())
    plan = make_plan(leaves)
    gatherer = gatherer_of(staging)
    gatherer.prepare(plan)
    before = [leaf.addressable_data(0).unsafe_buffer_pointer() for leaf in leaves]
    staged = []
    for _ in range(200):
        staged.append(stage(plan, leaves, staging, gatherer))
        leaves = step(leaves)
    after = [leaf.addressable_data(0).unsafe_buffer_pointer() for leaf in leaves]
    assert before == after, "gathering does not keep a step from its input's memory"
    part = np.empty(plan.length, np.uint8)
    for number, one in enumerate(staged):
        one.copy_into(part)
        assert (part.view(np.float32) == number + 1).all()


def test_programs_are_few_and_kept_for_other_trees_of_such_leaves() -> None:
    many = {f"x{n}": jnp.full(3, n) for n in range(BATCH_SIZES[0] * 2 + FEW + 1)}
    cache, gatherer = PlanCache(), gatherer_of()
    plan = cache.get(many)
    counts = [batch.kind.count for batch in plan.batches]
    assert counts == [BATCH_SIZES[0], BATCH_SIZES[0], FEW]
    gatherer.prepare(plan)
    renamed = cache.get({f"y{name}": leaf for name, leaf in many.items()})
    assert renamed is not plan
    leaves = list(many.values())[: BATCH_SIZES[0]]
    assert gatherer.gather(renamed.batches[0].kind, leaves) is not None
    assert [batch.kind for batch in renamed.batches] == [batch.kind for batch in plan.batches]


def test_a_view_of_a_few_shards_is_there_sooner_than_a_program() -> None:
    mesh = mesh_of()
    tree = {
        "few": [jnp.full(3, n) for n in range(FEW)],
        "spread": [
            jax.device_put(np.full((8, 2), n), NamedSharding(mesh, P(("a", "b"))))
            for n in range(FEW)
        ],
    }
    plan = make_plan(tree)
    batches = {batch.kind.shape: batch for batch in plan.batches}
    for staging, shapes in (("view", {(8, 2)}), ("device", {(3,), (8, 2)})):
        gatherer = gatherer_for(staging)
        gatherer.prepare(plan)
        leaves = jax.tree.leaves(tree)
        found = {
            shape
            for shape, batch in batches.items()
            if gatherer.gather(batch.kind, [leaves[n] for n in batch.leaves]) is not None
        }
        assert found == shapes
        assert part_of(plan, tree, gatherer, staging) == part_of(plan, tree, None, staging)


@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("staging", STAGINGS)
def test_64_bits_stay_64_wherever_they_were_enabled_case_9(staging: Staging, scoped: bool) -> None:
    """`jax.enable_x64` counts in one thread, and perhaps only where the state was made."""
    with jax.enable_x64(True):
        tree = {
            "small": [jnp.full(3, 2**40 + n) for n in range(FEW)],
            "wide": jnp.arange(8) + 2**40,
            "complex": jnp.full(4, 1 / 3 + 1j),
        }
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)} == {8, 16}
    plan = make_plan(tree)
    gatherer = gatherer_of(staging)
    gatherer.prepare(plan)
    with jax.enable_x64(scoped):
        gathered = gatherer.gather(plan.batches[0].kind, tree["small"])
        assert gathered is not None
        parts = [part_of(plan, tree, one, staging) for one in (gatherer, None)]
    leaves = jax.tree.leaves(tree)
    for part in parts:
        for owned in plan.ranges:
            assert part[owned.offset : owned.offset + owned.nbytes] == raw(leaves[owned.leaf])


def test_preparing_stops_when_there_is_something_else_to_do() -> None:
    tree = [[jnp.full(n, 1.0) for _ in range(FEW)] for n in (1, 2, 3)]
    plan = make_plan(tree)
    gatherer = gatherer_of()
    answers = iter([True, False])
    gatherer.prepare(plan, lambda: next(answers))
    ready = [
        gatherer.gather(batch.kind, leaves) is not None
        for batch, leaves in zip(plan.batches, tree, strict=True)
    ]
    assert ready == [True, False, False]
    assert part_of(plan, tree, gatherer) == part_of(plan, tree, None)


def test_a_batch_with_a_deleted_leaf_names_it_case_4() -> None:
    tree = {f"x{n:02d}": jnp.full(3, n) for n in range(FEW)}
    plan = make_plan(tree)
    gatherer = gatherer_of()
    gatherer.prepare(plan)
    tree["x07"].delete()
    with pytest.raises(StagingError, match=r"leaf \['x07'\] \(int32\[3\]\).*deleted"):
        stage(plan, tree, "view", gatherer)


@pytest.mark.parametrize("count", [2, 4])
def test_each_process_gathers_its_own(count: int) -> None:
    """Replicated leaves belong to one process or another; what one has for itself is its own."""
    mesh = mesh_of()
    whole = {
        "copies": [
            jax.device_put(np.full((4, 4), n, np.float32), NamedSharding(mesh, P()))
            for n in range(count * FEW)
        ],
        "mine": [jnp.full(5, n) for n in range(FEW)],
    }
    seen: list[tuple[int, bytes]] = []
    for index in range(count):
        tree = as_seen_by(whole, index, count)
        plan = make_plan(tree, processes(index, count))
        gatherer = gatherer_of()
        gatherer.prepare(plan)
        assert sorted(len(batch.leaves) for batch in plan.batches) == [FEW, FEW]
        part = np.empty(plan.length, np.uint8)
        stage(plan, tree, "view", gatherer).copy_into(part)
        leaves = jax.tree.leaves(tree)
        for owned in plan.ranges:
            stored = part[owned.offset : owned.offset + owned.nbytes].tobytes()
            assert stored == raw(leaves[owned.leaf])
            seen.append((owned.leaf, stored))
    assert len({leaf for leaf, _ in seen}) == len(jax.tree.leaves(whole))


def test_a_program_that_does_not_fit_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    tree = [jnp.full(3, n) for n in range(FEW)]
    plan = make_plan(tree)
    gatherer = gatherer_of()
    gatherer.prepare(plan)

    def misfit(*values: jax.Array) -> jax.Array:
        raise ValueError("compiled for other layouts")

    gatherer._programs[plan.batches[0].kind] = misfit
    with caplog.at_level(logging.WARNING):
        assert part_of(plan, tree, gatherer) == part_of(plan, tree, None)
        assert part_of(plan, tree, gatherer) == part_of(plan, tree, None)
    assert "saved one by one" in caplog.records[0].message
    assert len(caplog.records) == 1


def test_many_batches_are_gathered_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the same part; a leaf that is gone is named, whichever thread comes to it."""
    monkeypatch.setattr(transfer, "THREADED_MIN", 3)
    tree = {f"x{n:03d}": jnp.full(n // FEW + 1, n) for n in range(4 * FEW)}
    plan = make_plan(tree)
    assert len(plan.batches) == 4
    gatherer = gatherer_of()
    gatherer.prepare(plan)
    threads: set[int] = set()
    one_by_one = gatherer.gather

    def seen(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return one_by_one(*args)

    monkeypatch.setattr(gatherer, "gather", seen)
    assert part_of(plan, tree, gatherer) == part_of(plan, tree, None)
    assert len(threads) == 2
    for number in (FEW - 1, FEW):
        name = f"x{number:03d}"
        gone = {**tree, name: tree[name] + 0}
        gone[name].delete()
        with pytest.raises(StagingError, match=rf"leaf \['{name}'\].*deleted"):
            stage(plan, gone, "view", gatherer)
