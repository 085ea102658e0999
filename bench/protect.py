"""`protected` and `cpu_per_gib`: four hosts, from `save` until any loss can be borne.

Ours is the whole way: copied out of the devices' buffers, checksummed, pulled by the peers,
checked, coded, reported and committed. The limit is the reference method, which only codes; Orbax
writes the same bytes to tmpfs, from the same processes.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.baseline_coding import CodingHosts
from bench.baseline_orbax import TMPFS
from bench.measure import Report
from bench.rows import Row, at_most, median, row
from bench.sizes import GIB, Sizes
from bench.world import World

CODES = ((3, 1), (2, 2))
HOSTS = 4


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """Two rows for each code."""
    rows = []
    for k, m in CODES:
        rows += _code(k, m, sizes, report)
    return rows


def _code(k: int, m: int, sizes: Sizes, report: Report) -> list[Row]:
    ours, peers, limits, ours_cpu, limits_cpu = [], [], [], [], []
    gib = HOSTS * sizes.host_bytes / GIB
    with (
        World(HOSTS, f"{k}+{m}", sizes.host_bytes) as world,
        CodingHosts(k, m, sizes.host_bytes) as reference,
        shared_tmpfs() as directory,
    ):
        world.all("open_orbax", directory=str(directory))
        warm_up(world)
        reference.protect()
        world.orbax_s()
        for number in range(sizes.rounds):
            world.all("step")
            before_s = world.cpu_s()
            ours.append(world.protect_s())
            ours_cpu.append((world.cpu_s() - before_s) / gib)
            coded = reference.protect()
            limits.append(coded.wall_s)
            limits_cpu.append(coded.cpu_s / gib)
            if number < sizes.slow_rounds:
                peers.append(world.orbax_s())
            report(number + 1, sizes.rounds, f"protect {k}+{m}")
    bounds = (at_most(1.3, "limit"), at_most(1 / 5, "peer"))
    return [
        row(
            f"protected[{k}+{m}]",
            "s",
            median(ours),
            *bounds,
            peer=median(peers),
            limit=median(limits),
        ),
        row(
            f"cpu_per_gib[{k}+{m}]",
            "s",
            median(ours_cpu),
            at_most(1.3, "limit"),
            limit=median(limits_cpu),
        ),
    ]


def warm_up(world: World) -> None:
    """Both slots get their pages, and programs are compiled."""
    for _ in range(3):
        world.all("step")
        world.protect_s()


@contextlib.contextmanager
def shared_tmpfs() -> Iterator[Path]:
    """A directory in memory for all ranks, taken away at the end."""
    directory = Path(tempfile.mkdtemp(prefix="jaxft-bench-", dir=TMPFS))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
