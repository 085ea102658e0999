"""When a world takes in hosts that wait beside it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from jaxft.group import membership as m
from jaxft.group.growing import ASK_AGAIN_S
from jaxft.group.manifest import SnapshotId
from jaxft.group.records import DONE, FAULT, PROGRESS, Progress
from jaxft.group.restarts import failures_in_vain
from jaxft.group.world import Export
from tests.group.test_membership import NAMES, RULES, Board, inside, me

ELASTIC = msgspec.structs.replace(RULES, hosts_min=3)


def shrunk() -> Board:
    """A world of three of four hosts that has settled, and committed snapshot 0."""
    board = Board(*NAMES[:3])
    board.form(ELASTIC)
    commit(board, 0, 10)
    return board


def commit(board: Board, seq: int, step: int) -> None:
    number = board.generation.number
    snapshot = SnapshotId(number, seq, board.generation.nonce)
    board.put(f"{PROGRESS}{number}", Progress(base=-1, step=step, snapshot=snapshot))


class Looking:
    """One agent of the world, whose clock a test moves."""

    def __init__(self, board: Board, host: str = "host1") -> None:
        self.board, self.host = board, host
        self.observer = m.Observer(ELASTIC)
        self.now_s = 0.0

    def after(self, seconds: float) -> m.Decision:
        """What it decides then; it looks once a second."""
        end_s = self.now_s + seconds
        while True:
            self.now_s = min(self.now_s + 1.0, end_s)
            who = inside(self.board.generation.number, self.host)
            decision = self.observer.decide(self.board.view(), who, self.now_s, "n")
            if self.now_s == end_s or not isinstance(decision, m.Wait):
                return decision


@pytest.mark.parametrize("host", ["host0", "host2"])
def test_a_world_grows_after_the_snapshot_that_it_asks_for(host: str) -> None:
    board = shrunk()
    agent = Looking(board, host)
    assert isinstance(agent.after(5), m.Wait)
    board.join("host3")
    assert isinstance(agent.after(3), m.Wait)
    assert isinstance(agent.after(2), m.AskSnapshot)
    assert isinstance(agent.after(10), m.Wait)
    commit(board, 1, 14)
    declared = agent.after(1)
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "grown"
    assert declared.fault.detail == (
        "host3 is there, so the world grows from 3 to 4 hosts, after the snapshot of step 14"
    )

    # All members are there, and so is who comes: nobody else is waited for.
    board.put(f"{FAULT}1", declared.fault)
    board.acknowledge(*NAMES[:3])
    formed = m.Observer(ELASTIC).decide(board.view(), me("host0"), 0.0, "n")
    assert isinstance(formed, m.Form)
    assert [member.host for member in formed.generation.hosts] == list(NAMES)
    assert [len(group.hosts) for group in formed.generation.groups] == [4]
    # It is no failure, whoever counts these.
    assert failures_in_vain(board.view(), ELASTIC.restarts) == []


def test_a_world_that_grows_to_less_than_it_may_waits_for_nobody() -> None:
    rules = msgspec.structs.replace(ELASTIC, hosts_max=6)
    board = Board(*NAMES[:3])
    board.form(rules)
    board.join("host3")
    board.fault("grown", "host3")
    board.acknowledge(*NAMES[:3])
    formed = m.Observer(rules).decide(board.view(), me("host0"), 0.0, "n")
    assert isinstance(formed, m.Form)
    assert len(formed.generation.hosts) == 4


def test_members_that_are_all_there_go_on_at_once_unless_the_run_was_started_again() -> None:
    board = shrunk()
    board.fault()
    board.acknowledge(*NAMES[:3])
    assert isinstance(m.Observer(ELASTIC).decide(board.view(), me(), 0.0, "n"), m.Form)
    for host in NAMES[:3]:
        board.join(host, "b")  # the fourth is on its way too, then
    board.fault("agent_restarted")
    assert isinstance(m.Observer(ELASTIC).decide(board.view(), me(), 0.0, "n"), m.Wait)


def test_who_comes_and_goes_costs_nothing() -> None:
    board = shrunk()
    agent = Looking(board)
    for start in range(5):
        board.join("host3", f"start{start}")
        assert isinstance(agent.after(2), m.Wait)
    board.leave("host3")
    assert isinstance(agent.after(10), m.Wait)


def test_what_was_committed_before_they_could_join_does_not_count() -> None:
    board = shrunk()
    agent = Looking(board)
    board.join("host3")
    assert isinstance(agent.after(2), m.Wait)
    commit(board, 1, 14)
    assert isinstance(agent.after(3), m.AskSnapshot)
    assert isinstance(agent.after(3), m.Wait)


def test_a_wish_that_comes_to_nothing_is_repeated() -> None:
    board = shrunk()
    agent = Looking(board)
    board.join("host3")
    assert isinstance(agent.after(9), m.AskSnapshot)
    assert isinstance(agent.after(ASK_AGAIN_S - 5), m.Wait)
    assert isinstance(agent.after(ASK_AGAIN_S), m.AskSnapshot)
    assert isinstance(agent.after(ASK_AGAIN_S - 5), m.Wait)


def unsettled(board: Board) -> None:
    del board.entries[f"{PROGRESS}1"]


def ending(board: Board) -> None:
    board.put(f"{DONE}1/host0", (0,))


def exporting(board: Board) -> None:
    export = Export(directory="/d", keep=1)
    board.put("generation", msgspec.structs.replace(board.generation, export=export))


def told_to_end(board: Board) -> None:
    board.change("host3", leaving=True)


@pytest.mark.parametrize("why", [unsettled, ending, exporting, told_to_end])
def test_there_are_worlds_that_do_not_grow(why: Callable[[Board], None]) -> None:
    board = shrunk()
    board.join("host3")
    why(board)
    agent = Looking(board)
    assert isinstance(agent.after(20), m.Wait)


def test_a_full_world_does_not_grow() -> None:
    board = Board(*NAMES)
    board.form(ELASTIC)
    commit(board, 0, 10)
    board.join("host4")
    assert isinstance(Looking(board).after(20), m.Wait)


def test_who_waits_is_told_what_for() -> None:
    board = shrunk()
    board.join("host3")
    told = m.Observer(ELASTIC).decide(board.view(), me("host3"), 0.0, "n")
    assert isinstance(told, m.Wait)
    assert told.tell
    assert "takes in after its next snapshot" in told.reason
    board.join("host4")
    told = m.Observer(ELASTIC).decide(board.view(), me("host4"), 0.0, "n")
    assert isinstance(told, m.Wait)
    assert "a spare: it takes the place of one of the 3 hosts that is lost" in told.reason


def test_who_lends_its_memory_is_told_too_why_it_does_not_train() -> None:
    board = shrunk()
    board.join("host3")
    lender = board.view().hosts["host3"].member()
    board.put("generation", msgspec.structs.replace(board.generation, holders=(lender,)))
    told = m.Observer(ELASTIC).decide(board.view(), me("host3", entered=1), 0.0, "n")
    assert isinstance(told, m.Wait)
    assert told.tell
    assert "runs without this host, which it takes in" in told.reason
