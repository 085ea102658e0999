"""`wrapped_step`: a snapshot at every step through `jaxft.wrap`, against `save` and the bare step.

Four hosts train under the launcher. The same step is taken bare, after a call of `save`, and
wrapped, in turn, and each time until its outputs are there; the next one waits until the snapshot
is protected, so that no step is slowed by the snapshot before it. In a second world the devices
code. Only stated: on CPU devices the twin copies and codes within the step's program, on the
processor that the step wants, and does not overlap with it.
"""

from __future__ import annotations

from bench.measure import Report
from bench.protect import HOSTS
from bench.rows import Row, median, row
from bench.sizes import Sizes
from bench.world import World

WAYS = ("bare", "save", "wrap")
CODED = "coded"  # by the devices, in the wrapped step

# Three calls until there is a twin, and as many for slots to have their pages.
WARM_UP = 6


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """What the training thread spends beside the bare step, and the CPU time of a step."""
    wall: dict[str, list[float]] = {way: [] for way in (*WAYS, CODED)}
    cpu: dict[str, list[float]] = {way: [] for way in (*WAYS, CODED)}
    code, nbytes = f"{HOSTS - 1}+1", sizes.small_host_bytes
    with (
        World(HOSTS, code, nbytes) as hosts_code,
        World(HOSTS, code, nbytes, {"JAXFT_PARITY": "device"}) as devices_code,
    ):
        worlds = dict.fromkeys(WAYS, hosts_code) | {CODED: devices_code}
        hows = {way: way for way in WAYS} | {CODED: "wrap"}
        for way, world in worlds.items():
            world.all("take", steps=WARM_UP, how=hows[way])
        for world, who in ((hosts_code, "host"), (devices_code, "device")):
            assert all(world.all("has_twin")), f"a rank runs no twin:\n{world.log()}"
            assert set(world.all("coded_by")) == {who}, world.log()
        for number in range(sizes.rounds):
            for way, world in worlds.items():
                before_s = world.cpu_s()
                hosts = world.all("take", steps=sizes.train_steps, how=hows[way])
                cpu[way].append((world.cpu_s() - before_s) / sizes.train_steps)
                wall[way].append(median([one for host in hosts for one in host]))
            report(number + 1, sizes.rounds, "wrapped step")
    used = {way: median(cpu[way]) for way in cpu}
    stall = {way: _beside(wall, way) for way in wall}
    bare_s = used["bare"]
    return [
        row("wrapped_step[stall]", "ms", stall["wrap"], peer=stall["save"]),
        row("wrapped_step[cpu]", "s", used["wrap"], peer=used["save"], limit=bare_s),
        row("wrapped_step[device parity, stall]", "ms", stall[CODED], peer=stall["wrap"]),
        row("wrapped_step[device parity, cpu]", "s", used[CODED], peer=used["wrap"], limit=bare_s),
    ]


def _beside(wall: dict[str, list[float]], way: str) -> float:
    """Milliseconds that a step takes longer than the bare one of the same round."""
    return 1e3 * median([one - bare for one, bare in zip(wall[way], wall["bare"], strict=True)])
