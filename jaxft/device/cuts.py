"""Cuts: what the twin's program gives of each leaf of the state, and what of that is owned here.

The rules:
- The program is the same on all processes: it has nothing of one process in it. Which rows a device
  owns of a leaf that others hold too is told it by an argument, a table with a row on each device.
- A shard of at most SMALL_BYTES is given by every device that holds it, and its owner's is used.
- A whole shard is given as it is. (A TPU makes integers of floats in device memory, as much as the
  shard has, and copies a shard to its host from where it lies.) What is cut of one, and elements
  that are not numbers of whole bytes, are given as unsigned integers (see `bits`).
- What is given looks like no leaf that the step donates. XLA takes the memory of such a leaf for an
  output that looks the same, also for one that is to be in the host's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxft.device.bits import bits_of
from jaxft.device.boxes import count
from jaxft.device.calls import Call, Traced
from jaxft.device.lanes import Lanes
from jaxft.device.layout import Owned
from jaxft.device.leaves import SUB_BYTE_BITS, element
from jaxft.device.memory import is_usual
from jaxft.device.pieces import Places, way_to_pieces
from jaxft.device.shards import SMALL_BYTES, Plan, device_boxes
from jaxft.device.sources import Held
from jaxft.group.manifest import Leaf

# What stands for an array where a program is only compiled is one as well.
ARRAY = (jax.Array, jax.ShapeDtypeStruct)


class Cut(NamedTuple):
    """What the program gives of a leaf: each device's shard, or `rows` rows of it.

    `place` is the leaf's among the call's leaves, `leaf` its number in the plan; `column` is where
    in its table the first row is. It is given with `lead` dimensions of 1 before its own.
    """

    place: int
    leaf: int
    sharding: NamedSharding | SingleDeviceSharding
    rows: int = 0
    column: int = 0
    lead: int = 0


def in_order(sharding: Sharding) -> tuple[Device, ...]:
    """A sharding's devices, as a program has them; none if that is not known."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    if isinstance(sharding, SingleDeviceSharding):
        return tuple(sharding.device_set)
    return ()


def cuts_of(
    call: Call, traced: Traced, plan: Plan, values: list[Any], devices: tuple[Device, ...]
) -> tuple[Cut, ...]:
    """What the program gives: the same on all processes."""
    columns: dict[Mesh, int] = {}
    cuts = []
    found = zip(plan.leaves, values, places_of(call, values), strict=True)
    for number, (leaf, value, place) in enumerate(found):
        if place is None or not _goes_along(value, traced.in_shardings[place], devices):
            continue
        rows = _rows(leaf, value.sharding)
        column = 0
        if rows:
            column = columns.setdefault(value.sharding.mesh, 0)
            columns[value.sharding.mesh] += 1
        cuts.append(Cut(place, number, value.sharding, rows, column))
    return tuple(cuts)


def places_of(call: Call, values: Sequence[Any]) -> tuple[int | None, ...]:
    """Where the state's arrays are among the leaves of a call; None of what is none of these. An
    array that is several of them has a place for each, as far as there are any. (In another call
    that looks the same these are different arrays, so a twin is for these places alone.)"""
    at: dict[int, list[int]] = {}
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, ARRAY):
            at.setdefault(id(leaf), []).append(place)
    found: list[int | None] = []
    for value in values:
        places = at.get(id(value), [None])
        found.append(places.pop(0) if len(places) > 1 else places[0])
    return tuple(found)


def _goes_along(value: Any, asked: Sharding | None, devices: tuple[Device, ...]) -> bool:
    """Whether a leaf is an array on the program's devices, in their usual memory, where the step
    leaves it: not elsewhere, from where it is brought to the sharding that the step asks for."""
    if not isinstance(value, ARRAY) or not value.size:
        return False
    if asked is not None and not asked.is_equivalent_to(value.sharding, value.ndim):
        return False
    return in_order(value.sharding) == devices and is_usual(value.sharding)


def _rows(leaf: Leaf, sharding: Sharding) -> int:
    """How many rows of its shard each of the devices that hold it gives; 0: the whole shard."""
    boxes = device_boxes(sharding, leaf)
    box = next(iter(boxes.values()))
    holders = len(boxes) // len(set(boxes.values()))
    is_small = count(box) * element(leaf).itemsize <= SMALL_BYTES
    if leaf.kind != "array" or holders == 1 or is_small:
        return 0
    height = box[1][0] - box[0][0]
    rows = math.ceil(height / holders)
    return rows if rows < height else 0


def told_of(cuts: tuple[Cut, ...], plan: Plan, lanes: Lanes | None, is_abstract: bool) -> list[Any]:
    """What each device is told: int32 of shape (devices, numbers), a row on each device. For each
    mesh, in the order in which leaves have it, the first row of each leaf that is cut; and last, if
    it gives the parity of lanes, what it needs for that."""
    owned = _by_leaf(plan)
    found = []
    for mesh, members in _by_mesh(cuts).items():

        def firsts(device: Device, members: list[Cut] = members) -> list[int]:
            return [_first_row(cut, owned.get(cut.leaf, []), device, plan) for cut in members]

        found.append(_table(mesh, len(members), None if is_abstract else firsts))
    if lanes is not None:
        found.append(_table(lanes.mesh, lanes.columns, None if is_abstract else lanes.row_of))
    return found


def _table(mesh: Mesh, columns: int, row_of: Callable[[Device], list[int]] | None) -> Any:
    """What stands for a table, where there is no device to have it; else the table."""
    shape = (mesh.devices.size, columns)
    if row_of is None:
        struct: Any = jax.ShapeDtypeStruct
        return struct(shape, np.int32, sharding=spread(mesh))
    pieces = [
        jax.device_put(np.array([row_of(device)], np.int32), device)
        for device in mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays(shape, spread(mesh), pieces)


def _first_row(cut: Cut, owned: list[Owned], device: Device, plan: Plan) -> int:
    """Of those rows that a device gives; all that it owns are among them."""
    mine = next((one for one in owned if one.device == device), None)
    if mine is None:
        return 0
    height = mine.shard[1][0] - mine.shard[0][0]
    return min((mine.rows or (0, 0))[0], height - cut.rows)


def _by_leaf(plan: Plan) -> dict[int, list[Owned]]:
    found: dict[int, list[Owned]] = {}
    for owned in plan.owned:
        found.setdefault(owned.range.leaf, []).append(owned)
    return found


def _by_mesh(cuts: tuple[Cut, ...]) -> dict[Mesh, list[Cut]]:
    found: dict[Mesh, list[Cut]] = {}
    for cut in cuts:
        if cut.rows:
            assert isinstance(cut.sharding, NamedSharding), "others are on one device"
            found.setdefault(cut.sharding.mesh, []).append(cut)  # type: ignore[arg-type]
    return found


def spread(mesh: Mesh, memory_kind: str | None = None, lead: int = 0) -> NamedSharding:
    """A piece of the first dimension, but `lead` others before it, for each device."""
    spec = PartitionSpec(*[None] * lead, tuple(mesh.axis_names))  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def pinned(cut: Cut) -> NamedSharding | None:
    """Where the program puts what it gives of a leaf."""
    sharding = cut.sharding
    if isinstance(sharding, SingleDeviceSharding):
        return None
    if cut.rows:
        return spread(sharding.mesh, "pinned_host", cut.lead)  # type: ignore[arg-type]
    spec = PartitionSpec(*[None] * cut.lead, *sharding.spec)  # type: ignore[no-untyped-call]
    return NamedSharding(sharding.mesh, spec, memory_kind="pinned_host")


# A global or a device's own shape, and a dtype.
Looks = set[tuple[tuple[int, ...], Any]]


def looks_of(call: Call, donated: Sequence[int]) -> Looks:
    """How donated leaves look that what is given of the state could look like. XLA takes the memory
    of such a leaf for an output that looks the same, also for one that is to be in the host's."""
    found: Looks = set()
    for place in donated:
        leaf = call.leaves[place]
        if isinstance(leaf, ARRAY) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            found |= {(leaf.shape, leaf.dtype)}
            found |= {(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)}
    return found


def apart(cut: Cut, leaf: Any, taken: Looks) -> Cut:
    """The cut, so that what is given looks like none of these."""
    if not taken:
        return cut
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    given = bits_of if cut.rows else _whole
    bits = jax.eval_shape(lambda all: given(jax.random.key_data(all) if is_key else all), leaf)
    shapes = [bits.shape, (*cut.sharding.shard_shape(leaf.shape), *bits.shape[leaf.ndim :])]
    if cut.rows:
        of_all = cut.rows * len(cut.sharding.device_set)
        shapes = [(rows, *shapes[1][1:]) for rows in (of_all, cut.rows)]
    return cut._replace(lead=lead_of(shapes, bits.dtype, taken))


def lead_of(shapes: Sequence[tuple[int, ...]], dtype: Any, taken: Looks) -> int:
    lead = 0
    while any(((1,) * lead + shape, dtype) in taken for shape in shapes):
        lead += 1
    return lead


def deeper(array: jax.Array, lead: int) -> jax.Array:
    return array.reshape((1,) * lead + array.shape) if lead else array


def hold(cuts: tuple[Cut, ...], values: dict[int, Any], told: Sequence[Any]) -> list[Any]:
    """What is given of the leaves; `values` are these, by number, behind barriers."""
    by_mesh = dict(zip(_by_mesh(cuts), told, strict=False))
    held = []
    for cut in cuts:
        value, sharding = values[cut.leaf], cut.sharding
        if isinstance(sharding, SingleDeviceSharding):
            whole = deeper(_whole(value), cut.lead)
            held.append(jax.device_put(whole, jax.memory.Space.Host))
        elif cut.rows:
            mesh: Any = sharding.mesh
            each = jax.shard_map(
                functools.partial(_cut, rows=cut.rows, column=cut.column),
                mesh=mesh,
                in_specs=(sharding.spec, spread(mesh).spec),
                out_specs=spread(mesh).spec,
                check_vma=False,
            )
            held.append(deeper(each(value, by_mesh[mesh]), cut.lead))
        else:
            held.append(deeper(_whole(value), cut.lead))
    return held


def _whole(shard: jax.Array) -> jax.Array:
    """A whole shard as it is given."""
    dtype = shard.dtype
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if dtype == jnp.bool_ or dtype.name in SUB_BYTE_BITS or is_complex:
        return bits_of(shard)
    return shard


def _cut(shard: jax.Array, starts: jax.Array, *, rows: int, column: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(bits_of(shard), starts[0, column], rows, 0)


class Wanted(NamedTuple):
    """What is owned of the shard, or of its rows, that a device gave as output `number`."""

    owned: Owned
    number: int
    rows: tuple[int, int] | None
    lead: int


def wanted_of(plan: Plan, cuts: tuple[Cut, ...]) -> list[Wanted]:
    by_leaf = _by_leaf(plan)
    found = []
    for number, cut in enumerate(cuts):
        for owned in by_leaf.get(cut.leaf, []):
            assert owned.device is not None, "it is an array"
            rows = owned.rows
            if cut.rows:
                first, end = rows or (0, owned.shard[1][0] - owned.shard[0][0])
                start = _first_row(cut, [owned], owned.device, plan)
                rows = (first - start, end - start)
                assert 0 <= rows[0] <= rows[1] <= cut.rows, "the program gives all that is owned"
            found.append(Wanted(owned, number, rows, cut.lead))
    return found


def sources_of(wanted: list[Wanted], leaves: tuple[Leaf, ...], held: list[jax.Array]) -> list[Held]:
    """What of the part the program's outputs are. The list of these is emptied."""
    places, pieces_of = Places(), way_to_pieces()
    found = []
    for owned, number, rows, lead in wanted:
        array = held[number]
        assert owned.device is not None, "it is an array"
        piece = pieces_of(array)[places.of(array)[owned.device]]
        found.append(Held(owned, leaves, piece, rows, lead))
    held.clear()
    return found
