"""Hosts that come and go: how long one waits that the world has lost before, with the reason.

Each time a member is lost, all ranks are restarted. So one that is lost again and again is taken in
again later each time.

Rules
- A host that was lost once is taken in at once. Lost twice within the window, it waits `flap_s`
  since it was lost, then twice as long, ..., FLAP_S_MAX at most.
- While it waits the world goes on without it, and lends its memory, as a spare's. A world of less
  than MIN hosts takes it in all the same: who was lost least often comes first.
- Nobody waits who was told to end, or lost with a rank: that is a failure (`restarts`). Nor who has
  killed its ranks itself, for want of a store: others that reached it would have found the lease
  gone long before, so it was away for them as well.
- How long it waits is counted by what an observer has seen itself, or by the clocks of the hosts
  that wrote the losses down, whichever is longer. So a wrong clock keeps nobody out for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxft.group.records import Fault, View
from jaxft.group.restarts import RestartPolicy

FLAP_S_MAX = 600.0
FLAPS = frozenset({"host_lost", "memory_lost", "agent_restarted", "smp_moved", "unreachable"})


class BackedOff(NamedTuple):
    """A host that waits, and for how much longer; it was lost `times` times within the window."""

    times: int
    left_s: float
    reason: str


class Flapping:
    """What one observer remembers of hosts that were lost.

    Args:
        policy: of the job.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._seen: dict[str, tuple[int, float]] = {}

    def backed_off(self, view: View, now_s: float) -> dict[str, BackedOff]:
        """The hosts that have to wait now, by name.

        Args:
            view: what is in the store.
            now_s: the observer's monotonic time.
        """
        losses = self._losses(view)
        self._seen = {host: one for host, one in self._seen.items() if host in losses}
        newest_s = max((fault.at_s for fault in view.faults.values()), default=0.0)
        found = {}
        for host, faults in losses.items():
            last = faults[-1]
            seen = self._seen.get(host)
            if seen is None or seen[0] != last.generation:
                seen = self._seen[host] = (last.generation, now_s)
            wait_s = wait_of(len(faults), self._policy)
            left_s = wait_s - max(now_s - seen[1], newest_s - last.at_s)
            if left_s > 0:
                reason = (
                    f"{host} was lost {len(faults)} times lately, the last time in generation "
                    f"{last.generation}, so it waits {wait_s:g} s before it is taken in again"
                )
                found[host] = BackedOff(len(faults), left_s, reason)
        return found

    def _losses(self, view: View) -> Mapping[str, list[Fault]]:
        """Those within the window, by host, the oldest first."""
        newest_s = max((fault.at_s for fault in view.faults.values()), default=0.0)
        found: dict[str, list[Fault]] = {}
        for number in sorted(view.faults):
            fault = view.faults[number]
            if fault.kind in FLAPS and self._policy.is_within(fault.at_s, newest_s):
                found.setdefault(fault.host, []).append(fault)
        return found


def wait_of(count: int, policy: RestartPolicy) -> float:
    """How long a host waits that was lost so often, in seconds."""
    if count < 2 or policy.flap_s == 0:
        return 0.0
    return float(min(FLAP_S_MAX, policy.flap_s * 2.0 ** (count - 2)))


def needed(waiting: Mapping[str, BackedOff], missing: int) -> set[str]:
    """Those that are taken in all the same, where so many hosts are missing."""
    ranked = sorted(waiting, key=lambda host: (waiting[host].times, waiting[host].left_s, host))
    return set(ranked[: max(0, missing)])
