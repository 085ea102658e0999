"""A segment in mapped memory, each piece of which is checked before anybody gets to see it.

Threads check ahead, in the order in which the pieces will be asked for, so that whoever uses them
seldom waits. The pages of a piece are mapped and hashed together, and its user finds it in cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from jaxft.errors import ChunkDamaged
from jaxft.group.manifest import CHUNK, Manifest
from jaxft.host.layout import segment_check
from jaxft.host.memory import Arena, Bytes

# Checked in one go: large enough that a thread asks for the interpreter lock seldom.
UNIT = 8 * CHUNK
THREADS = 2


class BadChunks(ChunkDamaged):
    """Chunks at `offsets` of the segment of `host` (a place) do not have their checksums."""

    def __init__(self, host: int, offsets: tuple[int, ...]) -> None:
        super().__init__(f"{len(offsets)} chunks of segment {host} do not have their checksums")
        self.host = host
        self.offsets = offsets


class CheckedSegment:
    """Pieces of one segment, checked. Use it in a `with` statement, which ends its threads.

    Args:
        arena: where the segment lies, from its first byte on.
        manifest: the segment's.
        wanted: (offset, bytes) of every piece that will be asked for, in that order.
        timeout_s: for each piece.
    """

    def __init__(
        self,
        arena: Arena,
        manifest: Manifest,
        wanted: Iterable[tuple[int, int]],
        *,
        timeout_s: float,
    ) -> None:
        self.host = manifest.host
        self._arena = arena
        self._length = manifest.length
        self._check = segment_check(manifest)
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(
            min(THREADS, os.cpu_count() or 1), thread_name_prefix="jaxft-check"
        )
        self._units: dict[int, Future[tuple[int, ...]]] = {}
        for offset, nbytes in wanted:
            for unit in _units(offset, nbytes):
                if unit not in self._units:
                    self._units[unit] = self._pool.submit(self._bad_in, unit)

    def read(self, offset: int, nbytes: int) -> Bytes:
        """A view of a piece, as soon as it is checked.

        Raises:
            BadChunks: it is damaged; names all that is damaged of what is wanted.
            TimeoutError: it could not be checked in time.
        """
        for unit in _units(offset, nbytes):
            if self._units[unit].result(self._timeout_s):
                raise BadChunks(self.host, self._all_bad())
        return self._arena.view(offset, nbytes)

    def _all_bad(self) -> tuple[int, ...]:
        found = [future.result(self._timeout_s) for future in self._units.values()]
        return tuple(sorted(at for bad in found for at in bad))

    def _bad_in(self, unit: int) -> tuple[int, ...]:
        start = unit * UNIT
        nbytes = min(UNIT, self._length - start)
        self._arena.map_pages(start, nbytes)
        return tuple(self._check.bad_chunks(start, self._arena.view(start, nbytes)))

    def __enter__(self) -> CheckedSegment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _units(offset: int, nbytes: int) -> range:
    return range(offset // UNIT, -(-(offset + nbytes) // UNIT))
