"""Trees of many leaves are gone through in threads of their own, with the same result."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.device.aside import LEAVES_MIN, aside, begin_aside
from jaxft.device.shards import PlanCache, make_plan
from jaxft.device.transfer import Staging
from jaxft.errors import StagingError
from tests.device.snapshots import stage
from tests.device.test_gather import STAGINGS, gatherer_of, part_of


@pytest.fixture(params=["aside", "here"])
def goes_aside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the trees of a test have many leaves."""
    leaves_min = 1 if request.param == "aside" else 1_000_000
    monkeypatch.setattr("jaxft.device.aside.LEAVES_MIN", leaves_min)
    return request.param == "aside"


class Node:
    """A node of a tree that knows which threads have taken it apart."""

    seen: set[int]

    def __init__(self, leaves: list[Any], seen: set[int]) -> None:
        self.leaves = leaves
        self.seen = seen


def _take_apart(node: Node) -> tuple[list[Any], None]:
    node.seen.add(threading.get_ident())
    return node.leaves, None


jax.tree_util.register_pytree_node(Node, _take_apart, lambda _, leaves: Node(list(leaves), set()))


def test_work_gives_what_it_gives_in_another_thread() -> None:
    assert aside(threading.get_ident, LEAVES_MIN) != threading.get_ident()
    assert aside(threading.get_ident, LEAVES_MIN - 1) == threading.get_ident()
    waits = [begin_aside(lambda number=number: number + 1) for number in range(3)]  # type: ignore[misc]
    assert [wait() for wait in waits] == [1, 2, 3]


def test_what_work_raises_is_raised_and_keeps_nothing() -> None:
    class Kept:
        pass

    kept = weakref.ref(Kept())

    def fail() -> None:
        nonlocal kept
        state = Kept()
        kept = weakref.ref(state)
        raise KeyboardInterrupt("in the middle")

    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt, match="in the middle") as caught:
            begin_aside(fail)()
        assert kept() is not None, "its frame is in the traceback"
        del caught
        assert kept() is None, "no cycle keeps it"
    finally:
        gc.enable()


def test_a_tree_like_the_last_is_found_there(goes_aside: bool) -> None:
    cache = PlanCache()
    seen: set[int] = set()
    tree = {"a": Node([jnp.ones(n + 1) for n in range(3)], seen), "b": jnp.zeros(2)}
    plan, first = cache.find(tree)
    assert [id(leaf) for leaf in first] == [id(leaf) for leaf in jax.tree.leaves(tree)]
    seen.clear()
    for _ in range(2):
        tree = jax.tree.map(lambda leaf: leaf + 1, tree)
        tree["a"].seen = seen
        again, leaves = cache.find(tree)
        assert again is plan
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in jax.tree.leaves(tree)]
    seen.discard(threading.get_ident())  # `leaves` of this test
    assert bool(seen) == goes_aside
    changed, _ = cache.find({**tree, "b": jnp.zeros(3)})
    assert changed.digest != plan.digest


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.usefixtures("goes_aside")
def test_a_state_of_many_leaves_has_its_bytes(staging: Staging) -> None:
    tree = {
        "small": [jnp.full(3, n, jnp.float32) for n in range(16)],
        "key": jax.random.key(3),
        "host": np.arange(5.0),
        "number": 7,
    }
    plan = make_plan(tree)
    gatherer = gatherer_of(staging)
    gatherer.prepare(plan)
    assert plan.batches
    part = part_of(plan, tree, gatherer, staging)
    assert np.asarray(tree["host"]).tobytes() in part
    assert part == part_of(plan, tree, None, staging)


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.usefixtures("goes_aside")
def test_a_leaf_that_is_gone_is_named_case_4(name: str) -> None:
    tree = {"small": [jnp.full(3, n) for n in range(16)], "large": jnp.ones(70_000)}
    plan = make_plan(tree)
    gatherer = gatherer_of()
    gatherer.prepare(plan)
    jax.tree.leaves(tree[name])[-1].delete()
    with pytest.raises(StagingError, match=rf"leaf \['{name}'\].*deleted"):
        stage(plan, tree, "view", gatherer)
