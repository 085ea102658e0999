"""How far a generation's snapshots are, kept in the store for who comes after all memory is lost.

The first snapshot of a job is written down at once, later ones at most once a second: a store is
not made for a write a snapshot, and to know that something was protected is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from jaxft.group.identity import SnapshotId
from jaxft.group.records import PROGRESS, Progress
from jaxft.group.world import Generation, encode
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

    def enter(self, generation: Generation) -> None:
        self._generation = generation
        self._known = self._written = None

    def announced(self, kind: str, detail: Detail) -> None:
        """The root's SMP has said "settled" or "committed". What it said late, of a generation that
        was left, is not about this one."""
        generation = self._generation
        if generation is None or detail["generation"] != generation.number:
            return
        step = int(detail["step"])
        if kind == "committed":
            base = self._known.base if self._known is not None else -1
            snapshot = SnapshotId(generation.number, int(detail["seq"]), generation.nonce)
            self._known = Progress(base=base, step=step, snapshot=snapshot)
        elif detail["base"]:
            snapshot = SnapshotId.parse(str(detail["base"]), str(detail["nonce"]))
            self._known = Progress(base=step, step=step, snapshot=snapshot)
        else:
            self._known = Progress()

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
        if first or at_once or now_s - self._written_s > EVERY_S:
            store.commit({}, {f"{PROGRESS}{self._generation.number}": encode(self._known)})
            self._written, self._written_s = self._known, now_s
