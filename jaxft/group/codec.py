"""Cauchy Reed-Solomon over GF(2^8): data into parity, and what is left into what was lost.

The code. The field has the polynomial 0x11d (x^8 + x^4 + x^3 + x^2 + 1) with generator 2. A code
k+m has the generator matrix of ISA-L's `gf_gen_cauchy1_matrix`: the identity above m rows of

    a[j][i] = 1 / ((k + j) ^ i)         (k + j never equals i, so the inverse exists)

Any k of the k + m rows can be inverted (Blömer and others: An XOR-Based Erasure-Resilient Coding
Scheme, 1995), so any m fragments may be lost. A row does not depend on m. The bytes are those of
pyeclib's `isa_l_rs_cauchy`.

Who computes. One operation is all there is: `Backend.combine`, a matrix times fragments. The best
backend that passes `verify` on known blocks is used, and the log ("jaxft.codec") says which:

    1. ISA-L as pyeclib's wheel holds it: another package's private library, hence the check
    2. ISA-L of the system
    3. pyeclib's own API: encoding only, it holds the GIL and copies
    4. NumPy, always there
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxft.errors import CodecError
from jaxft.group.world import DATA_MAX, PARITY_MAX

Bytes = NDArray[np.uint8]

# What a fragment may lie in: anything with one contiguous buffer.
Buffer = bytes | bytearray | memoryview | mmap | NDArray[Any]

log = logging.getLogger("jaxft.codec")

POLYNOMIAL = 0x11D

# ISA-L's lengths are C ints; a multiple of any vector width below that.
CALL_BYTES_MAX = 1 << 30


# The field


def _field() -> tuple[Bytes, Bytes]:
    """Products [256, 256] and inverses [256] (0 for 0), from powers and logarithms of 2."""
    power = np.zeros(510, np.uint8)
    logarithm = np.zeros(256, np.intp)
    value = 1
    for exponent in range(255):
        power[exponent] = power[exponent + 255] = value
        logarithm[value] = exponent
        value = (value << 1) ^ (POLYNOMIAL if value & 0x80 else 0)
    product = power[logarithm[:, None] + logarithm[None, :]]
    product[0, :] = product[:, 0] = 0
    inverse = power[255 - logarithm]
    inverse[0] = 0
    return product, inverse


_PRODUCT, _INVERSE = _field()


def multiply(a: Bytes, b: Bytes) -> Bytes:
    """The matrix product over GF(2^8): [r, n] times [n, c] is [r, c]."""
    products = _PRODUCT[a[:, :, None], b[None, :, :]]
    result: Bytes = np.bitwise_xor.reduce(products, axis=1)
    return result


def invert(matrix: Bytes) -> Bytes:
    """The inverse of a square matrix over GF(2^8), by Gauss-Jordan elimination.

    Raises:
        CodecError: the matrix is not square, or is singular.
    """
    size = len(matrix)
    if matrix.shape != (size, size):
        raise CodecError(f"only a square matrix has an inverse, found shape {matrix.shape}")
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        below = np.flatnonzero(work[column:, column])
        if not below.size:
            raise CodecError(f"the matrix is singular (no pivot in column {column})")
        pivot = column + int(below[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = _PRODUCT[_INVERSE[work[column, column]], work[column]]
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= _PRODUCT[factors[:, None], work[column][None, :]]
    inverse: Bytes = work[:, size:].copy()
    return inverse


# The code


def _check_code(k: int, m: int) -> None:
    if not (1 <= k <= DATA_MAX and 0 <= m <= PARITY_MAX):
        raise CodecError(
            f"code {k}+{m} is not supported: data must be 1 to {DATA_MAX}, parity 0 to {PARITY_MAX}"
        )


@functools.cache
def encode_rows(k: int, m: int) -> Bytes:
    """The m rows [m, k] that make parity fragments 0 to m-1 of k data fragments; read-only.

    Columns of fragments that are all zeros may be left out together with the fragments.

    Raises:
        CodecError: the code is out of range.
    """
    _check_code(k, m)
    rows: Bytes = _INVERSE[np.arange(k, k + m)[:, None] ^ np.arange(k)[None, :]]
    rows.flags.writeable = False
    return rows


def decode_matrix(k: int, m: int, have: Sequence[int], want: Sequence[int]) -> Bytes:
    """The matrix [len(want), k] that makes the wanted fragments from k others; read-only.

    Args:
        k, m: the code.
        have: k different fragments in code order (data i is i, parity j is k + j); the columns
            are in their order.
        want: the fragments to make, data or parity; the rows are in their order.

    Raises:
        CodecError: the code or a fragment is out of range, or `have` is not k different ones.
    """
    return _decode_matrix(k, m, tuple(have), tuple(want))


@functools.lru_cache(maxsize=1024)
def _decode_matrix(k: int, m: int, have: tuple[int, ...], want: tuple[int, ...]) -> Bytes:
    generator = np.concatenate([np.eye(k, dtype=np.uint8), encode_rows(k, m)])
    if len(have) != k or len(set(have)) != k:
        raise CodecError(f"code {k}+{m} decodes from {k} different fragments, found {have}")
    if not all(0 <= fragment < k + m for fragment in (*have, *want)):
        raise CodecError(f"code {k}+{m} has fragments 0 to {k + m - 1}, found {have} and {want}")
    matrix = multiply(generator[list(want)], invert(generator[list(have)]))
    matrix.flags.writeable = False
    return matrix


# The backends


class Backend(ABC):
    """Multiplies a matrix over GF(2^8) with fragments. Safe to use from several threads."""

    name: str

    def combine(
        self,
        matrix: Bytes,
        sources: Sequence[Buffer],
        outputs: Sequence[Buffer],
    ) -> None:
        """Writes outputs[r] = XOR over c of matrix[r, c] * sources[c], without a copy.

        Args:
            matrix: [rows, columns] of uint8. Without columns the outputs are zeros.
            sources: a contiguous buffer a column.
            outputs: a contiguous writable buffer a row, none of which overlaps another or a
                source. All buffers have the same length in bytes.

        Raises:
            CodecError: shapes, lengths or kinds of buffers do not fit.
        """
        for _ in self.combine_by_steps(matrix, sources, outputs, CALL_BYTES_MAX):
            pass

    def combine_by_steps(
        self,
        matrix: Bytes,
        sources: Sequence[Buffer],
        outputs: Sequence[Buffer],
        step_bytes: int,
    ) -> Iterator[int]:
        """`combine`, from the beginning of the buffers to their end. Yields the offset of each step
        when it is made, so that the caller can look at its bytes while they are in cache.

        Raises:
            CodecError: as `combine`, before the first step.
        """
        ins = [_view(source) for source in sources]
        outs = [_view(output) for output in outputs]
        if matrix.dtype != np.uint8 or matrix.shape != (len(outs), len(ins)):
            raise CodecError(
                f"{len(ins)} sources and {len(outs)} outputs need a uint8 matrix of shape "
                f"{(len(outs), len(ins))}, found {matrix.dtype} of shape {matrix.shape}"
            )
        lengths = {view.size for view in ins} | {view.size for view in outs}
        if len(lengths) > 1:
            raise CodecError(f"fragments of different lengths: {sorted(lengths)} bytes")
        if not all(out.flags.writeable for out in outs):
            raise CodecError("an output is a read-only buffer")
        if not outs or not outs[0].size:
            return
        if ins:
            yield from self._steps(matrix, ins, outs, step_bytes)
            return
        for out in outs:
            out.fill(0)
        yield from range(0, outs[0].size, step_bytes)

    def combine_clipped(
        self,
        matrix: Bytes,
        sources: Sequence[Buffer],
        outputs: Sequence[Buffer],
    ) -> None:
        """`combine` for fragments of any lengths: a short source stands for itself and zeros after
        it, and of a short output only the beginning is wanted.

        Raises:
            CodecError: as `combine`, lengths apart.
        """
        ins = [_view(source) for source in sources]
        outs = [_view(output) for output in outputs]
        lengths = {view.size for view in ins} | {view.size for view in outs}
        if len(lengths) == 1 or matrix.shape != (len(outs), len(ins)):
            self.combine(matrix, ins, outs)
            return
        for start, stop in itertools.pairwise(sorted(lengths | {0})):
            rows = [row for row, view in enumerate(outs) if view.size >= stop]
            columns = [column for column, view in enumerate(ins) if view.size >= stop]
            self.combine(
                matrix[np.ix_(rows, columns)],
                [ins[column][start:stop] for column in columns],
                [outs[row][start:stop] for row in rows],
            )

    @abstractmethod
    def _steps(
        self, matrix: Bytes, sources: list[Bytes], outputs: list[Bytes], step_bytes: int
    ) -> Iterator[int]:
        """`combine_by_steps` after all checks: at least one source, one output and one byte."""


class _StepwiseBackend(Backend):
    """A backend for which each step is a call of its own."""

    def _steps(
        self, matrix: Bytes, sources: list[Bytes], outputs: list[Bytes], step_bytes: int
    ) -> Iterator[int]:
        for start in range(0, sources[0].size, step_bytes):
            step = slice(start, start + step_bytes)
            self._combine(matrix, [one[step] for one in sources], [one[step] for one in outputs])
            yield start

    @abstractmethod
    def _combine(self, matrix: Bytes, sources: list[Bytes], outputs: list[Bytes]) -> None:
        """One step."""


def _view(buffer: Buffer) -> Bytes:
    """The buffer's bytes as one array over the same memory."""
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        kind = type(buffer).__name__
        message = f"a fragment must be one contiguous buffer, found a {kind}: {error}"
        raise CodecError(message) from error


class IsalBackend(Backend):
    """Intel's ISA-L through ctypes, which lets go of the GIL.

    Args:
        path: what `dlopen` takes: a file, or a name that the system finds.

    Raises:
        CodecError: there is no such library, or it is not an ISA-L.
    """

    def __init__(self, path: str) -> None:
        self.name = f"ISA-L ({path})"
        try:
            library = ctypes.CDLL(path)
            self._init_tables = library.ec_init_tables
            self._encode_data = library.ec_encode_data
        except (OSError, AttributeError) as error:
            raise CodecError(f"no ISA-L in {path}: {error}") from error
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        # void ec_init_tables(int k, int rows, uchar *a, uchar *gftbls)
        self._init_tables.argtypes = [integer, integer, pointer, pointer]
        self._init_tables.restype = None
        # void ec_encode_data(int len, int k, int rows, uchar *gftbls, uchar **data, uchar **coding)
        self._encode_data.argtypes = [integer, integer, integer, pointer, pointer, pointer]
        self._encode_data.restype = None
        self._tables = functools.lru_cache(maxsize=1024)(self._expand)

    def _expand(self, rows: int, columns: int, matrix: bytes) -> ctypes.Array[ctypes.c_char]:
        """ISA-L's expanded form of a matrix: 32 opaque bytes a coefficient."""
        tables = ctypes.create_string_buffer(32 * rows * columns)
        self._init_tables(columns, rows, matrix, tables)
        return tables

    def _steps(
        self, matrix: Bytes, sources: list[Bytes], outputs: list[Bytes], step_bytes: int
    ) -> Iterator[int]:
        rows, columns = matrix.shape
        tables = self._tables(rows, columns, matrix.tobytes())
        size = sources[0].size
        starts = range(0, size, step_bytes)
        # Made before the first: between steps that go through the cache, little is to be done.
        addresses = np.array([one.ctypes.data for one in (*sources, *outputs)], np.uintp)
        pointers = addresses + np.array(starts, np.uintp)[:, None]
        ins = pointers.ctypes.data
        outs = ins + pointers.itemsize * columns
        for start in starts:
            length = min(step_bytes, size - start)
            self._encode_data(length, columns, rows, tables, ins, outs)
            ins += pointers.strides[0]
            outs += pointers.strides[0]
            yield start


class NumpyBackend(_StepwiseBackend):
    """Products looked up in a table. `bytes.translate` is the fastest look-up Python has."""

    name = "NumPy"

    # Source, product and output of one round stay in the processor's cache.
    BLOCK_BYTES = 64 * 1024

    def __init__(self) -> None:
        self._products = [row.tobytes() for row in _PRODUCT]

    def _combine(self, matrix: Bytes, sources: list[Bytes], outputs: list[Bytes]) -> None:
        for start in range(0, sources[0].size, self.BLOCK_BYTES):
            block = slice(start, start + self.BLOCK_BYTES)
            texts = [source[block].tobytes() for source in sources]
            for coefficients, output in zip(matrix.tolist(), outputs, strict=True):
                output[block] = 0
                for coefficient, text in zip(coefficients, texts, strict=True):
                    if coefficient:
                        product = text.translate(self._products[coefficient])
                        output[block] ^= np.frombuffer(product, np.uint8)


class PyeclibBackend(_StepwiseBackend):
    """pyeclib's own API where it can do it, which is whole parity rows; NumPy for the rest.

    Its decoder is not used: it wants its own headers around fragments, aborts the process on
    memoryviews and returns wrong data for damaged fragments. It is handed small pieces only: above
    2 GiB it misbehaves, and pieces that stay in the processor's cache are several times faster.

    Raises:
        ImportError: pyeclib is not there, or cannot be loaded.
    """

    name = "pyeclib"

    # A fragment is this header and then the payload (liberasurecode's fragment_header_t).
    HEADER_BYTES = 80
    PIECE_BYTES = 32 * 1024

    def __init__(self) -> None:
        from pyeclib.ec_iface import ECDriver, ECDriverError

        self._error = ECDriverError
        self._driver = functools.cache(functools.partial(ECDriver, ec_type="isa_l_rs_cauchy"))
        self._rest = NumpyBackend()

    def _combine(self, matrix: Bytes, sources: list[Bytes], outputs: list[Bytes]) -> None:
        rows = _parity_rows(matrix)
        if rows is None:
            self._rest._combine(matrix, sources, outputs)
            return
        k, m = len(sources), max(rows) + 1
        for start in range(0, sources[0].size, self.PIECE_BYTES):
            piece = slice(start, start + self.PIECE_BYTES)
            parts = [source[piece].tobytes() for source in sources]
            try:
                fragments = self._driver(k=k, m=m).encode(b"".join(parts))
            except self._error as error:
                raise CodecError(f"pyeclib cannot encode {k}+{m}: {error}") from error
            for row, output in zip(rows, outputs, strict=True):
                payload = np.frombuffer(fragments[k + row], np.uint8)[self.HEADER_BYTES :]
                if payload.size != len(parts[0]):
                    raise CodecError(
                        f"pyeclib made a fragment of {payload.size} bytes from {len(parts[0])}"
                    )
                output[piece] = payload


def _parity_rows(matrix: Bytes) -> list[int] | None:
    """Which parity rows of a code the matrix consists of, or None if of anything else."""
    columns = matrix.shape[1]
    if columns > DATA_MAX:
        return None
    known = encode_rows(columns, PARITY_MAX).tolist()
    rows = matrix.tolist()
    return [known.index(row) for row in rows] if all(row in known for row in rows) else None


# The choice


@functools.cache
def backend() -> Backend:
    """The backend of this process, chosen at the first call."""
    return choose(candidates())


def candidates() -> Iterator[Callable[[], Backend]]:
    """Ways to get a backend, best first. Looks no further than it is asked."""
    for path in itertools.chain(bundled_libraries(), system_libraries()):
        yield functools.partial(IsalBackend, path)
    yield PyeclibBackend
    yield NumpyBackend


def choose(ways: Iterable[Callable[[], Backend]]) -> Backend:
    """The first backend that can be made and passes `verify`; the log says which and why.

    Raises:
        CodecError: none did.
    """
    for way in ways:
        try:
            chosen = way()
            verify(chosen)
        except (ImportError, CodecError) as error:
            log.warning("a codec backend is passed over: %s", error)
            continue
        if isinstance(chosen, IsalBackend):
            log.info("parity is computed by %s", chosen.name)
        else:
            log.warning("no usable ISA-L: parity is computed by %s, much slower", chosen.name)
        return chosen
    raise CodecError("no backend codes correctly on this machine")


def verify(chosen: Backend) -> None:
    """Codes known blocks of several lengths, on and off vector widths, and compares every byte.

    Raises:
        CodecError: a byte is wrong.
    """
    reference = NumpyBackend()
    rebuilding = decode_matrix(4, 2, have=(1, 3, 4, 5), want=(0, 2))
    for matrix in (encode_rows(3, 1), encode_rows(DATA_MAX, PARITY_MAX), rebuilding):
        rows, columns = matrix.shape
        for length in (1, 31, 64, 1000, 4096 + 17):
            block = np.arange(columns * length, dtype=np.uint32) * np.uint32(2654435761) >> 24
            sources = list(block.astype(np.uint8).reshape(columns, length))
            expected, found = np.zeros((2, rows, length), np.uint8)
            reference.combine(matrix, sources, list(expected))
            chosen.combine(matrix, sources, list(found))
            if not np.array_equal(expected, found):
                raise CodecError(
                    f"{chosen.name} codes {columns} fragments of {length} bytes into wrong parity"
                )


def bundled_libraries() -> Iterator[str]:
    """Paths of the ISA-L inside pyeclib's wheel: as its list of files says, else where it is."""
    found = set()
    try:
        listed = importlib.metadata.files("pyeclib") or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    for file in listed:
        if file.name.startswith("libisal"):
            found.add(Path(file.locate()).resolve())
    spec = importlib.util.find_spec("pyeclib")
    for package in (spec and spec.submodule_search_locations) or ():
        for folder in (Path(package).parent / "pyeclib.libs", Path(package)):
            found.update(path.resolve() for path in folder.rglob("libisal*"))
    return (str(path) for path in sorted(found) if path.is_file())


def system_libraries() -> Iterator[str]:
    """Names under which the system may have an ISA-L."""
    yield "libisal.so.2"
    if name := ctypes.util.find_library("isal"):
        yield name
