"""The counters of a SQLite store's leases: a file beside the database, eight bytes for each.

They are not in the database because whoever waits for a change there hears of each write to its
log. Who may write which counter, and when, is decided by `jaxft.launch.sqlite`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from jaxft.errors import StoreError

_COUNTER = struct.Struct("<Q")


class PulseFile:
    """Counters by their place, 0 where nobody has counted yet; each counter has one writer.

    Args:
        path: the file, which is there.

    Raises:
        StoreError: from each method too: it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._lost(error) from error

    def write(self, place: int, count: int) -> None:
        try:
            os.pwrite(self._fd, _COUNTER.pack(count), place * _COUNTER.size)
        except OSError as error:
            raise self._lost(error) from error

    def read(self, places: int) -> list[int]:
        """The first so many counters."""
        size_bytes = places * _COUNTER.size
        try:
            data = os.pread(self._fd, size_bytes, 0)
        except OSError as error:
            raise self._lost(error) from error
        return [count for (count,) in _COUNTER.iter_unpack(data.ljust(size_bytes, b"\0"))]

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lost(self, error: OSError) -> StoreError:
        return StoreError(
            f"store {self._path} cannot be used: {error.strerror}; is it closed, or the disk full?"
        )
