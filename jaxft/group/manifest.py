"""What a segment is: the bytes that one host holds of one snapshot, and how to find a leaf in them.

Layout of a segment of a host with ranks r0, r1, ...:

    | part of r0 | pad | part of r1 | pad | ...        every part starts at a multiple of CHUNK

Layout of a part: the owned ranges of its rank, one after the other, each aligned to ALIGN bytes.
A range is a box of one leaf: rows `start[0]` to `stop[0]` of one shard, in C order, in the leaf's
canonical bytes (the dtype's own little-endian bytes; one byte an element for types below a byte,
with the unused high bits zero; the key data of a typed PRNG key).

Where devices code, a part is `lanes` of whole chunks, one after the other: one for each device of
its rank, and a last one for what is on none of these. If they have coded this snapshot, the parity
that this host holds of each of the devices' lanes lies behind them, in the part as well:

    | lane of device 0 | lane of device 1 | ... | rest | parity of lane 0 | parity of lane 1 | ... |

Checksums are xxh3_64 of every CHUNK of a part (the last one may be short), as little-endian
uint64, so that any piece that starts at a multiple of CHUNK can be checked on its own.
"""

from __future__ import annotations

import msgspec

from jaxft.group.identity import SnapshotId as SnapshotId
from jaxft.group.world import World

CHUNK = 256 * 1024
ALIGN = 64

# ("k", key) dict key · ("t", json) dict key that is a tuple · ("i", index) sequence ·
# ("a", name) attribute · ("f", index) flattened child
PathKey = tuple[str, str | int]
Path = tuple[PathKey, ...]


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One leaf of the tree.

    `kind` is "array" (a jax.Array), "key" (a typed PRNG key; `impl` names it, `shape` is that of
    the key array, the stored box has one more dimension), "numpy" (a numpy.ndarray) or "literal"
    (a Python or NumPy scalar, str or bytes: `literal` holds its encoded value and there are no
    bytes in any segment). `dtype` is the canonical dtype name of the stored elements. Behind all of
    these may come nodes of kind "empty", which are in no target and in no segment.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: str
    impl: str = ""
    weak_type: bool = False
    literal: bytes = b""


class Range(msgspec.Struct, frozen=True, array_like=True):
    """A box of leaf number `leaf`: elements start..stop (exclusive) in each dimension.

    Its bytes lie at `offset` of the part, `nbytes` long.
    """

    leaf: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    nbytes: int


class Part(msgspec.Struct, frozen=True):
    """What one rank put into the segment: `length` bytes at `base` of the segment.

    `lanes` are (offset, length) within the part; without any, the host's parts are one lane in all.
    `parity` is where in the part the parity begins that the devices have made of all lanes but the
    last; 0: the hosts make it.
    """

    rank: int
    base: int
    length: int
    ranges: tuple[Range, ...]
    checksums: bytes
    extras: bytes = b""
    lanes: tuple[tuple[int, int], ...] = ()
    parity: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One host's segment of one snapshot.

    `host` is the index in `world.hosts`. `plan` is the digest of the plan of the whole snapshot,
    equal on every host. `lanes` are (offset, length) byte ranges of the segment that are coded on
    their own; offsets are multiples of CHUNK.
    """

    id: SnapshotId
    step: int
    host: int
    world: World
    plan: str
    leaves: tuple[Leaf, ...]
    parts: tuple[Part, ...]
    length: int
    lanes: tuple[tuple[int, int], ...]


def align(value: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `value`."""
    return -(-value // to) * to
