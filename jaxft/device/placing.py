"""Placing: from checked bytes to arrays on the devices.

The rules:
- A restored array shares no memory with what the reader returned.
- On CPU the devices take the reader's bytes as they lie, without a copy, and one compiled copy
  makes arrays of their own of them, on all devices at once. Their buffers are XLA's: the first step
  may donate them. Replicas of a shard are copied from the same bytes, which are read once.
- What does not lie there whole rows at a time is put together in a fresh buffer first. Other
  devices copy from the reader's bytes, or from such a buffer. So does a CPU where the leaf is
  small: to compile a program for it would cost more than its first donation, which allocates.
- Floats travel as unsigned integers of their size: XLA changes the payload of some NaNs otherwise.
- Arrays come back with the target's sharding; uncommitted ones, and structs without a sharding,
  come back uncommitted on the default device. Literals come from the first host's manifest.
- Weak types come back for scalars that this process addresses fully. Other weakly typed arrays come
  back strongly typed with the same bytes (JAX has no way to make them); a step may be traced anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxft.device.assembly import Fill, Target, Targets, is_uncommitted
from jaxft.device.boxes import Box, count, from_index, intersect, sides, whole, within
from jaxft.device.contexts import own_contexts
from jaxft.device.leaves import SUB_BYTE_BITS, decode_literal, element, stored_shape
from jaxft.device.memory import is_usual
from jaxft.group.manifest import ALIGN, Leaf

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# (host index, offset in its segment, bytes) -> these bytes, checked. Called for pieces of `needs`,
# in the order of `reads`.
Read = Callable[[int, int, int], Bytes]

# Bytes of arrays that may be on their way to the devices at the same time.
IN_FLIGHT_BYTES = 256 * 1024 * 1024

# Bytes of a leaf in this process from which on a compiled copy is worth its compilation.
COPIED_BYTES = 1024 * 1024


def assemble(targets: Targets, read: Read) -> Any:
    """Builds the tree. When it returns, nothing of it depends on what `read` returned.

    Args:
        targets: what to restore.
        read: gives any piece within `needs(targets)`, checked; what it returns is copied.
    """
    flight = _Flight()
    try:
        restored = [_restore(target, read, flight) for target in targets.targets]
    finally:
        flight.land()
    return jax.tree_util.tree_unflatten(targets.treedef, restored)


class _Flight:
    """Arrays on their way to the devices, bounded, since each holds its host buffer until then."""

    def __init__(self) -> None:
        self._arrays: list[jax.Array] = []
        self._bytes = 0

    def add(self, array: jax.Array) -> None:
        self._arrays.append(array)
        self._bytes += array.nbytes
        if self._bytes > IN_FLIGHT_BYTES:
            self.land()

    def land(self) -> None:
        arrays, self._arrays, self._bytes = self._arrays, [], 0
        for array in arrays:
            array.block_until_ready()


def _restore(target: Target, read: Read, flight: _Flight) -> Any:
    leaf, like = target.leaf, target.like
    if leaf.kind == "literal":
        return decode_literal(leaf)
    if leaf.kind == "numpy":
        return _fill(leaf, target.fills[0], read)
    sharding = None if is_uncommitted(like) else like.sharding
    here_bytes = sum(source.nbytes for fill in target.fills for source in fill.sources)
    worth_it = here_bytes >= COPIED_BYTES and _can_alias(leaf, sharding)
    place = _place_by_copy if worth_it else _place
    array = place(leaf, sharding, target.fills, read)
    flight.add(array)
    if leaf.kind == "key":
        return jax.random.wrap_key_data(array, impl=leaf.impl)
    return weaken(array, like) if leaf.weak_type else array


def weaken(array: jax.Array, like: Any) -> jax.Array:
    """The same scalar, weakly typed, where JAX can make it: from a Python scalar."""
    if array.ndim or not array.is_fully_addressable:
        return array
    weak: jax.Array = jax.device_put(array.item())
    if not is_uncommitted(like):
        weak = jax.device_put(weak, like.sharding)
    # The payload of a NaN does not always survive being a Python float.
    same = weak.dtype == array.dtype and np.asarray(weak).tobytes() == np.asarray(array).tobytes()
    return weak if same else array


# ------------------------------------------------------------------------ where devices can alias


def _can_alias(leaf: Leaf, sharding: Sharding | None) -> bool:
    """Whether the devices can take host memory as it is, in the layout that the snapshot has."""
    if leaf.dtype in SUB_BYTE_BITS or 0 in stored_shape(leaf):
        return False
    if sharding is None:
        return jax.default_backend() == "cpu"
    device: jax.Device = next(iter(sharding.device_set))
    return device.platform == "cpu" and is_usual(sharding)


def _place_by_copy(
    leaf: Leaf, sharding: Sharding | None, fills: Sequence[Fill], read: Read
) -> jax.Array:
    """Has every device copy what it needs from where it lies."""
    rows = _rows_of_pieces(fills) if _is_cut_alike(sharding) else None
    views: dict[Box, list[np.ndarray[Any, Any]]] = {}
    for fill in fills:
        if rows is None:
            views[fill.box] = [_fill(leaf, fill, read)]
        else:
            views[fill.box] = [
                read(source.host, source.offset, source.nbytes)
                .view(element(leaf))
                .reshape(sides(source.box))
                for source in fill.sources
            ]
    carrier = _carrier(element(leaf))
    with own_contexts():
        pieces = [
            _alias(
                {box: parts[number].view(carrier) for box, parts in views.items()}, leaf, sharding
            )
            for number in range(len(next(iter(views.values()))))
        ]
        copied: jax.Array = _copier(element(leaf), sharding, len(pieces))(pieces)
    return copied


def _is_cut_alike(sharding: Sharding | None) -> bool:
    """Whether a compiled program can put pieces together on each device on its own."""
    return sharding is None or len(sharding.device_set) == 1 or isinstance(sharding, NamedSharding)


def _rows_of_pieces(fills: Sequence[Fill]) -> list[int] | None:
    """How many rows each piece of a box has, if all boxes consist of such pieces of whole rows."""
    found: list[list[int]] = []
    for fill in fills:
        boxes = [source.box for source in fill.sources]
        if not _covers(fill, boxes):
            return None
        found.append([(sides(box) or (1,))[0] for box in boxes])
    return found[0] if all(one == found[0] for one in found) else None


def _covers(fill: Fill, pieces: Sequence[Box]) -> bool:
    """Whether these boxes, one after the other, are the whole rows of the box."""
    if len(pieces) == 1:
        return pieces[0] == fill.box
    (first, *start), (last, *stop) = fill.box
    for begin, end in pieces:
        if (begin[0], *begin[1:]) != (first, *start) or list(end[1:]) != stop:
            return False
        first = end[0]
    return first == last


def _alias(
    views: dict[Box, np.ndarray[Any, Any]], leaf: Leaf, sharding: Sharding | None
) -> jax.Array:
    """One piece of every box as an array that shares its memory, sharded as the leaf is."""
    some = next(iter(views.values()))
    if sharding is None:
        array: jax.Array = jax.device_put(some)
        return array
    whole_shape = stored_shape(leaf)
    if not whole_shape:
        return jax.make_array_from_callback((), sharding, lambda index: some)
    height = sides(next(iter(views)))[0]
    rows = some.shape[0]
    shape = (whole_shape[0] // height * rows, *whole_shape[1:])

    def piece(index: Any) -> np.ndarray[Any, Any]:
        (begin, *start), (_, *stop) = from_index(index or (), shape)
        first = begin // rows * height
        return views[(first, *start), (first + height, *stop)]

    return jax.make_array_from_callback(shape, sharding, piece)


@functools.lru_cache(maxsize=1024)
def _copier(
    dtype: np.dtype[Any], sharding: Sharding | None, pieces: int
) -> Callable[[list[jax.Array]], jax.Array]:
    """The compiled copy of arrays of this sharding, from so many pieces."""

    def copy(parts: list[jax.Array]) -> jax.Array:
        joined = jnp.concatenate(parts) if pieces > 1 else jnp.copy(parts[0])
        if joined.dtype == dtype:
            return joined
        return jax.lax.bitcast_convert_type(joined, dtype)

    if sharding is None:
        return jax.jit(copy)
    if pieces == 1 or not isinstance(sharding, NamedSharding):
        return jax.jit(copy, out_shardings=sharding)
    spec = sharding.spec
    each = jax.shard_map(
        copy, mesh=sharding.mesh, in_specs=([spec] * pieces,), out_specs=spec, check_vma=False
    )
    return jax.jit(each, out_shardings=sharding)


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What elements of this dtype travel as."""
    moves_as_it_is = dtype.kind in "biuc"
    return dtype if moves_as_it_is else np.dtype(f"u{dtype.itemsize}")


# ------------------------------------------------------------------------ where they cannot


def _place(leaf: Leaf, sharding: Sharding | None, fills: Sequence[Fill], read: Read) -> jax.Array:
    """Puts fresh buffers on the devices; replicas of a shard share one."""
    buffers = {fill.box: _fill(leaf, fill, read) for fill in fills}
    array: jax.Array
    if sharding is None:
        (buffer,) = buffers.values()
        array = jax.device_put(buffer)
    else:
        shape = stored_shape(leaf)
        array = jax.make_array_from_callback(
            shape,
            sharding,
            lambda index: buffers[from_index(index or (), shape)],
            dtype=element(leaf),
        )
    return array


def _fill(leaf: Leaf, fill: Fill, read: Read) -> np.ndarray[Any, Any]:
    """A fresh array of the box, filled."""
    dtype = element(leaf)
    filled = _empty(sides(fill.box), dtype)
    raw = filled.view(_opaque(dtype))
    for source in fill.sources:
        data = read(source.host, source.offset, source.nbytes)
        rows = data.view(_opaque(dtype)).reshape(sides(source.box))
        common = intersect(source.box, fill.box)
        assert common is not None, "a source has elements of the box it is for"
        np.copyto(within(raw, fill.box[0], common), within(rows, source.box[0], common))
    return filled


def _opaque(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype of the same size whose elements NumPy copies without looking at them."""
    return np.dtype(
        f"u{dtype.itemsize}" if dtype.itemsize in (1, 2, 4, 8) else f"V{dtype.itemsize}"
    )


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Uninitialised memory at a multiple of ALIGN, which JAX's CPU devices take over as it is."""
    nbytes = count(whole(shape)) * dtype.itemsize
    memory = np.empty(nbytes + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes].view(dtype).reshape(shape)
