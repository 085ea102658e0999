"""What a snapshot costs, measured in a made-up training loop with a made-up clock."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

import jaxft
from jaxft.group.interval import FIRST, PROBE_EVERY, within_budget
from jaxft.group.messages import Measured
from jaxft.overhead import WARMUP, WINDOW, Auto, Meter

STEP_S = 0.100
SKIP_S = 0.0001


class Loop:
    """A training loop. A snapshot stalls it, and slows the steps that begin before its outcome.

    Attributes:
        step_s: how long an undisturbed step takes.
        stall_s: in a call that begins a snapshot, beyond a skipped one.
        slower_s: how much longer a step takes, of each of those that begin while one is on its way.
        after_s: how much longer the step after those takes.
        watched_s: how much longer a call takes that is measured and not due.
        decided_s: from a snapshot's begin to its outcome.
    """

    def __init__(self, *, stall_s: float = 0.004, slower_s: float = 0.003) -> None:
        self.meter = Meter()
        self.now_s = 1000.0
        self.step = self.seq = 0
        self.step_s = STEP_S
        self.stall_s = stall_s
        self.slower_s = slower_s
        self.after_s = 0.0
        self.watched_s = 0.0
        self.disturbed = False
        self.decided_s = 0.250
        self.outcomes_s: dict[int, float] = {}
        self.snapshot(first=True)

    def train(self, pause_s: float = 0.0) -> None:
        """A step, and whatever else the script does then."""
        on_its_way = bool(self.outcomes_s)
        more_s = self.slower_s if on_its_way else self.after_s if self.disturbed else 0.0
        self.disturbed = on_its_way
        self.pass_time(self.step_s + more_s + pause_s)
        self.step += 1

    def pass_time(self, taken_s: float) -> None:
        self.now_s += taken_s
        for seq, at_s in list(self.outcomes_s.items()):
            if at_s <= self.now_s:
                self.meter.decided(seq, at_s, ok=True)
                del self.outcomes_s[seq]

    def snapshot(self, *, first: bool = False) -> None:
        """A call that is due; it waits for the outcome before."""
        self.meter.called(self.step, self.now_s)
        for at_s in list(self.outcomes_s.values()):
            self.now_s = max(self.now_s, at_s)
            self.pass_time(0.0)
        self.meter.begins(self.seq)
        self.outcomes_s[self.seq] = self.now_s + self.decided_s
        self.seq += 1
        self.pass_time(SKIP_S + self.stall_s)
        self.meter.left(self.now_s, skipped=False)

    def skip(self) -> None:
        """A call that is not due, which takes longer where it is measured."""
        if not self.meter.watching:
            self.pass_time(SKIP_S)
            self.meter.skipped(SKIP_S)
            return
        self.meter.called(self.step, self.now_s)
        self.pass_time(SKIP_S + self.watched_s)
        self.meter.left(self.now_s, skipped=True)

    def interval(self, steps: int) -> None:
        """Steps up to the next snapshot."""
        for number in range(steps):
            self.train()
            self.snapshot() if number == steps - 1 else self.skip()


def warm(loop: Loop, steps: int = 10) -> Loop:
    for _ in range(WARMUP):
        loop.interval(steps)
    return loop


def test_the_stall_and_what_steps_took_longer() -> None:
    loop = warm(Loop())
    assert loop.meter.measured() == Measured()
    loop.interval(10)
    found = loop.meter.measured()
    # Three steps begin before the outcome, which comes after 250 ms.
    assert found.cost_s == pytest.approx(0.004 + 3 * 0.003)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.protect_s == pytest.approx(0.250)


def test_the_step_after_it_is_a_disturbed_one() -> None:
    loop = warm(Loop())
    loop.after_s = 0.007
    loop.interval(10)
    found = loop.meter.measured()
    assert found.cost_s == pytest.approx(0.004 + 3 * 0.003 + 0.007)
    assert found.step_s == pytest.approx(STEP_S)


def test_waiting_for_the_last_outcome_is_a_cost() -> None:
    loop = warm(Loop(), 2)
    loop.slower_s = 0.0
    for _ in range(3):
        loop.interval(2)
    left_s = 0.250 - (2 * STEP_S + 0.004 + 2 * SKIP_S)
    # Both calls of an interval are measured.
    assert loop.meter.measured().cost_s == pytest.approx(0.004 + left_s + 2 * SKIP_S)


def test_calls_that_are_not_due_are_counted() -> None:
    """The usual one comes with every step; what measured ones take beyond it, with a snapshot."""
    loop = warm(Loop(), 20)
    loop.watched_s = 0.0005
    loop.interval(20)
    loop.interval(20)
    found = loop.meter.measured()
    assert found.call_s == pytest.approx(SKIP_S)
    # Four disturbed steps, of which the last comes after the outcome, and as many others: the call
    # that ends the last of them is not looked at any more.
    assert found.cost_s == pytest.approx(0.004 + 3 * 0.003 + 8 * 0.0005)


def test_steps_that_seem_faster_do_not_pay_for_the_stall() -> None:
    loop = warm(Loop(stall_s=0.004, slower_s=-0.020))
    for _ in range(WINDOW):
        loop.interval(20)
    assert loop.meter.measured().cost_s == pytest.approx(0.004)


def test_no_cost_is_below_zero() -> None:
    loop = warm(Loop(stall_s=0.0, slower_s=-0.01))
    loop.interval(10)
    assert loop.meter.measured().cost_s == 0.0


def test_the_first_snapshots_do_not_count() -> None:
    loop = Loop(stall_s=5.0)
    loop.train(pause_s=60.0)  # the step is compiled
    loop.skip()
    loop.interval(3)
    loop.stall_s = 0.004
    for _ in range(WARMUP):
        loop.interval(10)
    assert loop.meter.measured().cost_s == pytest.approx(0.004 + 3 * 0.003)


@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_pause_does_not_count(at: int) -> None:
    """Neither while a snapshot is on its way nor afterwards."""
    loop = warm(Loop())
    for _ in range(3):
        loop.interval(10)
    before = loop.meter.measured()
    for number in range(10):
        loop.train(pause_s=1000.0 if number == at else 0.0)
        loop.snapshot() if number == 9 else loop.skip()
    after = loop.meter.measured()
    assert (after.cost_s, after.step_s) == pytest.approx((before.cost_s, before.step_s))


def test_steps_that_vary() -> None:
    """Within a sixth, whatever the seed, also with a step in twenty that takes twice as long."""
    for seed in range(20):
        noise = random.Random(seed)
        loop = warm(Loop(stall_s=0.05, slower_s=0.02))
        for _ in range(2 * WINDOW):
            for number in range(12):
                loop.step_s = STEP_S * noise.gauss(1.0, 0.03) * (1 + (noise.random() < 0.05))
                loop.train()
                loop.snapshot() if number == 11 else loop.skip()
        found = loop.meter.measured()
        assert found.cost_s == pytest.approx(0.05 + 2 * 0.02, abs=0.015)
        assert found.step_s == pytest.approx(STEP_S, rel=0.05)


def test_only_as_many_steps_are_watched_as_were_disturbed() -> None:
    loop = warm(Loop())
    watched = []
    for number in range(10):
        loop.train()
        watched.append(loop.meter.watching)
        loop.snapshot() if number == 9 else loop.skip()
    assert watched == [True] * 8 + [False] * 2


def test_steps_that_are_jumped_over_are_steps() -> None:
    loop = warm(Loop())
    for _ in range(3):
        loop.interval(6)
        for _ in range(20):
            loop.train()
        loop.snapshot()
    assert loop.meter.measured().step_s == pytest.approx(STEP_S)


def test_an_aborted_snapshot_and_a_call_that_is_let_pass_say_nothing() -> None:
    loop = warm(Loop())
    loop.outcomes_s.clear()
    loop.meter.decided(loop.seq - 1, loop.now_s, ok=False)
    loop.interval(10)
    assert loop.meter.measured().step_s == 0.0
    loop.train()
    loop.meter.called(loop.step, loop.now_s)
    loop.meter.spoil()
    loop.pass_time(60.0)
    loop.meter.left(loop.now_s, skipped=False)
    loop.interval(10)
    assert loop.meter.measured().step_s == 0.0
    loop.interval(10)
    assert loop.meter.measured().cost_s == pytest.approx(0.004 + 3 * 0.003)


def test_steps_while_a_snapshot_is_always_on_its_way() -> None:
    """Before an undisturbed step was seen, a disturbed one has to do."""
    loop = Loop()
    for _ in range(5):
        loop.interval(2)
    assert loop.meter.measured().step_s == pytest.approx(STEP_S + 0.003)


# ------------------------------------------------------------------------ with the root's decision


def run(loop: Loop, overhead: float, snapshots: int) -> list[int]:
    """The intervals that a world of this one rank takes: an outcome has the one after the next."""
    intervals = [FIRST, FIRST]
    for seq in range(snapshots):
        loop.interval(intervals[seq])
        found = loop.meter.measured()
        intervals.append(within_budget(overhead, found, seq=seq + 1, before=intervals[seq + 1]))
    return intervals[1:]


@pytest.mark.parametrize(("overhead", "steps"), [(0.01, 15), (0.03, 5), (0.05, 3), (0.5, 3)])
def test_a_budget_is_used_up(overhead: float, steps: int) -> None:
    intervals = run(Loop(), overhead, 6 * PROBE_EVERY)
    usual = intervals[4 * PROBE_EVERY :]
    assert sorted(usual)[len(usual) // 2] == steps
    assert set(usual) <= {steps, 6}


def test_a_step_that_takes_another_time_from_now_on_is_found_out() -> None:
    """Even where there is a snapshot at every step, and so hardly an undisturbed one."""
    loop = Loop(stall_s=0.0005, slower_s=0.0005)
    loop.decided_s = 0.050
    assert set(run(loop, 0.02, 4 * PROBE_EVERY)[-PROBE_EVERY:]) == {1, 3}
    for step_s in (0.5, 0.010, 0.100):
        loop.step_s = step_s
        loop.decided_s = 0.5 * step_s
        run(loop, 0.02, 20 * PROBE_EVERY)
        found = loop.meter.measured()
        assert found.step_s == pytest.approx(step_s)
        assert found.cost_s == pytest.approx(0.001)


# ------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("overhead", [0, -0.1, 1.5, float("nan"), True, "1%", None])
def test_a_budget_that_is_none(overhead: Any) -> None:
    message = f"Auto(overhead={overhead!r}): expected a fraction above 0"
    with pytest.raises(jaxft.ConfigError, match=re.escape(message)):
        Auto(overhead=overhead)


def test_a_budget_is_a_fraction() -> None:
    assert (Auto().overhead, Auto(overhead=1).overhead, Auto(overhead=0.03).overhead) == (
        0.01,
        1,
        0.03,
    )
    with pytest.raises(TypeError):
        Auto(0.01)  # type: ignore[misc]
