"""The erasure code: the bytes of pyeclib, every loss rebuilt, and the choice of a backend."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from pyeclib.ec_iface import ECDriver

from jaxft.errors import CodecError
from jaxft.group import codec
from jaxft.group.codec import Backend, Bytes, IsalBackend, NumpyBackend, PyeclibBackend
from jaxft.group.manifest import CHUNK
from jaxft.group.placement import LaneGeometry, clip
from jaxft.group.world import DATA_MAX, PARITY_MAX

CODES = [(k, m) for k in range(1, DATA_MAX + 1) for m in range(1, PARITY_MAX + 1)]
HEADER_BYTES = 80


@functools.cache
def isal() -> IsalBackend:
    return IsalBackend(next(codec.bundled_libraries()))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "isal": isal,
    "pyeclib": functools.cache(PyeclibBackend),
    "numpy": functools.cache(NumpyBackend),
}


@pytest.fixture(params=BACKENDS)
def each(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


def noise(count: int, length: int, seed: int = 0) -> list[Bytes]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8))


def combined(backend: Backend, matrix: Bytes, sources: Sequence[Bytes], length: int) -> list[Bytes]:
    outputs = [np.full(length, 0xA5, np.uint8) for _ in range(len(matrix))]
    backend.combine(matrix, sources, outputs)
    return outputs


def equal(found: Sequence[Bytes], expected: Sequence[Bytes]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


# The field and its matrices


def product_by_definition(a: int, b: int) -> int:
    """Multiplication of polynomials modulo 0x11d, bit by bit."""
    result = 0
    for bit in range(8):
        if b >> bit & 1:
            result ^= a << bit
    for bit in range(14, 7, -1):
        if result >> bit & 1:
            result ^= 0x11D << (bit - 8)
    return result


def test_products_follow_the_definition_of_the_field() -> None:
    values = np.arange(256, dtype=np.uint8)
    found = codec.multiply(values[:, None], values[None, :])
    assert found.tolist() == [[product_by_definition(a, b) for b in range(256)] for a in range(256)]


@pytest.mark.parametrize(("k", "m"), CODES)
def test_rows_are_those_of_isal(k: int, m: int) -> None:
    library = ctypes.CDLL(next(codec.bundled_libraries()))
    matrix = np.zeros((k + m, k), np.uint8)
    library.gf_gen_cauchy1_matrix(ctypes.c_void_p(matrix.ctypes.data), k + m, k)
    assert np.array_equal(matrix[:k], np.eye(k, dtype=np.uint8))
    assert np.array_equal(matrix[k:], codec.encode_rows(k, m))


def test_inverses_are_those_of_isal() -> None:
    library = ctypes.CDLL(next(codec.bundled_libraries()))
    rng = np.random.default_rng(1)
    singular = 0
    for size in range(1, DATA_MAX + 1):
        for _ in range(40):
            matrix = rng.integers(0, 256 if size > 2 else 3, (size, size), dtype=np.uint8)
            scratch, inverse = matrix.copy(), np.zeros((size, size), np.uint8)
            if library.gf_invert_matrix(
                ctypes.c_void_p(scratch.ctypes.data), ctypes.c_void_p(inverse.ctypes.data), size
            ):
                singular += 1
                with pytest.raises(CodecError, match="singular"):
                    codec.invert(matrix)
                continue
            assert np.array_equal(codec.invert(matrix), inverse)
            assert np.array_equal(codec.multiply(matrix, inverse), np.eye(size, dtype=np.uint8))
    assert singular


def test_only_a_square_matrix_is_inverted() -> None:
    with pytest.raises(CodecError, match="square"):
        codec.invert(np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize(("k", "m"), [(0, 1), (17, 1), (3, 5), (3, -1)])
def test_a_code_out_of_range_is_refused(k: int, m: int) -> None:
    with pytest.raises(CodecError, match="not supported"):
        codec.encode_rows(k, m)
    with pytest.raises(CodecError, match="not supported"):
        codec.decode_matrix(k, m, range(max(k, 0)), ())


@pytest.mark.parametrize(
    ("have", "want", "message"),
    [
        ((0, 1), (2,), "3 different fragments"),
        ((0, 1, 1), (2,), "3 different fragments"),
        ((0, 1, 2, 3), (2,), "3 different fragments"),
        ((0, 1, 5), (2,), "fragments 0 to 4"),
        ((0, 1, -1), (2,), "fragments 0 to 4"),
        ((0, 1, 3), (5,), "fragments 0 to 4"),
    ],
)
def test_fragments_that_do_not_fit_are_refused(
    have: tuple[int, ...], want: tuple[int, ...], message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        codec.decode_matrix(3, 2, have, want)


def test_shared_matrices_cannot_be_changed() -> None:
    for matrix in (codec.encode_rows(3, 1), codec.decode_matrix(3, 1, (1, 2, 3), (0,))):
        with pytest.raises(ValueError, match="read-only"):
            matrix[0, 0] = 1


# The bytes


@pytest.mark.parametrize(("k", "m"), CODES)
def test_parity_is_that_of_pyeclib(k: int, m: int) -> None:
    length = 1000 + 8 * k + m
    data = noise(k, length, seed=100 * k + m)
    fragments = ECDriver(ec_type="isa_l_rs_cauchy", k=k, m=m).encode(np.concatenate(data).tobytes())
    payloads = [np.frombuffer(fragment, np.uint8)[HEADER_BYTES:] for fragment in fragments]
    assert equal(payloads[:k], data)
    for load in BACKENDS.values():
        assert equal(combined(load(), codec.encode_rows(k, m), data, length), payloads[k:])
    for lone in range(m):
        row = codec.encode_rows(k, m)[lone : lone + 1]
        for load in BACKENDS.values():
            assert equal(combined(load(), row, data, length), payloads[k + lone : k + lone + 1])


def test_a_known_answer() -> None:
    data = [np.frombuffer(text, np.uint8) for text in (b"jaxft", b"keeps", b"going")]
    parity = combined(NumpyBackend(), codec.encode_rows(3, 2), data, 5)
    # For 3+2 the rows are 1/(3^i) and 1/(4^i): 1/3 = 244, 1/2 = 142, 1/1 = 1; 1/4 = 71, ...
    assert codec.encode_rows(3, 2).tolist() == [[244, 142, 1], [71, 167, 122]]
    expected = [
        [
            product_by_definition(row[0], a)
            ^ product_by_definition(row[1], b)
            ^ product_by_definition(row[2], c)
            for a, b, c in zip(*data, strict=True)
        ]
        for row in ([244, 142, 1], [71, 167, 122])
    ]
    assert [output.tolist() for output in parity] == expected


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("columns", [1, 3, 16])
def test_backends_agree_on_any_matrix_and_length(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows * 100 + columns)
    for length in (1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 255, 999, 4096, 65536 + 7):
        matrix = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        matrix[rng.random(matrix.shape) < 0.1] = 0
        data = noise(columns, length, seed=length)
        expected = combined(NumpyBackend(), matrix, data, length)
        assert equal(combined(isal(), matrix, data, length), expected)
        assert equal(combined(BACKENDS["pyeclib"](), matrix, data, length), expected)


def test_long_fragments_are_coded_in_several_calls(
    each: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "CALL_BYTES_MAX", 4096)
    monkeypatch.setattr(PyeclibBackend, "PIECE_BYTES", 4096)
    monkeypatch.setattr(NumpyBackend, "BLOCK_BYTES", 4096)
    data = noise(3, 3 * 4096 + 5)
    rows = codec.encode_rows(3, 2)
    whole = codec.multiply(rows, np.stack(data))
    assert equal(combined(each, rows, data, 3 * 4096 + 5), list(whole))


@pytest.mark.parametrize("columns", [0, 1, 3])
def test_steps_are_made_one_after_the_other(each: Backend, columns: int) -> None:
    length, step = 1000, 300
    matrix = np.ascontiguousarray(codec.encode_rows(3, 2)[:, :columns])
    sources = noise(columns, length)
    expected = combined(each, matrix, sources, length)
    outputs = [np.full(length, 0xA5, np.uint8) for _ in range(2)]
    offsets = []
    for start in each.combine_by_steps(matrix, sources, outputs, step):
        offsets.append(start)
        made = min(start + step, length)
        assert equal([one[:made] for one in outputs], [one[:made] for one in expected])
    assert offsets == [0, 300, 600, 900]


def test_columns_of_zeros_may_be_left_out(each: Backend) -> None:
    data = noise(5, 777)
    data[1][:] = data[4][:] = 0
    rows = codec.encode_rows(5, 3)
    kept = [0, 2, 3]
    found = combined(each, rows[:, kept], [data[column] for column in kept], 777)
    assert equal(found, combined(each, rows, data, 777))
    assert equal(combined(each, rows[:, :0], [], 777), [np.zeros(777, np.uint8)] * 3)


def test_nothing_to_do_is_done(each: Backend) -> None:
    each.combine(np.zeros((0, 2), np.uint8), noise(2, 9), [])
    each.combine(codec.encode_rows(2, 1), [b"", b""], [bytearray()])
    each.combine(np.zeros((0, 0), np.uint8), [], [])


def test_all_kinds_of_buffers_are_coded_in_place(each: Backend) -> None:
    data = noise(4, 100)
    slot = bytearray(300)
    sources: list[codec.Buffer] = [
        data[0],
        data[1].tobytes(),
        memoryview(data[2].tobytes()),
        bytearray(data[3].tobytes()),
    ]
    view = memoryview(slot)
    each.combine(codec.encode_rows(4, 2), sources, [view[50:150], view[200:300]])
    expected = combined(each, codec.encode_rows(4, 2), data, 100)
    assert slot == bytes(50) + expected[0].tobytes() + bytes(50) + expected[1].tobytes()


def test_buffers_that_do_not_fit_are_refused(each: Backend) -> None:
    rows, data, outputs = codec.encode_rows(3, 1), noise(3, 64), noise(1, 64)
    before = outputs[0].copy()
    with pytest.raises(CodecError, match="different lengths"):
        each.combine(rows, [data[0], data[1], data[2][1:]], outputs)
    with pytest.raises(CodecError, match="different lengths"):
        each.combine(rows, data, [outputs[0][1:]])
    with pytest.raises(CodecError, match=r"uint8 matrix of shape \(1, 2\)"):
        each.combine(rows, data[:2], outputs)
    with pytest.raises(CodecError, match=r"uint8 matrix of shape \(2, 3\)"):
        each.combine(rows, data, [outputs[0], bytearray(64)])
    with pytest.raises(CodecError, match="found int64"):
        each.combine(rows.astype(np.int64), data, outputs)
    with pytest.raises(CodecError, match="read-only"):
        each.combine(rows, data, [bytes(64)])
    with pytest.raises(CodecError, match="contiguous"):
        each.combine(rows, [*data[:2], np.zeros(128, np.uint8)[::2]], outputs)
    with pytest.raises(CodecError, match="contiguous"):
        each.combine(rows, [*data[:2], "text"], outputs)  # type: ignore[list-item]
    assert np.array_equal(outputs[0], before)


def test_clipped_fragments_are_coded_as_if_padded(each: Backend) -> None:
    rng = random.Random(5)
    rows = codec.encode_rows(4, 3)
    for _ in range(50):
        data = [noise(1, rng.choice([0, 1, 40, 99, 100]))[0] for _ in range(4)]
        lengths = [rng.choice([0, 1, 40, 99, 100, 120]) for _ in range(3)]
        padded = [np.pad(source, (0, 120 - source.size)) for source in data]
        expected = combined(each, rows, padded, 120)
        outputs = [np.full(length, 0xA5, np.uint8) for length in lengths]
        each.combine_clipped(rows, data, outputs)
        assert equal(outputs, [e[:length] for e, length in zip(expected, lengths, strict=True)])


def test_clipped_fragments_need_a_matrix_that_fits(each: Backend) -> None:
    with pytest.raises(CodecError, match="uint8 matrix of shape"):
        each.combine_clipped(codec.encode_rows(3, 1), noise(2, 5), [bytearray(6)])


def test_threads_code_at_the_same_time() -> None:
    data = noise(3, 100_000)
    expected = combined(NumpyBackend(), codec.encode_rows(3, 4), data, 100_000)
    results: dict[int, bool] = {}

    def work(seed: int) -> None:
        results[seed] = all(
            equal(combined(isal(), codec.encode_rows(3, 4), data, 100_000), expected)
            for _ in range(10)
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == dict.fromkeys(range(4), True)


# Losses


def check_loss(
    backend: Backend, k: int, m: int, fragments: list[Bytes], lost: Sequence[int]
) -> None:
    left = [fragment for fragment in range(k + m) if fragment not in lost]
    matrix = codec.decode_matrix(k, m, left[:k], lost)
    found = combined(backend, matrix, [fragments[f] for f in left[:k]], fragments[0].size)
    assert equal(found, [fragments[fragment] for fragment in lost]), (k, m, lost)


def fragments_of(k: int, m: int, length: int = 97) -> list[Bytes]:
    data = noise(k, length, seed=k * 10 + m)
    return data + combined(NumpyBackend(), codec.encode_rows(k, m), data, length)


@pytest.mark.parametrize(("k", "m"), [code for code in CODES if sum(code) <= 8])
def test_every_loss_of_a_small_code_is_rebuilt(k: int, m: int) -> None:
    fragments = fragments_of(k, m)
    for count in range(1, m + 1):
        for lost in itertools.combinations(range(k + m), count):
            check_loss(isal(), k, m, fragments, lost)


@pytest.mark.parametrize(("k", "m"), [code for code in CODES if sum(code) > 8])
def test_losses_of_a_large_code_are_rebuilt(k: int, m: int) -> None:
    fragments = fragments_of(k, m)
    rng = random.Random(k * 10 + m)
    for _ in range(12):
        check_loss(isal(), k, m, fragments, rng.sample(range(k + m), rng.randint(1, m)))


def test_every_backend_rebuilds(each: Backend) -> None:
    for k, m in [(3, 1), (6, 2), (16, 4)]:
        for lost in [(0,), (k,), tuple(range(m)), tuple(range(k + m - m, k + m))]:
            check_loss(each, k, m, fragments_of(k, m), lost)


def test_any_k_fragments_in_any_order_decode() -> None:
    fragments = fragments_of(4, 3)
    rng = random.Random(3)
    for have in itertools.combinations(range(7), 4):
        order = rng.sample(have, 4)
        matrix = codec.decode_matrix(4, 3, order, range(7))
        assert equal(combined(isal(), matrix, [fragments[f] for f in order], 97), fragments)


class Hosts:
    """A group whose members hold segments of different lengths, coded through the geometry."""

    def __init__(self, m: int, lengths: Sequence[int]) -> None:
        self.lane = LaneGeometry(len(lengths), m, max(lengths))
        self.segments = [noise(1, length, seed=i)[0] for i, length in enumerate(lengths)]
        self.parity = [np.full(self.lane.parity_bytes, 0xA5, np.uint8) for _ in lengths]
        rows = codec.encode_rows(self.lane.k, m)
        for stripe in range(self.lane.n):
            sources = [self.fragment(stripe, i) for i in range(self.lane.k)]
            for j in range(m):
                output = self.fragment(stripe, self.lane.k + j)
                isal().combine_clipped(rows[j : j + 1], sources, [output])

    def fragment(self, stripe: int, fragment: int) -> Bytes:
        """What is stored of one fragment: a view of its holder's segment or parity."""
        member = self.lane.holder(stripe, fragment)
        if fragment >= self.lane.k:
            offset, length = self.lane.parity_range(member, stripe)
            return self.parity[member][offset : offset + length]
        segment = self.segments[member]
        offset, length = clip(self.lane.data_range(member, stripe), segment.size)
        return segment[offset : offset + length]

    def lose_and_rebuild(self, lost: Sequence[int]) -> None:
        for member in lost:
            self.segments[member] = np.full_like(self.segments[member], 0x5A)
            self.parity[member] = np.full_like(self.parity[member], 0x5A)
        for stripe in range(self.lane.n):
            want = sorted(self.lane.missing(stripe, lost))
            have = self.lane.sources(want)
            assert have is not None
            isal().combine_clipped(
                codec.decode_matrix(self.lane.k, self.lane.m, have, want),
                [self.fragment(stripe, f) for f in have],
                [self.fragment(stripe, f) for f in want],
            )


@pytest.mark.parametrize(
    ("m", "lengths"),
    [
        (1, [CHUNK, CHUNK]),
        (1, [5 * CHUNK + 3, 0, 3 * CHUNK, CHUNK - 1]),
        (2, [1, 3 * CHUNK + 17, 2 * CHUNK, 0, 2 * CHUNK + 1]),
        (3, [2 * CHUNK + 1, 100, CHUNK, 3 * CHUNK + 1]),
        (1, [0, 0, 0]),
        (0, [10, 2 * CHUNK]),
        (0, [10]),
    ],
)
def test_any_m_hosts_of_a_group_are_rebuilt(m: int, lengths: list[int]) -> None:
    hosts = Hosts(m, lengths)
    segments = [segment.copy() for segment in hosts.segments]
    parity = [part.copy() for part in hosts.parity]
    for count in range(m + 1):
        for lost in itertools.combinations(range(len(lengths)), count):
            hosts.lose_and_rebuild(lost)
            assert equal(hosts.segments, segments), lost
            assert equal(hosts.parity, parity), lost


# The choice


class Wrong(NumpyBackend):
    """A library that gets one byte of a long fragment wrong."""

    name = "a broken library"

    def _combine(self, matrix: Bytes, sources: list[Bytes], outputs: list[Bytes]) -> None:
        super()._combine(matrix, sources, outputs)
        if outputs[0].size > 4096:
            outputs[-1][-1] ^= 1


def test_the_wheels_isal_is_used_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxft.codec"):
        chosen = codec.choose(codec.candidates())
    assert isinstance(chosen, IsalBackend)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "libisal" in caplog.text
    assert codec.backend() is codec.backend()


def test_each_backend_passes_the_check(each: Backend) -> None:
    codec.verify(each)


def test_a_library_that_codes_wrong_bytes_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CodecError, match="a broken library codes 3 fragments of 4113 bytes"):
        codec.verify(Wrong())
    chosen = codec.choose([Wrong, NumpyBackend])
    assert type(chosen) is NumpyBackend
    assert "passed over: a broken library codes" in caplog.text


def test_without_any_isal_pyeclib_then_numpy_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(codec, "bundled_libraries", lambda: iter(["/nowhere/libisal.so"]))
    monkeypatch.setattr(codec, "system_libraries", lambda: iter(()))
    assert isinstance(codec.choose(codec.candidates()), PyeclibBackend)
    assert "no ISA-L in /nowhere/libisal.so" in caplog.text
    assert "computed by pyeclib" in caplog.text
    monkeypatch.setitem(sys.modules, "pyeclib.ec_iface", None)
    assert isinstance(codec.choose(codec.candidates()), NumpyBackend)
    assert "computed by NumPy" in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_system_library_comes_after_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(codec.bundled_libraries())
    monkeypatch.setattr(codec, "bundled_libraries", lambda: iter(()))
    monkeypatch.setattr(codec, "system_libraries", lambda: iter([path]))
    assert isinstance(codec.choose(codec.candidates()), IsalBackend)


def test_the_system_is_asked_under_plain_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", {"isal": "libisal.so.9"}.get)
    assert list(codec.system_libraries()) == ["libisal.so.2", "libisal.so.9"]
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert list(codec.system_libraries()) == ["libisal.so.2"]


def test_a_library_that_is_not_isal_is_refused() -> None:
    with pytest.raises(CodecError, match="no ISA-L in libc"):
        IsalBackend("libc.so.6")


def test_no_backend_at_all_is_an_error() -> None:
    with pytest.raises(CodecError, match="no backend"):
        codec.choose([Wrong])


def test_the_wheels_library_is_found_without_its_list_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = list(codec.bundled_libraries())
    assert found
    assert all(Path(path).is_file() for path in found)

    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", nothing)
    assert list(codec.bundled_libraries()) == found
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    assert list(codec.bundled_libraries()) == found
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(codec.bundled_libraries()) == []


def test_the_wheels_library_is_found_without_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(codec.bundled_libraries())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(codec.bundled_libraries()) == found


def test_pyeclib_errors_are_codec_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = PyeclibBackend()

    def refuse(**code: int) -> ECDriver:
        raise backend._error("no such backend")

    monkeypatch.setattr(backend, "_driver", refuse)
    with pytest.raises(CodecError, match=r"pyeclib cannot encode 3\+1: no such backend"):
        combined(backend, codec.encode_rows(3, 1), noise(3, 8), 8)


def test_fragments_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PyeclibBackend, "HEADER_BYTES", 64)
    with pytest.raises(CodecError, match="fragment of 24 bytes from 8"):
        combined(PyeclibBackend(), codec.encode_rows(3, 1), noise(3, 8), 8)
