"""`wrapped_step`: a snapshot at every step through `jaxft.wrap`, against `save` and the bare step.

Four hosts train under the launcher. The same step is taken bare, after a call of `save`, and
wrapped, in turn, and each time until its outputs are there; the next one waits until the snapshot
is protected, so that no step is slowed by the snapshot before it. Only stated: on CPU devices the
twin copies within the step's program, and does not overlap with it.
"""

from __future__ import annotations

from bench.measure import Report
from bench.protect import HOSTS
from bench.rows import Row, median, row
from bench.sizes import Sizes
from bench.world import World

WAYS = ("bare", "save", "wrap")

# Three calls until there is a twin, and as many for slots to have their pages.
WARM_UP = 6


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """What the training thread spends beside the bare step, and the CPU time of a step."""
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    with World(HOSTS, f"{HOSTS - 1}+1", sizes.small_host_bytes) as world:
        for way in WAYS:
            world.all("take", steps=WARM_UP, how=way)
        assert all(world.all("has_twin")), f"a rank runs no twin:\n{world.log()}"
        for number in range(sizes.rounds):
            for way in WAYS:
                before_s = world.cpu_s()
                hosts = world.all("take", steps=sizes.train_steps, how=way)
                cpu[way].append((world.cpu_s() - before_s) / sizes.train_steps)
                wall[way].append(median([one for host in hosts for one in host]))
            report(number + 1, sizes.rounds, "wrapped step")
    bare, saved, wrapped = (median(cpu[way]) for way in WAYS)
    return [
        row("wrapped_step[stall]", "ms", _beside(wall, "wrap"), peer=_beside(wall, "save")),
        row("wrapped_step[cpu]", "s", wrapped, peer=saved, limit=bare),
    ]


def _beside(wall: dict[str, list[float]], way: str) -> float:
    """Milliseconds that a step takes longer than the bare one of the same round."""
    return 1e3 * median([one - bare for one, bare in zip(wall[way], wall["bare"], strict=True)])
