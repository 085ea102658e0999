"""Views: shards that are held, and looked at later, without a copy.

A step leaves new arrays and cold caches, so a save pays for each object that it touches. What is
wanted of which leaf is found out once for a plan. `look` then touches the leaves' pieces and
nothing else; what a part is made of is put together afterwards, away from the training thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Device

from jaxft.device.boxes import Box
from jaxft.device.layout import Owned
from jaxft.device.leaves import stored
from jaxft.device.pieces import Places, way_to_pieces
from jaxft.device.shards import Plan
from jaxft.device.sources import UNREACHABLE, Held, unreachable
from jaxft.group.manifest import Leaf

View = np.ndarray[Any, Any]


class _Sight(NamedTuple):
    """What is wanted of a leaf: its pieces by number, or what `way` gives of it."""

    leaf: int
    way: Callable[[Any], list[View]] | None
    numbers: tuple[int, ...] = ()


class Views:
    """What is wanted of a plan's leaves.

    Args:
        plan: the plan.
        ranges: ranges of it, each once.
    """

    def __init__(self, plan: Plan, ranges: Sequence[Owned]) -> None:
        self._plan = plan
        self._ranges = ranges
        # Where several devices of this process have the same shard, one view of it is enough.
        self._wanted: dict[int, dict[Box, Device | None]] = {}
        for owned in sorted(ranges, key=lambda owned: owned.range.leaf):
            shards = self._wanted.setdefault(owned.range.leaf, {})
            shards.setdefault(owned.shard, owned.device)
        self._sights: list[_Sight] | None = None

    def look(self, values: list[Any]) -> list[View]:
        """Views of these leaves' shards, in the order that `sources` wants. They hold a device's
        buffers without a copy; NumPy leaves are copied.

        Raises:
            StagingError, ConfigError: a leaf that has no bytes (any more); names it.
        """
        sights = self._sights
        if sights is None:
            sights = self._sights = self._find(values)
        pieces_of, asarray = way_to_pieces(), np.asarray
        views: list[View] = []
        leaf = 0
        try:
            for leaf, way, numbers in sights:
                if way is None:
                    pieces = pieces_of(values[leaf])
                    views += [asarray(pieces[number]) for number in numbers]
                else:
                    views += way(values[leaf])
        except UNREACHABLE as error:
            raise unreachable(self._plan.leaves[leaf], values[leaf], error) from error
        return views

    def sources(self, views: list[View], leaves: tuple[Leaf, ...]) -> list[Held]:
        """What of the part these views are. The list is emptied."""
        wanted = [(leaf, shard) for leaf, shards in self._wanted.items() for shard in shards]
        held = dict(zip(wanted, views, strict=True))
        views.clear()
        return [
            Held(owned, leaves, held[owned.range.leaf, owned.shard], owned.rows)
            for owned in self._ranges
        ]

    def _find(self, values: list[Any]) -> list[_Sight]:
        places = Places()
        sights = []
        for leaf, shards in self._wanted.items():
            value, description = values[leaf], self._plan.leaves[leaf]
            try:
                devices = list(shards.values())
                sights.append(_sight(leaf, description, value, devices, places))
            except UNREACHABLE as error:
                raise unreachable(description, value, error) from error
        return sights


def _sight(
    leaf: int,
    description: Leaf,
    value: Any,
    devices: list[Device | None],
    places: Places,
) -> _Sight:
    if isinstance(value, np.ndarray):
        return _Sight(leaf, _copied)
    array = stored(description, value)
    found = places.of(array)
    numbers = tuple([0 if device is None else found[device] for device in devices])
    if description.kind == "key":
        return _Sight(leaf, functools.partial(_of_keys, numbers))
    if len(found) > 1 and array.is_fully_replicated:
        return _Sight(leaf, _any_replica)
    return _Sight(leaf, None, numbers)


def _copied(value: View) -> list[View]:
    return [np.array(value, order="C")]


def _any_replica(array: jax.Array) -> list[View]:
    """JAX gives one replica without making an object for each."""
    return [np.asarray(array.addressable_data(0))]


def _of_keys(numbers: tuple[int, ...], keys: jax.Array) -> list[View]:
    pieces = way_to_pieces()(jax.random.key_data(keys))
    return [np.asarray(pieces[number]) for number in numbers]
