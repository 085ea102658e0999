"""A rank that hangs: how long it may be silent, and which one the others wait for."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from jaxft.group import membership as m
from jaxft.group.hanging import (
    CALLS_MIN,
    CONFIRM_S,
    GATHER_S,
    WINDOW_S,
    Reading,
    Watch,
    find_hang,
)
from jaxft.group.records import STILL, Fault, HostStill, RankStill
from jaxft.group.restarts import hangs_in_vain
from jaxft.group.world import Code
from tests.group.test_membership import Board, decide, inside, me

HANG_S = 60.0
LOOK_S = 2.0
START_S = 600.0
RULES = m.Rules(job="j", code=Code(data=1, parity=1), hosts_min=2, hosts_max=2)


class Clock:
    """A watch over rank 0 (and others), looked at every LOOK_S."""

    def __init__(self, hang_s: float = HANG_S, start_s: float = 0.0) -> None:
        self.watch = Watch(hang_s, LOOK_S, start_s=start_s)
        self.now_s = 1000.0
        self.says = {0: Reading(0)}

    def pass_s(self, seconds: float) -> bool:
        """Time passes, and nobody calls; whether one is late then."""
        end_s, late = self.now_s + seconds, False
        while self.now_s < end_s:
            self.now_s += LOOK_S
            late = self.watch.look(self.says, self.now_s)
        return late

    def call(self, pause_s: float = LOOK_S, times: int = 1) -> None:
        """Rank 0 calls, each time after this pause."""
        for _ in range(times):
            self.pass_s(pause_s)
            self.says[0] = self.says[0]._replace(calls=self.says[0].calls + 1)


def test_a_rank_that_has_called_often_enough_hangs_after_a_minute() -> None:
    clock = Clock()
    clock.call(times=CALLS_MIN)
    assert not clock.pass_s(HANG_S)
    assert clock.pass_s(2 * LOOK_S)
    (rank,) = clock.watch.ranks()
    assert (rank.calls, rank.is_late, rank.limit_s) == (CALLS_MIN, True, HANG_S)


def test_compiling_is_no_hang_and_nothing_is_learned_of_it() -> None:
    clock = Clock()
    clock.call()
    assert not clock.pass_s(100 * HANG_S)
    clock.call(times=2)
    assert clock.watch.limit_s == HANG_S


def test_a_script_that_calls_seldom_is_given_ten_times_as_long() -> None:
    clock = Clock()
    clock.call(1000.0, times=CALLS_MIN)
    assert not clock.pass_s(9 * 1000.0)
    assert clock.pass_s(1100.0)


def test_a_pause_is_forgotten_at_last_and_known_until_then() -> None:
    clock = Clock()
    clock.call(times=CALLS_MIN)
    clock.call(50.0, times=2)
    assert clock.watch.limit_s == pytest.approx(10 * 50.0, rel=0.1)
    clock.call(times=int(WINDOW_S / LOOK_S) + 1)
    assert clock.watch.limit_s > HANG_S
    clock.call(times=int(WINDOW_S / LOOK_S) + 1)
    assert clock.watch.limit_s == HANG_S


def test_what_the_looker_was_paused_for_is_no_silence() -> None:
    clock = Clock()
    clock.call(times=CALLS_MIN)
    clock.now_s += 1e6
    assert not clock.pass_s(LOOK_S)
    assert clock.watch.ranks()[0].still_s <= 2 * LOOK_S


def test_in_a_long_phase_nobody_hangs_for_as_long_as_was_said() -> None:
    clock = Clock()
    clock.says[1] = Reading(5)
    clock.call(times=CALLS_MIN)
    clock.says[1] = Reading(5, until_s=clock.now_s + 1000.0, phase="evaluation")
    assert not clock.pass_s(990.0)
    assert [one.phase for one in clock.watch.ranks()] == ["", "evaluation"]
    assert not clock.pass_s(HANG_S)
    assert clock.pass_s(20.0)
    assert [one.phase for one in clock.watch.ranks()] == ["", ""]


def test_after_the_last_call_and_before_it_has_a_snapshotter_nobody_is_watched() -> None:
    clock = Clock(start_s=START_S)
    clock.says = {0: Reading(0, arrived=False), 1: Reading(9, closed=True)}
    assert not clock.pass_s(100 * START_S)
    assert clock.watch.ranks() == ()


@pytest.mark.parametrize("calls", range(CALLS_MIN))
def test_one_that_has_hardly_begun_has_another_limit(calls: int) -> None:
    clock = Clock(start_s=START_S)
    clock.says[0] = Reading(0, arrived=False)
    clock.pass_s(START_S)
    clock.says[0] = Reading(0)
    clock.call(times=calls)
    assert not clock.pass_s(START_S)
    assert clock.pass_s(3 * LOOK_S)
    (rank,) = clock.watch.ranks()
    assert (rank.calls, rank.starts, rank.limit_s) == (calls, True, START_S)
    # It is no shorter than that of others; without one they are not watched.
    assert Watch(HANG_S, LOOK_S, start_s=1.0).start_limit_s == HANG_S
    assert Watch(HANG_S, LOOK_S).start_limit_s == 0.0


# ------------------------------------------------------------------------------ who it is


def stands(rank: int, calls: int, still_s: float = 70.0, **more: object) -> HostStill:
    """What the host of this rank says."""
    one = RankStill(rank=rank, calls=calls, still_s=still_s, limit_s=HANG_S)
    return HostStill(host=f"host{rank}", ranks=(msgspec.structs.replace(one, **more),))


def find(*said: HostStill, hosts: int = 2, waited_s: float = 0.0) -> Fault | None:
    names = [f"host{index}" for index in range(hosts)]
    rules = msgspec.structs.replace(RULES, hosts_min=hosts, hosts_max=hosts)
    still: Mapping[str, HostStill] = {one.host: one for one in said}
    return find_hang(Board(*names).form(rules), still, waited_s, CONFIRM_S)


def test_the_rank_that_is_behind_is_named_with_what_it_is_in() -> None:
    stack = 'File "train.py", line 3 in load\nFile "train.py", line 9 in main'
    fault = find(stands(0, 8), stands(1, 7, stack=stack))
    assert fault is not None
    assert (fault.kind, fault.host, fault.rank, fault.tail) == ("hung", "host1", 1, stack)
    assert fault.detail == (
        "rank 1 on host1 hangs: it has not called save for 70 s, since call 7 (the other ranks are "
        'at call 8); it is in File "train.py", line 3 in load'
    )


def test_where_none_is_behind_that_is_said_with_where_each_is() -> None:
    fault = find(stands(0, 7, stack="wait (jax.py:1)"), stands(1, 7, stack="sleep (x.py:2)"))
    assert fault is not None
    assert "all 2 ranks hang" in fault.detail
    assert "none is behind: all stand at call 7" in fault.detail
    assert fault.tail == "rank 0 on host0: wait (jax.py:1)\nrank 1 on host1: sleep (x.py:2)"


def test_of_those_that_stand_alike_it_is_the_one_that_is_stopped() -> None:
    fault = find(stands(0, 7), stands(1, 7, state="T"))
    assert fault is not None
    assert (fault.rank, fault.host) == (1, "host1")
    assert "it is stopped by a signal" in fault.detail


@pytest.mark.parametrize("calls", [7, 8])
def test_the_one_that_is_behind_is_judged_by_its_own_limit(calls: int) -> None:
    assert find(stands(0, 8), stands(1, calls, limit_s=100.0)) is None
    assert find(stands(0, 8), stands(1, calls, still_s=101.0, limit_s=100.0)) is not None


def test_the_others_may_wait_for_one_that_still_calls() -> None:
    assert find(stands(0, 8), stands(1, 7, still_s=1.0)) is None


def test_one_that_is_not_watched_yet_can_be_what_a_late_one_waits_for() -> None:
    for limit_s in (0.0, 3600.0):
        fault = find(stands(0, 4), stands(1, 2, limit_s=limit_s, starts=True))
        assert fault is not None
        assert fault.host == "host1"


def test_of_those_that_have_hardly_begun_the_one_that_is_behind_has_its_own_limit() -> None:
    def starts(rank: int, calls: int, still_s: float) -> HostStill:
        return stands(rank, calls, still_s=still_s, limit_s=3600.0, starts=True)

    assert find(starts(0, 1, 3700.0), starts(1, 0, 3500.0)) is None
    fault = find(starts(0, 1, 3700.0), starts(1, 0, 3650.0))
    assert fault is not None
    assert fault.detail.startswith(
        "rank 1 on host1 hangs: it has not called save for 3650 s, not once (the other ranks are"
    )


def test_while_one_is_in_a_long_phase_nobody_hangs() -> None:
    assert find(stands(0, 8), stands(1, 7, still_s=0.0, phase="evaluation")) is None


def test_all_hosts_are_heard_unless_one_says_nothing() -> None:
    assert find(stands(0, 8), stands(2, 8), hosts=3) is None
    assert find(stands(0, 8), stands(2, 8), hosts=3, waited_s=GATHER_S) is not None


def wait_for_fault(observer: m.Observer, board: Board, within_s: float) -> m.DeclareFault:
    """What host0 decides, looking each second."""
    for second in range(int(within_s) + 1):
        decision = observer.decide(board.view(), inside(board.generation.number), second, "n")
        if isinstance(decision, m.DeclareFault):
            return decision
        assert isinstance(decision, m.Wait)
        assert observer.counts
    raise AssertionError("there is no fault")


def suspicious(*said: HostStill) -> Board:
    """Two hosts whose ranks run, and what they say of them."""
    board = Board("host0", "host1")
    board.form(RULES)
    for one in said:
        board.put(f"{STILL}{board.generation.number}/{one.host}", one)
    return board


def test_a_hang_is_a_fault_that_counts_and_the_next_one_is_waited_for_twice_as_long() -> None:
    board = suspicious(stands(0, 8), stands(1, 7))
    for count in range(1, 4):
        number = board.generation.number
        decision = wait_for_fault(m.Observer(RULES), board, 3.0)
        assert (decision.fault.kind, decision.fault.generation) == ("hung", number)
        board.commit({}, {f"fault/{number}": decision.fault})
        assert hangs_in_vain(board.view(), RULES.restarts) == count
        assert isinstance(decide(board, inside(number), RULES), m.KillRanks)
        board.acknowledge("host0", "host1")
        if count < RULES.restarts.same_step_max:
            board.form(RULES)
            assert not board.view().still
            for one in (stands(0, 8), stands(1, 7)):
                board.put(f"{STILL}{board.generation.number}/{one.host}", one)
    end = decide(board, me("host0", entered=number), RULES)
    assert isinstance(end, m.Finish)
    assert "rank 1 on host1 hangs" in end.end.reason


def test_what_was_said_of_another_generation_is_not_this_ones() -> None:
    board = suspicious()
    board.put(f"{STILL}{board.generation.number - 1}/host0", stands(0, 8))
    assert not board.view().still
    assert isinstance(decide(board, inside(board.generation.number), RULES), m.Wait)


def test_a_suspicion_is_looked_at_again_as_time_passes() -> None:
    board = suspicious(stands(0, 8))
    with pytest.raises(AssertionError, match="no fault"):
        wait_for_fault(m.Observer(RULES), board, GATHER_S - 1)
    assert wait_for_fault(m.Observer(RULES), board, GATHER_S).fault.host == "host0"


def test_a_late_rank_that_goes_on_before_it_is_sure_does_not_hang() -> None:
    board = suspicious(stands(0, 8), stands(1, 7))
    observer, number = m.Observer(RULES), board.generation.number
    for second in range(10):
        board.put(f"{STILL}{number}/host1", stands(1, 7 + second))
        assert isinstance(observer.decide(board.view(), inside(number), second, "n"), m.Wait)
