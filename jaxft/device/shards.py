"""Shards: the plan that says which bytes of the state this process saves.

The rules:
- Every distinct byte of the state has one owner in the whole world. A shard that R devices hold is
  cut into R ranges of whole rows along its first dimension, one a device, so that state which is
  replicated over hosts costs each of them 1/R of it.
- A shard of at most SMALL_BYTES has one owner; owners take turns.
- A leaf that lives on one process's own devices only (a step counter made by `jnp.zeros`, a key of
  its own, a NumPy array) is that process's: each saves its own, and gets its own back.
- The plan is a pure function of shapes, dtypes, shardings and the processes. Every process computes
  it for the whole world, and its digest is equal on all of them, or their trees differ.
- `jax.ShapeDtypeStruct`s give the same plan as the arrays they stand for.

A part holds the ranges by device, so that the bytes of one device are next to each other; what one
device has for itself, and NumPy arrays, come last, wherever they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np
import xxhash
from jax import Device

from jaxft.device.boxes import Box, count, cut_rows, from_index, whole
from jaxft.device.leaves import describe, element, empty_nodes, flatten, show, stored_shape
from jaxft.errors import ConfigError
from jaxft.group.manifest import ALIGN, Leaf, Range, align

SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of the world: this one's number, how many there are, whose device is whose."""

    index: int
    count: int
    of: Callable[[Device], int]

    @classmethod
    def here(cls) -> Processes:
        """The world as JAX sees it now."""
        return cls(
            index=jax.process_index(),
            count=jax.process_count(),
            of=lambda device: device.process_index,
        )


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A range that this process saves: rows `rows` of the shard of a leaf that `device` holds.

    `device` is None for a NumPy leaf, and for a struct without a sharding; `shard` is the box of
    the shard, in the leaf's stored elements. `rows` is None where the whole shard is owned.
    """

    range: Range
    device: Device | None
    shard: Box
    rows: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which bytes this process saves, and where in its part they go.

    Attributes:
        leaves: every leaf of the tree, without the values of literals.
        empty: the tree's nodes with nothing in them, see `leaves.empty_nodes`.
        treedef: the tree's structure.
        owned: this process's ranges, by ascending offset.
        length: bytes of this process's part.
        digest: xxh3_128 of the whole world's plan, in hex; equal on every process.
    """

    leaves: tuple[Leaf, ...]
    empty: tuple[Leaf, ...]
    treedef: jax.tree_util.PyTreeDef
    owned: tuple[Owned, ...]
    length: int
    digest: str

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(owned.range for owned in self.owned)


@dataclass(frozen=True)
class _Shard:
    """One distinct shard of a leaf, and the devices that hold it, process by process.

    `in_turn` has the same devices, one of each process and then the next of each, so that turns go
    round the processes. Both are (None,) where it is the host that holds it.
    """

    box: Box
    holders: tuple[Device | None, ...]
    in_turn: tuple[Device | None, ...]


@dataclass(frozen=True)
class _Cut:
    """An owned box before it has an offset.

    `is_alone` says that one device, or the host, has all of the leaf.
    """

    leaf: int
    is_alone: bool
    device: Device | None
    shard: Box
    box: Box


def make_plan(tree: Any, processes: Processes | None = None) -> Plan:
    """Plans the saving of a tree of arrays or `ShapeDtypeStruct`s.

    Args:
        tree: the state, or what `jax.eval_shape` and shardings say of it.
        processes: the world; by default, as JAX sees it.

    Raises:
        ConfigError: a leaf, or a place it is in, that cannot be saved.
    """
    planner = _Planner(processes or Processes.here())
    with_path, treedef = flatten(tree)
    described = tuple(describe(path, leaf) for path, leaf in with_path)
    for number, (leaf, (_, value)) in enumerate(zip(described, with_path, strict=True)):
        planner.add(number, leaf, value)
    owned, length = _lay_out(planner.cuts, described)
    return Plan(
        leaves=described,
        empty=empty_nodes(tree),
        treedef=treedef,
        owned=owned,
        length=length,
        digest=planner.digest(),
    )


class _Planner:
    """Goes through the leaves in order; whose turn it is depends on the leaves before."""

    def __init__(self, processes: Processes) -> None:
        self.cuts: list[_Cut] = []
        self._processes = processes
        self._placements: dict[tuple[Any, ...], tuple[int, list[_Shard]]] = {}
        self._turns = {"small": 0, "rows": 0}
        self._hash = xxhash.xxh3_128(msgspec.msgpack.encode(processes.count))

    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, number: int, leaf: Leaf, value: Any) -> None:
        self._hash.update(msgspec.msgpack.encode(leaf))
        if leaf.kind == "literal":
            return
        sharding = None if leaf.kind == "numpy" else value.sharding
        if sharding is None or self._is_local(leaf, sharding):
            self._hash.update(b"local")
            # Nothing says that what a process has to itself is the same on the others: each saves
            # its own, and on which of its devices that is must not change the others' turns.
            shards = _shards(sharding, leaf, self._processes.of)
            self._cut(number, shards, _are_small(shards, leaf), number)
        else:
            shards = self._global_shards(sharding, leaf)
            small = _are_small(shards, leaf)
            self._cut(number, shards, small, self._turn("small" if small else "rows"))

    def _is_local(self, leaf: Leaf, sharding: jax.sharding.Sharding) -> bool:
        """Whether every process has this leaf to itself."""
        owners = {self._processes.of(device) for device in sharding.device_set}
        if self._processes.index not in owners:
            raise ConfigError(
                f"leaf {show(leaf.path)} has no shard on process {self._processes.index} of "
                f"{self._processes.count}, only on processes {sorted(owners)[:8]}: every leaf "
                "needs a sharding over all processes; give it one that covers the whole mesh"
            )
        return len(owners) == 1

    def _global_shards(self, sharding: jax.sharding.Sharding, leaf: Leaf) -> list[_Shard]:
        key = (sharding, leaf.shape, stored_shape(leaf))
        if key not in self._placements:
            shards = _shards(sharding, leaf, self._processes.of)
            self._placements[key] = (len(self._placements), shards)
            self._hash.update(msgspec.msgpack.encode([self._identify(shard) for shard in shards]))
        number, shards = self._placements[key]
        self._hash.update(msgspec.msgpack.encode(number))
        return shards

    def _identify(self, shard: _Shard) -> tuple[Any, ...]:
        return shard.box, [(self._processes.of(d), d.id) for d in shard.holders if d is not None]

    def _turn(self, whose: str) -> int:
        self._turns[whose] += 1
        return self._turns[whose] - 1

    def _cut(self, number: int, shards: list[_Shard], small: bool, turn: int) -> None:
        """Gives every byte of a leaf's shards an owner and keeps what is this process's."""
        is_alone = len(shards) == len(shards[0].holders) == 1
        for shard in shards:
            for device, box in self._owners(shard, small, turn):
                if count(box) and (device is None or self._is_mine(device)):
                    self.cuts.append(_Cut(number, is_alone, device, shard.box, box))

    def _is_mine(self, device: Device) -> bool:
        return self._processes.of(device) == self._processes.index

    def _owners(self, shard: _Shard, small: bool, turn: int) -> list[tuple[Device | None, Box]]:
        holders = shard.holders
        if small or not shard.box[0] or len(holders) == 1:
            return [(shard.in_turn[turn % len(holders)], shard.box)]
        # Rows that are left over, or fewer rows than holders, fall on others the next time.
        first = turn % len(holders)
        rotated = holders[first:] + holders[:first]
        return list(zip(rotated, cut_rows(shard.box, len(holders)), strict=True))


def _are_small(shards: list[_Shard], leaf: Leaf) -> bool:
    return all(count(shard.box) * element(leaf).itemsize <= SMALL_BYTES for shard in shards)


def _shards(sharding: Any, leaf: Leaf, process_of: Callable[[Device], int]) -> list[_Shard]:
    """The distinct shards of an array, ordered by box."""
    if sharding is None:
        return [_Shard(whole(stored_shape(leaf)), (None,), (None,))]
    holders: dict[Box, list[Device]] = {}
    for device, box in device_boxes(sharding, leaf).items():
        holders.setdefault(box, []).append(device)
    shards = []
    for box in sorted(holders):
        devices = sorted(holders[box], key=lambda device: (process_of(device), device.id))
        shards.append(_Shard(box, tuple(devices), tuple(_interleave(devices, process_of))))
    return shards


def device_boxes(sharding: jax.sharding.Sharding, leaf: Leaf) -> dict[Device, Box]:
    """Which box of a leaf's stored elements each device of the world holds.

    A sharding of PRNG keys leaves out the dimensions that their key data adds: those are whole.
    """
    stored = stored_shape(leaf)
    return {
        device: from_index(index, stored)
        for device, index in sharding.devices_indices_map(leaf.shape).items()
    }


def _interleave(devices: list[Device], process_of: Callable[[Device], int]) -> list[Device]:
    """One device of each process, then the next of each."""
    seen: dict[int, int] = {}
    nth = []
    for device in devices:
        process = process_of(device)
        nth.append((seen.get(process, 0), process))
        seen[process] = nth[-1][0] + 1
    return [device for _, device in sorted(zip(nth, devices, strict=True), key=lambda it: it[0])]


def _lay_out(cuts: Sequence[_Cut], leaves: Sequence[Leaf]) -> tuple[tuple[Owned, ...], int]:
    """Gives every cut its offset in the part, by device, then leaf, then place in the leaf."""
    owned: list[Owned] = []
    end = 0
    for cut in sorted(cuts, key=_order):
        start, stop = cut.box
        nbytes = count(cut.box) * element(leaves[cut.leaf]).itemsize
        offset = align(end, ALIGN)
        end = offset + nbytes
        rows = None
        if cut.box != cut.shard:
            rows = (start[0] - cut.shard[0][0], stop[0] - cut.shard[0][0])
        placed = Range(leaf=cut.leaf, start=start, stop=stop, offset=offset, nbytes=nbytes)
        owned.append(Owned(range=placed, device=cut.device, shard=cut.shard, rows=rows))
    return tuple(owned), end


def _order(cut: _Cut) -> tuple[Any, ...]:
    place = 0 if cut.is_alone or cut.device is None else cut.device.id
    return cut.is_alone, place, cut.leaf, cut.box


class PlanCache:
    """Remembers the plans of the trees seen last, by structure, shapes, dtypes and shardings.

    A tree with another leaf, shape or sharding than before gets a plan of its own.
    """

    def __init__(self, processes: Processes | None = None, size: int = 8) -> None:
        self._processes = processes
        self._size = size
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def get(self, tree: Any) -> Plan:
        """The plan of a tree. Costs less than a microsecond a leaf where the tree is known."""
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        key = (treedef, tuple(map(_signature, leaves)))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(tree, self._processes)
            if len(self._plans) > self._size:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan


def _signature(leaf: Any) -> Hashable:
    """All that the plan takes from a leaf. Arrays and their structs have the same."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.shape, leaf.dtype
    try:
        return leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type
    except AttributeError:  # a key array has no weak type, a literal has none of them
        return type(leaf), *(getattr(leaf, name, None) for name in ("shape", "dtype", "sharding"))
