"""When a snapshot is due, and what a rank makes of a call of `save` that it had to let pass."""

from __future__ import annotations

import pytest

from jaxft.group.messages import Outcome, Turn, TurnAnswer
from jaxft.schedule import Await, AwaitTurn, Begin, Missed, Schedule, Skip


def outcome(seq: int, step: int, interval: int = 4, *, ok: bool = True) -> Outcome:
    return Outcome(seq=seq, step=step, ok=ok, interval=interval)


def test_a_call_is_due_an_interval_after_the_last_snapshot() -> None:
    schedule = Schedule(first_interval=4)
    assert schedule.decide(10) == Begin(0)
    assert schedule.decide(13) == Skip(14)
    assert schedule.decide(14) == Await(0)
    schedule.learn(outcome(0, 10, interval=6))
    assert schedule.decide(14) == Begin(1)
    schedule.learn(outcome(1, 14, interval=2))
    assert schedule.decide(19) == Skip(20)
    assert schedule.decide(20) == Begin(2)


def test_it_goes_by_what_the_root_called_a_snapshot() -> None:
    """A rank that began snapshot 1 at another step than the others is due with them again."""
    schedule = Schedule(first_interval=4)
    schedule.decide(10)
    schedule.learn(outcome(0, 10))
    assert schedule.decide(14) == Begin(1)
    assert schedule.decide(18) == Await(1)
    assert schedule.learn(outcome(1, 16, ok=False)) is None
    assert schedule.decide(18) == Skip(20)


def test_what_was_decided_without_this_rank_is_not_begun() -> None:
    schedule = Schedule()
    schedule.decide(0)
    schedule.learn(outcome(0, 0))
    schedule.learn(outcome(1, 1, ok=False))
    assert schedule.decide(4) == Skip(5)
    assert schedule.decide(5) == Begin(2)


def test_nothing_begins_while_snapshots_are_held() -> None:
    schedule = Schedule(first_interval=4)
    schedule.decide(0)
    schedule.learn(outcome(0, 0))
    assert schedule.decide(3, held=True) == Skip(4)
    assert schedule.decide(4, held=True) == Await(0)
    assert schedule.let_pass(4) == Missed(1, 4, call=0)
    assert schedule.decide(8, held=True) == Await(1)


def test_a_call_that_passed_has_missed_what_was_due_there() -> None:
    """That is known once the outcome is: only then are others able to have begun it."""
    schedule = Schedule(first_interval=4)
    schedule.decide(0)
    for step in (4, 5, 6):
        assert schedule.decide(step) == Await(0)
        assert schedule.let_pass(step) is None
    assert schedule.learn(outcome(0, 0)) == Missed(1, 6, call=0)
    assert schedule.decide(10) == Await(1)
    assert schedule.learn(outcome(1, 6, ok=False)) is None
    assert schedule.decide(10) == Begin(2)


def test_a_late_begin_that_did_not_count_has_missed_the_next_one_too() -> None:
    """The root had aborted snapshot 1, as of step 4, when this rank began it at step 9: others may
    have begun snapshot 2 at step 8."""
    schedule = Schedule(first_interval=4)
    schedule.decide(0)
    schedule.learn(outcome(0, 0))
    assert schedule.decide(9) == Begin(1)
    assert schedule.learn(outcome(1, 4, ok=False)) == Missed(2, 9, call=0)
    assert schedule.learn(outcome(1, 4, ok=False)) is None


# ------------------------------------------------------------------ out of turn


def call(schedule: Schedule, step: int) -> Skip | Await | AwaitTurn | Begin:
    schedule.enter()
    return schedule.decide(step)


@pytest.fixture
def running() -> Schedule:
    """Snapshot 0 was its first call, three more were not due."""
    schedule = Schedule(first_interval=100)
    call(schedule, 0)
    schedule.learn(outcome(0, 0, interval=100))
    for step in (1, 2, 3):
        assert call(schedule, step) == Skip(100)
    return schedule


def test_it_is_quiet_while_no_snapshot_out_of_turn_is_asked_for(running: Schedule) -> None:
    assert not Schedule().quiet
    assert running.quiet
    running.hear(Turn(number=1))
    assert not running.quiet
    running.hear(Turn(number=1, call=6))
    assert not running.quiet
    running.hear(Turn(number=1, call=6, result="aborted"))
    assert running.quiet


def test_calls_that_are_known_not_to_be_due_are_counted(running: Schedule) -> None:
    running.skip(4, 10.0)
    running.skip(6, 11.0)
    assert running.step_s == 0.5
    assert running.hear(Turn(number=1))[0] == TurnAnswer(number=1, call=6)
    assert running.hear(Turn(number=1, call=6)) == (None, Missed(1, 6, call=6))


def test_the_call_after_the_answer_waits_for_the_name(running: Schedule) -> None:
    asked = (TurnAnswer(number=1, call=4), None)
    assert running.hear(Turn(number=1)) == asked
    assert call(running, 4) == AwaitTurn(1)
    assert running.hear(Turn(number=1)) == asked
    assert not running.knows_turn(1)
    assert running.hear(Turn(number=1, call=6)) == (None, None)
    assert running.knows_turn(1)
    assert running.decide(4) == Skip(100)
    assert call(running, 5) == Begin(1)
    assert running.learn(Outcome(seq=1, step=5, ok=True, interval=100, turn=1)) is None
    assert call(running, 6) == Skip(105)
    assert running.hear(Turn(number=1, call=6, result="protected")) == (None, None)


def test_a_turn_that_is_dropped_lets_the_call_go_on(running: Schedule) -> None:
    running.hear(Turn(number=1))
    assert call(running, 4) == AwaitTurn(1)
    running.hear(Turn(number=1, result="no answer"))
    assert running.decide(4) == Skip(100)
    # An older word comes late, from an SMP that was started again.
    assert running.hear(Turn(number=1, result="no answer")) == (None, None)
    assert running.hear(Turn(number=2))[0] == TurnAnswer(number=2, call=5)


def test_a_call_that_did_not_wait_may_have_missed_the_snapshot(running: Schedule) -> None:
    running.hear(Turn(number=1))
    assert call(running, 4) == AwaitTurn(1)
    running.break_promise()
    assert running.decide(4) == Skip(100)
    assert call(running, 5) == Skip(100)
    assert running.hear(Turn(number=1, call=5)) == (None, Missed(1, 5, call=6))
    assert call(running, 6) == Skip(105)


def test_the_named_call_waits_for_the_last_outcome(running: Schedule) -> None:
    running.hear(Turn(number=1))
    running.hear(Turn(number=1, call=5))
    assert call(running, 4) == Begin(1)
    running.hear(Turn(number=2))
    running.hear(Turn(number=2, call=6))
    assert call(running, 5) == Await(1)
    running.learn(outcome(1, 4, interval=100))
    assert running.decide(5) == Begin(2)


def forced(schedule: Schedule, step: int) -> Skip | Await | AwaitTurn | Begin:
    """A call that is due by what all ranks say of it."""
    schedule.enter(forced=True)
    return schedule.decide(step)


def test_a_forced_call_is_due_and_the_interval_counts_from_it() -> None:
    schedule = Schedule(first_interval=4)
    assert call(schedule, 0) == Begin(0)
    assert forced(schedule, 1) == Await(0)
    schedule.learn(outcome(0, 0))
    assert schedule.decide(1) == Begin(1)
    schedule.learn(outcome(1, 1))
    assert call(schedule, 4) == Skip(5)
    assert not schedule.is_due(4)
    assert forced(schedule, 0) == Begin(2)  # after a rollback
    schedule.learn(outcome(2, 0))
    assert call(schedule, 3) == Skip(4)


def test_a_forced_call_that_passed_has_missed_what_the_others_began_there() -> None:
    schedule = Schedule(first_interval=4)
    call(schedule, 0)
    assert forced(schedule, 1) == Await(0)
    assert schedule.let_pass(1) is None
    assert call(schedule, 2) == Skip(4)
    assert schedule.learn(outcome(0, 0)) == Missed(1, 2, call=3)
    schedule.learn(outcome(1, 2, ok=False))
    assert call(schedule, 3) == Skip(6)


def test_a_forced_call_is_over_with_the_snapshot_that_others_made_of_it() -> None:
    schedule = Schedule(first_interval=4)
    call(schedule, 0)
    forced(schedule, 1)
    schedule.let_pass(1)
    assert schedule.learn(outcome(1, 1, ok=False)) is None
    assert schedule.learn(outcome(0, 0)) is None


def test_the_time_of_a_step_is_a_running_mean() -> None:
    schedule = Schedule()
    schedule.called(0, 100.0)
    assert schedule.step_s == 0.0
    schedule.called(10, 105.0)
    assert schedule.step_s == 0.5
    schedule.called(10, 106.0)
    schedule.called(11, 107.0)
    assert schedule.step_s == pytest.approx(0.6)
