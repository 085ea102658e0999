"""The exchange: parity of device lanes, made by the devices of a group from each other's lanes.

Within the program that also takes the bytes of the state out, in `shard_map` over the leaves' own
mesh, all its axes as one: any mesh will do, in any order of its devices.

    for each bucket (the same bytes of each of the k fragments of a lane):
        the own k fragments' words  ──►  in code order  ──►  k x m rounds of ppermute  ──►  m sums

The rules:
- A device sends the fragment that is data fragment i of its stripe, for i = 0 to k-1, to the m
  holders of that stripe's parity. The holder of parity j stands `LaneGeometry.shift(j, i)` members
  further, wherever in the group that is: who sends to whom is part of the program. Which of a
  device's fragments it is depends on where its host stands; that, and which rows it owns, are told
  to it by a row of `Lanes.row_of`. So all processes run the same program.
- What comes from shift (j, i) is data fragment i of the stripe whose parity j this device holds:
  the coefficients are part of the program too.
- One bucket is worked on after the other, and each is an output of its own, in host memory: no more
  than one bucket's words are in device memory beside what is on its way to the host. Compilers put
  everything first that could be first, so each bucket's first rows are told by a number that
  depends on the bucket before: by a zero, of which the compiler does not know that it is one. (An
  optimization barrier is gone by the time that XLA for CPU puts operations in order.)
- A device's k fragments are joined, and the one that it sends is a slice from a place that it is
  told: a TPU takes a gather of rows apart into dozens of loops, and rows of k take it more memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxft.device.lanes import Lanes
from jaxft.device.parity.combining import combine, kernel_for
from jaxft.device.parity.packing import WORD_BYTES, words_of_rows
from jaxft.group.codec import encode_rows
from jaxft.group.manifest import CHUNK, align
from jaxft.group.placement import LaneGeometry

# Of a lane, all its fragments together; more where there would be too many buckets to compile.
BUCKET_BYTES = 32 << 20
BUCKETS_MAX = 32


class Piece(NamedTuple):
    """Bytes `start` to `stop` of the parity of a lane (m fragments, one after the other)."""

    start: int
    stop: int


def buckets(geometry: LaneGeometry) -> list[tuple[int, int]]:
    """The ranges of each fragment that are worked on one after the other, in bytes."""
    size = geometry.fragment_bytes
    step = align(max(BUCKET_BYTES // geometry.k, -(-size // BUCKETS_MAX)), CHUNK)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def pieces(geometry: LaneGeometry) -> Iterator[Piece]:
    """What each output of `code` is on each device, in their order."""
    for start, stop in buckets(geometry):
        for j in range(geometry.m):
            base = j * geometry.fragment_bytes
            yield Piece(base + start, base + stop)


def code(
    lanes: Lanes, specs: Sequence[PartitionSpec], leaves: Sequence[jax.Array], told: jax.Array
) -> list[jax.Array]:
    """The parity of all lanes; within `jit`.

    Args:
        lanes: the layout.
        specs: of the leaves of `lanes.places`, in their order.
        leaves: these leaves.
        told: int32 [devices, lanes.columns]: a row of `Lanes.row_of` on each device.

    Returns:
        For each of `pieces`: uint32 [devices, words], a row on each device.
    """
    spread = PartitionSpec(tuple(lanes.mesh.axis_names))  # type: ignore[no-untyped-call]
    each = jax.shard_map(
        functools.partial(_code, lanes),
        mesh=lanes.mesh,
        in_specs=(spread, list(specs)),
        out_specs=[spread for _ in pieces(lanes.geometry)],
        check_vma=False,
    )
    made: list[jax.Array] = each(told, list(leaves))
    return made


def _code(lanes: Lanes, told: jax.Array, shards: list[jax.Array]) -> list[jax.Array]:
    """What one device does."""
    geometry = lanes.geometry
    k, m = geometry.k, geometry.m
    axes = tuple(lanes.mesh.axis_names)
    rows = encode_rows(k, m)
    order, zero, rows_told = told[0, :k], told[0, k], told[0, k + 1 :].reshape(-1, 2)
    made: list[jax.Array] = []
    for start, stop in buckets(geometry):
        # Not before the bucket before is done with.
        after = functools.reduce(operator.xor, [one[0] for one in made[-m:]], jnp.uint32(0))
        firsts = rows_told.at[:, 0].add(after.astype(jnp.int32) & zero)
        bases = range(0, k * geometry.fragment_bytes, geometry.fragment_bytes)
        own = [_words(lanes, shards, firsts, at + start, at + stop) for at in bases]
        words = own[0].size
        joined = jnp.concatenate(own)
        sent = [jax.lax.dynamic_slice(joined, (order[i] * words,), (words,)) for i in range(k)]
        kernel = kernel_for(lanes.mesh.devices.flat[0].platform, words)
        for j in range(m):
            pairs = [lanes.pairs(geometry.shift(j, i)) for i in range(k)]
            come = [jax.lax.ppermute(sent[i], axes, pairs[i]) for i in range(k)]  # type: ignore[no-untyped-call]
            made += combine(rows[j : j + 1], come, kernel=kernel)
    return [one[None] for one in made]


def _words(
    lanes: Lanes, shards: Sequence[jax.Array], firsts: jax.Array, start: int, stop: int
) -> jax.Array:
    """Bytes `start` to `stop` of the device's lane, and zeros behind its end."""
    found: list[Any] = []
    at = start

    def fill(to: int) -> None:
        if at < to:
            found.append(jnp.zeros((to - at) // WORD_BYTES, jnp.uint32))

    for number, place in enumerate(lanes.places):
        first, last = max(start, place.offset), min(stop, place.offset + place.nbytes)
        if first >= last:
            continue
        fill(first)
        words = words_of_rows(
            shards[number],
            (first - place.offset, last - place.offset),
            first=firsts[number, 0],
            live=firsts[number, 1] if place.ragged else None,
        )
        found.append(words)
        at = first + WORD_BYTES * words.size
    fill(stop)
    return jnp.concatenate(found)
