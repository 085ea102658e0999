"""A segment in mapped memory, each piece of which is checked before anybody gets to see it.

Threads check ahead, in the order in which the pieces will be asked for, so that whoever uses them
seldom waits. The pages of a piece are mapped and hashed together, and its user finds it in cache.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from jaxft.errors import ChunkDamaged
from jaxft.group.manifest import CHUNK, Manifest
from jaxft.host.layout import data_spans, segment_check
from jaxft.host.memory import Arena, Bytes

# Checked in one go: large enough that a thread asks for the interpreter lock seldom.
UNIT = 8 * CHUNK
THREADS = 2
LOOK_S = 0.001


class BadChunks(ChunkDamaged):
    """Chunks at `offsets` of the segment of `host` (a place) do not have their checksums."""

    def __init__(self, host: int, offsets: tuple[int, ...]) -> None:
        super().__init__(f"{len(offsets)} chunks of segment {host} do not have their checksums")
        self.host = host
        self.offsets = offsets


class Making(NamedTuple):
    """A segment that another process is still making.

    Attributes:
        made: a byte for each chunk, 1 once it is there.
        look: raises when it is of no use to wait any longer.
    """

    made: Bytes
    look: Callable[[], None]


class CheckedSegment:
    """Pieces of one segment, checked. Use it in a `with` statement, which ends its threads.

    Args:
        arena: where the segment lies, from its first byte on.
        manifest: the segment's.
        wanted: (offset, bytes) of every piece that will be asked for, in that order.
        timeout_s: for each piece.
        making: what tells which of it is there, if it is still being made.
    """

    def __init__(
        self,
        arena: Arena,
        manifest: Manifest,
        wanted: Iterable[tuple[int, int]],
        *,
        timeout_s: float,
        making: Making | None = None,
    ) -> None:
        self.host = manifest.host
        self._arena = arena
        # Parity is not looked at: a segment that is made again has none.
        self._spans = data_spans(manifest)
        self._check = segment_check(manifest)
        self._timeout_s = timeout_s
        self._making = making
        self._ended = threading.Event()
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
            TimeoutError: it was not made, or could not be checked in time.
        """
        for unit in _units(offset, nbytes):
            if self._units[unit].result(self._timeout_s):
                raise BadChunks(self.host, self._all_bad())
        return self._arena.view(offset, nbytes)

    def _all_bad(self) -> tuple[int, ...]:
        found = [future.result(self._timeout_s) for future in self._units.values()]
        return tuple(sorted(at for bad in found for at in bad))

    def _bad_in(self, unit: int) -> tuple[int, ...]:
        bad: list[int] = []
        for first, end in self._spans:
            start = max(first, unit * UNIT)
            nbytes = min(end, (unit + 1) * UNIT) - start
            if nbytes <= 0:
                continue
            if self._making is not None:
                self._wait_until_made(self._making, start // CHUNK, -(-nbytes // CHUNK))
            self._arena.map_pages(start, nbytes)
            bad += self._check.bad_chunks(start, self._arena.view(start, nbytes))
        return tuple(bad)

    def _wait_until_made(self, making: Making, first: int, count: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not making.made[first : first + count].all():
            making.look()
            if self._ended.wait(LOOK_S) or time.monotonic() > deadline:
                raise TimeoutError(f"segment {self.host} was not made within {self._timeout_s:g} s")

    def __enter__(self) -> CheckedSegment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)


def _units(offset: int, nbytes: int) -> range:
    return range(offset // UNIT, -(-(offset + nbytes) // UNIT))
