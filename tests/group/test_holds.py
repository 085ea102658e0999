"""A process that reads a snapshot keeps its slot from being granted, for a while."""

from __future__ import annotations

from jaxft.group import events as e
from jaxft.group.keeper import HOLD_S, Keeper
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Ledger
from jaxft.group.timing import Timing

ONE, TWO = SnapshotId(1, 1, "n"), SnapshotId(1, 2, "n")


def test_what_is_read_is_pinned_until_its_reader_goes_or_has_had_its_time() -> None:
    keeper = Keeper("a", Ledger(arena="m"), Timing())
    keeper.handle(e.HoldWanted(7, ONE), 0.0)
    keeper.handle(e.HoldWanted(8, TWO), 1.0)
    assert keeper.pinned == {ONE, TWO}
    keeper.handle(e.HoldOver(8), 2.0)
    assert keeper.pinned == {ONE}
    keeper.handle(e.HoldWanted(7, TWO), 3.0)  # it reads another one
    assert keeper.pinned == {TWO}
    keeper.handle(e.HoldWanted(7, TWO), 10.0)  # and says so again
    keeper.handle(e.HoldWanted(9, ONE), 3.0 + HOLD_S)
    assert keeper.pinned == {ONE, TWO}
    keeper.handle(e.Ticked(), 10.0 + HOLD_S)
    assert keeper.pinned == {ONE}
    keeper.handle(e.Ticked(), 3.0 + 2 * HOLD_S)
    assert keeper.pinned == set()
