"""Words have the bytes that hosts have of the same leaves, and give the leaves back bit for bit."""

from __future__ import annotations

import math
import random
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxft.device.leaves import describe, flatten
from jaxft.device.parity import Packing, combine, lay_out, pack, unpack
from jaxft.errors import ConfigError
from jaxft.group.codec import decode_matrix, encode_rows
from jaxft.group.manifest import ALIGN
from tests.device.parity.fragments import CODES, QUICKLY, assert_equal, by_hosts
from tests.device.snapshots import raw, take

DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "float16",
    "bfloat16", "complex64", "int4", "uint4", "int2", "uint2", "float4_e2m1fn", "float8_e4m3fn",
    "float8_e5m2", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e8m0fnu",
)  # fmt: skip


def every_pattern(dtype: str, shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    """An array whose elements have any bits, NaNs of all payloads included."""
    kind = jnp.dtype(dtype)
    count = math.prod(shape)
    rng = np.random.default_rng(seed)
    if kind == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape).astype(bool))
    if kind.name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        bits = 2 if "2" in kind.name.removesuffix("_e2m1fn") else 4
        unsigned = jnp.asarray(rng.integers(0, 1 << bits, shape)).astype(f"uint{bits}")
        return jax.lax.bitcast_convert_type(unsigned, kind)
    data = rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8)
    return jnp.asarray(data.view(kind).reshape(shape))


def packing_of(tree: Any, bucket_bytes: int) -> tuple[Packing, list[jax.Array]]:
    pairs, _ = flatten(tree)
    return lay_out([describe(*pair) for pair in pairs], bucket_bytes), [one for _, one in pairs]


def packed(packing: Packing, values: list[jax.Array]) -> np.ndarray:
    """The bytes of all words."""
    program = jax.jit(lambda all: pack(packing, all), compiler_options=QUICKLY)
    return bytes_of(packing, program(values))


def bytes_of(packing: Packing, buckets: list[jax.Array]) -> np.ndarray:
    sizes = [stop - start for start, stop in packing.buckets()]
    assert [(one.dtype, one.shape) for one in buckets] == [(jnp.uint32, (n,)) for n in sizes]
    return np.concatenate([np.asarray(one).view(np.uint8) for one in buckets])


def bits(array: jax.Array) -> tuple[Any, ...]:
    """What two arrays have to have in common."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return (array.dtype, *bits(jax.random.key_data(array)))
    return array.dtype, array.shape, raw(array)


# Bytes


@pytest.mark.parametrize("dtypes", [DTYPES[i : i + 4] for i in range(0, len(DTYPES), 4)])
def test_leaves_have_the_bytes_of_a_snapshot_and_come_back(dtypes: tuple[str, ...]) -> None:
    """Several in one program, which is compiled sooner."""
    tree = {d: [every_pattern(d, (3, 7)), every_pattern(d, (43,), seed=1)] for d in dtypes}
    packing, values = packing_of(tree, ALIGN * 3)

    def there_and_back(all: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        buckets = pack(packing, all)
        return buckets, unpack(packing, buckets)

    buckets, back = jax.jit(there_and_back, compiler_options=QUICKLY)(values)
    assert list(map(bits, back)) == list(map(bits, values))
    found = bytes_of(packing, buckets)
    snapshot = take(tree)
    for range_ in snapshot.manifests[0].parts[0].ranges:
        start = 4 * packing.offsets[range_.leaf]
        expected = snapshot.segments[0][range_.offset : range_.offset + range_.nbytes]
        np.testing.assert_array_equal(found[start : start + range_.nbytes], expected)


def test_wide_elements() -> None:
    with jax.enable_x64(True):
        dtypes = ("int64", "uint64", "float64", "complex128")
        test_leaves_have_the_bytes_of_a_snapshot_and_come_back(dtypes)


def test_keys_are_their_data() -> None:
    for impl in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(7, impl=impl), 3)
        packing, values = packing_of({"k": keys}, ALIGN)
        expected = np.asarray(jax.random.key_data(keys)).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(packed(packing, values)[: expected.size], expected)
        (back,) = jax.jit(lambda all, by=packing: unpack(by, pack(by, all)))(values)
        assert bits(back) == bits(keys)


def test_leaves_of_few_elements() -> None:
    dtypes = ("bool", "bfloat16", "complex64")
    shapes = ((), (0,), (3, 0, 2), (1,))
    tree = [every_pattern(dtype, shape) for dtype in dtypes for shape in shapes]
    packing, values = packing_of(tree, 4 * ALIGN)
    back = jax.jit(lambda all: unpack(packing, pack(packing, all)), compiler_options=QUICKLY)(
        values
    )
    assert list(map(bits, back)) == list(map(bits, values))


def test_no_leaves_are_no_words() -> None:
    packing = lay_out([])
    assert (packing.words, packing.buckets()) == (0, [])
    assert pack(packing, []) == unpack(packing, []) == []


def test_buckets_have_one_size_and_cut_leaves() -> None:
    packing, values = packing_of([jnp.arange(100.0), jnp.ones(17, jnp.int8)], 2 * ALIGN)
    assert packing.offsets == (0, 112)
    assert packing.words == 128
    assert packing.buckets() == [(0, 32), (32, 64), (64, 96), (96, 128)]
    other, _ = packing_of([jnp.arange(100.0), jnp.ones(17, jnp.int8)], 1 << 20)
    np.testing.assert_array_equal(packed(packing, values), packed(other, values))


# What is refused


def test_what_cannot_be_taken_apart_is_refused_by_path() -> None:
    for dtype in ("int1", "uint1"):
        leaf = jax.ShapeDtypeStruct((3,), jnp.dtype(dtype))  # type: ignore[no-untyped-call]
        with pytest.raises(ConfigError, match=rf"leaf \['x'\]: .* take apart {dtype}"):
            packing_of({"x": leaf}, ALIGN)
    with pytest.raises(ConfigError, match=r"leaf \['x'\] is a numpy, which is on no device"):
        packing_of({"x": np.ones(3)}, ALIGN)
    with pytest.raises(ConfigError, match="bucket_bytes=100: expected a multiple of 64"):
        lay_out([], 100)


def test_another_leaf_than_was_laid_out_is_refused() -> None:
    packing, _ = packing_of({"x": jnp.ones((2, 3))}, ALIGN)
    for other in (jnp.ones((3, 2)), jnp.ones((2, 3), jnp.int32), jax.random.key(0)):
        with pytest.raises(ConfigError, match=r"leaf \['x'\] was to be float32\[2, 3\], found"):
            pack(packing, [other])


# All of it together


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    code=st.sampled_from([code for code in CODES if sum(code) <= 6]),
    bucket=st.sampled_from((2, 5, 1000)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=6, derandomize=True, deadline=None, database=None)
def test_a_tree_is_lost_and_made_again(
    dtypes: list[str], code: tuple[int, int], bucket: int, seed: int
) -> None:
    """k hosts of one tree each; devices make parity, and from what is left the trees."""
    k, m = code
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 3))) for _ in dtypes]
    trees = [
        {f"leaf{i}": every_pattern(*pair, seed=seed + host) for i, pair in enumerate(zipped)}
        for host in range(k)
        for zipped in [list(zip(dtypes, shapes, strict=True))]
    ]
    packing, _ = packing_of(trees[0], bucket * ALIGN)
    lost = sorted(rng.sample(range(k + m), rng.randint(1, m)))
    have = rng.sample([one for one in range(k + m) if one not in lost], k)
    again = [one for one in lost if one < k]

    def lose_and_make_again(values: list[list[jax.Array]]) -> tuple[Any, Any, Any]:
        hosts = [pack(packing, one) for one in values]
        parity: list[list[jax.Array]] = [[] for _ in range(m)]
        made: list[list[jax.Array]] = [[] for _ in again]
        for data in zip(*hosts, strict=True):
            coded = [*data, *combine(encode_rows(k, m), data)]
            for j in range(m):
                parity[j].append(coded[k + j])
            found = combine(decode_matrix(k, m, have, again), [coded[one] for one in have])
            for host, words in zip(made, found, strict=True):
                host.append(words)
        return hosts, parity, [unpack(packing, words) for words in made]

    values = [[one for _, one in flatten(tree)[0]] for tree in trees]
    data, parity, made = jax.jit(lose_and_make_again, compiler_options=QUICKLY)(values)
    for host, leaves in zip(again, made, strict=True):
        assert list(map(bits, leaves)) == list(map(bits, values[host]))
    if packing.words:
        expected = by_hosts(encode_rows(k, m), [bytes_of(packing, one) for one in data])
        assert_equal([bytes_of(packing, one) for one in parity], expected)
