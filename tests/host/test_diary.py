"""What an SMP remembers for people: when, and what went wrong."""

from __future__ import annotations

import itertools

import msgspec

from jaxft.group import events as e
from jaxft.group.account import Committed, Note
from jaxft.group.identity import SnapshotId
from jaxft.group.messages import Directive, Ledger, Outcome, PersistOrder
from jaxft.host.diary import NOTES_MAX, Diary

FIRST = SnapshotId(2, 0, "n")
ENTERED = Ledger(arena="a", generation=2, nonce="n")


def with_outcome(seq: int, *, ok: bool, reason: str = "") -> Ledger:
    outcome = Outcome(seq=seq, step=10 + seq, ok=ok, reason=reason, committed=FIRST)
    return msgspec.structs.replace(ENTERED, outcome=outcome, committed=FIRST)


def test_times_are_of_what_is_new_in_the_ledger() -> None:
    diary = Diary(Ledger(arena="a"), itertools.count(100.0).__next__)
    diary.see(e.WriteLedger(ENTERED))
    assert diary.entered_s == 100
    committed = with_outcome(0, ok=True)
    diary.see(e.WriteLedger(committed))
    diary.see(e.WriteLedger(committed))  # for another reason
    assert diary.committed == Committed(FIRST, 101)
    diary.see(e.WriteLedger(with_outcome(1, ok=False, reason="h1: cold")))
    assert diary.committed == Committed(FIRST, 101)
    order = PersistOrder(number=1, wanted=False, step=10, result="written")
    diary.see(e.WriteLedger(msgspec.structs.replace(committed, persist=order)))
    failed = msgspec.structs.replace(order, number=2, result="h1: no space")
    diary.see(e.WriteLedger(msgspec.structs.replace(committed, persist=failed)))
    assert diary.persisted is not None
    assert diary.persisted.step == 10
    assert [(note.kind, note.detail) for note in diary.notes] == [
        ("aborted", "snapshot 2.1 of step 11: h1: cold"),
        ("persist_failed", "of step 10: h1: no space"),
    ]


def test_what_was_before_this_process_happened_at_no_known_time() -> None:
    """A rank that comes back is told the outcome again, which is no news."""
    ledger = with_outcome(0, ok=True)
    diary = Diary(ledger, lambda: 100.0)
    diary.see(e.WriteLedger(msgspec.structs.replace(ledger, boots=2)))
    assert ledger.outcome is not None
    diary.see(e.TellOutcome(ledger.outcome))
    assert (diary.entered_s, diary.committed, diary.persisted, diary.notes) == (None,) * 3 + ((),)


def test_snapshots_are_held_since_they_were_first() -> None:
    diary = Diary(ENTERED, itertools.count(100.0).__next__)
    for reason in ("", "h1 is silent", "h1, h2 are silent"):
        diary.see(e.TellHeld(reason))
    assert diary.held_s == 100
    assert [note.detail for note in diary.notes] == ["h1 is silent"]
    diary.see(e.TellHeld(""))
    assert diary.held_s is None


def test_it_keeps_the_last_notes_and_passes_over_the_rest() -> None:
    diary = Diary(ENTERED, lambda: 100.0)
    diary.see(e.TellSettled(Directive(version=1)))
    diary.see(e.Announce("settled", {}))
    assert diary.notes == ()
    diary.see(e.Announce("plan_failed", {"reason": "damage"}))
    for number in range(NOTES_MAX - 1):
        diary.see(e.DeclareFault("h1", f"reason {number}"))
    assert diary.notes[0] == Note(100, "plan_failed", "damage")
    diary.note("slot_damaged", "slot 1")
    assert len(diary.notes) == NOTES_MAX
    assert diary.notes[0] == Note(100, "fault", "h1: reason 0")
