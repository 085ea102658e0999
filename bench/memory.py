"""`memory`: what many snapshots take of a host's memory beyond the state itself.

Counted are the private pages of the snapshot process, all of them; the pages of its snapshot
memory (not that of its peers on this machine, which it maps now and then); and the private pages of
the rank, less what it had before its first snapshot.

On CPU devices the state lies in host memory, and while a snapshot is copied the step that was to
overwrite it writes a second one. That is the devices' memory, so the rank has made such steps
before its first snapshot. What they take is stated. The C library is told to give large blocks
back at once: else it keeps several times as much as is in use, with snapshots and without.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.measure import Report
from bench.protect import HOSTS
from bench.rows import Row, at_most, row
from bench.sizes import MIB, Sizes
from bench.world import World

SLOTS = 2
SAMPLE_S = 0.02
GROWTH_MAX = 1.02
EARLY = 10
BATCHES = 10

# See mallopt(3): a threshold that is set does not grow.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}

# Memory for a restore, which is named after its purpose and not after a host.
_WORK = re.compile(r"/memfd:jaxft-(fetch|rebuilt)\b")


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The peak, and how it grew from the tenth snapshot on."""
    k, m = HOSTS - 1, 1
    with World(HOSTS, f"{k}+{m}", sizes.small_host_bytes, _GIVE_BACK) as world:
        world.all("step")
        alone = _ranks(world)
        with Peaks(lambda: _ranks(world)) as peaks:
            world.all("hold_many", count=EARLY)
            before = peaks.take()
        with Peaks(lambda: used_by(world)) as peaks:
            world.all("save_many", count=EARLY)
            early = peaks.take()
            batch = max(1, (sizes.memory_saves - EARLY) // BATCHES)
            late: list[list[int]] = []
            for number in range(BATCHES):
                world.all("save_many", count=batch)
                late.append(peaks.take())
                report(number + 1, BATCHES, "memory")
    extra = max(
        peak - base for one in (early, *late) for peak, base in zip(one, before, strict=True)
    )
    held = max(peak - base for peak, base in zip(before, alone, strict=True))
    slots = SLOTS * sizes.small_host_bytes * (k + m) / k
    limit_mib = (1.05 * slots + 64 * MIB) / MIB
    growth = sum(late[-1]) / sum(late[0])
    return [
        row("memory", "MiB", extra / MIB, at_most(1.0, "limit"), limit=limit_mib),
        row("memory[growth]", "", growth, at_most(GROWTH_MAX, "itself")),
        row("memory[held]", "MiB", held / MIB),
    ]


class Peaks:
    """The largest of several figures, sampled in a thread."""

    def __init__(self, sample: Callable[[], list[int]]) -> None:
        self._used = sample
        self._lock = threading.Lock()
        self._peaks = sample()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self._note()
            time.sleep(SAMPLE_S)

    def _note(self) -> None:
        used = self._used()
        with self._lock:
            self._peaks = [max(one) for one in zip(self._peaks, used, strict=True)]

    def take(self) -> list[int]:
        """The peaks since the last call."""
        self._note()
        with self._lock:
            peaks, self._peaks = self._peaks, [0] * len(self._peaks)
        return peaks

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()


def _ranks(world: World) -> list[int]:
    return [private_bytes(rank) for rank in world.pids("rank")]


def used_by(world: World) -> list[int]:
    """Bytes that each host uses now."""
    pairs = zip(world.pids("rank"), world.pids("smp"), strict=True)
    return [
        private_bytes(rank) + private_bytes(smp) + _shared(smp, f"host{number}")
        for number, (rank, smp) in enumerate(pairs)
    ]


def private_bytes(pid: int) -> int:
    """Bytes of a process's own pages, see proc_pid_status(5): RssAnon is in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _shared(pid: int, host: str) -> int:
    """Pages of the memory files that a process has open and that are no other host's slots;
    stat(2) counts blocks of 512 bytes."""
    blocks: dict[int, int] = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(fd)
            if name.startswith(f"/memfd:jaxft-{host}-") or _WORK.match(name):
                found = fd.stat()
                blocks[found.st_ino] = found.st_blocks
    return 512 * sum(blocks.values())
