"""Where things lie in a slot, how blobs are checked, and how bytes are named on the wire.

A blob (a manifest, or a group's manifests) is 8 bytes of xxh3_64 and then its payload, so that
whoever reads one, here or from a peer, can tell whether it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from jaxft.errors import ChunkDamaged
from jaxft.group.manifest import CHUNK, Manifest, SnapshotId, align
from jaxft.group.messages import Damage
from jaxft.group.placement import LaneGeometry
from jaxft.group.world import Group
from jaxft.host.memory import Bytes

PAGE = 4096
_CHECK_BYTES = 8

digest = xxhash.xxh3_64_intdigest


class ReadKey(msgspec.Struct, frozen=True, array_like=True):
    """What a bulk read is for: `kind` "segment", "rebuilt" (a segment that this host has made again
    from the others; its own may be damaged), "parity", "own" (the manifest blob), "group" (the
    group's blob) or "sizes" (the lengths of these two blobs, little-endian uint64) of the share of
    `host` (a place in the snapshot's world)."""

    kind: str
    id: SnapshotId
    host: int


class GroupBlob(msgspec.Struct, frozen=True, array_like=True):
    """What a coded share adds: the manifests of the other members of its group, and xxh3_64 of
    every CHUNK of its parity as little-endian uint64."""

    manifests: tuple[Manifest, ...]
    parity_checksums: bytes


# Asks for the memory of the ledger, whole; `ledger.read_bytes` reads it.
LEDGER_KEY = msgspec.msgpack.encode("ledger")


def read_key(kind: str, identity: SnapshotId, host: int) -> bytes:
    return msgspec.msgpack.encode(ReadKey(kind, identity, host))


def seal(payload: bytes) -> bytes:
    """A blob of this payload."""
    return xxhash.xxh3_64_intdigest(payload).to_bytes(_CHECK_BYTES, "little") + payload


def unseal(blob: Bytes | memoryview | bytes) -> bytes:
    """The payload of a blob.

    Raises:
        ChunkDamaged: it is not what was written.
    """
    data = bytes(blob)
    payload = data[_CHECK_BYTES:]
    found = xxhash.xxh3_64_intdigest(payload).to_bytes(_CHECK_BYTES, "little")
    if len(data) < _CHECK_BYTES or found != data[:_CHECK_BYTES]:
        raise ChunkDamaged(f"a manifest of {len(data)} bytes does not have its checksum")
    return payload


def decode_manifest(payload: bytes) -> Manifest:
    return msgspec.msgpack.decode(payload, type=Manifest)


def decode_group(payload: bytes) -> GroupBlob:
    return msgspec.msgpack.decode(payload, type=GroupBlob)


def own_blob_offset(segment_bytes: int) -> int:
    """The manifest lies behind the segment."""
    return align(segment_bytes, PAGE)


def checksums(data: Bytes | memoryview) -> bytes:
    """xxh3_64 of every CHUNK of `data`, little-endian."""
    return np.array([digest(chunk) for chunk in split(data)], "<u8").tobytes()


def split(data: Bytes | memoryview) -> list[memoryview]:
    """The chunks of `data`, without a copy."""
    view = np.frombuffer(data, np.uint8).data
    return [view[at : at + CHUNK] for at in range(0, len(view), CHUNK)]


class ChunkCheck:
    """Knows what the chunks of something have to be.

    What is asked for is made in one go, before the bytes are looked at: between chunks that go
    through the cache, every step of the interpreter is a slow one.

    Args:
        digests: xxh3_64 of every chunk.
        sizes: how many bytes of each it is of; what comes after them is padding.
    """

    def __init__(self, digests: list[int], sizes: list[int]) -> None:
        # Lists of plain integers: a look-up in an array costs as much as a tenth of a checksum.
        self._digests = digests
        self._sizes = sizes

    def chunks(self, start: int, data: Bytes | memoryview) -> list[memoryview]:
        """The chunks of `data`, which begins at `start` (a multiple of CHUNK), without padding."""
        assert start % CHUNK == 0
        view = np.frombuffer(data, np.uint8).data
        sizes = self._sizes[start // CHUNK :][: -(-len(view) // CHUNK)]
        return [
            view[at : at + size] for at, size in zip(range(0, len(view), CHUNK), sizes, strict=True)
        ]

    def digests(self, start: int, count: int) -> list[int]:
        """What the digests of so many chunks from `start` on have to be."""
        return self._digests[start // CHUNK :][:count]

    def bad_chunks(self, start: int, data: Bytes | memoryview) -> list[int]:
        """The offsets of chunks of `data` (which begins at `start`, a multiple of CHUNK) that are
        damaged. One that `data` does not have all bytes of counts as damaged too: pieces are whole
        chunks."""
        return self.unlike(start, list(map(digest, self.chunks(start, data))))

    def unlike(self, start: int, digests: list[int]) -> list[int]:
        """The offsets of chunks whose digests, from `start` on, are not what they have to be."""
        pairs = zip(digests, self.digests(start, len(digests)), strict=True)
        return [
            start + number * CHUNK
            for number, (found, wanted) in enumerate(pairs)
            if found != wanted
        ]


def parity_check(sums: bytes) -> ChunkCheck:
    """For parity whose `sums` are xxh3_64 of every CHUNK, little-endian."""
    digests = np.frombuffer(sums, "<u8").tolist()
    return ChunkCheck(digests, [CHUNK] * len(digests))


def segment_check(manifest: Manifest) -> ChunkCheck:
    """For the segment of this manifest."""
    count = -(-manifest.length // CHUNK)
    all_digests, all_sizes = [0] * count, [0] * count
    for part in manifest.parts:
        first = part.base // CHUNK
        digests = np.frombuffer(part.checksums, "<u8").tolist()
        sizes = [CHUNK] * len(digests)
        if sizes:
            sizes[-1] = part.length - (len(digests) - 1) * CHUNK
        all_digests[first : first + len(digests)] = digests
        all_sizes[first : first + len(digests)] = sizes
    return ChunkCheck(all_digests, all_sizes)


def data_spans(manifest: Manifest) -> list[tuple[int, int]]:
    """(start, stop) of what is coded in a segment: all but the parity that devices have made."""
    return [
        (part.base, part.base + (part.parity or part.length))
        for part in sorted(manifest.parts, key=attrgetter("base"))
    ]


class ParityPlace(NamedTuple):
    """Where a member's parity of a lane begins: in its segment, where its devices have made it, or
    in its parity region."""

    offset: int
    in_segment: bool


class GroupLayout:
    """The geometry of all lanes of a group for one snapshot.

    Args:
        group: its hosts by place in the snapshot's world.
        manifests: of every member, by place.
    """

    def __init__(self, group: Group, manifests: Mapping[int, Manifest]) -> None:
        self.group = group
        self.manifests = manifests
        self.lanes: list[LaneGeometry] = []
        for lane in range(max(len(manifests[host].lanes) for host in group.hosts)):
            longest = max(self.lane(host, lane)[1] for host in group.hosts)
            self.lanes.append(LaneGeometry.of(group, longest))
        self._regions: dict[int, int] = {}
        self._parity = {host: self._parity_places(host) for host in group.hosts}

    def _parity_places(self, host: int) -> list[ParityPlace]:
        """Of all lanes, for one member. What is not in its segment lies in the order of lanes."""
        given: dict[int, int] = {}
        first = 0
        for part in self.manifests[host].parts:
            at = part.base + part.parity
            for lane in range(first, first + len(part.lanes) - 1) if part.parity else ():
                given[lane] = at
                at += self.lanes[lane].parity_bytes
            first += len(part.lanes)
        found, base = [], 0
        for lane, geometry in enumerate(self.lanes):
            if lane in given:
                found.append(ParityPlace(given[lane], True))
            else:
                found.append(ParityPlace(base, False))
                base += geometry.parity_bytes
        self._regions[host] = base
        return found

    def parity(self, host: int, lane: int) -> ParityPlace:
        """Where `host` has its parity of this lane."""
        return self._parity[host][lane]

    def region_bytes(self, host: int) -> int:
        """The size of its parity region: of what its devices have not made."""
        return self._regions[host]

    def lane(self, host: int, lane: int) -> tuple[int, int]:
        """(offset, length) of this lane in the segment of `host`."""
        lanes = self.manifests[host].lanes
        return lanes[lane] if lane < len(lanes) else (0, 0)

    def position(self, host: int) -> int:
        """Where the host stands within its group."""
        return self.group.hosts.index(host)

    def damage_at(self, host: int, offset: int) -> Damage:
        """The fragment that byte `offset` of the segment of `host` belongs to."""
        for number, geometry in enumerate(self.lanes):
            start, length = self.lane(host, number)
            if start <= offset < start + length:
                stripes = geometry.stripes_of_data(self.position(host))
                return Damage(host, number, stripes[(offset - start) // geometry.fragment_bytes])
        return Damage(host)
