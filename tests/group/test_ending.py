"""Before a job ends, what memory has and storage lacks is written: one more generation."""

from __future__ import annotations

import msgspec
import pytest

from jaxft.group import membership as m
from jaxft.group.ending import are_needed, writers
from jaxft.group.manifest import SnapshotId
from jaxft.group.records import DONE, END, ENDING, GENERATION, PROGRESS, JobEnd, Progress
from jaxft.group.world import Export
from tests.group.test_membership import (
    ELASTIC,
    NAMES,
    RULES,
    Board,
    decide,
    fail_again,
    inside,
    me,
    settle,
)

EXPORT = Export(directory="/ckpt", keep=3)
NEWEST = Progress(base=10, step=30, snapshot=SnapshotId(1, 4, "n"), export=EXPORT, stored=20)
NOBODY = dict.fromkeys(NAMES, False)


def trained(progress: Progress = NEWEST) -> Board:
    """A job whose first generation has got as far as that."""
    board = Board(*NAMES)
    board.form()
    board.put(f"{PROGRESS}1", progress)
    return board


def done(board: Board) -> None:
    """All ranks of the newest generation end well."""
    generation = board.generation
    for index, member in enumerate(generation.hosts):
        first = generation.first_rank(index)
        board.put(f"{DONE}{generation.number}/{member.host}", (first,))


def perform(board: Board, formed: m.Decision) -> None:
    """Writes a formed generation as an agent does."""
    assert isinstance(formed, m.Form), formed
    put: dict[str, object] = {GENERATION: formed.generation}
    if formed.end is not None:
        put[ENDING] = formed.end
    assert board.commit(formed.expect, put)
    for key in formed.delete:
        board.entries.pop(key, None)


def test_a_job_that_is_done_writes_its_newest_snapshot_first() -> None:
    board = trained()
    board.change("host1", ranks=2)
    done(board)
    formed = decide(board, inside(1))
    perform(board, formed)
    generation = board.generation
    assert generation.number == 2
    assert generation.export == Export(directory="/ckpt", keep=3, tries=1)
    assert [member.ranks for member in generation.hosts] == [1, 1, 1, 1]
    assert generation.expected == NEWEST.snapshot
    assert generation.reason.endswith("with status 0: the newest snapshot goes to storage")
    assert isinstance(decide(board, me(entered=1, running=1)), m.KillRanks)
    assert isinstance(decide(board, me(entered=1)), m.Enter)
    done(board)
    end = decide(board, inside(2))
    assert isinstance(end, m.Finish)
    assert (end.end.kind, end.known) == ("finished", False)
    assert end.reason.endswith("; the snapshot of step 30 is on storage, in /ckpt")


@pytest.mark.parametrize(
    "progress",
    [
        msgspec.structs.replace(NEWEST, stored=30),
        msgspec.structs.replace(NEWEST, export=None),
        msgspec.structs.replace(NEWEST, step=-1, snapshot=None, stored=-1),
    ],
    ids=["it is there", "no directory", "no snapshot"],
)
def test_what_is_not_to_be_written_delays_no_end(progress: Progress) -> None:
    board = trained(progress)
    done(board)
    end = decide(board, inside(1))
    assert isinstance(end, m.Finish)
    assert end.reason == "all 4 ranks ended with status 0"


def test_an_export_that_fails_changes_only_the_words_of_the_end() -> None:
    board = trained()
    done(board)
    perform(board, decide(board, inside(1)))
    gone = m.Exit(rank=0, code=1, tail="...\nOSError: no space left")
    declared = decide(board, inside(2, exits=(gone,)))
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "export_failed"
    board.put("fault/2", declared.fault)
    assert isinstance(decide(board, inside(2)), m.KillRanks)
    board.acknowledge(*NAMES)
    end = settle(m.Observer(RULES), board, me(entered=2))
    assert isinstance(end, m.Finish)
    assert end.end.ok
    assert "step 30 did not get to storage in /ckpt: host0: OSError: no space left" in end.reason


def test_an_export_that_loses_a_host_is_tried_again_by_the_rest() -> None:
    board = trained()
    done(board)
    perform(board, decide(board, inside(1)))
    board.leave("host3")
    for tries in (2, 3):
        board.fault("host_lost", "host3")
        for name in NAMES[:3]:
            board.change(name, left=board.generation.number)
        formed = settle(m.Observer(RULES), board, me(answers=NOBODY))
        perform(board, formed)
        assert [one.host for one in board.generation.hosts] == ["host0", "host1", "host2"]
        assert board.generation.export is not None
        assert board.generation.export.tries == tries
    board.fault("host_lost", "host2")
    board.acknowledge("host0", "host1", "host2")
    assert isinstance(settle(m.Observer(RULES), board, me(answers=NOBODY)), m.Finish)


def test_an_export_that_does_not_hear_a_host_is_tried_again_by_the_rest() -> None:
    """With its memory, as far as it is heard then: it may have hung, and been started again."""
    board = trained()
    done(board)
    perform(board, decide(board, inside(1)))
    for name in NAMES:
        board.change(name, snapshot=NEWEST.snapshot)
    for tries, silent in ((2, "host3"), (3, "host0")):
        board.fault("unreachable", silent)
        board.acknowledge(*NAMES)
        perform(board, settle(m.Observer(RULES), board, me(answers=NOBODY)))
        assert board.generation.export is not None
        assert board.generation.export.tries == tries
        writers = [one.host for one in board.generation.hosts]
        holders = [one.host for one in board.generation.holders]
        assert silent not in writers
        assert (len(writers), sorted(writers + holders)) == (5 - tries, list(NAMES))
    board.fault("unreachable", "host1")
    board.acknowledge(*NAMES)
    assert isinstance(settle(m.Observer(RULES), board, me(answers=NOBODY)), m.Finish)


def test_too_few_hosts_that_do_not_hear_one_of_them_write_without_it() -> None:
    board = trained()
    board.leave("host3")
    board.fault("host_lost", "host3")
    board.acknowledge(*NAMES[:3])
    perform(board, settle(m.Observer(RULES), board, me(answers=NOBODY)))
    for name in NAMES[:3]:
        board.change(name, snapshot=NEWEST.snapshot)
    board.fault("unreachable", "host1")
    board.acknowledge(*NAMES[:3])
    perform(board, settle(m.Observer(RULES), board, me(answers=NOBODY)))
    assert board.generation.export is not None
    assert [one.host for one in board.generation.hosts] == ["host0", "host2"]
    assert [one.host for one in board.generation.holders] == ["host1"]


def test_a_lone_host_writes_whatever_was_said_of_it() -> None:
    board = trained()
    done(board)
    perform(board, decide(board, inside(1)))
    board.fault("unreachable", "host0")
    alone = {"host0": board.view().hosts["host0"]}
    assert writers(board.view(), alone) == alone


def test_one_that_takes_for_ever_is_ended() -> None:
    board = trained()
    done(board)
    perform(board, decide(board, inside(1)))
    declared = settle(m.Observer(RULES), board, inside(2))
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "export_late"


def test_a_script_that_is_given_up_leaves_its_newest_snapshot_on_storage() -> None:
    board = Board(*NAMES)
    for _ in range(3):
        board.form()
        decision = fail_again(board, NEWEST)
    assert isinstance(decision, m.Form)
    board.form()
    formed = fail_again(board, NEWEST)
    assert isinstance(formed, m.Form)
    assert formed.end is not None
    assert formed.end.kind == "script"
    assert "no snapshot newer than step 30" in formed.end.reason
    assert "memory" not in formed.end.reason


def test_too_few_hosts_write_what_they_hold_and_then_wait_for_more() -> None:
    board = trained()
    board.leave("host3")
    board.fault("host_lost", "host3")
    board.acknowledge(*NAMES[:3])
    formed = settle(m.Observer(RULES), board, me(answers=NOBODY))
    perform(board, formed)
    assert len(board.generation.hosts) == 3
    assert board.generation.export is not None
    assert ENDING not in board.entries
    done(board)
    waits = m.Observer(RULES).decide(board.view(), me(entered=2, answers=NOBODY), 0.0, "n")
    assert isinstance(waits, m.Wait)
    assert "3 of 4 hosts" in waits.reason
    late = settle(m.Observer(RULES), board, me(entered=2, answers=NOBODY))
    assert isinstance(late, m.Finish)
    assert late.end.kind == "world"
    assert "is on storage" in late.reason
    board.join("host3", "b", "new")
    assert isinstance(settle(m.Observer(RULES), board, me(entered=2)), m.Form)


def test_what_goes_with_the_memory_of_hosts_that_are_told_to_end_is_said() -> None:
    for progress, lost in (
        (msgspec.structs.replace(NEWEST, export=None), True),
        (Progress(), False),
        (msgspec.structs.replace(NEWEST, stored=30), False),
    ):
        board = trained(progress)
        board.fault("told_to_end")
        for name in NAMES:
            board.change(name, left=1, leaving=True)
        end = settle(m.Observer(RULES), board, me())
        assert isinstance(end, m.Finish)
        words = "the snapshot of step 30 goes with the run's memory, since there is no Orbax"
        assert (words in end.reason) == lost


def test_hosts_that_are_told_to_end_export_together() -> None:
    board = trained()
    for name in NAMES:
        board.change(name, leaving=True)
    leaves = me(entered=1, leaving=True)
    declared = decide(board, leaves)
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "told_to_end"
    board.put("fault/1", declared.fault)
    assert isinstance(decide(board, inside(1, leaving=True)), m.KillRanks)
    board.acknowledge(*NAMES)
    formed = settle(m.Observer(RULES), board, leaves)
    perform(board, formed)
    assert isinstance(decide(board, leaves), m.Enter)
    done(board)
    end = decide(board, inside(2, leaving=True))
    assert isinstance(end, m.Finish)
    assert (end.end.kind, end.end.ok) == ("told", False)
    assert "all hosts were told to end; the snapshot of step 30 is on storage" in end.reason


def test_the_hosts_that_stay_form_a_world_without_one_that_was_told_to_end() -> None:
    board = trained()
    board.change("host3", leaving=True)
    board.put("fault/1", decide(board, me("host3", entered=1, leaving=True)).fault)
    board.acknowledge(*NAMES)
    waits = settle(m.Observer(ELASTIC), board, me("host3", entered=1, leaving=True))
    assert isinstance(waits, m.Wait)
    formed = settle(m.Observer(ELASTIC), board, me(entered=1))
    assert isinstance(formed, m.Form)
    assert [one.host for one in formed.generation.hosts] == ["host0", "host1", "host2"]
    assert formed.generation.export is None
    assert formed.generation.holders == ()  # It does not wait for that, either.


def test_hosts_that_are_told_to_end_stay_while_others_need_their_memory() -> None:
    """Of a group that may lose one host two are told."""
    board = trained()
    assert not are_needed(board.view())
    board.change("host3", leaving=True)
    assert not are_needed(board.view())
    board.change("host2", leaving=True)
    assert are_needed(board.view())
    board.fault("told_to_end", "host3")
    board.acknowledge(*NAMES)
    who = me(entered=1, answers=dict.fromkeys(NAMES, False))
    rules = msgspec.structs.replace(ELASTIC, hosts_min=2)
    for number in (2, 3):
        formed = settle(m.Observer(rules), board, who)
        assert isinstance(formed, m.Form)
        assert [one.host for one in formed.generation.hosts] == ["host0", "host1"]
        assert [one.host for one in formed.generation.holders] == ["host2", "host3"]
        perform(board, formed)
        lends = decide(board, me("host3", leaving=True))
        assert isinstance(lends, m.Enter)
        assert lends.index is None
        assert are_needed(board.view())
        if number == 2:  # It fails before it has restored.
            board.fault("rank_exited")
            board.acknowledge("host0", "host1")
    board.put(f"{PROGRESS}3", Progress(base=30, step=30, snapshot=SnapshotId(3, 0, "n")))
    assert not are_needed(board.view())


def test_a_world_of_newcomers_does_not_wait_where_all_others_were_told_and_have_stopped() -> None:
    board = trained()
    for name in NAMES:
        board.change(name, leaving=True)
    board.fault("told_to_end")
    board.acknowledge(*NAMES)
    for name in ("new0", "new1", "new2", "new3"):
        board.join(name)
    formed = decide(board, me("new0"))
    assert isinstance(formed, m.Form)
    assert [one.host for one in formed.generation.holders] == list(NAMES)


def test_hosts_without_a_world_that_are_told_to_end_just_do() -> None:
    board = Board(*NAMES)
    for name in NAMES:
        board.change(name, leaving=True)
    assert isinstance(decide(board, me(leaving=True)), m.Finish)


def test_a_run_that_starts_after_all_were_killed_in_an_export_goes_on() -> None:
    board = trained()
    done(board)
    perform(board, decide(board, inside(1)))
    for name in NAMES:
        board.join(name, "b", "m")
    declared = decide(board, me(agent="host0-b"))
    assert isinstance(declared, m.DeclareFault)
    board.put("fault/2", declared.fault)
    formed = settle(m.Observer(RULES), board, me(agent="host0-b"))
    assert isinstance(formed, m.Form)
    assert formed.generation.export is None
    assert JobEnd(kind="finished", reason="").ok
    assert END not in board.entries
