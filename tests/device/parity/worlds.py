"""Worlds that one process plays: its devices are dealt to hosts, which code each other's lanes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np

from jaxft.device.lanes import find_rings
from jaxft.device.shards import Plan, Processes, make_plan
from jaxft.group import world as groups
from jaxft.group.manifest import CHUNK, Manifest, Part, SnapshotId, align
from jaxft.group.messages import Damage
from jaxft.group.placement import form_groups
from jaxft.group.world import Code, Group
from jaxft.host.coding import Sources, check_given, encode_share, rebuild_segment
from jaxft.host.layout import GroupLayout, checksums, read_key
from jaxft.host.shares import whole_manifest
from tests.host.held import HeldMemory

ID = SnapshotId(1, 0, "n")


@dataclass
class World:
    """Hosts of `ranks` processes each, which have the first of the devices, `each` a process."""

    code: Code
    hosts: int
    each: int = 2
    ranks: int = 1
    groups: tuple[Group, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = form_groups(self.hosts, self.code)

    @property
    def processes(self) -> int:
        return self.hosts * self.ranks

    @property
    def devices(self) -> list[jax.Device]:
        return jax.devices()[: self.processes * self.each]

    def process_of(self, device: jax.Device) -> int:
        return int(device.id) // self.each

    def plan(self, tree: Any, index: int, *, with_lanes: bool = True) -> Plan:
        """What process `index` saves of a tree."""
        processes = Processes(index=index, count=self.processes, of=self.process_of)
        ranks = [self.ranks] * self.hosts
        rings = find_rings(self.groups, ranks, self.devices, self.process_of, index)
        return make_plan(tree, processes, rings if with_lanes else None)


def part_of(staged: Any) -> np.ndarray:
    """What is written of a staged state; where nothing is written, it shows."""
    dest = np.full(staged.length, 0x5A, np.uint8)
    assert staged.copy_into(dest) == checksums(dest)
    return dest


class Snapshot:
    """The shares of all hosts of a world.

    Args:
        plans, parts: of each process.
        given: whether the devices' parity is in the parts.
    """

    def __init__(
        self, world: World, plans: list[Plan], parts: list[np.ndarray], *, given: bool
    ) -> None:
        self.world = world
        self.segments: list[np.ndarray] = []
        self.memory = HeldMemory()
        self.regions: dict[int, np.ndarray] = {}
        self.sums: dict[int, bytes] = {}
        names = tuple(f"h{host}" for host in range(world.hosts))
        self._names = names
        template = Manifest(
            id=ID,
            step=1,
            host=0,
            world=groups.World(names, world.groups),
            plan="p",
            leaves=(),
            parts=(),
            length=0,
            lanes=(),
        )
        self.manifests = {}
        for host in range(world.hosts):
            own, base = [], 0
            mine = range(host * world.ranks, (host + 1) * world.ranks)
            segment = np.zeros(sum(align(len(parts[one]), CHUNK) for one in mine), np.uint8)
            for rank in mine:
                plan, data = plans[rank], parts[rank]
                segment[base : base + len(data)] = data
                part = Part(
                    rank=rank,
                    base=base,
                    length=len(data),
                    ranges=plan.ranges,
                    checksums=checksums(data),
                    lanes=plan.spans,
                    parity=plan.length if given else 0,
                )
                own.append(part)
                base += align(len(data), CHUNK)
            self.segments.append(segment)
            blank = msgspec.structs.replace(template, host=host)
            self.manifests[host] = whole_manifest(blank, tuple(own))
            self.memory.held[read_key("segment", ID, host)] = segment

    def layout(self, host: int) -> GroupLayout:
        group = next(group for group in self.world.groups if host in group.hosts)
        return GroupLayout(group, self.manifests)

    def sources(self, host: int) -> Sources:
        """Whom to read from for the share of this host."""
        return Sources(
            id=ID,
            layout=self.layout(host),
            addresses=dict.fromkeys(range(self.world.hosts), "address"),
            reader=self.memory,
            cancel=threading.Event(),
            names=self._names,
            parity_checksums=self.sums,
        )

    def code(self) -> None:
        """The hosts make what parity there is not yet."""
        for host in range(self.world.hosts):
            region = np.full(self.layout(host).region_bytes(host), 0xA5, np.uint8)
            self.sums[host] = encode_share(self.sources(host), host, region)
            self.regions[host] = region
            self.memory.held[read_key("parity", ID, host)] = region

    def check(self) -> None:
        for host, segment in enumerate(self.segments):
            check_given(self.sources(host), host, segment)

    def parity(self, host: int, lane: int) -> np.ndarray:
        """The m fragments that a host has of a lane."""
        layout = self.layout(host)
        offset, in_segment = layout.parity(host, lane)
        data = self.segments[host] if in_segment else self.regions[host]
        return data[offset : offset + layout.lanes[lane].parity_bytes]

    def rebuild(self, lost: Sequence[int], host: int) -> np.ndarray:
        """The data of a lost host's segment, without the shares of all that are lost."""
        for one in lost:
            for kind in ("segment", "parity"):
                self.memory.held.pop(read_key(kind, ID, one), None)
        nbytes = self.manifests[host].length
        output, made = np.zeros(nbytes, np.uint8), np.zeros(-(-nbytes // CHUNK), np.uint8)
        damages = frozenset(map(Damage, lost))
        rebuild_segment(self.sources(host), host, damages, output, made, lambda at, size: None)
        return output
