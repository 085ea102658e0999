"""`hosts`: what a protected GiB costs in CPU seconds, in worlds of more and more hosts.

Groups stay small however large the world is, so the cost must not grow with it. Each row is held
against the mean of all.
"""

from __future__ import annotations

from bench.measure import Report
from bench.protect import warm_up
from bench.rows import Row, at_least, at_most, median, row
from bench.sizes import GIB, Sizes
from bench.world import World

CODE = (3, 1)


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """A row for each size of the world."""
    taken: dict[int, float] = {}
    for number, count in enumerate(sizes.hosts):
        taken[count] = _cpu_per_gib(count, sizes)
        report(number + 1, len(sizes.hosts), "hosts")
    mean = sum(taken.values()) / len(taken)
    bounds = (at_most(1.2, "limit"), at_least(0.8, "limit"))
    return [row(f"hosts[{n}]", "s", cpu, *bounds, limit=mean) for n, cpu in taken.items()]


def _cpu_per_gib(count: int, sizes: Sizes) -> float:
    k, m = CODE
    k = min(k, count - m)
    gib = count * sizes.small_host_bytes / GIB
    found = []
    with World(count, f"{k}+{m}", sizes.small_host_bytes) as world:
        warm_up(world)
        for _ in range(sizes.rounds):
            world.all("step")
            before_s = world.cpu_s()
            world.protect_s()
            found.append((world.cpu_s() - before_s) / gib)
    return median(found)
