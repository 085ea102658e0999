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

Where the ranges lie in the part is told by `layout`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import jax
import msgspec
import numpy as np
import xxhash
from jax import Device

from jaxft.device.aside import aside
from jaxft.device.boxes import Box, count, cut_rows, from_index, whole
from jaxft.device.garbage import not_collected
from jaxft.device.lanes import LanePlanner, Lanes, Rings
from jaxft.device.layout import Batch, Kind, Layout, Owned, Piece, Shard
from jaxft.device.leaves import (
    describe,
    element,
    empty_nodes,
    flatten,
    literals_of,
    show,
    stored_shape,
)
from jaxft.errors import ConfigError
from jaxft.group.manifest import CHUNK, Leaf, Path, Range, align

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which bytes this process saves, and where in its part they go.

    Attributes:
        leaves: every leaf of the tree, without the values of literals.
        empty: the tree's nodes with nothing in them, see `leaves.empty_nodes`.
        treedef: the tree's structure.
        singles: this process's ranges of leaves that are taken one by one.
        batches: small leaves that are taken together. The ranges of a tree of many leaves are made
            when they are asked for, so that `save` does not wait for them.
        length: bytes of this process's part; whole chunks where it has lanes. If the devices have
            made these lanes' parity, it lies behind that.
        world: what is equal on all processes, beside the leaves: how many there are, and where in
            the world the leaves are.
        lanes: what of the part devices can code; None: nothing.
    """

    leaves: tuple[Leaf, ...]
    empty: tuple[Leaf, ...]
    treedef: jax.tree_util.PyTreeDef
    singles: tuple[Owned, ...]
    batches: tuple[Batch, ...]
    length: int
    world: tuple[Any, ...]
    lanes: Lanes | None = None

    @functools.cached_property
    def digest(self) -> str:
        """xxh3_128 of the whole world's plan, in hex; equal on every process."""
        return xxhash.xxh3_128(msgspec.msgpack.encode((self.leaves, self.world))).hexdigest()

    @functools.cached_property
    def literals(self) -> tuple[int, ...]:
        """The numbers of the leaves that are literals."""
        return literals_of(self.leaves)

    @functools.cached_property
    def owned(self) -> tuple[Owned, ...]:
        """This process's ranges, by ascending offset."""
        runs = (run.owned() for batch in self.batches for run in batch.runs)
        found = [*self.singles, *itertools.chain.from_iterable(runs)]
        return tuple(sorted(found, key=lambda owned: owned.range.offset))

    @functools.cached_property
    def ranges(self) -> tuple[Range, ...]:
        return tuple([owned.range for owned in self.owned])

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of the part's lanes and of its rest, where it has lanes."""
        return () if self.lanes is None else self.lanes.spans(self.length)


def make_plan(tree: Any, processes: Processes | None = None, rings: Rings | None = None) -> Plan:
    """Plans the saving of a tree of arrays or `ShapeDtypeStruct`s.

    Args:
        tree: the state, or what `jax.eval_shape` and shardings say of it.
        processes: the world; by default, as JAX sees it.
        rings: which devices can code with each other, if any are to.

    Raises:
        ConfigError: a leaf, or a place it is in, that cannot be saved.
    """
    signatures = list(map(_signature, jax.tree_util.tree_leaves(tree)))
    return _make_plan(tree, signatures, processes, rings)


def _make_plan(
    tree: Any,
    signatures: Iterable[Hashable],
    processes: Processes | None,
    rings: Rings | None,
) -> Plan:
    """Plans a tree whose leaves have these signatures."""
    planner = _Planner(processes or Processes.here(), rings)
    with_path, treedef = flatten(tree)
    described = zip(with_path, signatures, strict=True)
    leaves = tuple([planner.add(path, leaf, signature) for (path, leaf), signature in described])
    lanes = planner.lanes
    layout = Layout(planner.kinds.values(), lanes)
    return Plan(
        leaves=leaves,
        empty=empty_nodes(tree),
        treedef=treedef,
        singles=tuple(layout.singles),
        batches=tuple(layout.batches),
        length=layout.end if lanes is None else align(layout.end, CHUNK),
        world=planner.world if lanes is None else (*planner.world, lanes.looks),
        lanes=lanes,
    )


class _Planner:
    """Goes through the leaves in order; whose turn it is depends on the leaves before.

    Trees have many leaves of few kinds: all that does not depend on the path is found out once.
    """

    def __init__(self, processes: Processes, rings: Rings | None = None) -> None:
        self.kinds: dict[Hashable, Kind] = {}
        self._processes = processes
        self._lanes = None if rings is None else LanePlanner(rings)
        self._placements: dict[tuple[Any, ...], int] = {}
        self._placed: list[Any] = []
        self._of_leaves: list[int] = []
        self._turns = {"small": 0, "rows": 0}

    @property
    def world(self) -> tuple[Any, ...]:
        return self._processes.count, self._of_leaves, self._placed

    @property
    def lanes(self) -> Lanes | None:
        return None if self._lanes is None else self._lanes.lanes()

    def add(self, path: Path, value: Any, signature: Hashable) -> Leaf:
        """Takes the next leaf."""
        kind = self.kinds.get(signature)
        if kind is None:
            kind = self.kinds[signature] = self._kind(describe(path, value), value)
        known = kind.leaf
        number = len(self._of_leaves)
        self._of_leaves.append(kind.number)
        if kind.shards:
            turn = number
            if kind.turns:
                turn = self._turns[kind.turns]
                self._turns[kind.turns] += 1
            if self._lanes is not None:
                self._lanes.add(number, kind, turn)
            pieces = self._pieces(kind, turn)
            if pieces:
                kind.members.append((number, pieces))
        return Leaf(path, known.kind, known.shape, known.dtype, known.impl, known.weak_type)

    def _kind(self, leaf: Leaf, value: Any) -> Kind:
        kind = Kind(leaf, value)
        if leaf.kind == "literal":
            return kind
        sharding = None if leaf.kind == "numpy" else value.sharding
        kind.shards = _shards(sharding, leaf, self._processes.of)
        kind.small = _are_small(kind.shards, leaf)
        kind.period = math.lcm(*(len(shard.holders) for shard in kind.shards))
        # Nothing says that what a process has to itself is the same on the others: each saves its
        # own, and on which of its devices that is must not change the others' turns.
        if sharding is not None and not self._is_local(leaf, sharding):
            kind.turns = "small" if kind.small else "rows"
            kind.number = self._placement((sharding, leaf.shape, stored_shape(leaf)), kind.shards)
        return kind

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

    def _placement(self, key: tuple[Any, ...], shards: list[Shard]) -> int:
        if key not in self._placements:
            self._placements[key] = len(self._placements)
            self._placed.append([self._identify(shard) for shard in shards])
        return self._placements[key]

    def _identify(self, shard: Shard) -> tuple[Any, ...]:
        return shard.box, [(self._processes.of(d), d.id) for d in shard.holders if d is not None]

    def _pieces(self, kind: Kind, turn: int) -> list[Piece]:
        """What this process owns of a leaf."""
        turn %= kind.period
        if turn not in kind.pieces:
            kind.pieces[turn] = list(self._own_pieces(kind, turn))
        return kind.pieces[turn]

    def _own_pieces(self, kind: Kind, turn: int) -> Iterator[Piece]:
        """Gives every byte of a leaf's shards an owner and keeps what is this process's."""
        itemsize = element(kind.leaf).itemsize
        is_alone = len(kind.shards) == len(kind.shards[0].holders) == 1
        for shard in kind.shards:
            first = shard.box[0]
            for device, box in self._owners(shard, kind.small, turn):
                if not count(box) or not (device is None or self._is_mine(device)):
                    continue
                rows = None
                if box != shard.box:
                    rows = (box[0][0] - first[0], box[1][0] - first[0])
                area = (is_alone, 0 if is_alone or device is None else device.id)
                yield Piece(area, device, shard.box, box, rows, count(box) * itemsize)

    def _is_mine(self, device: Device) -> bool:
        return self._processes.of(device) == self._processes.index

    def _owners(self, shard: Shard, small: bool, turn: int) -> list[tuple[Device | None, Box]]:
        holders = shard.holders
        if small or not shard.box[0] or len(holders) == 1:
            return [(shard.in_turn[turn % len(holders)], shard.box)]
        # Rows that are left over, or fewer rows than holders, fall on others the next time.
        first = turn % len(holders)
        rotated = holders[first:] + holders[:first]
        return list(zip(rotated, cut_rows(shard.box, len(holders)), strict=True))


def _are_small(shards: list[Shard], leaf: Leaf) -> bool:
    return all(count(shard.box) * element(leaf).itemsize <= SMALL_BYTES for shard in shards)


def _shards(sharding: Any, leaf: Leaf, process_of: Callable[[Device], int]) -> list[Shard]:
    """The distinct shards of an array, ordered by box."""
    if sharding is None:
        return [Shard(whole(stored_shape(leaf)), (None,), (None,))]
    holders: dict[Box, list[Device]] = {}
    for device, box in device_boxes(sharding, leaf).items():
        holders.setdefault(box, []).append(device)
    shards = []
    for box in sorted(holders):
        devices = sorted(holders[box], key=lambda device: (process_of(device), device.id))
        shards.append(Shard(box, tuple(devices), tuple(_interleave(devices, process_of))))
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


# What a tree looked like, and its plan.
_Seen = tuple[jax.tree_util.PyTreeDef, list[Any], Plan]


class PlanCache:
    """Remembers the plans of the trees seen last, by structure, shapes, dtypes and shardings.

    A tree with another leaf, shape or sharding than before gets a plan of its own.
    """

    def __init__(
        self,
        processes: Processes | None = None,
        size: int = 8,
        *,
        rings: Rings | None = None,
    ) -> None:
        self._processes = processes
        self._rings = rings
        self._size = size
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._last: _Seen | None = None

    def get(self, tree: Any) -> Plan:
        """The plan of a tree."""
        return self.find(tree)[0]

    def find(self, tree: Any) -> tuple[Plan, list[Any]]:
        """The plan of a tree, and its leaves. Costs less than half a microsecond a leaf where it is
        like the last one, and about a microsecond where it is known."""
        with not_collected():
            last = self._last
            flatten = functools.partial(_flatten, tree, last)
            expected = 0 if last is None else len(last[2].leaves)
            leaves, treedef, like_last = aside(flatten, expected)
            if last is not None and like_last:
                return last[2], leaves
            looks = _looks(leaves)
            if last is not None and last[:2] == (treedef, looks):
                return last[2], leaves
            plan = self._find(tree, treedef, tuple(map(_signature, leaves)))
            self._last = treedef, looks, plan
            return plan, leaves

    def _find(
        self, tree: Any, treedef: jax.tree_util.PyTreeDef, signatures: tuple[Hashable, ...]
    ) -> Plan:
        key = (treedef, signatures)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _make_plan(tree, signatures, self._processes, self._rings)
            if len(self._plans) > self._size:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan


def _flatten(tree: Any, last: _Seen | None) -> tuple[list[Any], jax.tree_util.PyTreeDef, bool]:
    """A tree's leaves and structure, and whether it looks like the last one."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    alike = last is not None and last[0] == treedef and _look_the_same(leaves, last[1])
    return leaves, treedef, alike


def _look_the_same(leaves: list[Any], looks: list[Any]) -> bool:
    """Are these arrays, and are their looks the very objects of before? Makes no list of them."""
    try:
        now = itertools.chain(map(_aval, leaves), map(_sharding, leaves))
        return all(map(is_, now, looks))
    except AttributeError:
        return False


def _looks(leaves: list[Any]) -> list[Any]:
    """All that the plan takes from these leaves, for comparison with that of another tree: what a
    compiled step makes has the very same objects each time, which `==` sees at once."""
    try:
        return [*map(_aval, leaves), *map(_sharding, leaves)]
    except AttributeError:  # not all of them are arrays
        return [_look(leaf) for leaf in leaves]


_aval = attrgetter("aval")
_sharding = attrgetter("sharding")


def _look(leaf: Any) -> Any:
    try:
        return leaf.aval, leaf.sharding
    except AttributeError:
        return _signature(leaf)


def _signature(leaf: Any) -> Hashable:
    """All that the plan takes from a leaf. Arrays and their structs have the same."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.shape, leaf.dtype
    try:
        return leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type
    except AttributeError:  # a key array has no weak type, a literal has none of them
        return type(leaf), *(getattr(leaf, name, None) for name in ("shape", "dtype", "sharding"))
