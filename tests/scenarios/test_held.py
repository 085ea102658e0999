"""The SMPs' network is down and the collectives are not: snapshots are held, training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxft.group import events as e
from jaxft.group.keeper import Keeper
from jaxft.group.messages import Directive
from jaxft.group.root import Root
from jaxft.schedule import Schedule
from tests.scenarios.stage import Stage
from tests.sim.checker import Violation

Patch = pytest.MonkeyPatch


def steps(stage: Stage) -> int:
    """How far the slowest rank is."""
    return min(rank.state.step for rank in stage.sim.ranks() if rank.state is not None)


def trains_on(stage: Stage, count: int) -> None:
    target = steps(stage) + count
    stage.until(lambda: steps(stage) >= target, f"{count} more steps")


def cut_off(every_steps: int, name: str) -> Stage:
    """The SMP of one host is cut off for long; then it is reached again."""
    stage = Stage(every_steps=every_steps)
    stage.commits(2)
    number = stage.number
    for other in "abc":
        if other != name:
            stage.cut(name, other)
    trains_on(stage, 40)
    stage.sim.blocked.clear()
    stage.commits(3)
    assert stage.number == number
    return stage


def announced(stage: Stage, kind: str) -> list[Any]:
    return [detail for what, detail in stage.sim.checker.announced if what == kind]


@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize("name", ["a", "c"])
def test_training_goes_on_and_snapshots_come_back(every_steps: int, name: str) -> None:
    """Host a is the root's."""
    stage = cut_off(every_steps, name)
    held = announced(stage, "held")
    assert {detail["host"] for detail in held} == ({"a", "b", "c"} if name == "a" else {"a", "c"})
    assert len(held) == len(announced(stage, "held_over"))
    assert all("not known to have heard of" in d["reason"] for d in held if d["host"] == "a")
    assert all("has not heard that of a, the root" in d["reason"] for d in held if d["host"] != "a")


@pytest.mark.parametrize("name", ["a", "c"])
@pytest.mark.parametrize("side", ["root", "host"])
def test_without_holding_training_stands_still(side: str, name: str, monkeypatch: Patch) -> None:
    """Each side is told by what it knows itself: the other one is out of reach."""
    if side == "root":
        monkeypatch.setattr(Root, "_hold", lambda self, *_: [])
    else:
        real = Keeper._mind_root

        def hearing(self: Keeper, now_s: float) -> list[e.Effect]:
            self._root_heard_s = now_s
            return real(self, now_s)

        monkeypatch.setattr(Keeper, "_mind_root", hearing)
    with pytest.raises(Violation, match="40 more steps does not happen"):
        cut_off(3, name)


def one_way(stage: Stage, kind: type, **ends: str) -> None:
    """Only messages of this kind are lost, in one direction."""
    lost = stage.hold(kind, **ends)
    trains_on(stage, 40)
    lost.drop()
    stage.commits(2)


def test_a_host_that_is_heard_and_hears_nothing_is_not_waited_for() -> None:
    stage = Stage()
    stage.commits(2)
    one_way(stage, Directive, to="b")
    assert stage.number == 1


def a_rank_that_learns_late() -> None:
    """Snapshots are held. When the network is there again, b is told so some steps after the
    others, which have begun the next snapshot by then and wait for its outcome."""
    stage = Stage(every_steps=1)
    stage.commits(2)
    stage.cut("b", "a")
    stage.cut("b", "c")
    trains_on(stage, 30)
    late: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    rank = stage.rank("b")
    hear = rank.hear
    rank.hear = lambda effect: late.append((hear, (effect,)))  # type: ignore[method-assign]
    stage.sim.blocked.clear()
    stage.run(2.0)
    rank.hear = hear  # type: ignore[method-assign]
    for told, args in late:
        told(*args)
    stage.commits(3)
    assert stage.number == 1


def test_a_rank_says_which_snapshot_it_has_missed(monkeypatch: Patch) -> None:
    a_rank_that_learns_late()
    monkeypatch.setattr(Schedule, "_find_missed", lambda self: None)
    with pytest.raises(Violation, match="commits does not happen"):
        a_rank_that_learns_late()
