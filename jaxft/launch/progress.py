"""How far a generation's snapshots are, kept in the store for who comes after all memory is lost.

The first snapshot of a job is written down at once, later ones at most once a second: a store is
not made for a write a snapshot, and to know that something was protected is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from jaxft.group.identity import SnapshotId
from jaxft.group.messages import RankOptions
from jaxft.group.records import PROGRESS, Progress
from jaxft.group.world import Export, Generation, encode
from jaxft.launch.store import Store

EVERY_S = 1.0

Detail = Mapping[str, str | int | float]


class ProgressLog:
    """Of the generation that was entered last."""

    def __init__(self) -> None:
        self._generation: Generation | None = None
        self._known: Progress | None = None
        self._written: Progress | None = None
        self._written_s = 0.0
        self._hurried = False

    def enter(self, generation: Generation) -> None:
        self._generation = generation
        self._known = self._written = None
        self._hurried = False

    def hurry(self) -> None:
        """The world ends after its next snapshot: what is committed is written at once now."""
        self._hurried = True

    def announced(self, kind: str, detail: Detail) -> None:
        """The root's SMP has said "settled", "committed" or "persisted". What it said late, of a
        generation that was left, is not about this one."""
        generation = self._generation
        if generation is None or detail["generation"] != generation.number:
            return
        step, known = int(detail["step"]), self._known or Progress()
        if kind == "committed":
            snapshot = SnapshotId(generation.number, int(detail["seq"]), generation.nonce)
            self._known = msgspec.structs.replace(known, step=step, snapshot=snapshot)
        elif kind == "persisted":
            self._known = msgspec.structs.replace(known, stored=step)
        else:
            self._known = _settled(step, detail)

    def come_back(self, options: RankOptions | None) -> None:
        """To a generation that was entered, and has settled, before this process was there."""
        if options is not None and options.directory:
            export = Export(directory=options.directory, keep=options.persist_keep)
            self._known = Progress(export=export)

    @property
    def unsaved(self) -> Export | None:
        """Where the newest snapshot is to be written before its memory goes; None: nowhere."""
        return None if self._known is None else self._known.unsaved

    @property
    def step(self) -> int:
        """Of the newest snapshot known to be committed; -1: none."""
        return -1 if self._known is None else self._known.step

    @property
    def is_written(self) -> bool:
        """Is there nothing that the store has not got yet?"""
        return self._generation is None or self._known is None or self._known == self._written

    def write(self, store: Store, *, at_once: bool = False) -> None:
        """Writes what is new, if it is time.

        Raises:
            StoreError: the store does not answer; it is written the next time.
        """
        if self._generation is None or self._known is None or self.is_written:
            return
        now_s = time.monotonic()
        first = self._written is None or self._written.snapshot is None
        if first or at_once or self._hurried or now_s - self._written_s > EVERY_S:
            store.commit({}, {f"{PROGRESS}{self._generation.number}": encode(self._known)})
            self._written, self._written_s = self._known, now_s


def _settled(step: int, detail: Detail) -> Progress:
    """A generation that has settled: what it goes on from, and where its checkpoints go."""
    directory = str(detail["directory"])
    export = Export(directory=directory, keep=int(detail["keep"])) if directory else None
    if not detail["base"]:  # nothing, or a checkpoint of plain Orbax, which has no identity
        return Progress(export=export, stored=step or -1)
    snapshot = SnapshotId.parse(str(detail["base"]), str(detail["nonce"]))
    stored = int(detail["stored"])
    return Progress(base=step, step=step, snapshot=snapshot, export=export, stored=stored)
