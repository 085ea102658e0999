"""Clocks, and what the machine itself can do."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Called after each round with the number of rounds done, how many there are, and what they are of.
Report = Callable[[int, int, str], None]


SETTLE_PIECE = 256 << 20


def timed(action: Callable[[], object]) -> float:
    """Seconds that the action takes."""
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def in_turn(
    rounds: int, what: str, report: Report, ways: Mapping[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Takes one figure of every way, round by round; one round before that is thrown away."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            figure = way()
            if number:
                taken[name].append(figure)
        report(number + 1, rounds + 1, what)
    return taken


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, in all its threads. See clock_getcpuclockid(3): the
    clock of a process is its negated number, shifted by three, with type 2 (the scheduler's)."""
    return time.clock_gettime((~pid << 3) | 2)


def cpu_of(pids: Iterable[int]) -> float:
    return sum(cpu_s(pid) for pid in pids)


def touched(nbytes: int) -> Bytes:
    """Memory that has its pages, huge ones where the kernel gives them."""
    memory = np.empty(nbytes, np.uint8)
    memory[:] = 1
    return memory


def settle(nbytes: int) -> None:
    """Uses this much memory once, and lets it go. On some virtual machines the first use of a page
    was seen to take ten times as long as later ones, and whoever comes first would pay for that.
    """
    pieces = [touched(min(SETTLE_PIECE, nbytes - at)) for at in range(0, nbytes, SETTLE_PIECE)]
    del pieces


def noise(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes that nothing can compress or take for zeros."""
    words = np.random.default_rng(seed).integers(0, 2**63, -(-nbytes // 8), np.uint64)
    return words.view(np.uint8)[:nbytes]


def copy_all(sources: Sequence[Bytes], target: Bytes) -> float:
    """Seconds to copy the sources one after the other into a target that was touched before."""
    began_s = time.perf_counter()
    end = 0
    for source in sources:
        np.copyto(target[end : end + source.size], source)
        end += source.size
    return time.perf_counter() - began_s


def copy_all_into_fresh(sources: Sequence[Bytes]) -> float:
    """Seconds to copy the sources into huge pages that the kernel still has to give."""
    nbytes = sum(source.size for source in sources)
    began_s = time.perf_counter()
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(memory, np.uint8)
    copy_all(sources, target)
    taken_s = time.perf_counter() - began_s
    del target
    memory.close()
    return taken_s
