"""Copying: from the sources that hold a part's bytes into the part, with its checksums.

The rules:
- A few threads share the work span by span, so that none waits for one that is slow. NumPy and
  xxhash let the interpreter lock go while they work.
- What was copied is checksummed while it is still in the cache.
- A source is let go as soon as its last byte is copied. The first that fails ends all.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from jaxft.errors import StagingError
from jaxft.group.manifest import CHUNK

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_digest = xxhash.xxh3_64_intdigest

# Bytes copied before they are checksummed: small enough to be in the cache still, and large enough
# that the thread asks for the interpreter lock seldom.
PIECE = 2 * CHUNK

# Bytes that a thread takes on at once.
SPAN = 32 * CHUNK

# One thread does not get all that the memory gives; more than two would be missed by training.
THREADS = 2


class Source(Protocol):
    """Holds `nbytes` bytes that go to `offset` of the part."""

    offset: int
    nbytes: int

    def bytes(self) -> Bytes:
        """Its bytes; a view where that is possible."""

    def failed(self, error: BaseException) -> StagingError:
        """The error that says that these bytes could not be had; names the leaf."""


class PartCopy:
    """One part that is being written. `run` may be called once.

    Args:
        part: where the bytes go; those between sources become zero.
        sources: by ascending offset. The list is emptied while the bytes are copied.
        on_progress: called after each source with the bytes that are done so far.
    """

    def __init__(
        self,
        part: Bytes,
        sources: Sequence[Source],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._part = part
        self._sources: list[Source | None] = list(sources)
        self._starts = [source.offset for source in sources]
        self._left = [source.nbytes for source in sources]
        ends = [source.offset + source.nbytes for source in sources]
        self._steps = np.diff(ends, prepend=0).tolist()
        self._on_progress = on_progress
        self._spans = range(0, len(part), SPAN)
        self._checksums: list[bytes] = [b""] * len(self._spans)
        self._lock = threading.Lock()
        self._next = 0
        self._done = 0
        self._error: BaseException | None = None

    def run(self) -> bytes:
        """Copies everything.

        Returns:
            Little-endian xxh3_64 of each CHUNK of the part.

        Raises:
            StagingError: a source failed; names its leaf.
        """
        wanted = min(THREADS, os.cpu_count() or 1, len(self._spans))
        others = [threading.Thread(target=self._work, daemon=True) for _ in range(wanted - 1)]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()
        if self._error is not None:
            raise self._error
        return b"".join(self._checksums)

    def _work(self) -> None:
        while True:
            with self._lock:
                number = self._next
                if number == len(self._spans) or self._error is not None:
                    return
                self._next += 1
            try:
                self._checksums[number] = self._write_span(self._spans[number])
            except BaseException as error:  # noqa: BLE001 - `run` raises it, in the caller's thread
                with self._lock:
                    self._error = self._error or error

    def _write_span(self, start: int) -> bytes:
        stop = min(start + SPAN, len(self._part))
        writer = _Writer(self._part[start:stop])
        number = max(0, bisect.bisect_right(self._starts, start) - 1)
        while number < len(self._starts) and self._starts[number] < stop:
            source = self._sources[number]
            if source is not None and source.offset + source.nbytes > start:
                first = max(start, source.offset)
                end = min(stop, source.offset + source.nbytes)
                try:
                    data = source.bytes()[first - source.offset : end - source.offset]
                    writer.write(first - start, data)
                    self._copied(number, end - first)
                except (OSError, RuntimeError, ValueError, MemoryError) as error:
                    raise source.failed(error) from error
            number += 1
        return writer.finish()

    def _copied(self, number: int, nbytes: int) -> None:
        with self._lock:
            self._left[number] -= nbytes
            if self._left[number]:
                return
            self._sources[number] = None
            self._done += self._steps[number]
            if self._on_progress is not None:
                self._on_progress(self._done)


class _Writer:
    """Writes a span from front to back, and checksums each chunk as soon as it is complete."""

    def __init__(self, span: Bytes) -> None:
        self._span = span
        self._chunks = [span[at : at + CHUNK].data for at in range(0, len(span), CHUNK)]
        self._done = 0
        self._digests: list[int] = []

    def write(self, offset: int, data: Bytes) -> None:
        self._span[self._done : offset] = 0
        # Chunks that zeros have completed, or that are nothing else.
        self._digests += map(_digest, self._chunks[len(self._digests) : offset // CHUNK])
        # Pieces end where chunks end. All are laid out before: between copies that go through the
        # cache, every step of the interpreter is a slow one.
        stop = offset + len(data)
        cuts = [offset, *range((offset // PIECE + 1) * PIECE, stop, PIECE), stop]
        pieces = [
            (
                self._span[first:end],
                data[first - offset : end - offset],
                self._chunks[first // CHUNK : end // CHUNK],
            )
            for first, end in itertools.pairwise(cuts)
        ]
        self._done = stop
        for target, source, chunks in pieces:
            np.copyto(target, source)
            self._digests += map(_digest, chunks)

    def finish(self) -> bytes:
        """The checksums of the whole span."""
        self._span[self._done :] = 0
        self._digests += map(_digest, self._chunks[len(self._digests) :])
        return np.array(self._digests, "<u8").tobytes()
