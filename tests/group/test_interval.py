"""The interval: the formula of a budget, and the rules around it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxft.group.interval import (
    AFTER_STEPS,
    FIRST,
    PROBE_EVERY,
    PROBE_STEPS,
    dearest,
    first_interval,
    interval_steps,
    smallest,
    within_budget,
)
from jaxft.group.messages import Measured, RankOptions, Report

seconds = st.floats(1e-6, 1e4)
budgets = st.floats(1e-4, 1.0)


def measured(cost_s: float, step_s: float, protect_s: float = 0.0, call_s: float = 0.0) -> Measured:
    return Measured(cost_s=cost_s, step_s=step_s, protect_s=protect_s, call_s=call_s)


def reports(*several: Measured) -> dict[str, Report | None]:
    return {f"h{number}": Report(seq=0, measured=one) for number, one in enumerate(several)}


@pytest.mark.parametrize(
    ("overhead", "one", "steps"),
    [
        (0.01, measured(0.010, 0.1), 10),
        (0.03, measured(0.010, 0.1), 4),  # 3.3 steps are too few
        (0.10, measured(0.010, 0.1), 1),
        (0.10, measured(0.011, 0.1), 2),
        (0.01, measured(0.0, 0.1), 1),
        (0.10, measured(0.3, 1.0), 3),  # 0.3 / 0.1 is not 3 in floats
        (0.10, measured(0.7, 1.0), 7),
        (0.10, measured(0.010, 0.1, protect_s=0.35), 4),  # not due before it is protected
        (0.10, measured(0.010, 0.1, protect_s=0.30), 3),
        (0.10, measured(0.300, 1.0, call_s=0.020), 4),  # 0.3 / 0.08
        (0.10, measured(0.300, 1.0, call_s=0.050), 6),
        (0.10, measured(0.300, 1.0, call_s=0.700), 6),  # half of the budget, no more
    ],
)
def test_the_smallest_interval_within_a_budget(overhead: float, one: Measured, steps: int) -> None:
    assert smallest(overhead, one) == steps


@given(budgets, st.floats(0, 1e3), seconds, st.floats(0, 1e3))
@example(0.1, 0.3, 1.0, 0.0)
def test_it_is_within_the_budget_and_no_smaller_one_is(
    overhead: float, cost_s: float, step_s: float, protect_s: float
) -> None:
    def fits(steps: int, slack: float) -> bool:
        return cost_s / (steps * step_s) <= overhead * slack and steps * step_s * slack >= protect_s

    steps = smallest(overhead, measured(cost_s, step_s, protect_s))
    assert fits(steps, 1 + 1e-6)
    assert steps == 1 or not fits(steps - 1, 1 - 1e-6)


@given(budgets, seconds, seconds, seconds, st.integers(0, 100), st.integers(1, 10**6))
def test_one_figure_changes_it_little(
    overhead: float, cost_s: float, step_s: float, protect_s: float, seq: int, before: int
) -> None:
    steps = within_budget(overhead, measured(cost_s, step_s, protect_s), seq=seq, before=before)
    assert max(1, before // 2) <= steps <= 2 * before + 1


@given(st.integers(1, 10**6))
def test_what_an_outlier_has_made_longer_is_as_short_as_before_at_once(before: int) -> None:
    wild, usual = measured(1e9, 1.0), measured(0.0, 1.0)
    longer = within_budget(0.01, wild, seq=0, before=before)
    assert longer == 2 * before + 1
    assert within_budget(0.01, usual, seq=1, before=longer) == before


def test_it_comes_to_the_wanted_one_and_stays() -> None:
    one, steps, taken = measured(1.0, 0.1, 0.5), FIRST, []
    for seq in range(PROBE_EVERY - 1):
        steps = within_budget(0.01, one, seq=seq, before=steps)
        taken.append(steps)
    assert taken == [21, 43, 87, 175, 351, 703, 1000]
    assert {within_budget(0.01, one, seq=seq, before=1000) for seq in range(100)} == {1000}


def test_nothing_measured_keeps_what_it_was() -> None:
    assert within_budget(0.01, Measured(), seq=3, before=7) == 7
    options = RankOptions(overhead=0.01)
    assert first_interval(options) == FIRST
    assert interval_steps(options, {"h0": None, "h1": Report(seq=0)}, seq=0, before=FIRST) == FIRST


def test_a_snapshot_at_every_step_leaves_room_for_an_undisturbed_step_now_and_then() -> None:
    one, steps, taken = measured(0.001, 1.0, 0.2), 1, []
    for seq in range(2 * PROBE_EVERY):
        steps = within_budget(0.1, one, seq=seq, before=steps)
        taken.append(steps)
    # One step has the snapshot on its way, one comes after it, and one is undisturbed.
    assert taken == 2 * [*[1] * (PROBE_EVERY - 1), 3]


def test_a_probe_is_longer_than_a_snapshot_is_on_its_way() -> None:
    one = measured(0.001, 1.0, 4.5)
    longer = within_budget(0.1, one, seq=PROBE_EVERY - 1, before=5)
    assert longer == 5 + AFTER_STEPS + PROBE_STEPS
    assert within_budget(0.1, one, seq=PROBE_EVERY, before=longer) == 5


def test_the_dearest_host_decides() -> None:
    slow, fast = measured(0.030, 0.110, 0.5, 1e-4), measured(0.010, 0.100, 0.9)
    assert dearest([fast, Measured(), slow]) == measured(0.030, 0.100, 0.9, 1e-4)
    assert dearest([]) == dearest([Measured()]) == Measured()
    options = RankOptions(overhead=0.01)
    for order in ((slow, fast, Measured()), (Measured(), fast, slow)):
        assert interval_steps(options, reports(*order), seq=0, before=20) == 34


def test_steps_and_times_ask_for_no_more_than_they_say() -> None:
    steps, time = RankOptions(every_steps=7), RankOptions(every_s=1.0)
    assert first_interval(steps) == interval_steps(steps, {}, seq=0, before=3) == 7
    assert first_interval(time) == interval_steps(time, {}, seq=0, before=3) == 1
    said = {"h0": Report(seq=0, step_s=0.3), "h1": Report(seq=0, step_s=0.4), "h2": None}
    assert interval_steps(time, said, seq=0, before=3) == 3
