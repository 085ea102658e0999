"""Coding over memory that may change: what was read is checked after its use."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from jaxft.errors import PeerUnreachable
from jaxft.group.manifest import CHUNK, Manifest, Part, SnapshotId
from jaxft.group.messages import Damage
from jaxft.group.world import Group, World
from jaxft.host import coding
from jaxft.host.coding import DamagedFragments, Sources, encode_share, rebuild_segment
from jaxft.host.layout import GroupLayout, checksums, read_key
from jaxft.host.memory import Arena, Bytes
from tests.host.held import HeldMemory

ID = SnapshotId(1, 0, "n")
NAMES = ("a", "b", "c")
LENGTH = 5 * CHUNK + 1000


class Memory(HeldMemory):
    """Three hosts' segments and parity, read where they lie."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.segments = [rng.integers(0, 256, LENGTH, np.uint8) for _ in NAMES]
        held = {read_key("segment", ID, host): data for host, data in enumerate(self.segments)}
        super().__init__(held)


def manifest(host: int, segment: Bytes) -> Manifest:
    part = Part(rank=host, base=0, length=segment.size, ranges=(), checksums=checksums(segment))
    return Manifest(
        id=ID,
        step=1,
        host=host,
        world=World(NAMES, (Group((0, 1, 2), 1),)),
        plan="p",
        leaves=(),
        parts=(part,),
        length=segment.size,
        lanes=((0, segment.size),),
    )


def sources(memory: Memory, sums: dict[int, bytes] | None = None) -> Sources:
    manifests = {host: manifest(host, data.copy()) for host, data in enumerate(memory.segments)}
    return Sources(
        id=ID,
        layout=GroupLayout(Group((0, 1, 2), 1), manifests),
        addresses=dict.fromkeys(range(3), "address"),
        reader=memory,
        cancel=threading.Event(),
        names=NAMES,
        parity_checksums=sums or {},
    )


def parity_of(memory: Memory, given: Sources, host: int) -> tuple[Bytes, bytes]:
    parity = np.full(given.layout.region_bytes(host), 0xA5, np.uint8)
    return parity, encode_share(given, host, parity)


def test_a_lost_segment_comes_back_and_its_memory_just_before_its_bytes() -> None:
    memory = Memory()
    given = sources(memory)
    sums = {}
    for host in (0, 1):
        parity, sums[host] = parity_of(memory, given, host)
        assert sums[host] == checksums(parity)
        memory.held[read_key("parity", ID, host)] = parity
    whole = memory.segments[2].copy()
    del memory.held[read_key("segment", ID, 2)]
    arena = Arena.create("rebuilt", LENGTH)
    touched: list[tuple[int, int]] = []

    def touch(offset: int, nbytes: int) -> None:
        assert not arena.view(offset, nbytes).any()
        touched.append((offset, nbytes))
        arena.touch(offset, nbytes)

    output = arena.view(0, LENGTH)
    made = np.zeros(-(-LENGTH // CHUNK), np.uint8)
    given = sources(memory, sums)
    rebuild_segment(given, 2, frozenset({Damage(2)}), output, made, touch)
    assert (output == whole).all()
    assert made.all()
    assert sum(nbytes for _, nbytes in touched) == LENGTH
    del output
    arena.close()


def test_a_source_that_is_damaged_is_named() -> None:
    memory = Memory()
    given = sources(memory)
    memory.segments[1][2 * CHUNK + 5] ^= 1
    with pytest.raises(DamagedFragments, match="on b do not have their checksums") as caught:
        parity_of(memory, given, 0)
    assert {damage.host for damage in caught.value.damaged} == {1}


@pytest.mark.parametrize("victim", [1, 2])
def test_memory_that_is_used_again_while_it_is_coded_is_found(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner writes its next snapshot there: between the codec's look at it and ours."""
    memory = Memory()
    given = sources(memory)
    real = coding.backend()

    class Disturbed(type(real)):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def combine_by_steps(self, *args: object) -> Iterator[int]:
            for start in real.combine_by_steps(*args):
                memory.segments[victim][:] = 7
                yield start

        def combine_clipped(self, *args: object) -> None:
            memory.segments[victim][: LENGTH // 2] = 7
            real.combine_clipped(*args)

    monkeypatch.setattr(coding, "backend", Disturbed)
    with pytest.raises(DamagedFragments) as caught:
        parity_of(memory, given, 0)
    assert victim in {damage.host for damage in caught.value.damaged}


def test_a_peer_that_no_longer_has_the_snapshot_is_named() -> None:
    memory = Memory()
    given = sources(memory)
    del memory.held[read_key("segment", ID, 1)]
    with pytest.raises(PeerUnreachable, match="b does not give its bytes: not here"):
        parity_of(memory, given, 0)
