"""Device lanes: the bytes of a part that devices can code, before its rest, which the hosts code.

    part:   | lane of device 0 | lane of device 1 | ... | rest |
    lane:   | rows of leaf a | rows of leaf b | ... |

The devices of a world run one program, so all its lanes have one layout: the same leaves at the
same offsets. What a program can give of a leaf is the same number of rows on each device; where a
device owns one row less, that row is zeros in its lane.

The rules:
- On lanes are arrays that all devices of the world hold in equal pieces, in one mesh: each piece
  larger than what has one owner only, and its rows so many that they can be dealt to its holders
  with little room left over. All other leaves are in the rest.
- Device l of a host codes with device l of each other host of its group (a *ring*). So there are
  lanes only where all groups are alike, and all hosts have as many devices.
- Everything here is a pure function of shapes, shardings and the world: equal on all processes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from jax import Device
from jax.sharding import Mesh, NamedSharding

from jaxft.device.boxes import sides
from jaxft.device.layout import Kind
from jaxft.device.leaves import SUB_BYTE_BITS, element
from jaxft.device.memory import is_usual
from jaxft.errors import ConfigError
from jaxft.group.manifest import ALIGN, CHUNK, align
from jaxft.group.placement import LaneGeometry
from jaxft.group.world import Group

# Rows that there is room for, to rows that there are.
ROOM_MAX = 1.25


class Seat(NamedTuple):
    """Where a device stands: in which group, at which of its members, as which of its devices."""

    group: int
    position: int
    lane: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Rings:
    """Which devices code with each other.

    Attributes:
        n, m: members of each group, and its parity.
        seats: of every device of the world.
        own: this process's devices; the d-th has the d-th lane of its part.
    """

    n: int
    m: int
    seats: dict[Device, Seat]
    own: tuple[Device, ...]


def find_rings(
    groups: Sequence[Group],
    ranks: Sequence[int],
    devices: Iterable[Device],
    process_of: Any,
    index: int,
) -> Rings:
    """The rings of a world.

    Args:
        groups: of hosts.
        ranks: how many processes each host has, in the order of `jax.process_index()`.
        devices: of the world.
        process_of: whose a device is.
        index: this process.

    Raises:
        ConfigError: devices cannot code in this world; says why.
    """
    codes = sorted({f"{group.data}+{group.parity}" for group in groups})
    if len(codes) > 1:
        raise ConfigError(f"its groups of hosts are not alike: {', '.join(codes)}")
    n, m = len(groups[0].hosts), groups[0].parity
    if not m:
        raise ConfigError("no host has another one that could hold parity for it")
    by_process: dict[int, list[Device]] = {}
    for device in sorted(devices, key=lambda device: device.id):
        by_process.setdefault(process_of(device), []).append(device)
    each = {len(mine) for mine in by_process.values()}
    if len(set(ranks)) > 1 or len(each) > 1 or sorted(by_process) != list(range(sum(ranks))):
        raise ConfigError(
            f"its hosts do not have the same devices: processes {list(ranks)}, devices "
            f"{[len(mine) for _, mine in sorted(by_process.items())]}"
        )
    members = {
        host: (number, position)
        for number, group in enumerate(groups)
        for position, host in enumerate(group.hosts)
    }
    seats = {}
    for process, mine in by_process.items():
        host, local = divmod(process, ranks[0])
        for number, device in enumerate(mine):
            seats[device] = Seat(*members[host], local * len(mine) + number)
    return Rings(n=n, m=m, seats=seats, own=tuple(by_process[index]))


class Place(NamedTuple):
    """Where rows of leaf number `leaf` lie in every lane: `nbytes` at `offset`.

    With which of its shard's rows they begin, a device is told. `ragged`: the last of them may not
    be the device's own, and is zeros then.
    """

    leaf: int
    offset: int
    nbytes: int
    ragged: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Lanes:
    """The lanes of a plan.

    Attributes:
        rings: who codes with whom.
        mesh: of the leaves; has all devices of the world.
        places: the layout of every lane, ascending.
        length: bytes of every lane: whole chunks, so that each can be checked on its own.
        rows: for each device of this process, for each of `places`: the first of the shard's rows,
            and how many it owns from there on.
    """

    rings: Rings
    mesh: Mesh
    places: tuple[Place, ...]
    length: int
    rows: dict[Device, list[tuple[int, int]]]
    _offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._offsets.update((place.leaf, place.offset) for place in self.places)

    @functools.cached_property
    def geometry(self) -> LaneGeometry:
        return LaneGeometry(self.rings.n, self.rings.m, self.length)

    @property
    def end(self) -> int:
        """Where the rest of the part begins."""
        return len(self.rings.own) * self.length

    @property
    def parity_bytes(self) -> int:
        """Of all lanes of the part."""
        return len(self.rings.own) * self.geometry.parity_bytes

    def spans(self, part_bytes: int) -> tuple[tuple[int, int], ...]:
        """(offset, length) of each lane of a part of this length, the rest being the last."""
        starts = range(0, self.end, self.length)
        return *[(start, self.length) for start in starts], (self.end, part_bytes - self.end)

    def offset(self, leaf: int, device: Device | None) -> int | None:
        """Where the rows of a leaf that this process's device owns lie in the part; None: in its
        rest."""
        found = self._offsets.get(leaf)
        if found is None or device is None:
            return None
        return self.rings.own.index(device) * self.length + found

    @property
    def looks(self) -> tuple[Any, ...]:
        """What of it is equal on all processes."""
        seats = [self.rings.seats[device] for device in self.mesh.devices.flat]
        return self.rings.n, self.rings.m, self.length, self.places, seats

    def row_of(self, device: Device) -> list[int]:
        """What the program has to be told on a device: which of its fragments, by the place of the
        device's host in the group, is data fragment i of its stripe, for i = 0 to k-1; a zero; and
        the rows of each leaf."""
        order = self.geometry.order(self.rings.seats[device].position)
        return [*order, 0, *[number for pair in self.rows[device] for number in pair]]

    @property
    def columns(self) -> int:
        """The length of `row_of`."""
        return self.geometry.k + 1 + 2 * len(self.places)

    def pairs(self, shift: int) -> list[tuple[int, int]]:
        """Each device of the mesh, by number, and the one that stands so many members further."""
        seats = self.rings.seats
        numbers = {seats[device]: number for number, device in enumerate(self.mesh.devices.flat)}
        return [
            (number, numbers[seat._replace(position=(seat.position + shift) % self.rings.n)])
            for seat, number in numbers.items()
        ]


class LanePlanner:
    """Finds out which leaves of a tree go on lanes, and where."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._rooms: dict[int, int] = {}
        self._fits: dict[Mesh, bool] = {}
        self._found: dict[Mesh, list[tuple[int, Kind, int]]] = {}

    def add(self, number: int, kind: Kind, turn: int) -> None:
        """Takes the next leaf; `turn` says who owns which of its rows."""
        if id(kind) not in self._rooms:
            self._rooms[id(kind)] = self._room(kind)
        if self._rooms[id(kind)]:
            self._found.setdefault(kind.value.sharding.mesh, []).append((number, kind, turn))

    def lanes(self) -> Lanes | None:
        """Those of the mesh that most bytes are on; None: there is no leaf for them."""
        if not self._found:
            return None
        mesh = max(self._found, key=lambda mesh: sum(map(self._nbytes, self._found[mesh])))
        places: list[Place] = []
        end = 0
        dealt: dict[tuple[int, int], dict[Device, tuple[int, int]]] = {}
        rows: dict[Device, list[tuple[int, int]]] = {device: [] for device in mesh.local_devices}
        for number, kind, turn in self._found[mesh]:
            holders = len(kind.shards[0].holders)
            height = sides(kind.shards[0].box)[0]
            offset, nbytes = align(end, ALIGN), self._nbytes((number, kind, turn))
            end = offset + nbytes
            places.append(Place(number, offset, nbytes, height % holders > 0))
            key = (id(kind), turn % holders)
            if key not in dealt:
                dealt[key] = _dealt(kind, turn, rows)
            for device, given in rows.items():
                given.append(dealt[key][device])
        return Lanes(
            rings=self._rings,
            mesh=mesh,
            places=tuple(places),
            length=align(end, CHUNK),
            rows=rows,
        )

    def _nbytes(self, found: tuple[int, Kind, int]) -> int:
        """What there has to be room for in each lane."""
        _, kind, _ = found
        row = prod(sides(kind.shards[0].box)[1:]) * element(kind.leaf).itemsize
        return self._rooms[id(kind)] * row

    def _room(self, kind: Kind) -> int:
        """How many rows of such a leaf each device gives; 0: it does not go on lanes."""
        if kind.turns != "rows" or kind.leaf.kind != "array" or kind.leaf.dtype in SUB_BYTE_BITS:
            return 0
        sharding = kind.value.sharding
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return 0
        if not self._is_everywhere(sharding.mesh) or not is_usual(sharding):
            return 0
        looks = {(sides(shard.box), len(shard.holders)) for shard in kind.shards}
        shape, holders = looks.pop()
        if looks or not shape:
            return 0
        rows = -(-shape[0] // holders)
        return rows if rows * holders <= ROOM_MAX * shape[0] else 0

    def _is_everywhere(self, mesh: Mesh) -> bool:
        if mesh not in self._fits:
            self._fits[mesh] = set(mesh.devices.flat) == self._rings.seats.keys()
        return self._fits[mesh]


def _dealt(kind: Kind, turn: int, devices: Iterable[Device]) -> dict[Device, tuple[int, int]]:
    """The first row of its shard that each of the devices owns, and how many (see `shards`)."""
    wanted = set(devices)
    found = {}
    for shard in kind.shards:
        count, height = len(shard.holders), sides(shard.box)[0]
        for place, device in enumerate(shard.holders):
            if device in wanted:
                part = (place - turn) % count
                first = height * part // count
                found[device] = (first, height * (part + 1) // count - first)
    return found
