"""When what happened in an SMP, for people who ask. It is forgotten with the process.

What counts is read off the ledger when it is written, and not off what clients are told, which they
are told again when they come back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from jaxft.group import events as e
from jaxft.group.account import Committed, Note, Persisted
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Ledger

NOTES_MAX = 16


class Diary:
    """Of one SMP.

    Args:
        ledger: as it was found; what it says already happened at an unknown time.
        clock: seconds since the epoch.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._clock = clock
        self._notes: deque[Note] = deque(maxlen=NOTES_MAX)
        self._held = ""
        self.entered_s: float | None = None
        self.held_s: float | None = None
        self.committed: Committed | None = None
        self.persisted: Persisted | None = None

    @property
    def notes(self) -> tuple[Note, ...]:
        """What went wrong, the oldest first."""
        return tuple(self._notes)

    def note(self, kind: str, detail: str) -> None:
        """Something went wrong just now."""
        self._notes.append(Note(self._clock(), kind, detail))

    def see(self, effect: e.Effect) -> None:
        """Takes note of an effect of the core, if it is worth it."""
        if isinstance(effect, e.WriteLedger):
            self._written(effect.ledger)
        elif isinstance(effect, e.TellHeld):
            self._held_is(effect.reason)
        elif isinstance(effect, e.DeclareFault):
            self.note("fault", f"{effect.host}: {effect.reason}")
        elif isinstance(effect, e.Announce) and effect.kind == "plan_failed":
            self.note(effect.kind, str(effect.detail["reason"]))

    def _written(self, ledger: Ledger) -> None:
        old, self._ledger = self._ledger, ledger
        if (ledger.generation, ledger.nonce) != (old.generation, old.nonce):
            self.entered_s = self._clock()
        outcome, order = ledger.outcome, ledger.persist
        if outcome is not None and outcome != old.outcome:
            identity = SnapshotId(ledger.generation, outcome.seq, ledger.nonce)
            if outcome.ok:
                self.committed = Committed(identity, self._clock())
            else:
                what = f"snapshot {identity} of step {outcome.step}"
                self.note("aborted", f"{what}: {outcome.reason}")
        if order is not None and order.result and order != old.persist:
            if order.result == "written":
                self.persisted = Persisted(order.step, self._clock())
            else:
                self.note("persist_failed", f"of step {order.step}: {order.result}")

    def wrote(self, step: int) -> None:
        """Ranks have written a checkpoint of this step to storage."""
        self.persisted = Persisted(step, self._clock()) if step >= 0 else None

    def _held_is(self, reason: str) -> None:
        before, self._held = self._held, reason
        if not reason:
            self.held_s = None
        elif not before:
            self.held_s = self._clock()
            self.note("held", reason)
