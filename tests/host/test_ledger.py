"""The ledger tells a write cut short by a death from memory that changed by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxft.errors import ConfigError
from jaxft.host.ledger import (
    BANK_BYTES,
    LEDGER_BYTES,
    PAYLOAD_BYTES_MAX,
    Ledger,
    Reading,
    store,
    stores,
)
from jaxft.host.memory import Arena
from tests.host.children import child


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create("ledger", 1)
    yield arena
    arena.close()


def bank(arena: Arena, sequence: int) -> np.ndarray:
    return arena.view(sequence % 2 * BANK_BYTES, BANK_BYTES)


def test_new_memory_holds_nothing(arena: Arena) -> None:
    assert Ledger(arena).read() == Reading(None)
    assert arena.size_bytes == LEDGER_BYTES


def test_the_newest_record_is_read_also_by_a_successor(arena: Arena) -> None:
    ledger = Ledger(arena)
    for payload in (b"one", b"", b"three" * 1000, bytes(PAYLOAD_BYTES_MAX), b"five"):
        ledger.write(payload)
        assert ledger.read() == Reading(payload)
        other = Arena.adopt(os.dup(arena.fd))
        assert Ledger(other).read() == Reading(payload)
        other.close()


def test_too_long_is_refused_and_changes_nothing(arena: Arena) -> None:
    ledger = Ledger(arena)
    ledger.write(b"one")
    with pytest.raises(ConfigError, match="1048577 bytes"):
        ledger.write(bytes(PAYLOAD_BYTES_MAX + 1))
    assert ledger.read() == Reading(b"one")


@pytest.mark.parametrize("earlier", [0, 1, 2, 3])
def test_a_write_cut_short_anywhere_leaves_the_record_before(arena: Arena, earlier: int) -> None:
    ledger = Ledger(arena)
    for number in range(1, earlier + 1):
        ledger.write(b"record %d " % number * number)
    before = Reading(b"record %d " % earlier * earlier if earlier else None)
    payload = b"the next one, of another length"
    clean = arena.view(0, LEDGER_BYTES).copy()
    steps = stores(earlier + 1, payload)
    for last, (offset, value) in enumerate(steps):
        # A marker is stored as one word, everything else may stop after any byte.
        for done in (0, len(value)) if offset == 0 else range(len(value) + 1):
            arena.view(0, LEDGER_BYTES)[:] = clean
            for at, whole in steps[:last]:
                store(bank(arena, earlier + 1), at, whole)
            if done:
                store(bank(arena, earlier + 1), offset, value[:done])
            took_effect = last == len(steps) - 1 and done
            assert ledger.read() == (Reading(payload) if took_effect else before)
            ledger.write(b"after")
            assert ledger.read() == Reading(b"after")


def test_a_flipped_bit_in_the_newest_record_is_said(arena: Arena) -> None:
    ledger = Ledger(arena)
    ledger.write(b"older")
    ledger.write(b"newest")
    used = 32 + len(b"newest")
    for at in range(used):
        for bit in range(8):
            bank(arena, 2)[at] ^= 1 << bit
            assert ledger.read() == Reading(b"older", damaged=True)
            bank(arena, 2)[at] ^= 1 << bit
    bank(arena, 2)[used] ^= 1
    assert ledger.read() == Reading(b"newest")


def test_damage_of_the_older_record_is_said_too(arena: Arena) -> None:
    ledger = Ledger(arena)
    ledger.write(b"older")
    ledger.write(b"newest")
    bank(arena, 1)[16] ^= 1
    assert ledger.read() == Reading(b"newest", damaged=True)
    ledger.write(b"third")
    assert ledger.read() == Reading(b"third")


def test_damage_of_both_is_nothing_until_the_next_record(arena: Arena) -> None:
    ledger = Ledger(arena)
    for payload in (b"one", b"two", b"three"):
        ledger.write(payload)
    for number in (2, 3):
        bank(arena, number)[40:] ^= 255
        bank(arena, number)[33] ^= 255
    assert ledger.read() == Reading(None, damaged=True)
    ledger.write(b"again")
    assert ledger.read() == Reading(b"again")
    ledger.write(b"and again")
    assert ledger.read() == Reading(b"and again")


def test_a_writer_killed_at_any_moment(arena: Arena) -> None:
    Ledger(arena)
    for pause_s in (0.0, 0.0007, 0.0013, 0.0031):
        with child("write_ledger", arena.fd, fds=(arena.fd,)) as writer:
            acknowledged = int(writer.line())
            time.sleep(pause_s)  # where in a write it is killed does not matter
            writer.kill()
            assert writer.process.stdout is not None
            acknowledged = max([acknowledged, *map(int, writer.process.stdout.read().split())])
        reading = Ledger(arena).read()
        assert not reading.damaged
        assert reading.payload is not None
        number = int.from_bytes(reading.payload[:8], "little")
        assert number in (acknowledged, acknowledged + 1)
        assert reading.payload == reading.payload[:8] * (20_000 + number % 7)
        arena.view(0, LEDGER_BYTES)[:] = 0
