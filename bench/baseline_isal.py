"""ISA-L called as directly as Python can: the rate that the codec is held against."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from bench.measure import Bytes
from jaxft.group.codec import bundled_libraries, system_libraries

# ISA-L's lengths are C ints.
CALL_BYTES_MAX = 1 << 30


class Isal:
    """The library. Nothing is checked here.

    Raises:
        RuntimeError: there is none on this machine.
    """

    def __init__(self) -> None:
        for path in itertools.chain(bundled_libraries(), system_libraries()):
            try:
                self._library = ctypes.CDLL(path)
            except OSError:
                continue
            return
        raise RuntimeError("there is no ISA-L here: install pyeclib's wheel")

    def prepare(
        self, matrix: Bytes, sources: Sequence[Bytes], outputs: Sequence[Bytes]
    ) -> Callable[[], None]:
        """A call that multiplies the matrix [outputs, sources] with the sources."""
        rows, columns = matrix.shape
        coefficients = np.ascontiguousarray(matrix).tobytes()
        tables = ctypes.create_string_buffer(32 * rows * columns)
        self._library.ec_init_tables(columns, rows, coefficients, tables)
        length = sources[0].size
        assert length <= CALL_BYTES_MAX, "ISA-L's lengths are C ints"
        inputs = (ctypes.c_void_p * columns)(*[source.ctypes.data for source in sources])
        results = (ctypes.c_void_p * rows)(*[output.ctypes.data for output in outputs])

        def call() -> None:
            self._library.ec_encode_data(length, columns, rows, tables, inputs, results)

        return call
