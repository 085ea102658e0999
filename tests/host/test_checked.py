"""No byte of a segment is seen before it is checked, and all that is damaged is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from jaxft.errors import PeerUnreachable
from jaxft.group.manifest import CHUNK, Manifest, Part, SnapshotId
from jaxft.group.world import World
from jaxft.host.checked import UNIT, BadChunks, CheckedSegment, Making
from jaxft.host.layout import checksums
from jaxft.host.memory import Arena
from tests.host.world import until

LENGTHS = (3 * UNIT + 5 * CHUNK + 17, CHUNK - 1)


@pytest.fixture(name="arena")
def an_arena() -> Iterator[Arena]:
    arena = Arena.create("segment", sum(LENGTHS) + CHUNK)
    random = np.random.default_rng(0)
    arena.view(0, arena.size_bytes)[:] = random.integers(0, 256, arena.size_bytes, np.uint8)
    yield arena
    arena.close()


def manifest_of(arena: Arena) -> Manifest:
    """Two parts, as two ranks have it."""
    parts, base = [], 0
    for rank, length in enumerate(LENGTHS):
        sums = checksums(arena.view(base, length))
        parts.append(Part(rank=rank, base=base, length=length, ranges=(), checksums=sums))
        base = -(-(base + length) // CHUNK) * CHUNK
    length = parts[-1].base + parts[-1].length
    return Manifest(
        id=SnapshotId(1, 0),
        step=0,
        host=3,
        world=World((), ()),
        plan="",
        leaves=(),
        parts=tuple(parts),
        length=length,
        lanes=((0, length),),
    )


def test_pieces_are_given_in_any_order(arena: Arena) -> None:
    manifest = manifest_of(arena)
    wanted = [(manifest.parts[1].base, LENGTHS[1]), (UNIT - 5, 10), (0, LENGTHS[0]), (77, 1)]
    before = threading.active_count()
    with CheckedSegment(arena, manifest, wanted, timeout_s=30) as segment:
        assert segment.host == 3
        for offset, nbytes in (*wanted, *wanted[::-1]):
            assert (segment.read(offset, nbytes) == arena.view(offset, nbytes)).all()
    assert threading.active_count() == before


def test_all_damage_in_what_is_wanted_is_named_at_once(arena: Arena) -> None:
    manifest = manifest_of(arena)
    damaged = [CHUNK, UNIT + 2 * CHUNK, manifest.parts[1].base]
    for at in damaged:
        arena.view(at + 100, 1)[0] ^= 1
    wanted = [(0, LENGTHS[0]), (manifest.parts[1].base, LENGTHS[1])]
    with CheckedSegment(arena, manifest, wanted, timeout_s=30) as segment:
        with pytest.raises(BadChunks) as caught:
            segment.read(*wanted[0])
        assert (caught.value.host, list(caught.value.offsets)) == (3, damaged)
        untouched = segment.read(2 * UNIT, UNIT)
        assert (untouched == arena.view(2 * UNIT, UNIT)).all()


def test_damage_elsewhere_does_not_matter(arena: Arena) -> None:
    manifest = manifest_of(arena)
    arena.view(2 * UNIT, 1)[0] ^= 1
    with CheckedSegment(arena, manifest, [(0, UNIT)], timeout_s=30) as segment:
        assert segment.read(0, UNIT).size == UNIT


def test_an_empty_segment(arena: Arena) -> None:
    manifest = msgspec.structs.replace(manifest_of(arena), parts=(), length=0, lanes=())
    with CheckedSegment(arena, manifest, [], timeout_s=30):
        pass


def test_a_segment_that_is_being_made_is_read_as_far_as_it_is_there(arena: Arena) -> None:
    """Nobody waits for its end, nor sees what is not there yet."""
    manifest = manifest_of(arena)
    whole = arena.view(0, manifest.length).copy()
    arena.view(0, manifest.length)[:] = 0
    made = np.zeros(-(-manifest.length // CHUNK), np.uint8)
    wanted = [(0, UNIT), (UNIT, UNIT)]
    found = []
    with CheckedSegment(
        arena, manifest, wanted, timeout_s=30, making=Making(made, lambda: None)
    ) as segment:
        reader = threading.Thread(
            target=lambda: found.extend(segment.read(*one).copy() for one in wanted)
        )
        reader.start()
        for number, (start, _) in enumerate(wanted):
            assert len(found) == number
            arena.view(start, UNIT)[:] = whole[start : start + UNIT]
            made[start // CHUNK : (start + UNIT) // CHUNK] = 1
            until(lambda count=number + 1: len(found) == count, f"piece {number}")
        reader.join()
    assert (np.concatenate(found) == whole[: 2 * UNIT]).all()


def test_a_wait_for_what_is_never_made_ends(arena: Arena) -> None:
    manifest = manifest_of(arena)
    made = np.zeros(-(-manifest.length // CHUNK), np.uint8)

    def look() -> None:
        raise PeerUnreachable("its maker is gone")

    wanted = [(0, UNIT)]
    with (
        CheckedSegment(arena, manifest, wanted, timeout_s=30, making=Making(made, look)) as segment,
        pytest.raises(PeerUnreachable, match="its maker is gone"),
    ):
        segment.read(0, UNIT)
    with (
        CheckedSegment(
            arena, manifest, wanted, timeout_s=0.05, making=Making(made, lambda: None)
        ) as segment,
        pytest.raises(TimeoutError),
    ):
        segment.read(0, UNIT)
    before = threading.active_count()
    with CheckedSegment(arena, manifest, wanted, timeout_s=30, making=Making(made, lambda: None)):
        pass  # whoever ends early does not wait for it
    assert threading.active_count() == before
