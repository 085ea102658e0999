"""`restore_own`: the whole state from the host's own memory onto the devices.

Each round is what a script does that was started again: a new Snapshotter, and `restore`. The
limit copies as many bytes as the devices receive (replicas counted) into huge pages that the kernel
still has to give. Orbax restores the same state from tmpfs, which is its page cache.

`restore_own` is the time from the plan to the arrays, `restore_own[call]` the whole call, with what
all processes have to agree on before. `restore_own[donated]` is the share of restored bytes whose
memory the first step takes over, once the snapshot that `restore` takes has let go of them.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

from bench.baseline_orbax import OrbaxPeer
from bench.lone import WAIT_S, open_snapshotter, own_run_dir
from bench.measure import Bytes, Report, copy_all_into_fresh, settle, touched
from bench.processes import until
from bench.rows import Row, at_least, at_most, median, row
from bench.sizes import Sizes
from bench.states import four_devices, large_state, pointers, ready, received_bytes, step, structs

DONATED_MIN = 0.99

# What is in memory at once: states, Orbax's files and copies, slots, and what is copied.
SETTLED_STATES = 8


class Taken(NamedTuple):
    """One restore: its part from plan to arrays, the whole call, and the share of donated bytes."""

    data_s: float
    call_s: float
    donated: float


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The three rows."""
    settle(SETTLED_STATES * sizes.state_bytes)
    state = large_state(four_devices(), sizes.state_bytes)
    nbytes, like = received_bytes(state), structs(state)
    taken, copies, peers = [], [], []
    with contextlib.closing(OrbaxPeer()) as peer, own_run_dir():
        peer.save(state)
        with open_snapshotter(fresh=True) as snapshotter:
            snapshotter.save(1, state).protected.result(WAIT_S)
            snapshotter.close(failing=True)
        del state
        source = touched(nbytes)
        for number in range(sizes.rounds + 1):
            one = _restore(like)
            copied_s = copy_all_into_fresh(_pieces(source))
            restored_s = peer.restore(like) if number <= sizes.slow_rounds else None
            if number:  # the first round is thrown away
                taken.append(one)
                copies.append(copied_s)
                peers += [] if restored_s is None else [restored_s]
            report(number, sizes.rounds, "restore")
    limit_ms, peer_ms = 1e3 * median(copies), 1e3 * median(peers)
    third = at_most(1 / 3, "peer")
    return [
        row(
            "restore_own",
            "ms",
            1e3 * median([one.data_s for one in taken]),
            at_most(1.0, "limit"),
            third,
            peer=peer_ms,
            limit=limit_ms,
        ),
        row(
            "restore_own[call]",
            "ms",
            1e3 * median([one.call_s for one in taken]),
            third,
            peer=peer_ms,
        ),
        row(
            "restore_own[donated]",
            "",
            min(one.donated for one in taken),
            at_least(DONATED_MIN, "itself"),
        ),
    ]


def _restore(like: Any) -> Taken:
    """Restores in a new generation, and takes the first step from there."""
    snapshotter = open_snapshotter()
    began_s = time.perf_counter()
    restored = snapshotter.restore(like)
    assert restored is not None, "memory has a snapshot"
    data_s, number, state = restored.seconds, restored.step, ready(restored.state)
    call_s = time.perf_counter() - began_s
    assert restored.source == "own", restored.source
    del restored  # or the state would have another holder, and could not be donated
    until(lambda: snapshotter.latest == number, "restore's own snapshot", WAIT_S)
    before = pointers(state)
    state = ready(step(state))
    after = pointers(state)
    taken_over = sum(nbytes for where, nbytes in before.items() if where in after)
    donated = taken_over / sum(before.values())
    snapshotter.close(failing=True)
    return Taken(data_s, call_s, donated)


def _pieces(source: Bytes) -> list[Bytes]:
    """As the devices' buffers are: a few MiB each."""
    size = 4 << 20
    return [source[at : at + size] for at in range(0, source.size, size)]
