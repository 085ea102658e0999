"""A host that is lost again and again waits longer each time, and the world goes on without it."""

from __future__ import annotations

import msgspec
import pytest

from jaxft.group import membership as m
from jaxft.group.flapping import FLAP_S_MAX, Flapping, wait_of
from jaxft.group.manifest import SnapshotId
from jaxft.group.records import FAULT, PROGRESS, Fault, Progress, View
from jaxft.group.restarts import RestartPolicy
from tests.group.test_membership import ELASTIC, NAMES, RULES, Board, me, settle

POLICY = RestartPolicy(flap_s=30.0)


def losses(*at_s: float, host: str = "host3", kind: str = "host_lost") -> dict[int, Fault]:
    return {
        number: Fault(generation=number, host=host, kind=kind, detail="", at_s=moment)
        for number, moment in enumerate(at_s, 1)
    }


def test_the_wait_doubles_and_has_an_end() -> None:
    assert [wait_of(count, POLICY) for count in range(6)] == [0, 0, 30, 60, 120, 240]
    assert wait_of(50, POLICY) == FLAP_S_MAX
    assert wait_of(50, RestartPolicy(flap_s=0)) == 0


def test_only_losses_of_a_host_within_the_window_count() -> None:
    def waits(faults: dict[int, Fault]) -> dict[str, float]:
        found = Flapping(POLICY).backed_off(View(faults=faults), 0.0)
        return {host: one.left_s for host, one in found.items()}

    assert waits(losses(10, 50)) == {"host3": 30}
    assert waits(losses(10, 50, kind="unreachable")) == {"host3": 30}
    assert waits(losses(10)) == {}
    assert waits(losses(10, 5000)) == {}
    # Of one that was cut off alone, others would have said that it is lost.
    for kind in ("rank_exited", "told_to_end", "grown", "cut_off"):
        assert waits(losses(10, 20, kind=kind)) == {}
    # Another fault since then, by the clocks of those who wrote both.
    other = Fault(generation=9, host="host0", kind="rank_exited", detail="", at_s=70.0)
    assert waits(losses(10, 50) | {9: other}) == {"host3": 10}


def test_time_is_what_the_observer_has_seen_where_no_clock_says_more() -> None:
    one, view = Flapping(POLICY), View(faults=losses(10, 50))
    assert one.backed_off(view, 1000.0)["host3"].left_s == 30
    assert one.backed_off(view, 1020.0)["host3"].left_s == 10
    assert one.backed_off(view, 1031.0) == {}
    assert one.backed_off(view, 1500.0) == {}
    # A third loss, by a clock that is far behind, or ahead: nobody waits for ever.
    for at_s in (-9e9, 9e9):
        assert one.backed_off(View(faults=losses(10, 50, at_s)), 1600.0) == {}


def flapped(times: int, rules: m.Rules, *hosts: str) -> Board:
    """A world in which host 3 was lost so often, and is there again each time."""
    board = Board(*NAMES, *hosts)
    board.form(rules)
    for count in range(times):
        number = board.generation.number
        board.put(f"{PROGRESS}{number}", Progress(base=count, step=count + 1))
        board.put(f"{FAULT}{number}", losses(10.0 * count)[1])
        fault = board.view().faults[number]
        board.put(f"{FAULT}{number}", msgspec.structs.replace(fault, generation=number))
        board.join("host3", f"again{count}", f"new{count}")
        board.acknowledge(*NAMES, *hosts)
        if count < times - 1:
            board.form(rules)
    return board


ANYBODY = me(answers=dict.fromkeys([*NAMES, "spare"], False))


def test_the_world_goes_on_without_it_and_lends_its_memory() -> None:
    board = flapped(2, ELASTIC)
    board.change("host3", snapshot=SnapshotId(1, 0, "n"))
    formed = settle(m.Observer(ELASTIC), board, ANYBODY)
    assert isinstance(formed, m.Form)
    assert [one.host for one in formed.generation.hosts] == ["host0", "host1", "host2"]
    assert [one.host for one in formed.generation.holders] == ["host3"]
    why = "host3 was lost 2 times lately, the last time in generation 2, so it waits 30 s"
    assert why in formed.generation.reason
    assert "host/host3" in formed.expect


def test_a_spare_takes_its_place_at_once() -> None:
    board = flapped(2, RULES, "spare")
    formed = m.Observer(RULES).decide(board.view(), ANYBODY, 0.0, "n")
    assert isinstance(formed, m.Form)
    assert [one.host for one in formed.generation.hosts] == ["host0", "host1", "host2", "spare"]


def test_a_world_that_needs_it_takes_it_at_once() -> None:
    board = flapped(3, RULES)
    formed = m.Observer(RULES).decide(board.view(), ANYBODY, 0.0, "n")
    assert isinstance(formed, m.Form)
    assert [one.host for one in formed.generation.hosts] == list(NAMES)
    assert "was lost 2 times" not in formed.generation.reason


@pytest.mark.parametrize("is_there", [True, False])
def test_it_is_not_waited_for(is_there: bool) -> None:
    """Once it was one time too many: all others are there."""
    board = flapped(2, ELASTIC)
    if not is_there:
        board.leave("host3")
    who = me(answers={"host3": True})
    formed = m.Observer(ELASTIC).decide(board.view(), who, 0.0, "n")
    assert isinstance(formed, m.Form), formed
    assert len(formed.generation.hosts) == 3


def test_it_does_not_keep_a_world_from_settling_by_coming_and_going() -> None:
    board = flapped(2, ELASTIC)
    board.leave("host2")  # which is waited for
    observer = m.Observer(ELASTIC)
    for tenth in range(29):
        assert isinstance(observer.decide(board.view(), ANYBODY, tenth / 10, "n"), m.Wait)
        board.join("host3", f"flaps{tenth}", f"flaps{tenth}")
    formed = observer.decide(board.view(), ANYBODY, 3.0, "n")
    assert isinstance(formed, m.Form), formed
    assert len(formed.generation.hosts) == 2


@pytest.mark.parametrize("seconds", [0.0, 29.0, 31.0])
def test_the_running_world_takes_it_in_after_the_wait(seconds: float) -> None:
    board = flapped(2, ELASTIC)
    observer = m.Observer(msgspec.structs.replace(ELASTIC, late_s=1e9))
    formed = settle(observer, board, ANYBODY)
    assert isinstance(formed, m.Form)
    board.put("generation", formed.generation)
    number = formed.generation.number
    board.put(f"{PROGRESS}{number}", Progress(base=2, step=3))
    who = msgspec.structs.replace(ANYBODY, entered=number, running=number)
    waits = observer.decide(board.view(), who, seconds, "n")
    assert isinstance(waits, m.Wait)
    assert ("host3 can join" in waits.reason) == (seconds > 30)
    its_own = m.Observer(ELASTIC)
    says = its_own.decide(board.view(), me("host3"), 0.0, "n")
    assert isinstance(says, m.Wait)
    assert "runs without this host: host3 was lost 2 times lately" in says.reason
    assert its_own.why_it_waits(board.view(), "host3") in says.reason
    assert its_own.why_it_waits(board.view(), "host0") == ""
