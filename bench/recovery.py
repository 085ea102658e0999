"""`recovery`: from a SIGKILL to the next finished step, beside a cold start of the same script.

The limit is that cold start: from when the ranks are started, the first time, to the first step
that all have finished, with the same cache of compiled programs. It has no agents and snapshot
processes to start. The peer is the same script with Orbax, in a plain restart loop that starts the
ranks again when one ends. In every round each world is begun, struck once and ended, ours and the
peer's in turn; one before that fills the cache.

    rank      a rank of two hosts, nobody waits to follow it (`--no-warm`)
    warm      the same, and processes wait that have imported JAX (the default)
    wrapped   the same, and the step is one that `jaxft.wrap` has made
    spare     one host of two is lost with all it has, and a third one takes its place
    shrink    one host of three is lost, and two go on
    restore   a rank of one host with more state: what `restore` takes, from the plan to the arrays
    smp       in the world of `rank`, before that: a snapshot process; training goes on

`recovery[WAY,STAGE]` is what one stage of it took, from the end of the stage before, on the slowest
agent or rank; its limit is the same stage of the cold start.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from bench.measure import Report
from bench.processes import until
from bench.recovery_world import WAIT_S, Struck, Trail, loop_s, struck
from bench.rows import Bound, Row, at_most, median, row
from bench.sizes import Sizes

DETECTION_S = 0.2
RESTORE_S = 0.5
SNAPSHOTS = 3

# What comes one after the other, with the event by which it is over; up to `started` it is of the
# agents, after that of the ranks.
STAGES = {
    "detection": "fault",
    "killed": "ranks_killed",
    "started": "rank_started",
    "begun": "begun",
    "imported": "imported",
    "met": "met",
    "built": "built",
    "restored": "restored",
    "step": "step",
}


class Way(NamedTuple):
    """How a world is made, and what is struck."""

    hosts: int
    options: tuple[str, ...]
    strikes: tuple[str, ...]
    script: str = "jaxft"
    ranks: int = 2
    bound: Bound | None = None

    @property
    def is_warm(self) -> bool:
        return "--no-warm" not in self.options


PAIR = ("--code", "1+1", "--no-respawn")
HOST = ("agent", "smp", "rank")
WAYS = {
    "rank": Way(2, ("--no-warm", *PAIR), ("rank",), bound=at_most(1.3, "limit")),
    "warm": Way(2, PAIR, ("rank",), bound=at_most(1.0, "limit")),
    "wrapped": Way(2, PAIR, ("rank",), "wrapped", bound=at_most(0.7, "limit")),
    "spare": Way(3, (*PAIR, "--hosts", "2"), HOST),
    "shrink": Way(3, (*PAIR, "--hosts", "2:3"), HOST, ranks=3),
    "restore": Way(1, ("--no-warm",), ("rank",), ranks=1),
}


class Taken(NamedTuple):
    """Seconds of a round: the whole, each stage, and those of the cold start. `smp` is from the
    end of a snapshot process to the next step, and to the next protected snapshot."""

    whole_s: float
    stages: dict[str, float]
    cold_s: float
    cold_stages: dict[str, float]
    restore_s: float
    smp: tuple[float, float] | None


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The rows, a group for each way."""
    taken: dict[str, list[Taken]] = defaultdict(list)
    peers: list[float] = []
    rounds = sizes.slow_rounds
    with tempfile.TemporaryDirectory(prefix="jaxft-bench-") as directory:
        cache = Path(directory)
        if rounds > 1:
            _take(WAYS["rank"], sizes.host_bytes, cache)
        for number in range(rounds):
            for name in sizes.recoveries:
                nbytes = sizes.state_bytes if name == "restore" else sizes.host_bytes
                taken[name].append(_take(WAYS[name], nbytes, cache))
            peers.append(loop_s(WAYS["rank"].ranks, sizes.host_bytes * WAYS["rank"].ranks, cache))
            report(number + 1, rounds, "recovery")
    peer_s = median(peers)
    return [one for name, found in taken.items() for one in _rows(name, found, peer_s)]


def _take(way: Way, nbytes: int, cache: Path) -> Taken:
    """Begins a world with so many bytes a rank, strikes it, and ends it when it trains again."""
    with struck(way.hosts, way.options, nbytes * way.ranks, way.script, cache) as world:
        trail = world.trail
        trail.until_steps(way.ranks, 1)
        started_s = max(float(one["t"]) for one in trail.all("rank_started", generation=1))
        cold_s = trail.first_s("step", way.ranks, 1) - started_s
        cold_stages = _stages(trail, started_s, way.ranks, 1, "begun")
        trail.wait("committed", SNAPSHOTS)
        smp = _lose_smp(world, way.ranks) if way is WAYS["rank"] else None
        if way.is_warm:
            world.until_warm(way.hosts)
        # The last rank, and not the host whose agent has written the generation down.
        host = str(trail.all("generation_formed")[-1]["hosts"][-1])
        struck_s = world.kill(host, *way.strikes)
        ranks = way.ranks - (way.hosts == way.ranks and way.strikes == HOST)
        trail.until_steps(ranks, 2)
        return Taken(
            whole_s=trail.first_s("step", ranks, 2) - struck_s,
            stages=_stages(trail, struck_s, ranks, 2, "detection"),
            cold_s=cold_s,
            cold_stages=cold_stages,
            restore_s=max(
                float(one["restore_s"]) for one in trail.wait("restored", ranks, role="rank")
            ),
            smp=smp,
        )


def _lose_smp(world: Struck, ranks: int) -> tuple[float, float]:
    """Seconds from the SIGKILL of a snapshot process to the next step that all have finished, and
    to the next snapshot that is protected."""
    trail = world.trail
    struck_s = world.kill("host1", "smp")

    def after(event: str) -> list[float]:
        return [float(one["t"]) for one in trail.all(event) if float(one["t"]) > struck_s]

    until(lambda: after("committed") and len(after("step")) >= 2 * ranks, "training", WAIT_S)
    return after("step")[2 * ranks - 1] - struck_s, after("committed")[0] - struck_s


def _stages(
    trail: Trail, began_s: float, ranks: int, generation: int, first: str
) -> dict[str, float]:
    """What each stage took, from the end of the one before, on the slowest rank or agent."""
    stages = {}
    names = list(STAGES)
    for name in names[names.index(first) :]:
        if name == "detection":
            found = trail.all("fault", generation=generation - 1)
            ended_s = min(float(one["t"]) for one in found)
        elif name == "killed":
            found = trail.all("ranks_killed", generation=generation - 1)
            ended_s = max([began_s, *(float(one["t"]) for one in found)])
        elif name == "started":
            found = trail.all("rank_started", generation=generation)
            ended_s = max(float(one["t"]) for one in found)
        else:
            ended_s = trail.first_s(STAGES[name], ranks, generation)
        stages[name], began_s = ended_s - began_s, ended_s
    return stages


def _rows(name: str, taken: list[Taken], peer_s: float) -> list[Row]:
    """The rows of a way."""
    if name == "restore":
        bound = at_most(RESTORE_S, "itself")
        return [row("recovery[restore]", "s", median([one.restore_s for one in taken]), bound)]
    whole_s = median([one.whole_s for one in taken])
    cold_s = median([one.cold_s for one in taken])
    bounds = [one for one in [WAYS[name].bound] if one is not None]
    rows = [row(f"recovery[{name}]", "s", whole_s, *bounds, peer=peer_s, limit=cold_s)]
    for stage in taken[0].stages:
        figure = median([one.stages[stage] for one in taken])
        cold = [one.cold_stages[stage] for one in taken if stage in one.cold_stages]
        is_of_a_rank = WAYS[name].strikes == ("rank",)
        bounds = [at_most(DETECTION_S, "itself")] if is_of_a_rank and stage == "detection" else []
        limit = median(cold) if cold else None
        rows.append(row(f"recovery[{name},{stage}]", "s", figure, *bounds, limit=limit))
    smp = [one.smp for one in taken if one.smp is not None]
    for at, what in enumerate(("smp", "smp,protected") if smp else ()):
        rows.append(row(f"recovery[{what}]", "s", median([one[at] for one in smp])))
    return rows
