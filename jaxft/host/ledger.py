"""A host's durable record: what its memory holds, kept next to the memory itself.

It has to tell three things apart when its writer is gone: a whole record; a write that was cut
short by the writer's death (then the record before it is right, the new one never took effect);
and memory that changed by itself (then the newest record may be the lost one, and the other one
may be stale: nothing it says about the slots may be believed).

Layout of the arena: two banks, BANK_BYTES each, written in turn: record number n lies in bank
n mod 2. Layout of a bank, little-endian:

    offset  size
         0     8  marker: EMPTY (never written), BUSY (being written) or WHOLE
         8     4  version of this layout
        12     4  length of the payload in bytes
        16     8  sequence number n of the record, from 1
        24     8  xxh3_64 of bytes 8 to 24 and the payload
        32     -  payload

Order of a write, in the bank that does not hold the newest record:

    1. marker = BUSY        2. payload        3. bytes 8 to 32        4. marker = WHOLE

The marker is one aligned word, stored at once, so a death leaves EMPTY, BUSY or WHOLE and nothing
else; any two of them differ in at least 30 bits. WHOLE with a wrong checksum, or any other marker,
is therefore damage and never a write cut short. The number in a damaged bank cannot be trusted, so
nothing says that it held the older record: damage in either bank is reported.

One process at a time uses a ledger: the one that owns the memory, or after it is known dead, its
successor.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from jaxft.errors import ConfigError
from jaxft.host.memory import Arena, Bytes

PAYLOAD_BYTES_MAX = 1 << 20
BANK_BYTES = PAYLOAD_BYTES_MAX + 4096
LEDGER_BYTES = 2 * BANK_BYTES

_EMPTY = 0
_BUSY = 0x59535542_7466786A
_WHOLE = 0x8B7C41C9_D2A69E35
_VERSION = 1
_FIELDS = struct.Struct("<IIQ")
_CHECKSUM = struct.Struct("<Q")
_FIELDS_AT, _PAYLOAD_AT = 8, 32


@dataclass(frozen=True)
class Reading:
    """What a ledger says.

    `payload` is the newest whole record, None if there is none. `damaged` means that some byte
    changed by itself: there may have been a newer record than this one.
    """

    payload: bytes | None
    damaged: bool = False


@dataclass(frozen=True)
class _Bank:
    """What one bank holds; `sequence` is 0 if not a whole record."""

    sequence: int = 0
    payload: bytes | None = None
    damaged: bool = False


class Ledger:
    """The record in `arena`, which is grown to LEDGER_BYTES if it is smaller."""

    def __init__(self, arena: Arena) -> None:
        arena.ensure(LEDGER_BYTES)
        self._banks = [arena.view(index * BANK_BYTES, BANK_BYTES) for index in (0, 1)]

    def read(self) -> Reading:
        """The newest whole record. A write cut short by the writer's death is not damage."""
        return _newest(self._banks)

    def write(self, payload: bytes) -> None:
        """Makes `payload` the newest record. Until the last store the one before is still read.

        Raises:
            ConfigError: longer than PAYLOAD_BYTES_MAX.
        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise ConfigError(
                f"a ledger record has {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX} are kept"
            )
        banks = [_look(bank) for bank in self._banks]
        sequence = max(bank.sequence for bank in banks) + 1
        index = sequence % 2
        for offset, value in stores(sequence, payload):
            store(self._banks[index], offset, value)
        # Both banks were damaged. The record just written says all there is to say, so the other
        # one's damage is of no more interest.
        if banks[1 - index].damaged:
            store(self._banks[1 - index], 0, _marker(_EMPTY))


def read_bytes(data: Bytes) -> Reading:
    """As `Ledger.read`, of a copy of LEDGER_BYTES. While somebody writes, what was being written
    looks damaged."""
    return _newest([data[index * BANK_BYTES :][:BANK_BYTES] for index in (0, 1)])


def _newest(stored: Sequence[Bytes]) -> Reading:
    banks = [_look(bank) for bank in stored]
    newest = max(banks, key=lambda bank: bank.sequence)
    return Reading(newest.payload, any(bank.damaged for bank in banks))


def stores(sequence: int, payload: bytes) -> list[tuple[int, bytes]]:
    """The stores into a bank that make one record, in order: (offset, bytes)."""
    fields = _FIELDS.pack(_VERSION, len(payload), sequence)
    return [
        (0, _marker(_BUSY)),
        (_PAYLOAD_AT, payload),
        (_FIELDS_AT, fields + _CHECKSUM.pack(_digest(fields, payload))),
        (0, _marker(_WHOLE)),
    ]


def store(bank: Bytes, offset: int, value: bytes) -> None:
    """One of `stores`: a marker as a single word, all else in any order of bytes."""
    if offset == 0:
        bank[:8].view(np.uint64)[0] = np.frombuffer(value, np.uint64)[0]
    else:
        bank[offset : offset + len(value)] = np.frombuffer(value, np.uint8)


def _look(bank: Bytes) -> _Bank:
    marker = int(bank[:8].view(np.uint64)[0])
    if marker in (_EMPTY, _BUSY):
        return _Bank()
    fields = bank[_FIELDS_AT : _FIELDS_AT + _FIELDS.size].tobytes()
    version, length, sequence = _FIELDS.unpack(fields)
    if marker != _WHOLE or version != _VERSION or length > PAYLOAD_BYTES_MAX:
        return _Bank(damaged=True)
    payload = bank[_PAYLOAD_AT : _PAYLOAD_AT + length].tobytes()
    (checksum,) = _CHECKSUM.unpack(bank[_FIELDS_AT + _FIELDS.size : _PAYLOAD_AT].tobytes())
    if checksum != _digest(fields, payload):
        return _Bank(damaged=True)
    return _Bank(sequence, payload)


def _digest(fields: bytes, payload: bytes) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return int(digest.intdigest())


def _marker(value: int) -> bytes:
    return value.to_bytes(8, "little")
