"""A part is written by several threads as it would be by one, and the first failure ends all."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash

from jaxft.device.copying import SPAN, PartCopy
from jaxft.errors import StagingError
from jaxft.group.manifest import ALIGN, CHUNK, align


class Given:
    """A source of given bytes; it fails once `error` is set, and counts how often it is asked."""

    def __init__(self, offset: int, data: np.ndarray) -> None:
        self.offset = offset
        self.nbytes = len(data)
        self.error: Exception | None = None
        self.threads: set[int] = set()
        self._data = data

    def bytes(self) -> np.ndarray:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return self._data

    def failed(self, error: BaseException) -> StagingError:
        return StagingError(f"source at {self.offset}: {error}")


def sources_of(*sizes: int) -> tuple[list[Given], int]:
    random = np.random.default_rng(0)
    found, end = [], 0
    for size in sizes:
        offset = align(end, ALIGN)
        found.append(Given(offset, random.integers(0, 256, size, np.uint8)))
        end = offset + size
    return found, end


SIZES = (7, SPAN + 3, 5, CHUNK, 3 * SPAN - 64, 1, SPAN // 2, 63)


def test_sources_of_any_size_arrive_with_their_checksums() -> None:
    sources, length = sources_of(*SIZES)
    part = np.full(length, 0x5A, np.uint8)
    seen: list[int] = []
    checksums = PartCopy(part, sources, seen.append).run()
    want = np.zeros(length, np.uint8)
    for source in sources:
        want[source.offset : source.offset + source.nbytes] = source.bytes()
    assert (part == want).all()
    digests = [xxhash.xxh3_64_intdigest(want[at : at + CHUNK]) for at in range(0, length, CHUNK)]
    assert checksums == b"".join(digest.to_bytes(8, "little") for digest in digests)
    assert seen == sorted(seen)
    assert (len(seen), seen[-1]) == (len(SIZES), length)


@pytest.mark.parametrize("gap", [4, CHUNK, 3 * CHUNK + 64])
def test_zeros_between_sources_may_end_chunks(gap: int) -> None:
    """A chunk that no source's bytes complete was left out: all checksums after it were wrong."""
    data = np.random.default_rng(0).integers(1, 256, 2 * CHUNK, np.uint8)
    first, second = Given(0, data[: CHUNK - 4]), Given(CHUNK - 4 + gap, data)
    part = np.full(second.offset + second.nbytes, 0x5A, np.uint8)
    found = PartCopy(part, [first, second], None).run()
    assert not part[first.nbytes : second.offset].any()
    chunks = [part[at : at + CHUNK] for at in range(0, len(part), CHUNK)]
    digests = [xxhash.xxh3_64_intdigest(chunk) for chunk in chunks]
    assert found == b"".join(digest.to_bytes(8, "little") for digest in digests)


def test_nothing_to_copy() -> None:
    assert PartCopy(np.empty(0, np.uint8), [], None).run() == b""


@pytest.mark.parametrize("number", [0, 4, len(SIZES) - 1])
def test_the_source_that_fails_is_named_and_no_thread_is_left(number: int) -> None:
    sources, length = sources_of(*SIZES)
    sources[number].error = ValueError("injected")
    before = threading.active_count()
    with pytest.raises(StagingError, match=f"source at {sources[number].offset}: injected"):
        PartCopy(np.empty(length, np.uint8), sources, None).run()
    assert threading.active_count() == before


def test_an_error_of_the_listener_ends_it_too() -> None:
    sources, length = sources_of(*SIZES)

    def strike(done: int) -> None:
        raise KeyError(done)

    with pytest.raises(KeyError):
        PartCopy(np.empty(length, np.uint8), sources, strike).run()
