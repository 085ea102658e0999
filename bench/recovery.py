"""`recovery`: from a SIGKILL to the next finished step, beside a cold start of the same script.

The limit is that cold start: from when the ranks are started, the first time, to the first step
that all have finished, with the same cache of compiled programs. It has no agents and snapshot
processes to start. The peer is the same script with Orbax, in a plain restart loop that starts the
ranks again when one ends. In every round worlds are begun, struck once and ended, ours and the
peer's in turn; the first round fills the cache, and does not count.

    rank      a rank of two hosts, nobody waits to follow it (`--no-warm`)
    warm      the same, and processes wait that have imported JAX (the default)
    wrapped   the same, and the step is one that `jaxft.wrap` has made
    spare     one host of two is lost with all it has, and a third one takes its place
    shrink    one host of three is lost, and two go on
    restore   a rank of one host with more state: what `restore` takes, from the plan to the arrays

In `rank`, the snapshot process of a host is killed before: training goes on, and the figure is from
there to the next snapshot that is protected.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from bench.measure import Report
from bench.recovery_world import Struck, Trail, loop_s, struck
from bench.rows import Bound, Row, at_most, median, row
from bench.sizes import Sizes

SEEN_S = 0.2
RESTORE_S = 0.5
SNAPSHOTS = 3

# What comes one after the other, with the event by which it is over; up to `started` it is of the
# agents, after that of the ranks.
STAGES = {
    "seen": "fault",
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
    """Seconds of a round: the whole, each stage of it, and those of the cold start."""

    whole_s: float
    stages: dict[str, float]
    cold_s: float
    cold_stages: dict[str, float]
    restore_s: float
    protected_s: float


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The rows, a group for each way."""
    taken: dict[str, list[Taken]] = defaultdict(list)
    peers: list[float] = []
    rounds = sizes.slow_rounds + 1
    with tempfile.TemporaryDirectory(prefix="jaxft-bench-") as cache:
        for number in range(rounds):
            for name in sizes.recoveries:
                nbytes = sizes.state_bytes if name == "restore" else sizes.host_bytes
                one = _take(WAYS[name], nbytes, Path(cache))
                if number:
                    taken[name].append(one)
            peer_s = loop_s(WAYS["rank"].ranks, sizes.host_bytes, Path(cache))
            if number:
                peers.append(peer_s)
            report(number + 1, rounds, "recovery")
    peer_s = median(peers)
    return [one for name, found in taken.items() for one in _rows(name, found, peer_s)]


def _take(way: Way, nbytes: int, cache: Path) -> Taken:
    with struck(way.hosts, way.options, nbytes, way.script, cache) as world:
        trail = world.trail
        trail.until_steps(way.ranks, 1)
        started_s = max(float(one["t"]) for one in trail.all("rank_started", generation=1))
        cold_s = trail.first_s("step", way.ranks, 1) - started_s
        cold_stages = _stages(trail, started_s, way.ranks, 1, "begun")
        trail.wait("committed", SNAPSHOTS)
        protected_s = _lose_smp(world) if not way.is_warm and way.hosts > 1 else 0.0
        if way.is_warm:
            world.until_warm(way.ranks)
        # The last rank, and not the host whose agent has written the generation down.
        host = str(trail.all("generation_formed")[-1]["hosts"][-1])
        struck_s = world.kill(host, *way.strikes)
        ranks = way.ranks - (way.hosts == way.ranks and way.strikes == HOST)
        trail.until_steps(ranks, 2)
        return Taken(
            whole_s=trail.first_s("step", ranks, 2) - struck_s,
            stages=_stages(trail, struck_s, ranks, 2, "seen"),
            cold_s=cold_s,
            cold_stages=cold_stages,
            restore_s=max(
                float(one["restore_s"]) for one in trail.wait("restored", ranks, role="rank")
            ),
            protected_s=protected_s,
        )


def _lose_smp(world: Struck) -> float:
    """Seconds from the SIGKILL of a snapshot process to the next snapshot that is protected."""
    struck_s = world.kill("host1", "smp")
    steps = world.trail.all("step")[-1]["step"]
    found = world.trail.wait("committed", len(world.trail.all("committed")) + 1)
    assert world.trail.all("step")[-1]["step"] >= steps
    return float(found[-1]["t"]) - struck_s


def _stages(
    trail: Trail, began_s: float, ranks: int, generation: int, first: str
) -> dict[str, float]:
    """What each stage took, from the end of the one before, on the slowest rank or agent."""
    stages = {}
    names = list(STAGES)
    for name in names[names.index(first) :]:
        if name == "seen":
            (fault,) = trail.all("fault", generation=generation - 1)
            ended_s = float(fault["t"])
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
    bound_of = WAYS[name].bound
    rows = [
        row(
            f"recovery[{name}]",
            "s",
            median([one.whole_s for one in taken]),
            *([bound_of] if bound_of else []),
            peer=peer_s,
            limit=median([one.cold_s for one in taken]),
        )
    ]
    for stage in taken[0].stages:
        cold = [one.cold_stages[stage] for one in taken if stage in one.cold_stages]
        bounds = (
            [at_most(SEEN_S, "itself")]
            if stage == "seen" and "rank" in WAYS[name].strikes[:1]
            else []
        )
        figure = median([one.stages[stage] for one in taken])
        limit = median(cold) if cold else None
        rows.append(row(f"recovery[{name},{stage}]", "s", figure, *bounds, limit=limit))
    if name == "rank":
        figure = median([one.protected_s for one in taken])
        rows.append(row("recovery[smp]", "s", figure))
    return rows
