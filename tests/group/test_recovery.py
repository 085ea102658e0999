"""What is chosen where the store knows of a snapshot that the hosts may have lost."""

from __future__ import annotations

import msgspec
import pytest

from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Ledger, Lineage, Slot, StorageEntry
from jaxft.group.recovery import Holder, choose
from jaxft.group.world import Group, World

LOST = SnapshotId(1, 3, "n")
OLDER = SnapshotId(1, 2, "n")
NEWER = SnapshotId(2, 0, "n2")
PAIR = World(("a", "b"), (Group((0, 1), 1),))


def holders(snapshot: SnapshotId | None = None, *lineage: Lineage) -> list[Holder]:
    """Two hosts that hold this, whole, or nothing."""
    slots = [Slot(), Slot()]
    if snapshot is not None:
        slots = [Slot(state="coded", id=snapshot, host=place, world=PAIR) for place in (0, 1)]
    return [
        Holder(name, name, Ledger(arena=name, slots=(slot, Slot()), lineage=lineage))
        for name, slot in zip(PAIR.hosts, slots, strict=True)
    ]


def test_what_the_store_knows_and_nobody_has_is_missed_and_named() -> None:
    plan = choose(holders(), attempt=1, expected=LOST, expected_step=30)
    assert (plan.base, plan.source, plan.newest_known) == (None, "none", LOST)
    assert plan.reasons == ("snapshot 1.3 of step 30: no host holds its segment whole",)


def test_nothing_is_missed_where_nothing_is_known() -> None:
    plan = choose(holders(), attempt=1)
    assert (plan.base, plan.newest_known, plan.reasons) == (None, None, ())


def test_older_memory_is_gone_on_from_and_the_lost_is_named() -> None:
    plan = choose(holders(OLDER), attempt=1, expected=LOST, expected_step=30)
    assert (plan.chosen, plan.newest_known) == (OLDER, LOST)
    assert "snapshot 1.3 of step 30" in plan.reasons[0]


@pytest.mark.parametrize("identity", [OLDER, None], ids=["jaxft's", "plain Orbax"])
def test_an_older_checkpoint_is_gone_on_from(identity: SnapshotId | None) -> None:
    entry = StorageEntry(step=20, id=identity)
    plan = choose(holders(), attempt=1, storage=[entry], expected=LOST)
    assert (plan.storage, plan.newest_known) == (entry, LOST)


@pytest.mark.parametrize("identity", [LOST, NEWER], ids=str)
def test_nothing_is_missed_where_it_is_there_or_newer(identity: SnapshotId) -> None:
    plan = choose(holders(identity), attempt=1, expected=LOST)
    assert (plan.chosen, plan.newest_known, plan.reasons) == (identity, LOST, ())


def test_what_was_abandoned_is_not_missed() -> None:
    plan = choose(holders(None, Lineage(2, OLDER)), attempt=1, expected=LOST)
    assert (plan.newest_known, plan.reasons) == (None, ())


def test_a_fresh_start_misses_nothing() -> None:
    assert choose(holders(), attempt=1, fresh=True, expected=LOST).newest_known is None


def test_a_checkpoint_does_not_need_the_snapshot_that_was_aborted() -> None:
    """Whoever wrote it had the state from elsewhere."""
    knowing = [
        msgspec.structs.replace(
            one.ledger, decided=LOST, committed=OLDER, generation=1, lineage=(Lineage(1, None),)
        )
        for one in holders(OLDER)
    ]
    aware = [Holder(name, name, one) for name, one in zip(PAIR.hosts, knowing, strict=True)]
    entry = StorageEntry(step=30, id=LOST)
    plan = choose(aware, attempt=1, storage=[entry])
    assert (plan.storage, plan.reasons) == (entry, ("snapshot 1.3: aborted",))
    assert choose(aware, attempt=1).chosen == OLDER


def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_named() -> None:
    bad = StorageEntry(step=30, id=LOST, lineage=(Lineage(1, None),), damaged="step 30: a file")
    good = StorageEntry(step=20, id=OLDER)
    plan = choose(holders(), attempt=2, storage=[good, bad])
    assert (plan.storage, plan.unreadable) == (good, False)
    assert plan.reasons[0] == "step 30: a file"


def test_a_job_whose_checkpoints_cannot_be_read_is_not_told_to_begin_anew() -> None:
    for bad in (StorageEntry(30, LOST, damaged="bad"), StorageEntry(30, damaged="bad")):
        plan = choose(holders(), attempt=2, storage=[bad])
        assert (plan.base, plan.unreadable, plan.reasons) == (None, True, ("bad",))
        assert not choose(holders(), attempt=2, storage=[bad], fresh=True).unreadable
    # What was left counts no more, whether it can be read or not.
    left = StorageEntry(30, LOST, damaged="bad")
    plan = choose(holders(None, Lineage(2, None)), attempt=2, storage=[left])
    assert (plan.unreadable, plan.reasons) == (False, ())


def test_what_a_damaged_checkpoint_says_of_futures_that_were_left_still_counts() -> None:
    bad = StorageEntry(20, NEWER, lineage=(Lineage(2, OLDER),), damaged="bad")
    left = StorageEntry(30, LOST)
    base = StorageEntry(10, OLDER)
    plan = choose(holders(), attempt=2, storage=[base, bad, left])
    assert plan.storage == base
