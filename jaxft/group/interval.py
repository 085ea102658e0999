"""How many steps lie between two snapshots: one pure decision of the root.

The outcome of snapshot k carries the interval from k + 1 to k + 2. `every=` is a number of steps, a
time, or a budget (`jaxft.Auto`), which is CheckFreq's idea (Mohan, Phanishayee, Chidambaram:
CheckFreq: Frequent, Fine-Grained DNN Checkpointing, FAST 2021).

Rules for a budget
- It is the smallest interval at which what a snapshot costs the training is within the budget, with
  the calls of `save` in between, and at which a snapshot is protected by the time the next one is
  due. The dearest host decides.
- Those calls come with every step, whatever the interval is: where they alone take more than half
  of the budget, the snapshots have the other half, and the interval is no longer than that wants.
- FIRST steps until a cost has been measured.
- It at most halves, or doubles and one more, from one snapshot to the next: a wrong figure does
  little harm, and an interval that was doubled by it is halved by the next.
- What a step takes can only be measured while no snapshot is on its way, nor has just been
  (AFTER_STEPS). One interval in PROBE_EVERY has PROBE_STEPS such steps; that costs nothing but a
  snapshot that comes a little later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from jaxft.group.messages import Measured, RankOptions, Report

FIRST = 10
PROBE_EVERY = 8
PROBE_STEPS = 2
AFTER_STEPS = 1

# A quotient that is an integer but for the last digits of its operands is that integer.
_ROUNDING = 1e-9


def first_interval(options: RankOptions) -> int:
    """The steps from snapshot 0 to 1, before anything is known."""
    if options.overhead > 0:
        return FIRST
    return 1 if options.every_s > 0 else max(1, options.every_steps)


def interval_steps(
    options: RankOptions, reports: Mapping[str, Report | None], *, seq: int, before: int
) -> int:
    """The steps from snapshot `seq` + 1 to `seq` + 2.

    Args:
        options: what the ranks want.
        reports: what the hosts said of snapshot `seq`, by name.
        before: the steps from snapshot `seq` to `seq` + 1.
    """
    known = [report for report in reports.values() if report is not None]
    if options.overhead > 0:
        measured = dearest(report.measured for report in known)
        return within_budget(options.overhead, measured, seq=seq, before=before)
    if options.every_s > 0:
        times = [report.step_s for report in known if report.step_s > 0]
        if not times:
            return 1
        return max(1, math.ceil(options.every_s / statistics.median_high(times)))
    return max(1, options.every_steps)


def dearest(several: Iterable[Measured]) -> Measured:
    """What bounds the interval most, of what was measured at several places."""
    known = [one for one in several if one.step_s > 0]
    if not known:
        return Measured()
    return Measured(
        cost_s=max(one.cost_s for one in known),
        protect_s=max(one.protect_s for one in known),
        step_s=min(one.step_s for one in known),
        call_s=max(one.call_s for one in known),
    )


def smallest(overhead: float, measured: Measured) -> int:
    """The smallest N from 1 for which (cost_s + N * call_s) / (N * step_s) <= overhead and
    N * step_s >= protect_s; and call_s counts for half of the budget at most."""
    budget_s = overhead * measured.step_s
    for_budget = measured.cost_s / (budget_s - min(measured.call_s, budget_s / 2))
    return max(1, _ceil(for_budget), _ceil(measured.protect_s / measured.step_s))


def within_budget(overhead: float, measured: Measured, *, seq: int, before: int) -> int:
    """`smallest`, with the rules above."""
    if measured.step_s <= 0:
        return before
    wanted = smallest(overhead, measured)
    if seq % PROBE_EVERY == PROBE_EVERY - 1:
        on_its_way = max(1, _ceil(measured.protect_s / measured.step_s))
        wanted = max(wanted, on_its_way + AFTER_STEPS + PROBE_STEPS)
    return max(1, before // 2, min(wanted, 2 * before + 1))


def _ceil(quotient: float) -> int:
    return math.ceil(quotient - _ROUNDING * max(1.0, quotient))
