"""`training_overhead`: a training run that saves at every step, against one that does not.

Four hosts train; each step computes for longer than it touches the state. Only stated: how often a
run saves is its own choice. Orbax's asynchronous save at every step is the peer.
"""

from __future__ import annotations

from bench.measure import Report
from bench.protect import HOSTS, shared_tmpfs
from bench.rows import Row, median, row
from bench.sizes import Sizes
from bench.world import World

WAYS = ("none", "jaxft", "orbax")


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """Percent of wall and CPU time that saving adds."""
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    with (
        World(HOSTS, f"{HOSTS - 1}+1", sizes.small_host_bytes) as world,
        shared_tmpfs() as directory,
    ):
        world.all("open_orbax", directory=str(directory))
        for way in WAYS:
            world.all("train", steps=1, how=way)
        for number in range(sizes.slow_rounds):
            for way in WAYS:
                before_s = world.cpu_s()
                spans = world.all("train", steps=sizes.train_steps, how=way)
                cpu[way].append(world.cpu_s() - before_s)
                ended_s = max(one["ended"] for one in spans)
                wall[way].append(ended_s - min(one["began"] for one in spans))
            report(number + 1, sizes.slow_rounds, "training")
    return [_row("wall", wall), _row("cpu", cpu)]


def _row(what: str, taken: dict[str, list[float]]) -> Row:
    none, ours, peer = (median(taken[way]) for way in WAYS)
    extra, extra_peer = (100 * (one / none - 1) for one in (ours, peer))
    return row(f"training_overhead[{what}]", "%", extra, peer=extra_peer)
