"""Which leaves are on device lanes, where, and in which worlds there are any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.device.lanes import Rings, Seat, find_rings
from jaxft.device.shards import Processes, make_plan
from jaxft.errors import ConfigError
from jaxft.group.manifest import CHUNK
from jaxft.group.placement import form_groups
from jaxft.group.world import Code
from tests.device.parity.worlds import World

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
WORLD = World(Code(data=3, parity=1), 4)


def put(shape: tuple[int, ...], *spec: Any, mesh: Mesh = MESH, dtype: Any = "f4") -> jax.Array:
    return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, P(*spec)))


def on_lanes(state: dict[str, Any]) -> set[str]:
    lanes = WORLD.plan(state, 0).lanes
    return set() if lanes is None else {sorted(state)[place.leaf] for place in lanes.places}


def test_large_leaves_in_equal_pieces_on_all_devices_are_on_lanes() -> None:
    turned = Mesh(np.array(jax.devices()[::-1]), ("t",))
    yes = {
        "everywhere": put((64, 2000)),
        "partly": put((404, 2000), "a"),
        "spread": put((800, 800), ("a", "b")),
        "columns": put((37, 8000), None, "b"),
        "ragged": put((15, 9000)),
    }
    no = {
        "small": put((64, 200)),
        "few rows": put((9, 9000)),  # 16 for which there would have to be room
        "one row": put((1, 90_000)),
        "other mesh": put((800, 800), "t", mesh=turned),
        "one device": jnp.zeros((800, 800)),
        "below a byte": put((512, 800), dtype="int4"),
        "key": jax.device_put(jax.random.split(jax.random.key(0), 9000), NamedSharding(MESH, P())),
        "on the host": jax.device_put(
            jnp.zeros((800, 800)), NamedSharding(MESH, P("a"), memory_kind="pinned_host")
        ),
        "numpy": np.zeros((800, 800)),
        "number": 5,
    }
    assert on_lanes(yes | no) == set(yes)
    assert on_lanes(no | {"again": no["numpy"]}) == {"other mesh"}
    assert on_lanes({"number": 5}) == set()


@pytest.mark.parametrize("index", range(4))
def test_all_lanes_have_one_layout_and_the_rest_lies_behind_them(index: int) -> None:
    state = {
        "w": put((331, 200)),
        "v": put((331, 200)),
        "m": put((800, 800), "a"),
        "few": put((9, 9000)),
        "biases": [put((7,)) for _ in range(40)],
        "numpy": np.arange(5),
    }
    plan = WORLD.plan(state, index)
    lanes = plan.lanes
    assert lanes is not None
    assert lanes.places == WORLD.plan(state, 0).lanes.places  # type: ignore[union-attr]
    assert lanes.length % CHUNK == 0 == plan.length % CHUNK
    assert plan.spans == (
        (0, lanes.length),
        (lanes.length, lanes.length),
        (2 * lanes.length, plan.length - 2 * lanes.length),
    )
    where = {place.leaf: place.offset for place in lanes.places}
    end = 0
    for owned in plan.owned:
        assert owned.range.offset >= end, "ranges do not overlap"
        end = owned.range.offset + owned.range.nbytes
        if owned.range.leaf in where:
            lane = lanes.rings.own.index(owned.device)  # type: ignore[arg-type]
            assert owned.range.offset == lane * lanes.length + where[owned.range.leaf]
            shard_rows = owned.shard[1][0] - owned.shard[0][0]
            first, stop = owned.rows or (0, shard_rows)
            number = list(where).index(owned.range.leaf)
            assert lanes.rows[owned.device][number] == (first, stop - first)  # type: ignore[index]
        else:
            assert owned.range.offset >= lanes.end
    plain = WORLD.plan(state, index, with_lanes=False)
    assert {(one.leaf, one.start, one.stop) for one in plain.ranges} == {
        (one.leaf, one.start, one.stop) for one in plan.ranges
    }
    assert plain.digest != plan.digest


def test_without_a_leaf_for_lanes_nothing_changes() -> None:
    state = {"small": put((7,)), "few": put((9, 9000)), "numpy": np.arange(5)}
    plans = [WORLD.plan(state, 1, with_lanes=with_lanes) for with_lanes in (False, True)]
    assert plans[0].digest == plans[1].digest
    assert plans[0].ranges == plans[1].ranges
    assert plans[0].length == plans[1].length
    assert plans[1].spans == ()


def rings_of(
    hosts: int, code: Code, ranks: list[int], process_of: Callable[[jax.Device], int], devices: int
) -> Rings:
    groups = form_groups(hosts, code)
    return find_rings(groups, ranks, jax.devices()[:devices], process_of, 0)


def test_each_device_codes_with_those_of_its_number_on_other_hosts() -> None:
    rings = rings_of(2, Code(data=1, parity=1), [2, 2], lambda device: device.id // 2, 8)
    seats = [rings.seats[device] for device in jax.devices()]
    assert seats == [Seat(0, host, lane) for host in range(2) for lane in range(4)]
    assert rings.own == tuple(jax.devices()[:2])


@pytest.mark.parametrize(
    ("hosts", "code", "ranks", "process_of", "devices", "why"),
    [
        (5, Code(data=2, parity=1), [1] * 5, lambda d: d.id, 5, r"not alike: 1\+1, 2\+1"),
        (1, Code(data=2, parity=1), [1], lambda d: 0, 8, "no host has another one"),
        (3, Code(data=2, parity=1), [1] * 3, lambda d: d.id // 3, 8, r"devices \[3, 3, 2\]"),
        (2, Code(data=1, parity=1), [1, 2], lambda d: d.id, 3, r"processes \[1, 2\]"),
        (3, Code(data=2, parity=1), [1] * 3, lambda d: d.id // 4, 8, r"devices \[4, 4\]"),
    ],
)
def test_worlds_in_which_devices_cannot_code_say_why(
    hosts: int, code: Code, ranks: list[int], process_of: Any, devices: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        rings_of(hosts, code, ranks, process_of, devices)


def test_a_struct_gives_the_plan_of_its_array() -> None:
    state = {"w": put((331, 200)), "m": put((800, 800), "a")}
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    assert WORLD.plan(like, 2).digest == WORLD.plan(state, 2).digest
    rings = find_rings(WORLD.groups, [1] * 4, jax.devices(), WORLD.process_of, 2)
    processes = Processes(index=2, count=4, of=WORLD.process_of)
    assert make_plan(like, processes, rings).spans == WORLD.plan(state, 2).spans
