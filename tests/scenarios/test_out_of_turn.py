"""Snapshots out of turn: all ranks take one at the same call, though none is due."""

from __future__ import annotations

import pytest

from jaxft.group import events as e
from jaxft.group import root, turn
from jaxft.group.messages import Directive, Status, Turn, TurnAnswer
from jaxft.schedule import Schedule
from tests.scenarios.stage import Stage
from tests.sim.checker import Violation

Patch = pytest.MonkeyPatch
SELDOM = 500


def want(stage: Stage, name: str) -> None:
    """The agent of this host wishes a snapshot."""
    smp = stage.host(name).smp
    assert smp is not None
    smp.deliver(e.TurnWanted(f"{name} is told to end"))


def known(stage: Stage, name: str) -> Turn | None:
    """The newest turn in this host's ledger."""
    memory = stage.host(name).memory
    assert memory is not None
    return memory.ledger.turn


def over(stage: Stage, number: int = 1) -> Turn:
    """What every host knows of this turn's end."""

    def there() -> bool:
        turns = [known(stage, name) for name in "abc"]
        return all(
            one is not None and (one.number, bool(one.result)) == (number, True) for one in turns
        )

    stage.until(there, f"turn {number} ends")
    found = known(stage, "a")
    assert found is not None
    return found


def started(every_steps: int = SELDOM) -> Stage:
    """Snapshot 0, of step 0, is committed; the next one would be due much later."""
    stage = Stage(every_steps=every_steps)
    stage.commits(1)
    stage.run(1.0)
    return stage


def step(stage: Stage) -> int:
    return max(rank.state.step for rank in stage.sim.ranks() if rank.state is not None)


def due_steps(stage: Stage) -> set[int | None]:
    return {rank.schedule.due_step for rank in stage.sim.ranks()}


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_snapshot_is_taken_though_none_is_due(name: str) -> None:
    stage = started()
    before = step(stage)
    want(stage, name)
    turn = over(stage)
    assert (turn.result, turn.reason) == ("protected", f"{name} is told to end")
    assert before < turn.step <= before + 3
    # The interval counts from it, for every rank.
    stage.run(0.5)
    assert due_steps(stage) == {turn.step + SELDOM}
    assert stage.number == 1


def test_wishes_of_several_hosts_and_of_one_again_are_one_request() -> None:
    stage = started()
    for name in "abcab":
        want(stage, name)
    turn = over(stage)
    assert turn.reason == "a is told to end"
    stage.run(3.0)
    assert over(stage) == turn
    want(stage, "b")
    assert over(stage, 2).result == "protected"


def test_a_rank_that_is_ahead_waits_for_the_name(monkeypatch: Patch) -> None:
    """The question reaches c late. The others have answered, and are kept from going past the call
    that will be named; what is known of it then reaches b last."""

    def scenario() -> Turn:
        stage = started()
        late = stage.hold(Directive, to="c")
        want(stage, "a")
        stage.run(1.0)
        late.release()
        named = stage.hold(Directive, to="b")
        stage.run(1.0)
        named.release()
        return over(stage)

    assert scenario().result == "protected"
    monkeypatch.setattr(Schedule, "_is_promised", lambda self: False)
    assert "let step" in scenario().result


def test_a_snapshot_that_is_due_meanwhile_is_taken_as_well() -> None:
    stage = started(every_steps=3)
    for number in range(1, 6):
        want(stage, "b")
        assert over(stage, number).result == "protected"
    stage.commits(3)
    assert stage.number == 1


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("when", ["asked", "named", "ended"])
def test_an_smp_that_dies_in_the_middle_loses_nothing_of_it(name: str, when: str) -> None:
    """Its SMP dies before it tells its ranks that word of the root's, and is started again."""
    stage = started()

    def telling(effect: e.Effect) -> bool:
        if not isinstance(effect, e.TellTurn) or not effect.turn.number:
            return False
        word = "ended" if effect.turn.result else "named" if effect.turn.call else "asked"
        return word == when

    stage.die_before(name, telling)
    want(stage, "c")
    stage.until(lambda: stage.host(name).smp is None, "the SMP dies")
    assert over(stage).result == "protected"
    stage.run(2.0)
    assert len(due_steps(stage)) == 1
    want(stage, name)
    assert over(stage, 2).result == "protected"
    assert stage.number == 1


def the_root_dies_between_the_outcome_and_the_end() -> None:
    stage = started()
    want(stage, "c")
    stage.die_before(
        "a",
        lambda effect: (
            isinstance(effect, e.WriteLedger)
            and effect.ledger.turn is not None
            and bool(effect.ledger.turn.result)
        ),
    )
    stage.until(lambda: stage.host("a").smp is None, "the SMP dies")
    assert over(stage).result == "protected"


def test_the_outcome_says_which_turn_it_ends(monkeypatch: Patch) -> None:
    the_root_dies_between_the_outcome_and_the_end()
    monkeypatch.setattr(root, "turn_of", lambda ledger: ledger.turn)
    with pytest.raises(Violation, match="turn 1 ends does not happen"):
        the_root_dies_between_the_outcome_and_the_end()


def test_a_rank_that_does_not_answer_is_waited_for_and_named(monkeypatch: Patch) -> None:
    """Its answer comes from a thread of its own, so only a rank that is stopped gives none."""
    monkeypatch.setattr(root, "ANSWER_S", 2.0)
    stage = started()
    stage.rank("b").stop()
    want(stage, "a")
    turn = over(stage)
    assert turn.result == "the ranks of b have not answered within 2 s"
    stage.rank("b").wake()
    before = step(stage)
    stage.until(lambda: step(stage) > before + 5, "training goes on")
    want(stage, "a")
    assert over(stage, 2).result == "protected"


def test_while_snapshots_are_held_there_is_none_out_of_turn() -> None:
    stage = started(every_steps=3)
    stage.cut("c", "a")
    stage.cut("c", "b")
    stage.run(5.0)
    want(stage, "b")
    stage.run(1.0)
    turn = known(stage, "b")
    assert turn is not None
    assert turn.result.startswith("snapshots are held: host c is not known to have heard")
    stage.peace()
    assert stage.number == 1


def a_host_is_cut_off_after_it_has_answered() -> Turn:
    """What was named does not reach c, which is held, and breaks its promise."""
    stage = started(every_steps=3)
    stage.until(stage.knows("c", 3))
    lost = stage.hold(Directive, to="c")
    want(stage, "c")
    stage.run(0.1)
    lost.drop()
    stage.until(lambda: bool((known(stage, "c") or Turn(number=0)).number), "c is asked")
    stage.hold(Directive, to="c")
    stage.run(6.0)
    stage.peace()
    assert stage.number == 1
    return over(stage)


def test_a_rank_that_could_not_keep_its_promise_says_so() -> None:
    assert a_host_is_cut_off_after_it_has_answered().result != ""


def test_a_world_that_has_not_settled_has_none() -> None:
    stage = Stage()
    stage.until(lambda: stage.host("b").smp is not None, "b has an SMP")
    smp = stage.host("b").smp
    assert smp is not None
    told: list[e.Effect] = smp.core.handle(e.TurnWanted("now"), stage.sim.now)
    assert [effect.turn.result for effect in told if isinstance(effect, e.TellTurn)] == [
        "no world of this host has settled"
    ]


def test_the_named_call_is_after_the_last_of_all() -> None:
    asked = Turn(number=2)
    statuses = {
        name: Status(version=1, answer=TurnAnswer(number=2, call=call))
        for name, call in (("a", 7), ("b", 9))
    }
    limits = {"open_s": 1.0, "answer_s": 10.0, "held": ""}
    named = turn.advance(asked, statuses, ["a", "b"], **limits)  # type: ignore[arg-type]
    assert named == Turn(number=2, call=10)
    assert turn.advance(asked, statuses, ["a", "b", "c"], **limits) is None  # type: ignore[arg-type]
    assert turn.advance(named, statuses, ["a", "b"], **limits) is None  # type: ignore[arg-type]
