"""Where things lie in a slot, how blobs are checked, and how bytes are named on the wire.

A blob (a manifest, or a group's manifests) is 8 bytes of xxh3_64 and then its payload, so that
whoever reads one, here or from a peer, can tell whether it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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

_digest = xxhash.xxh3_64_intdigest


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
    view = np.frombuffer(data, np.uint8).data
    digests = [_digest(view[at : at + CHUNK]) for at in range(0, len(view), CHUNK)]
    return np.array(digests, "<u8").tobytes()


class ParityCheck:
    """Tells whether chunks of parity have their checksums.

    Args:
        sums: xxh3_64 of every CHUNK, little-endian.
    """

    def __init__(self, sums: bytes) -> None:
        self._expected: list[int] = np.frombuffer(sums, "<u8").tolist()

    def is_whole(self, start: int, chunk: memoryview) -> bool:
        """Whether a chunk, which begins at `start` of the parity region, is what it should be."""
        return _digest(chunk) == self._expected[start // CHUNK]


class SegmentCheck:
    """Tells whether pieces of a segment are what its manifest says."""

    def __init__(self, manifest: Manifest) -> None:
        chunks = -(-manifest.length // CHUNK)
        # Lists of plain integers: a look-up in an array costs as much as a tenth of a checksum.
        self._expected = [0] * chunks
        self._sizes = [0] * chunks
        for part in manifest.parts:
            first = part.base // CHUNK
            digests = np.frombuffer(part.checksums, "<u8").tolist()
            sizes = [CHUNK] * len(digests)
            if sizes:
                sizes[-1] = part.length - (len(digests) - 1) * CHUNK
            self._expected[first : first + len(digests)] = digests
            self._sizes[first : first + len(digests)] = sizes

    def is_whole(self, start: int, chunk: memoryview) -> bool:
        """Whether a chunk, which begins at `start` of the segment, is what it should be."""
        number = start // CHUNK
        size = self._sizes[number]
        return len(chunk) >= size and _digest(chunk[:size]) == self._expected[number]

    def bad_chunks(self, start: int, data: Bytes | memoryview) -> Iterator[int]:
        """The offsets in the segment of chunks of `data` (which begins at `start`, a multiple of
        CHUNK) that are damaged. A chunk that `data` ends within is checked if its part ends there
        too, else it counts as damaged: pieces are whole chunks."""
        assert start % CHUNK == 0
        view = np.frombuffer(data, np.uint8).data
        for at in range(0, len(view), CHUNK):
            if not self.is_whole(start + at, view[at : at + CHUNK]):
                yield start + at


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
        self.parity_bases: list[int] = []
        base = 0
        for lane in range(max(len(manifests[host].lanes) for host in group.hosts)):
            longest = max(self.lane(host, lane)[1] for host in group.hosts)
            geometry = LaneGeometry.of(group, longest)
            self.lanes.append(geometry)
            self.parity_bases.append(base)
            base += geometry.parity_bytes
        self.parity_bytes = base

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
