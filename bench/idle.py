"""`idle`: what processes that have nothing to do use of a core, at the most of all hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.measure import Report, cpu_s
from bench.protect import HOSTS, warm_up
from bench.rows import Row, at_most, row
from bench.sizes import Sizes
from bench.world import World

PERCENT_MAX = 0.5
SETTLE_S = 1.0


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """A row for the snapshot processes and one for the agents."""
    with World(HOSTS, f"{HOSTS - 1}+1", sizes.small_host_bytes) as world:
        warm_up(world)
        time.sleep(min(SETTLE_S, sizes.idle_s))
        before = {role: _used(world.pids(role)) for role in ("smp", "agent")}
        began_s = time.monotonic()
        time.sleep(sizes.idle_s)
        after = {role: _used(world.pids(role)) for role in before}
        passed_s = time.monotonic() - began_s
        report(1, 1, "idle")
    rows = []
    for role, used in before.items():
        shares = [
            100 * (late - early) / passed_s for early, late in zip(used, after[role], strict=True)
        ]
        rows.append(row(f"idle[{role}]", "%", max(shares), at_most(PERCENT_MAX, "itself")))
    return rows


def _used(pids: Sequence[int]) -> list[float]:
    return [cpu_s(pid) for pid in pids]
