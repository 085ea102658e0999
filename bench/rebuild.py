"""`rebuild`: a host is lost with its memory, and comes back empty; its bytes come from its peers.

The figure is the time from the plan to the arrays on the devices of the host that was lost, while
the others restore their own. The limit is what the reference method takes on one host to compute as
many bytes from as many peers, with nobody else at work.
"""

from __future__ import annotations

from bench.baseline_coding import CodingHosts
from bench.measure import Report
from bench.protect import HOSTS, warm_up
from bench.rows import Row, at_most, median, row
from bench.sizes import Sizes
from bench.world import World

LOST = HOSTS - 1


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The row, from one loss a round."""
    ours, limits = [], []
    k, m = HOSTS - 1, 1
    with (
        World(HOSTS, f"{k}+{m}", sizes.host_bytes) as world,
        CodingHosts(k, m, sizes.host_bytes) as reference,
    ):
        reference.rebuild()
        for number in range(sizes.slow_rounds):
            warm_up(world)
            world.lose(LOST)
            restored = world.meet()[LOST]["restored"]
            assert restored["source"] == "rebuilt", restored
            ours.append(restored["s"])
            limits.append(reference.rebuild().wall_s)
            report(number + 1, sizes.slow_rounds, "rebuild")
    bound = at_most(1.5, "limit")
    return [row(f"rebuild[{k}+{m}]", "s", median(ours), bound, limit=median(limits))]
