"""Reading a snapshot back: manifests, extents of segments, rebuilt segments, wherever they lie.

Everything here runs in a job's thread and only reads slots; whatever it brings is checked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from jaxft.errors import ChunkDamaged, PeerUnreachable, ReadCancelled
from jaxft.faults import reach
from jaxft.group.manifest import CHUNK, Manifest, SnapshotId
from jaxft.group.messages import Damage, Plan
from jaxft.host.coding import DEADLINE_S, PEER_S, PIECE, DamagedFragments, Sources, rebuild_segment
from jaxft.host.layout import (
    GroupBlob,
    GroupLayout,
    decode_group,
    decode_manifest,
    read_key,
    segment_check,
    unseal,
)
from jaxft.host.memory import Arena
from jaxft.host.protocol import Extent
from jaxft.host.shares import Rebuilt, Shares
from jaxft.host.wire import Network, ReadRequest, Refused

NOT_YET_S = 0.05
REBUILT_POLL_S = 0.002


def bulk_address(address: str) -> str:
    """A member's address is "control,bulk"."""
    return address.partition(",")[2]


def control_address(address: str) -> str:
    return address.partition(",")[0]


class Fetched(NamedTuple):
    """Extents at `offsets` of an arena; where they are still being made, at `made_at` of it is a
    byte for each chunk of the segment that begins with it (see `Rebuilt`)."""

    arena: Arena
    offsets: tuple[int, ...]
    made_at: int | None = None


@dataclass
class Recall:
    """Reads the snapshot of one plan.

    Attributes:
        plan: what is restored, and where its shares are.
        network: to read with.
        cancel: set to stop.
        address, memory: of this host, whose own rebuilt segments are mapped and not sent.
    """

    plan: Plan
    network: Network
    cancel: threading.Event
    address: str = ""
    memory: Shares | None = None
    _manifests: dict[int, Manifest] = field(default_factory=dict)
    _groups: dict[int, GroupBlob] = field(default_factory=dict)
    _damaged: set[Damage] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def id(self) -> SnapshotId:
        assert self.plan.chosen is not None
        return self.plan.chosen

    # -------------------------------------------------------------------- manifests

    def manifests(self) -> dict[int, Manifest]:
        """The manifests of all segments by place, those of lost hosts from their groups.

        Raises:
            DamagedFragments: a share whose manifest is damaged.
            PeerUnreachable: a holder does not answer.
        """
        with self._lock:
            if len(self._manifests) == len(self.plan.world.hosts):
                return self._manifests
            shares = self._live_shares()
            self._read_blobs("own", shares, self._take_manifest)
            lost = [
                host for host in range(len(self.plan.world.hosts)) if host not in self._manifests
            ]
            if lost:
                groups = {host for one in lost for host in self.plan.world.group_of(one).hosts}
                self._read_groups({host: shares[host] for host in groups if host in shares})
            self._raise_damaged()
            return self._manifests

    def _live_shares(self) -> dict[int, str]:
        whole = {damage.host for damage in self.plan.damaged if damage.lane < 0}
        return {
            host: bulk_address(address) for host, address in self.plan.shares if host not in whole
        }

    def _take_manifest(self, host: int, payload: bytes) -> None:
        self._manifests[host] = decode_manifest(payload)

    def _take_group(self, host: int, payload: bytes) -> None:
        group = decode_group(payload)
        self._groups[host] = group
        for manifest in group.manifests:
            self._manifests.setdefault(manifest.host, manifest)

    def _read_groups(self, shares: dict[int, str]) -> None:
        missing = {host: address for host, address in shares.items() if host not in self._groups}
        self._read_blobs("group", missing, self._take_group)

    def _read_blobs(
        self, kind: str, shares: dict[int, str], take: Callable[[int, bytes], None]
    ) -> None:
        questions = [
            ReadRequest(address, read_key("sizes", self.id, host), 0, 16, host)
            for host, address in shares.items()
        ]
        requests = []
        for host, answer in self._read(questions):
            own, group = np.frombuffer(self._given(host, answer), "<u8")
            nbytes = int(own if kind == "own" else group)
            key = read_key(kind, self.id, host)
            requests.append(ReadRequest(shares[host], key, 0, nbytes, host))
        for host, answer in self._read(requests):
            try:
                take(host, unseal(self._given(host, answer)))
            except (ChunkDamaged, msgspec.MsgspecError):
                self._damaged.add(Damage(host))

    def _raise_damaged(self) -> None:
        if self._damaged:
            names = ", ".join(self.plan.world.hosts[damage.host] for damage in self._damaged)
            raise DamagedFragments(
                frozenset(self._damaged),
                f"snapshot {self.id}: the manifests on {names} are damaged; these shares count as "
                "lost",
            )

    def _read(
        self, requests: Iterable[ReadRequest[int]]
    ) -> Iterable[tuple[int, memoryview | Refused]]:
        return self.network.reader().read_many(
            requests, peer_s=PEER_S, deadline_s=DEADLINE_S, cancel=self.cancel
        )

    def _given(self, host: int, answer: memoryview | Refused) -> memoryview:
        if isinstance(answer, Refused):
            raise PeerUnreachable(
                f"snapshot {self.id}: the holder of the share of {self.plan.world.hosts[host]} "
                f"does not give it: {answer.reason}"
            )
        return answer

    # -------------------------------------------------------------------- segments

    def layout(self, host: int) -> GroupLayout:
        """The geometry of the group of this place."""
        return GroupLayout(self.plan.world.group_of(host), self.manifests())

    def fetch(self, extents: Sequence[Extent]) -> Fetched:
        """Brings extents into new memory, checked; or gives the memory in which they are being
        rebuilt, where that is on this host, for the reader to check.

        Raises:
            DamagedFragments: some do not have their checksums.
            PeerUnreachable: who should have them does not answer.
        """
        manifests = self.manifests()
        mapped = self._map(extents)
        if mapped is not None:
            made_at = Rebuilt.made_at(manifests[extents[0].host].length)
            return Fetched(mapped, tuple(extent.start for extent in extents), made_at)
        offsets, total = [], 0
        for extent in extents:
            offsets.append(total)
            total += -(-(extent.stop - extent.start) // CHUNK) * CHUNK
        arena = Arena.create("jaxft-fetch", max(total, 1))
        target = arena.view(0, total)
        checks = {extent.host: segment_check(manifests[extent.host]) for extent in extents}
        bad: set[tuple[int, int]] = set()
        try:
            arena.touch(0, total)
            for (number, at), data in self._pieces(extents):
                extent = extents[number]
                place = target[offsets[number] + at : offsets[number] + at + data.nbytes]
                place[:] = np.frombuffer(data, np.uint8)
                bad.update(
                    (extent.host, chunk)
                    for chunk in checks[extent.host].bad_chunks(extent.start + at, place)
                )
                del place
        except BaseException:
            del target
            arena.close()
            raise
        if bad:
            del target
            arena.close()
            self.raise_bad(bad)
        return Fetched(arena, tuple(offsets))

    def _map(self, extents: Sequence[Extent]) -> Arena | None:
        """The memory that all extents lie in, if this host rebuilds it: waited for until it is
        begun."""
        hosts = {extent.host for extent in extents}
        here = {
            one.host for one in self.plan.segments if one.rebuilt and one.address == self.address
        }
        if self.memory is None or len(hosts) != 1 or not hosts <= here:
            return None
        (host,) = hosts
        deadline = time.monotonic() + DEADLINE_S
        while (arena := self.memory.map_rebuilt(self.id, host)) is None:
            if self.cancel.wait(REBUILT_POLL_S):
                raise ReadCancelled("the read was cancelled")
            if time.monotonic() > deadline:
                raise PeerUnreachable(
                    f"snapshot {self.id}: to rebuild the segment of {self.plan.world.hosts[host]} "
                    f"was not begun within {DEADLINE_S:g} s"
                )
        return arena

    def raise_bad(self, bad: Iterable[tuple[int, int]]) -> None:
        """Raises DamagedFragments for chunks at (place, offset in its segment)."""
        damaged = frozenset(self.layout(host).damage_at(host, at) for host, at in bad)
        names = ", ".join(sorted({self.plan.world.hosts[damage.host] for damage in damaged}))
        raise DamagedFragments(
            damaged,
            f"snapshot {self.id}: {len(damaged)} fragments of {names} do not have their "
            "checksums; they count as lost",
        )

    def _pieces(self, extents: Sequence[Extent]) -> Iterable[tuple[tuple[int, int], memoryview]]:
        """The pieces of all extents; segments that are still being rebuilt are asked for again."""
        addresses = {one.host: bulk_address(one.address) for one in self.plan.segments}
        rebuilt = {one.host for one in self.plan.segments if one.rebuilt}
        open_pieces = {
            (number, at): ReadRequest(
                addresses[extent.host],
                read_key("rebuilt" if extent.host in rebuilt else "segment", self.id, extent.host),
                extent.start + at,
                min(PIECE, extent.stop - extent.start - at),
                (number, at),
            )
            for number, extent in enumerate(extents)
            for at in range(0, extent.stop - extent.start, PIECE)
        }
        deadline = time.monotonic() + DEADLINE_S
        while open_pieces:
            answers = self.network.reader().read_many(
                list(open_pieces.values()),
                peer_s=PEER_S,
                deadline_s=DEADLINE_S,
                cancel=self.cancel,
            )
            refused = None
            for tag, answer in answers:
                if isinstance(answer, Refused):
                    refused = (extents[tag[0]].host, answer)
                    continue
                del open_pieces[tag]
                yield tag, answer
            if refused is not None:
                host, answer = refused
                if host not in rebuilt or time.monotonic() > deadline:
                    self._given(host, answer)
                self.cancel.wait(NOT_YET_S)

    def rebuild(self, host: int) -> None:
        """Makes the segment of this place from the shares that are left, in memory of its own.

        Raises:
            DamagedFragments: more is damaged than was known.
            PeerUnreachable, ReadCancelled: as the coding does.
        """
        assert self.memory is not None, "there is no place to keep it"
        shares = self._live_shares()
        group = self.plan.world.group_of(host)
        members = {place: shares[place] for place in group.hosts if place in shares}
        layout = self.layout(host)
        with self._lock:
            self._read_groups(members)
            self._raise_damaged()
        absent = {Damage(place) for place in group.hosts if place not in shares}
        lost = frozenset(absent | set(self.plan.damaged))
        sums = {place: self._groups[place].parity_checksums for place in members}
        sources = Sources(
            id=self.id,
            layout=layout,
            addresses=members,
            reader=self.network.reader(),
            cancel=self.cancel,
            names=self.plan.world.hosts,
            parity_checksums=sums,
        )
        rebuilt = Rebuilt.create(layout.manifests[host].length)
        self.memory.keep_rebuilt(self.id, host, rebuilt, self.cancel)
        reach("smp.rebuild_begun", host=self.plan.world.hosts[host])
        touch = rebuilt.arena.touch
        rebuild_segment(sources, host, lost, rebuilt.segment, rebuilt.made, touch)
        rebuilt.made[:] = 1
