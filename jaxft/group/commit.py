"""Whether a snapshot is committed: one pure decision of the root.

Rules
- Committed needs staged and parity from every host, and one step and one plan digest among them.
- One failure, or two hosts that disagree, aborts it. So does a host whose SMP is silent while the
  others have begun: nobody else's deadline decides.
- Nothing is decided on snapshot k before every host knows the outcome of k - 1: a host learns of
  outcomes one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxft.group.messages import RankOptions, Report


class Decision(NamedTuple):
    """None while it is open; the reason says what is waited for, or why it was aborted."""

    ok: bool | None
    reason: str
    step: int = 0


def decide(
    seq: int,
    reports: Mapping[str, Report | None],
    silent: Mapping[str, float],
) -> Decision:
    """Decides on snapshot `seq`.

    Args:
        reports: of every host of the world by name; None or another seq: it has not begun.
        silent: hosts that have not been heard for too long, and for how many seconds.
    """
    begun = {
        host: report for host, report in reports.items() if report is not None and report.seq == seq
    }
    if not begun:
        return Decision(None, f"snapshot {seq} has not begun")
    for host, report in begun.items():
        if report.failure:
            return Decision(False, f"host {host}: {report.failure}", report.step)
    (first, one), *others = begun.items()
    for host, report in others:
        if report.step != one.step:
            return Decision(
                False,
                f"ranks disagree: {first} saved step {one.step}, {host} saved step {report.step}",
                one.step,
            )
        if report.plan != one.plan:
            return Decision(
                False,
                f"ranks disagree: the tree or its shardings on {host} are not those on {first}",
                one.step,
            )
    for host, silence_s in silent.items():
        if host in reports:
            return Decision(
                False, f"host {host}: its SMP has not answered for {silence_s:.1f} s", one.step
            )
    missing = [host for host in reports if host not in begun or not begun[host].staged]
    if missing:
        return Decision(None, f"not staged yet on {', '.join(missing)}", one.step)
    uncoded = [host for host, report in begun.items() if not report.coded]
    if uncoded:
        return Decision(None, f"parity is not done yet on {', '.join(uncoded)}", one.step)
    return Decision(True, "staged and coded everywhere", one.step)


def interval_steps(options: RankOptions | None, reports: Mapping[str, Report | None]) -> int:
    """How many steps lie between two snapshots, from what the ranks want and how fast they are."""
    if options is None:
        return 1
    if options.every_s > 0:
        times = sorted(report.step_s for report in reports.values() if report and report.step_s > 0)
        if not times:
            return 1
        return max(1, math.ceil(options.every_s / times[len(times) // 2]))
    return max(1, options.every_steps)
