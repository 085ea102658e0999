"""Packing: between the leaves of a tree and words of uint32, on the device.

The rules:
- The words' bytes, in little-endian order, are the canonical bytes of the leaves (see `leaves`),
  one leaf after the other, each aligned to ALIGN with zeros behind it: the layout of a part.
- Elements become unsigned integers before anything else happens to them (see `bits`).
- No array with a small last dimension is made on the way. A TPU pads it to 128 lanes, so that
  the bytes of a word as a dimension of their own take 32 times the memory of all words or more. It
  is rows of 128 words and of the elements in them that are taken apart and put together, by
  constant indices: what strided slices and interior padding do as well, but a TPU's compiler takes
  minutes over these.
- Words are in buckets of one size, the last of which may be shorter: a program that works on one
  bucket after the other has the temporary memory of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxft.device.bits import bits_of
from jaxft.device.leaves import SUB_BYTE_BITS, describe, element, show, stored, stored_shape
from jaxft.device.parity.products import LANES
from jaxft.errors import ConfigError
from jaxft.group.manifest import ALIGN, Leaf, align

BUCKET_BYTES = 64 << 20

WORD_BYTES = 4
_WORD_BITS = 8 * WORD_BYTES


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the leaves lie in the words.

    Attributes:
        leaves: what is packed.
        offsets: the first word of each.
        words: of all, those between leaves included.
        bucket_words: of every bucket but the last.
    """

    leaves: tuple[Leaf, ...]
    offsets: tuple[int, ...]
    words: int
    bucket_words: int

    def buckets(self) -> list[tuple[int, int]]:
        """The first word of each bucket, and the one behind its last."""
        starts = range(0, self.words, self.bucket_words)
        return [(start, min(start + self.bucket_words, self.words)) for start in starts]


def lay_out(leaves: Sequence[Leaf], bucket_bytes: int = BUCKET_BYTES) -> Packing:
    """Gives every leaf its place.

    Args:
        leaves: arrays and keys, as `leaves.describe` says what they are.
        bucket_bytes: a multiple of ALIGN.

    Raises:
        ConfigError: a leaf that is not on a device; a size of buckets that is no such multiple.
    """
    if bucket_bytes <= 0 or bucket_bytes % ALIGN:
        raise ConfigError(f"bucket_bytes={bucket_bytes}: expected a multiple of {ALIGN}")
    offsets = []
    end = 0
    for leaf in leaves:
        if leaf.kind not in ("array", "key"):
            raise ConfigError(f"leaf {show(leaf.path)} is a {leaf.kind}, which is on no device")
        offsets.append(end // WORD_BYTES)
        end = align(end + prod(stored_shape(leaf)) * element(leaf).itemsize, ALIGN)
    return Packing(
        leaves=tuple(leaves),
        offsets=tuple(offsets),
        words=end // WORD_BYTES,
        bucket_words=bucket_bytes // WORD_BYTES,
    )


def pack(packing: Packing, values: Sequence[jax.Array]) -> list[jax.Array]:
    """The words of the leaves; within `jit`.

    Returns:
        The buckets: arrays of uint32 [bucket_words], the last one shorter.

    Raises:
        ConfigError: a value is not what its leaf says, or cannot be taken apart (int1, uint1).
    """
    pieces = [_checked(*pair) for pair in zip(packing.leaves, values, strict=True)]
    ends = [*packing.offsets[1:], packing.words]
    buckets = []
    for start, stop in packing.buckets():
        inside = []
        for offset, end, words in zip(packing.offsets, ends, pieces, strict=True):
            first, last = max(start, offset), min(stop, end)
            if first < last:
                inside.append(_cut(words, first - offset, last - offset))
        buckets.append(jnp.concatenate(inside))
    return buckets


def unpack(packing: Packing, buckets: Sequence[jax.Array]) -> list[jax.Array]:
    """The leaves whose words these are; within `jit`. The inverse of `pack`, bit for bit.

    Args:
        buckets: as `pack` returns them.
    """
    values = []
    for leaf, offset in zip(packing.leaves, packing.offsets, strict=True):
        nbytes = prod(stored_shape(leaf)) * element(leaf).itemsize
        end = offset + -(-nbytes // WORD_BYTES)
        pieces = [
            bucket[max(start, offset) - start : min(stop, end) - start]
            for (start, stop), bucket in zip(packing.buckets(), buckets, strict=True)
            if max(start, offset) < min(stop, end)
        ]
        words = jnp.concatenate(pieces) if pieces else jnp.zeros(0, jnp.uint32)
        values.append(_value(leaf, words))
    return values


def _checked(leaf: Leaf, value: jax.Array) -> jax.Array:
    """The words of a value that is what its leaf says."""
    found = describe(leaf.path, jax.ShapeDtypeStruct(value.shape, value.dtype))  # type: ignore[no-untyped-call]
    kind = (found.kind, found.shape, found.dtype, found.impl)
    if kind != (leaf.kind, leaf.shape, leaf.dtype, leaf.impl):
        raise ConfigError(
            f"leaf {show(leaf.path)} was to be {leaf.dtype}{list(leaf.shape)}, found "
            f"{found.dtype}{list(found.shape)}"
        )
    return words_of(stored(leaf, value))


def _cut(words: jax.Array, start: int, stop: int) -> jax.Array:
    """Words of a leaf, and zeros for those behind its end."""
    inside = words[start:stop]
    return jnp.pad(inside, (0, stop - start - inside.size))


def words_of(array: jax.Array) -> jax.Array:
    """An array's canonical bytes as uint32 [ceil(bytes / 4)], zeros behind them; within `jit`."""
    return _joined([bits.reshape(-1) for bits in _parts(array)])


def words_of_rows(
    shard: jax.Array,
    span: tuple[int, int],
    *,
    first: jax.Array,
    live: jax.Array | None = None,
) -> jax.Array:
    """Bytes `span` of the rows of a shard as words, zeros behind them; within `jit`.

    Only the rows that these bytes are in are taken, so that no more is in memory on the way: the
    shard is behind a barrier of its own, as compilers would take all of it as integers once, for
    all that is taken of it.

    Args:
        shard: has at least one dimension.
        span: counted from row `first`; both ends are at whole elements.
        first: the row, int32.
        live: so many rows from there on are themselves, others are zeros; None: all are.
    """
    shard, first = jax.lax.optimization_barrier((shard, first))  # type: ignore[no-untyped-call]
    parts = _parts(shard)
    unit = sum(bits.dtype.itemsize for bits in parts)
    row = prod(shard.shape[1:]) * unit
    begin, end = span[0] // row, -(-span[1] // row)
    cut = slice((span[0] - begin * row) // unit, (span[1] - begin * row) // unit)
    found = []
    for bits in parts:
        rows = jax.lax.dynamic_slice_in_dim(bits, first + begin, end - begin, 0)
        if live is not None:
            number = begin + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
            rows = jnp.where(number < live, rows, jnp.zeros((), rows.dtype))
        found.append(rows.reshape(-1)[cut])
    return _joined(found)


def _parts(array: jax.Array) -> list[jax.Array]:
    """The elements as unsigned integers; those of complex ones as two arrays."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [bits_of(jax.lax.real(array)), bits_of(jax.lax.imag(array))]
    return [bits_of(array)]


def _joined(parts: list[jax.Array]) -> jax.Array:
    return _as_words(parts[0] if len(parts) == 1 else _interleaved(parts))


def _as_words(bits: jax.Array) -> jax.Array:
    itemsize = bits.dtype.itemsize
    if itemsize == WORD_BYTES:
        return bits
    if itemsize > WORD_BYTES:
        shift = np.asarray(_WORD_BITS, bits.dtype)
        return _interleaved([bits.astype(jnp.uint32), (bits >> shift).astype(jnp.uint32)])
    each = WORD_BYTES // itemsize
    parts = _dealt(jnp.pad(bits, (0, -bits.size % each)), each)
    words = parts[0].astype(jnp.uint32)
    for place, part in enumerate(parts[1:], 1):
        words |= part.astype(jnp.uint32) << np.uint32(8 * itemsize * place)
    return words


def _value(leaf: Leaf, words: jax.Array) -> jax.Array:
    """The leaf that has these words."""
    dtype = jnp.dtype(element(leaf))
    shape = stored_shape(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.dtype(f"float{4 * dtype.itemsize}")
        bits = _as_bits(words, part.itemsize, 2 * prod(shape))
        real, imag = (jax.lax.bitcast_convert_type(bits[place::2], part) for place in (0, 1))
        value = jax.lax.complex(real, imag)
    else:
        bits = _as_bits(words, dtype.itemsize, prod(shape))
        if dtype == jnp.bool_:
            value = bits.astype(jnp.bool_)
        else:
            if dtype.name in SUB_BYTE_BITS:
                bits = bits.astype(jnp.dtype(f"uint{SUB_BYTE_BITS[dtype.name]}"))
            value = jax.lax.bitcast_convert_type(bits, dtype)
    value = value.reshape(shape)
    return jax.random.wrap_key_data(value, impl=leaf.impl) if leaf.kind == "key" else value


def _as_bits(words: jax.Array, itemsize: int, count: int) -> jax.Array:
    """The inverse of `_as_words`: unsigned integers of this size."""
    if itemsize == WORD_BYTES:
        return words
    unsigned = jnp.dtype(f"uint{8 * itemsize}")
    if itemsize > WORD_BYTES:
        low, high = _dealt(words, 2)
        return low.astype(unsigned) | high.astype(unsigned) << np.asarray(_WORD_BITS, unsigned)
    shifts = [np.uint32(8 * itemsize * place) for place in range(WORD_BYTES // itemsize)]
    return _interleaved([(words >> shift).astype(unsigned) for shift in shifts])[:count]


def _dealt(array: jax.Array, count: int) -> list[jax.Array]:
    """Every count-th element of an array, from its first, its second, and so on; its size is a
    multiple of `count`."""
    size = array.size // count
    rows = jnp.pad(array, (0, -array.size % (count * LANES))).reshape(-1, count * LANES)
    places = np.arange(LANES, dtype=np.int32) * count
    parts = [jnp.take(rows, places + first, axis=1, mode="clip") for first in range(count)]
    return [part.reshape(-1)[:size] for part in parts]


def _interleaved(parts: Sequence[jax.Array]) -> jax.Array:
    """The first elements of all parts, then their second ones, and so on: undoes `_dealt`."""
    count, size = len(parts), parts[0].size
    lanes = np.arange(count * LANES, dtype=np.int32)
    total: jax.Array | None = None
    for number, part in enumerate(parts):
        rows = jnp.pad(part, (0, -size % LANES)).reshape(-1, LANES)
        spread = jnp.take(rows, lanes // count, axis=1, mode="clip")
        total = spread if total is None else jnp.where(lanes % count == number, spread, total)
    assert total is not None, "nothing to interleave"
    return total.reshape(-1)[: count * size]
