"""A host's snapshot memory: the ledger, the two slots, and what of them may be read by whom.

What is readable is a table that is replaced as a whole whenever the ledger is written; the bulk
server's thread only ever looks things up in it.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from jaxft.errors import ChunkDamaged, ConfigError, ReadCancelled
from jaxft.faults import reach
from jaxft.group.manifest import CHUNK, Manifest, Part, SnapshotId, align
from jaxft.group.messages import Blob, Ledger, Slot
from jaxft.host import ledger as banks
from jaxft.host.layout import (
    LEDGER_KEY,
    PAGE,
    GroupBlob,
    decode_group,
    decode_manifest,
    own_blob_offset,
    read_key,
    seal,
    unseal,
)
from jaxft.host.memory import Arena, Bytes
from jaxft.host.wire import Refused, Shared

SLOT_MIN_BYTES = 1 << 16


class _Readable(NamedTuple):
    """Bytes that may be read; they lie at `offset` of `arena`, if it can be passed on."""

    data: Bytes
    arena: Arena | None = None
    offset: int = 0


class Rebuilt(NamedTuple):
    """A segment that this host makes again from the others: `segment` lies in `arena`, from its
    first byte on, and `made` behind it, a byte for each chunk: 1 once it is there."""

    arena: Arena
    segment: Bytes
    made: Bytes

    @classmethod
    def create(cls, nbytes: int) -> Rebuilt:
        """Memory for a segment of so many bytes, of which nothing is made yet."""
        at = cls.made_at(nbytes)
        arena = Arena.create("jaxft-rebuilt", at + nbytes // CHUNK + 1)
        return cls(arena, arena.view(0, nbytes), arena.view(at, -(-nbytes // CHUNK)))

    @staticmethod
    def made_at(nbytes: int) -> int:
        """Where `made` is in the memory of a segment of so many bytes."""
        return align(nbytes, PAGE)

    @property
    def whole(self) -> bool:
        return bool(self.made.all())


class Shares:
    """The memory of one host.

    Args:
        arenas: ledger, slot 0, slot 1: new ones, or those of an SMP that is dead.
    """

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self.arenas = tuple(arenas)
        self.slots = self.arenas[1:]
        self._banks = banks.Ledger(self.arenas[0])
        self.rebuilt: dict[tuple[SnapshotId, int], Rebuilt] = {}
        self._rebuilt_lock = threading.Lock()
        self._readable: dict[bytes, _Readable] = {}

    @classmethod
    def create(cls, host: str) -> Shares:
        """New memory: a new arena id, nothing in it."""
        sizes = (banks.LEDGER_BYTES, SLOT_MIN_BYTES, SLOT_MIN_BYTES)
        names = ("ledger", "slot0", "slot1")
        return cls(
            [
                Arena.create(f"jaxft-{host}-{name}", size)
                for name, size in zip(names, sizes, strict=True)
            ]
        )

    @classmethod
    def adopt(cls, fds: Sequence[int]) -> Shares:
        """The memory of a dead SMP, from the descriptors that its agent kept."""
        if len(fds) != 3:
            raise ConfigError(f"an SMP's memory is 3 descriptors, found {len(fds)}")
        return cls([Arena.adopt(fd) for fd in fds])

    def load(self) -> Ledger:
        """What this memory holds, after one more start on it. Memory whose ledger is missing or
        damaged counts as new: nothing it says about the slots can be believed."""
        reading = self._banks.read()
        if reading.payload is None or reading.damaged:
            ledger = Ledger(arena=secrets.token_hex(8), boots=1)
        else:
            ledger = msgspec.msgpack.decode(reading.payload, type=Ledger)
            ledger = msgspec.structs.replace(ledger, boots=ledger.boots + 1)
        self.write(ledger)
        return ledger

    def write(self, ledger: Ledger) -> None:
        """Makes the ledger durable, then what it allows readable."""
        self._banks.write(msgspec.msgpack.encode(ledger))
        self.publish(ledger)

    def publish(self, ledger: Ledger) -> None:
        """Replaces the table of what may be read."""
        table: dict[bytes, _Readable] = {}
        table[LEDGER_KEY] = _Readable(self.arenas[0].view(0, banks.LEDGER_BYTES))
        for number, slot in enumerate(ledger.slots):
            if slot.readable and slot.id is not None:
                self._publish_slot(table, number, slot, slot.id)
        with self._rebuilt_lock:
            for (identity, host), rebuilt in self.rebuilt.items():
                if rebuilt.whole:
                    # Not passed on: its descriptor is closed while the server may look at it.
                    table[read_key("rebuilt", identity, host)] = _Readable(rebuilt.segment)
        self._readable = table

    def _publish_slot(
        self, table: dict[bytes, _Readable], number: int, slot: Slot, identity: SnapshotId
    ) -> None:
        arena = self.slots[number]
        arena.ensure(max(blob.offset + blob.length for blob in (slot.own, slot.parity, slot.group)))
        table[read_key("segment", identity, slot.host)] = _Readable(
            arena.view(0, slot.length), arena
        )
        sizes = np.array([slot.own.length, slot.group.length], "<u8").view(np.uint8)
        table[read_key("sizes", identity, slot.host)] = _Readable(sizes)
        for kind, blob in (("own", slot.own), ("parity", slot.parity), ("group", slot.group)):
            if blob.length:
                # Manifests are decoded where they lie, after they were checked: those are copied.
                passed = arena if kind == "parity" else None
                view = arena.view(blob.offset, blob.length)
                table[read_key(kind, identity, slot.host)] = _Readable(view, passed, blob.offset)

    def provide(self, key: bytes, offset: int, nbytes: int) -> memoryview | Shared | Refused:
        """Answers a bulk read."""
        reach("smp.serving", nbytes=nbytes)
        found = self._readable.get(key)
        if found is None:
            return Refused("not here")
        if offset < 0 or offset + nbytes > found.data.size:
            return Refused(f"bytes {offset} to {offset + nbytes} of {found.data.size}")
        data = found.data[offset : offset + nbytes].data
        if found.arena is None:
            return data
        return Shared(data, found.arena.fd, found.offset + offset)

    # -------------------------------------------------------------------- writing

    def seal_segment(self, number: int, manifest: Manifest) -> Blob:
        """Writes the manifest behind its segment."""
        return self._write_blob(
            number, own_blob_offset(manifest.length), msgspec.msgpack.encode(manifest)
        )

    def place_parity(self, number: int, slot: Slot, nbytes: int) -> tuple[int, Bytes]:
        """Room for the parity behind the manifest: its offset and a view of it."""
        offset = align(slot.own.offset + slot.own.length, PAGE)
        arena = self.slots[number]
        arena.ensure(offset + nbytes)
        return offset, arena.view(offset, nbytes)

    def seal_group(self, number: int, offset: int, group: GroupBlob) -> Blob:
        """Writes what a coded share adds, behind its parity."""
        return self._write_blob(number, align(offset, PAGE), msgspec.msgpack.encode(group))

    def _write_blob(self, number: int, offset: int, payload: bytes) -> Blob:
        blob = seal(payload)
        arena = self.slots[number]
        arena.ensure(offset + len(blob))
        arena.view(offset, len(blob))[:] = np.frombuffer(blob, np.uint8)
        return Blob(offset, len(blob), int.from_bytes(blob[:8], "little"))

    # -------------------------------------------------------------------- reading

    def manifest(self, number: int, slot: Slot) -> Manifest:
        """The manifest of the segment in this slot. Raises ChunkDamaged."""
        return decode_manifest(unseal(self._blob(number, slot.own)))

    def group_blob(self, number: int, slot: Slot) -> GroupBlob:
        """What a coded share adds. Raises ChunkDamaged."""
        return decode_group(unseal(self._blob(number, slot.group)))

    def _blob(self, number: int, blob: Blob) -> Bytes:
        view = self.slots[number].view(blob.offset, blob.length)
        if int.from_bytes(bytes(view[:8]), "little") != blob.checksum:
            raise ChunkDamaged("a manifest's checksum is not the one in the ledger")
        return view

    def spoiled(self, ledger: Ledger) -> list[tuple[int, str]]:
        """Slots that say they hold something whose manifests are damaged, and why."""
        found = []
        for number, slot in enumerate(ledger.slots):
            if not slot.readable:
                continue
            try:
                self.slots[number].ensure(slot.own.offset + slot.own.length)
                manifest = self.manifest(number, slot)
                if (manifest.id, manifest.length) != (slot.id, slot.length):
                    found.append((number, f"its manifest is that of snapshot {manifest.id}"))
                if slot.group.length:
                    self.group_blob(number, slot)
            except (ChunkDamaged, msgspec.MsgspecError, ValueError) as error:
                found.append((number, str(error)))
        return found

    def keep_rebuilt(
        self, identity: SnapshotId, host: int, rebuilt: Rebuilt, cancel: threading.Event
    ) -> None:
        """Has a segment that is being rebuilt, by any thread: this host's ranks may map it, and
        others read it once it is whole and published.

        Raises:
            ReadCancelled: it is no longer wanted.
        """
        with self._rebuilt_lock:
            if cancel.is_set():
                raise ReadCancelled("a newer plan has come")
            old = self.rebuilt.get((identity, host))
            if old is not None:
                old.arena.close()
            self.rebuilt[identity, host] = rebuilt

    def map_rebuilt(self, identity: SnapshotId, host: int) -> Arena | None:
        """The memory of a segment that is being rebuilt, if it is begun; for any thread, which then
        closes it."""
        with self._rebuilt_lock:
            found = self.rebuilt.get((identity, host))
            return None if found is None else Arena.adopt(os.dup(found.arena.fd))

    def drop_rebuilt(self) -> None:
        """Lets rebuilt segments go; whoever has one mapped keeps its memory."""
        with self._rebuilt_lock:
            for one in self.rebuilt.values():
                one.arena.close()
            self.rebuilt = {}

    def close(self) -> None:
        self._readable = {}
        self.drop_rebuilt()
        for arena in self.arenas:
            arena.close()


def whole_manifest(template: Manifest, parts: tuple[Part, ...]) -> Manifest:
    """The manifest of a segment with these parts."""
    length = max((part.base + part.length for part in parts), default=0)
    lanes = tuple(
        (part.base + offset, nbytes) for part in parts for offset, nbytes in part.lanes
    ) or ((0, length),)
    return msgspec.structs.replace(template, parts=parts, length=length, lanes=lanes)
