"""What failures mean for the job: how many restarts within how long, pauses, and why it ends."""

from __future__ import annotations

import msgspec
import pytest

from jaxft.group import membership as m
from jaxft.group.records import FAULT, PROGRESS, Fault, Progress
from jaxft.group.restarts import RestartPolicy
from tests.group.test_membership import NAMES, RULES, Board, inside, me, settle

# Each of these failures brings something newer, so none of them is in vain.
OFTEN = RestartPolicy(max_restarts=3, window_s=100.0)


def fail(board: Board, at_s: float, policy: RestartPolicy, **gone: object) -> m.Decision:
    """A rank of the newest generation fails at that time; what follows once all ranks are dead."""
    rules = msgspec.structs.replace(RULES, restarts=policy)
    number = board.generation.number
    ended = msgspec.structs.replace(m.Exit(rank=1, code=1, lived_s=90.0), **gone)
    declared = m.Observer(rules).decide(
        board.view(), inside(number, "host1", exits=(ended,)), at_s, "n"
    )
    assert isinstance(declared, m.DeclareFault), declared
    fault = msgspec.structs.replace(declared.fault, at_s=at_s)
    assert board.commit({f"{FAULT}{number}": declared.expect}, {f"{FAULT}{number}": fault})
    board.acknowledge(*NAMES)
    return settle(m.Observer(rules), board, me(), at_s)


def go_on(board: Board, formed: m.Decision) -> None:
    """The next generation, which protects something new."""
    assert isinstance(formed, m.Form), formed
    for key in formed.delete:
        del board.entries[key]
    board.put("generation", formed.generation)
    number = formed.generation.number
    board.put(f"{PROGRESS}{number}", Progress(base=10 * number, step=10 * number + 5))


def started() -> Board:
    board = Board(*NAMES)
    board.form()
    board.put(f"{PROGRESS}1", Progress(base=-1, step=10))
    return board


def test_more_restarts_than_the_window_allows_end_the_job() -> None:
    board = started()
    for at_s in (0.0, 30.0, 60.0):
        go_on(board, fail(board, at_s, OFTEN))
    end = fail(board, 99.0, OFTEN, tail="Traceback:\n  File x\nOSError: disk")
    assert isinstance(end, m.Finish)
    assert end.end.kind == "script"
    assert end.reason == (
        "rank 1 on host1 ended with status 1 after 90.0 s: OSError: disk (generation 4); the job "
        "has been restarted 3 times within 100 s already, as often as --max-restarts 3 allows"
    )
    assert [one.generation for one in end.end.failures] == [1, 2, 3, 4]
    assert end.end.tail.endswith("OSError: disk")


def test_restarts_before_the_window_do_not_count_and_all_do_without_one() -> None:
    for policy, kind in ((OFTEN, m.Form), (RestartPolicy(max_restarts=3, window_s=0), m.Finish)):
        board = started()
        for at_s in (0.0, 60.0, 120.0):
            go_on(board, fail(board, at_s, policy))
        assert isinstance(fail(board, 180.0, policy), kind)


def test_a_lost_host_is_no_restart_that_counts_and_forgets_none() -> None:
    board = started()
    for at_s in (0.0, 10.0, 20.0):
        go_on(board, fail(board, at_s, OFTEN))
        number = board.generation.number
        board.join("host3", f"again{number}")
        declared = m.Observer(RULES).decide(board.view(), inside(number), at_s, "n")
        assert isinstance(declared, m.DeclareFault)
        assert len(declared.fault.earlier_s) == 1 + int(at_s / 10)
        board.put(f"{FAULT}{number}", msgspec.structs.replace(declared.fault, at_s=at_s + 5))
        board.acknowledge(*NAMES)
        rules = msgspec.structs.replace(RULES, restarts=OFTEN)
        go_on(board, settle(m.Observer(rules), board, me(), at_s))
    assert isinstance(fail(board, 30.0, OFTEN), m.Finish)


def test_how_often_it_failed_outlives_the_records_of_old_failures() -> None:
    policy = RestartPolicy(max_restarts=m.FAULTS_KEPT + 5, window_s=0)
    board = started()
    for at_s in range(policy.max_restarts):
        go_on(board, fail(board, float(at_s), policy))
    assert len(board.view().faults) <= m.FAULTS_KEPT + 1
    end = fail(board, 1e6, policy)
    assert isinstance(end, m.Finish)
    assert f"restarted {policy.max_restarts} times already" in end.reason


def test_no_restart_at_all_may_be_asked_for() -> None:
    end = fail(started(), 5.0, RestartPolicy(max_restarts=0))
    assert isinstance(end, m.Finish)
    assert "restarted 0 times within 3600 s already" in end.reason


def test_the_first_restart_is_immediate_and_pauses_grow_until_something_is_protected() -> None:
    rules = msgspec.structs.replace(RULES, restarts=RestartPolicy(same_step_max=99))
    board = Board(*NAMES)
    board.form()
    pauses = []
    for number in range(1, 9):
        board.put(f"{PROGRESS}{number}", Progress(base=10, step=15 if number == 5 else 10))
        board.fault(lived_s=90.0)
        board.acknowledge(*NAMES)
        waits = m.Observer(rules).decide(board.view(), me(), 0.0, "n")
        pauses.append(waits.left_s if isinstance(waits, m.Wait) else 0.0)
        board.form(rules)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 0.0, 0.0, 1.0, 2.0]


def test_a_script_that_refuses_what_it_was_told_is_not_started_twice() -> None:
    tail = (
        'Traceback:\n  File "train.py", line 3\njaxft.errors.ConfigError: every=-1: expected more'
    )
    board = Board(*NAMES)
    board.form()
    end = fail(board, 0.0, RestartPolicy(), tail=tail, lived_s=2.0)
    assert isinstance(end, m.Finish)
    assert end.end.kind == "script"
    assert "ended with status 1 after 2.0 s: jaxft.errors.ConfigError: every=-1" in end.reason
    assert end.reason.endswith("the script refuses what it was told, which no restart changes")
    # One that has got somewhere may have met something that passes, such as a directory away.
    assert isinstance(fail(started(), 0.0, RestartPolicy(), tail=tail), m.Form)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((1, 1, 1), ": always rank 1 on host1"),
        ((1, 0, 1), ": rank 1 on host1, rank 0 on host0, ra"),
    ],
)
def test_the_end_says_who_failed_at_the_same_step_and_what_came_first(
    ranks: tuple[int, ...], words: str
) -> None:
    board = started()
    go_on(board, fail(board, 0.0, RestartPolicy()))
    for rank in ranks:
        host = f"host{rank}"
        number = board.generation.number
        board.put(f"{PROGRESS}{number}", Progress(base=25, step=25))
        fault = Fault(
            generation=number, host=host, kind="rank_exited", detail="it failed", rank=rank
        )
        board.put(f"{FAULT}{number}", fault)
        board.acknowledge(*NAMES)
        decided = settle(m.Observer(RULES), board, me())
        if isinstance(decided, m.Form):
            board.form()
    assert isinstance(decided, m.Finish)
    assert f"3 failures in a row brought no snapshot newer than step 25{words}" in decided.reason


def test_a_network_that_is_away_while_the_job_restores_is_waited_for() -> None:
    policy = RestartPolicy(max_restarts=6, flap_s=0.0)
    rules = msgspec.structs.replace(RULES, restarts=policy)
    board = started()
    board.fault("rank_exited")  # it had protected something, so that is no failure in vain
    decision: m.Decision = m.Wait("")
    for at_s in range(1, 7):
        board.acknowledge(*NAMES)
        decision = settle(m.Observer(rules), board, me(), float(at_s))
        assert isinstance(decision, m.Form), decision
        board.put("generation", decision.generation)
        number = decision.generation.number
        report = ("host2", "its SMP has not answered for 5.0 s", "unreachable")
        declared = settle(m.Observer(rules), board, inside(number, report=report))
        assert isinstance(declared, m.DeclareFault), declared
        board.put(f"{FAULT}{number}", msgspec.structs.replace(declared.fault, at_s=float(at_s)))
    board.acknowledge(*NAMES)
    decision = settle(m.Observer(rules), board, me(), 7.0)
    assert isinstance(decision, m.Finish)
    assert decision.end.kind == "world"
    assert "as often as --max-restarts 6 allows" in decision.reason
