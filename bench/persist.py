"""`persist`: a snapshot goes from the hosts' memory to storage, beside training.

Two hosts write the same state to tmpfs, with jaxft's helpers and with Orbax from the ranks, in
turn.

`persist` is the time from the commit of the snapshot to that of the checkpoint: helpers were
started before, as they are where checkpoints are far from each other. `persist[stall]` is how long
the call of `save` held up training whose snapshot was persisted; its peer is how long Orbax's
asynchronous save does. `persist[memory]` is what a host took beyond its snapshots, at most, and
`persist[left]` what of it was still taken afterwards.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from bench.baseline_orbax import TMPFS
from bench.measure import Report
from bench.memory import Peaks, private_bytes, used_by
from bench.processes import below, until, variables
from bench.rows import Row, at_most, median, row
from bench.sizes import MIB, Sizes
from bench.world import World

HOSTS = 2
SEGMENTS_MAX = 2.5
MORE_BYTES_MAX = 150 * MIB
LEFT_MIB_MAX = 16.0
END_S = 30.0


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The four rows."""
    ours: list[dict[str, float]] = []
    peers: list[dict[str, float]] = []
    peak = left = 0.0
    directory = Path(tempfile.mkdtemp(prefix="jaxft-bench-", dir=TMPFS))
    environment = {"BENCH_PERSIST": str(directory / "ours")}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        world = stack.enter_context(World(HOSTS, "1+1", sizes.host_bytes, environment))
        world.all("open_orbax", directory=str(directory / "orbax"))
        for number in range(sizes.slow_rounds + 1):
            world.all("protect")
            base = sum(used_by(world))
            with Peaks(lambda: [sum(used_by(world)) + _helpers(world)]) as peaks:
                answers = world.all("persist")
                # Those of the next one may have been started since.
                written = max(int(one["number"]) for one in answers)
                _await_end_of(written, world)
                peak = max(peak, peaks.take()[0] - base)
            left = max(left, sum(used_by(world)) - base)
            peer = _whole(world.all("orbax"))
            if number:  # the first round is thrown away
                ours.append(_whole(answers))
                peers.append(peer)
            report(number + 1, sizes.slow_rounds + 1, "persist")
    limit = (SEGMENTS_MAX * sizes.host_bytes + MORE_BYTES_MAX) / MIB
    return [
        row(
            "persist",
            "s",
            median([one["whole"] for one in ours]),
            at_most(1.5, "peer"),
            peer=median([one["whole"] for one in peers]),
        ),
        row(
            "persist[stall]",
            "ms",
            1e3 * median([one["stall"] for one in ours]),
            at_most(1 / 50, "peer"),
            peer=1e3 * median([one["stall"] for one in peers]),
        ),
        row("persist[memory]", "MiB", peak / HOSTS / MIB, at_most(1.0, "limit"), limit=limit),
        row("persist[left]", "MiB", left / HOSTS / MIB, at_most(LEFT_MIB_MAX, "itself")),
    ]


def _whole(answers: list[dict[str, float]]) -> dict[str, float]:
    """From the first rank's begin to the last one's end, and the longest stall."""
    began_s = min(one["began"] for one in answers)
    ended_s = max(one["protected"] for one in answers)
    return {"whole": ended_s - began_s, "stall": max(one["stall"] for one in answers)}


def _await_end_of(persist: int, world: World) -> None:
    """Waits until its helpers are gone."""
    until(lambda: persist not in _running(world).values(), "the end of the helpers", END_S)


def _running(world: World) -> dict[int, int]:
    """The helpers that there are, and which persist each is of."""
    found = {}
    for pid in below(world.directory):
        number = variables(pid).get("JAXFT_PERSIST")
        if number is not None:
            found[pid] = int(number)
    return found


def _helpers(world: World) -> int:
    """Bytes that the helpers have for themselves."""
    total = 0
    for pid in _running(world):
        with contextlib.suppress(OSError):
            total += private_bytes(pid)
    return total
