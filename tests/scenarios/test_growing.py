"""A world that has lost a host takes one in again, at a snapshot boundary."""

from __future__ import annotations

import msgspec
import pytest

from tests.scenarios.stage import Stage

SELDOM = 500


def shrunk(every_steps: int = SELDOM) -> Stage:
    """a and b go on without c, whose host is gone."""
    stage = Stage(agents=True, every_steps=every_steps)
    stage.commits(1)
    stage.lose("c")
    stage.until(lambda: stage.number == 2 and stage.settled(2)(), "a and b go on")
    stage.commits(1)
    return stage


@pytest.mark.parametrize("every_steps", [3, SELDOM])
def test_it_goes_on_from_the_snapshot_that_the_larger_world_waits_for(every_steps: int) -> None:
    stage = shrunk(every_steps)
    stage.run(1.0)
    before = stage.sim.checker.told_commits[-1]
    stage.host("c").boot()
    stage.until(lambda: stage.number == 3 and stage.settled(3)(), "c is taken in")
    assert stage.members() == "abc"
    base = stage.base()
    assert base is not None
    assert base.generation == 2
    assert base in stage.sim.checker.told_commits
    assert base > before
    # Protected again, by a group of three.
    stage.commits(1)
    stage.lose("b")
    stage.until(lambda: stage.number == 4 and stage.settled(4)(), "a and c go on")
    stage.peace()


def test_a_host_that_is_lost_while_it_is_taken_in_costs_no_snapshot() -> None:
    stage = shrunk()
    stage.host("c").boot()
    stage.until(lambda: stage.number == 3, "a world with c is formed")
    stage.lose("c")
    stage.until(lambda: stage.number == 4 and stage.settled(4)(), "a and b go on")
    base = stage.base()
    assert base is not None
    assert base.generation == 2
    stage.peace()


def test_where_snapshots_are_held_the_world_stays_as_it_is() -> None:
    stage = shrunk(every_steps=3)
    stage.cut("a", "b")
    stage.run(3.0)
    stage.host("c").boot()
    stage.run(4.0)
    assert stage.number == 2
    stage.peace()
    stage.until(lambda: stage.number == 3 and stage.settled(3)(), "c is taken in")


@pytest.mark.parametrize(("alone", "others"), [("c", "ab"), ("a", "bc")])
def test_a_host_whose_smp_nobody_reaches_is_left_out_and_taken_in_later(
    alone: str, others: str
) -> None:
    """A world could not restore with it. Whether it is the root makes no difference."""
    stage = Stage(agents=True)
    rules = stage.store.rules
    patient = msgspec.structs.replace(rules.restarts, flap_s=5.0)
    stage.store.rules = msgspec.structs.replace(rules, restarts=patient)
    stage.commits(2)
    for other in others:
        stage.cut(alone, other)
    stage.rank("b").crash()
    stage.until(lambda: stage.members() == others and stage.settled(stage.number)(), "they go on")
    assert stage.number <= 4
    stage.commits(2)
    stage.peace()
