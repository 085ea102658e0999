"""All kernels make the bytes that pyeclib and the hosts make, and are lowered for their devices."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec, use_abstract_mesh
from pyeclib.ec_iface import ECDriver

from jaxft.device.parity import KERNELS, Kernel, combine, combining, kernel_for, pallas_tpu
from jaxft.device.parity.products import LANES, double, multiply
from jaxft.errors import CodecError, ConfigError
from jaxft.group import codec
from jaxft.group.codec import Bytes, decode_matrix, encode_rows
from tests.device.parity import fragments
from tests.device.parity.fragments import CODES, assert_all_make, assert_equal, by_hosts, noise

HEADER_BYTES = 80

# Around rows of lanes, steps and blocks of both Pallas kernels.
LENGTHS = (1, 2, 127, 128, 129, 1023, 1024, 1025, 4096 + 128, 32768, 32768 + 5 * 128, 33000)


def by_pyeclib(k: int, m: int, data: Sequence[Bytes]) -> list[Bytes]:
    """The parity that pyeclib makes, without its headers."""
    coded = ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy").encode(b"".join(map(bytes, data)))
    return [np.frombuffer(one, np.uint8)[HEADER_BYTES:] for one in coded[k:]]


# Values


def test_a_word_is_doubled_byte_by_byte() -> None:
    values = np.arange(256, dtype=np.uint8)
    found = np.asarray(double(jnp.asarray(values.view("<u4")))).view(np.uint8)
    np.testing.assert_array_equal(found, codec._PRODUCT[2])


def test_every_coefficient_multiplies_every_byte() -> None:
    values = jnp.asarray(np.arange(256, dtype=np.uint8).view("<u4"))
    rows = tuple((coefficient,) for coefficient in range(256))
    outputs = multiply(rows, [values])
    found = np.stack([np.asarray(output).view(np.uint8) for output in outputs])
    np.testing.assert_array_equal(found, codec._PRODUCT)


@pytest.mark.parametrize(("k", "m"), CODES)
def test_every_code_makes_the_parity_of_pyeclib(k: int, m: int) -> None:
    data = noise(k, 132)
    expected = by_pyeclib(k, m, data)
    assert_equal(by_hosts(encode_rows(k, m), data), expected)
    assert_all_make(expected, encode_rows(k, m), data)


@pytest.mark.parametrize("words", LENGTHS)
def test_every_length_is_coded(words: int) -> None:
    data = noise(3, words)
    assert_all_make(by_hosts(encode_rows(3, 2), data), encode_rows(3, 2), data)


def test_a_large_code_of_many_blocks() -> None:
    data = noise(8, 100_001)
    assert_all_make(by_pyeclib(8, 4, data), encode_rows(8, 4), data)


@given(
    code=st.sampled_from(CODES),
    words=st.sampled_from((1, 5, 128, 300)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=10, derandomize=True, deadline=None, database=None)
def test_what_was_lost_is_made_again(code: tuple[int, int], words: int, seed: int) -> None:
    k, m = code
    rng = random.Random(seed)
    data = noise(k, words, seed)
    coded = [*data, *by_hosts(encode_rows(k, m), data)]
    lost = sorted(rng.sample(range(k + m), rng.randint(1, m)))
    have = rng.sample([one for one in range(k + m) if one not in lost], k)
    matrix = decode_matrix(k, m, have, lost)
    assert_all_make([coded[one] for one in lost], matrix, [coded[one] for one in have])


@given(rows=st.integers(1, 4), columns=st.integers(1, 8), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5, derandomize=True, deadline=None, database=None)
def test_any_matrix_will_do(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    matrix[rng.random(matrix.shape) < 0.3] = 0
    data = noise(columns, 40, seed)
    assert_all_make(by_hosts(matrix, data), matrix, data)


# The interface


def arrays(data: Sequence[Bytes]) -> list[jax.Array]:
    return [jnp.asarray(one.view("<u4")) for one in data]


def test_the_default_kernel_is_taken() -> None:
    data = noise(6, 77)
    outputs = combine(encode_rows(6, 2), arrays(data))
    assert_equal([np.asarray(one).view(np.uint8) for one in outputs], by_pyeclib(6, 2, data))


@pytest.mark.parametrize("kernel", fragments.KERNELS)
@pytest.mark.parametrize("shape", [(4, 33), (2, 3, 128)])
def test_fragments_may_have_any_shape(kernel: str, shape: tuple[int, ...]) -> None:
    data = noise(2, int(np.prod(shape)))
    words = [one.reshape(shape) for one in arrays(data)]
    rows = fragments.rows_of(encode_rows(2, 2))
    outputs = jax.jit(lambda *all: fragments.KERNELS[kernel](rows, all))(*words)
    assert {output.shape for output in outputs} == {shape}
    found = [np.asarray(output).reshape(-1).view(np.uint8) for output in outputs]
    assert_equal(found, by_hosts(encode_rows(2, 2), data))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_to_do_is_done(kernel: Kernel) -> None:
    empty = jnp.zeros(0, jnp.uint32)
    outputs = combine(encode_rows(3, 2), [empty] * 3, kernel=kernel)
    assert [(one.shape, one.dtype) for one in outputs] == [((0,), jnp.uint32)] * 2
    assert combine(np.zeros((0, 3), np.uint8), [jnp.ones(4, jnp.uint32)] * 3, kernel=kernel) == []


def test_what_does_not_fit_is_refused() -> None:
    one, rows = jnp.ones(4, jnp.uint32), encode_rows(2, 1)
    with pytest.raises(CodecError, match="no fragments"):
        combine(rows, [])
    with pytest.raises(CodecError, match=r"3 fragments need .* found uint8 of shape \(1, 2\)"):
        combine(rows, [one] * 3)
    with pytest.raises(CodecError, match="found int64"):
        combine(rows.astype(np.int64), [one] * 2)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"found uint32\[3\], uint32\[4\]"):
        combine(rows, [one, one[1:]])
    with pytest.raises(CodecError, match=r"found int32\[4\]"):
        combine(rows, [one.astype(jnp.int32)] * 2)
    with pytest.raises(CodecError, match="expected one of xla, pallas_tpu, pallas_gpu"):
        combine(rows, [one] * 2, kernel="cuda")  # type: ignore[arg-type]


def test_the_kernel_is_the_portable_one_unless_another_was_measured_or_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for platform in ("cpu", "gpu", "tpu", "other"):
        assert kernel_for(platform, 128) == "xla"
    monkeypatch.setitem(combining.FASTEST, "tpu", "pallas_tpu")
    assert [kernel_for("tpu", words) for words in (128, 129)] == ["pallas_tpu", "xla"]
    monkeypatch.setenv("JAXFT_PARITY_KERNEL", "pallas_gpu")
    assert kernel_for("gpu", 129) == kernel_for("tpu", 128) == "pallas_gpu"
    monkeypatch.setenv("JAXFT_PARITY_KERNEL", "cuda")
    with pytest.raises(ConfigError, match="JAXFT_PARITY_KERNEL=cuda: expected one of xla, pallas"):
        kernel_for("gpu", 128)


def test_devices_code_their_own_words_in_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()), ("all",))
    data = noise(3, 8 * 50)
    each = jax.shard_map(
        lambda *words: combine(encode_rows(3, 2), words),
        mesh=mesh,
        in_specs=PartitionSpec("all"),
        out_specs=PartitionSpec("all"),
        check_vma=False,
    )
    outputs = jax.jit(each)(*arrays(data))
    assert len(outputs[0].sharding.device_set) == 8
    expected = by_hosts(encode_rows(3, 2), data)
    assert_equal([np.asarray(one).view(np.uint8) for one in outputs], expected)


# Programs

# Triton wants to know for which one, from jax 0.12 on.
H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
TRITON_GOES = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def lowered(kernel: Kernel, k: int, m: int, words: int, platform: str) -> str:
    """The program that a platform is given, made without one."""
    described = [jax.ShapeDtypeStruct((words,), jnp.uint32)] * k  # type: ignore[no-untyped-call]
    function = jax.jit(lambda *all: combine(encode_rows(k, m), all, kernel=kernel))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = function.trace(*described)
        return str(traced.lower(lowering_platforms=(platform,)).as_text())


@TRITON_GOES
@pytest.mark.parametrize("code", [(1, 1), (6, 2), (8, 4)])
@pytest.mark.parametrize("words", [128, 128 * 1000, 100_001])
def test_pallas_kernels_are_lowered_for_their_platforms(code: tuple[int, int], words: int) -> None:
    assert len(re.findall("tpu_custom_call", lowered("pallas_tpu", *code, words, "tpu"))) == 1
    triton = lowered("pallas_gpu", *code, words, "cuda")
    assert len(re.findall(r"triton_kernel_call|xla\.gpu\.triton", triton)) == 1
    assert "mosaic" not in triton


def operations(jaxpr: Any) -> list[str]:
    """The names of all operations in a traced function, those within others too."""
    found = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.append(equation.primitive.name)
        for value in equation.params.values():
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                found += operations(value)
    return found


@TRITON_GOES
@pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu"])
def test_each_word_is_read_once_for_all_outputs(kernel: str) -> None:
    rows, words = fragments.rows_of(encode_rows(6, 4)), [jnp.ones(4096, jnp.uint32)] * 6
    found = operations(jax.make_jaxpr(lambda *all: fragments.KERNELS[kernel](rows, all))(*words))
    assert sum(name in ("get", "load", "masked_load") for name in found) == 6
    assert sum(name in ("swap", "store", "masked_swap") for name in found) == 4


@TRITON_GOES
def test_whole_rows_are_not_padded() -> None:
    assert "stablehlo.pad" not in lowered("pallas_tpu", 6, 2, 128 * 77, "tpu")
    assert "stablehlo.pad" in lowered("pallas_tpu", 6, 2, 128 * 77 + 1, "tpu")
    assert "stablehlo.pad" not in lowered("pallas_gpu", 6, 2, 128 * 77 + 1, "cuda")


@pytest.mark.parametrize(("k", "m"), [(6, 2), (8, 4)])
def test_doublings_are_shared_and_few(k: int, m: int) -> None:
    text = lowered("xla", k, m, 1000, "cpu")
    assert text.count("stablehlo.multiply") <= 7 * m


@pytest.mark.parametrize(("k", "m"), [(6, 2), (8, 4)])
def test_the_portable_kernel_needs_no_memory(k: int, m: int) -> None:
    words = [jnp.zeros(100_003, jnp.uint32)] * k
    program: Any = jax.jit(lambda *all: combine(encode_rows(k, m), all, kernel="xla"))
    memory = program.lower(*words).compile().memory_analysis()
    assert memory.temp_size_in_bytes == 0


def test_blocks_of_the_largest_code_fit_the_memory_of_a_tpu_core() -> None:
    block_bytes = pallas_tpu.BLOCK_ROWS * LANES * 4
    assert 2 * (8 + 4) * block_bytes <= (16 << 20) // 4
    assert pallas_tpu.BLOCK_ROWS % pallas_tpu.STEP_ROWS == 0
