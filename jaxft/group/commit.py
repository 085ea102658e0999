"""Whether a snapshot is committed: one pure decision of the root.

Rules
- Committed needs staged and parity from every host, and one step and one plan digest among them.
- One failure, or two hosts that disagree, aborts it. So does a host whose SMP is silent while the
  others have begun: nobody else's deadline decides.
- An aborted snapshot counts as taken at the last of the steps that were reported for it: no rank
  that had begun it is past the next one, which is due an interval later.
- Nothing is decided on snapshot k before every host knows the outcome of k - 1: a host learns of
  outcomes one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxft.group.messages import Report


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
    last = max(report.step for report in begun.values())
    for host, report in begun.items():
        if report.failure:
            return Decision(False, f"host {host}: {report.failure}", last)
    (first, one), *others = begun.items()
    for host, report in others:
        if report.step != one.step:
            return Decision(
                False,
                f"ranks disagree: {first} saved step {one.step}, {host} saved step {report.step}",
                last,
            )
        if report.plan != one.plan:
            return Decision(
                False,
                f"ranks disagree: the tree or its shardings on {host} are not those on {first}",
                last,
            )
    for host, silence_s in silent.items():
        if host in reports:
            return Decision(
                False, f"host {host}: its SMP has not answered for {silence_s:.1f} s", last
            )
    missing = [host for host in reports if host not in begun or not begun[host].staged]
    if missing:
        return Decision(None, f"not staged yet on {', '.join(missing)}", one.step)
    uncoded = [host for host, report in begun.items() if not report.coded]
    if uncoded:
        return Decision(None, f"parity is not done yet on {', '.join(uncoded)}", one.step)
    return Decision(True, "staged and coded everywhere", one.step)
