"""Pieces: the arrays of one device each that an array of this process consists of.

JAX's own way, `addressable_shards`, makes an object with a device and an index for each of them,
and takes most of the time that a save needs to reach a leaf. An array keeps a list of just the
pieces, in that order, as `_arrays`. That is private to JAX, so whether it is so is looked at once
in each process, on a small array; where it is not, the public way does the same.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Device
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

Pieces = Callable[[jax.Array], Sequence[jax.Array]]

_kept = operator.attrgetter("_arrays")


def public_pieces(array: jax.Array) -> Sequence[jax.Array]:
    """The pieces, in the order of `addressable_shards`.

    Raises:
        RuntimeError: the array was deleted.
    """
    return [piece for _, piece in _shards(array)]


def kept_pieces(array: jax.Array) -> Sequence[jax.Array]:
    """The same, as the array keeps them."""
    pieces: Sequence[jax.Array] | None = _kept(array)
    # A deleted array keeps none; JAX's own way says so. An only one may be something else.
    if pieces is None or (len(pieces) == 1 and _is_one_of_many(array)):
        return public_pieces(array)
    return pieces


@functools.cache
def way_to_pieces() -> Pieces:
    """What gives the pieces of an array in this process."""
    return kept_pieces if _are_kept(_small_array()) else public_pieces


class Places:
    """The number that the piece on each device has: found once for all arrays of one sharding."""

    def __init__(self) -> None:
        self._known: dict[Sharding, dict[Device, int]] = {}

    def of(self, array: jax.Array) -> dict[Device, int]:
        """Of this array's pieces.

        Raises:
            RuntimeError: the array was deleted.
        """
        found = self._known.get(array.sharding)
        if found is None:
            shards = enumerate(_shards(array))
            found = self._known[array.sharding] = {one[0]: number for number, one in shards}
        return found


def _shards(array: jax.Array) -> list[tuple[Device, jax.Array]]:
    """Each device with its piece.

    Where this process has one device of several, an array that `device_put` has replicated from a
    local one keeps a global array as its only piece, and `addressable_shards` fails (JAX 0.10).
    """
    if _is_one_of_many(array):
        (device,) = array.sharding.addressable_devices
        return [(device, array.addressable_data(0))]
    return [(shard.device, shard.data) for shard in array.addressable_shards]


def _is_one_of_many(array: jax.Array) -> bool:
    sharding = array.sharding
    return len(sharding.addressable_devices) == 1 < len(sharding.device_set)


def piece_on(device: Device, array: jax.Array) -> jax.Array:
    """The piece that a device holds."""
    return next(piece for piece in way_to_pieces()(array) if piece.devices() == {device})


def _are_kept(array: jax.Array) -> bool:
    """Does an array keep the very pieces that the public way gives, and none once it is deleted?"""
    try:
        pieces = _kept(array)
        public = public_pieces(array)
        same = type(pieces) is list and len(pieces) == len(public)
        same = same and all(map(operator.is_, pieces, public))
        array.delete()
        return same and _kept(array) is None
    except (AttributeError, TypeError, RuntimeError):
        return False


def _small_array() -> jax.Array:
    devices = np.array(jax.local_devices())
    sharding = NamedSharding(Mesh(devices, ("all",)), PartitionSpec("all"))  # type: ignore[no-untyped-call]
    return jax.make_array_from_callback(
        (len(devices),), sharding, lambda index: np.zeros(1, np.float32)
    )
