"""A rank that hangs: what a host sees of its own ranks, and what the agents make of it together.

Theory of operation. A rank counts its calls of `save` (or of the wrapped step), and its agent looks
at the count now and then. A rank that has not called for longer than it may is *late*. In
collectives one rank that hangs stops all others, and all are late; so an agent that sees a late one
writes down how its ranks stand, the other agents then do so too, and whoever sees all of that
decides: the rank whose count is behind is the one that the others wait for.

Rules
- A rank may be silent for `hang_s`, or FACTOR times the longest pause seen lately, whichever is
  longer. One that has called fewer than CALLS_MIN times may be for `start_s`, since it has a
  Snapshotter: it restores, loads its data, and compiles. What is learned begins with the pause
  after the second call: the one before it has the compilation in it.
- A rank that is in a long phase, which it has announced, is not late, nor is any other while it is:
  they may wait for it. So their silence counts anew when they hear of it.
- The ranks that are behind are judged by their own limits, and all of them have to be late: one may
  have had longer pauses than others, and one that still calls may be what the others wait for.
- What hosts say is older than they are: a late rank may have gone on meanwhile, also because what
  looks at its stack held it. So all have to have said the same for CONFIRM_S.
- After a hang that brought no newer snapshot the next one is waited for twice as long: it may have
  been none, and would come again at the same step.
- A look counts `look_s` at most: what the looker was paused for counts against nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxft.group.records import Fault, HostStill, RankStill
from jaxft.group.world import Generation

FACTOR = 10.0
CALLS_MIN = 3
LEARNS_FROM = 2
WINDOW_S = 6 * 3600.0
# How long the reports of the other hosts are waited for.
GATHER_S = 20.0
# Longer than a host takes to say that its rank has gone on.
CONFIRM_S = 2.0
# Shorter than this many looks, a silence cannot be told from a pause.
LOOKS_MIN = 3
RANKS_NAMED = 8
STOPPED = {"T": "it is stopped by a signal", "t": "a debugger holds it", "D": "the kernel holds it"}


class Reading(NamedTuple):
    """What a rank says of itself: its `calls` of `save`, until when (monotonic time; 0: never) it
    is in the long phase `phase`, whether it is past its last call, and whether it has come as far
    as to have a Snapshotter."""

    calls: int
    until_s: float = 0.0
    phase: str = ""
    closed: bool = False
    arrived: bool = True


class _Pace:
    """One rank, as it was seen last."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.still_s = 0.0
        self.in_phase = False


class Watch:
    """For how long each rank of one host has been silent, in one generation.

    Args:
        hang_s: the least that a rank may be silent.
        look_s: how often is looked, about.
        start_s: the least that one may be silent that has called fewer than CALLS_MIN times; 0:
            for ever.
        longest_s: the longest pause that was seen in earlier generations.

    Attributes:
        patience: what `hang_s` and `start_s` are multiplied by.
    """

    def __init__(
        self, hang_s: float, look_s: float, *, start_s: float = 0.0, longest_s: float = 0.0
    ) -> None:
        self.patience = 1.0
        self._hang_s = max(hang_s, LOOKS_MIN * look_s)
        self._start_s = start_s
        self._look_s = look_s
        self._looked_s = math.nan
        self._paces: dict[int, _Pace] = {}
        self._window_s = math.nan
        self._longest_s = (longest_s, 0.0)  # in the window before, and in this one

    @property
    def longest_s(self) -> float:
        """The longest pause lately, as far as looks can tell."""
        return max(self._longest_s)

    @property
    def limit_s(self) -> float:
        """How long a rank may be silent."""
        return max(self._hang_s * self.patience, FACTOR * self.longest_s)

    @property
    def start_limit_s(self) -> float:
        """How long one may be silent that has hardly begun; 0: for ever."""
        return max(self._start_s * self.patience, self.limit_s) if self._start_s else 0.0

    def look(self, readings: Mapping[int, Reading], now_s: float) -> bool:
        """Takes note of how the ranks stand; whether one is late."""
        gap_s = min(now_s - self._looked_s, self._look_s) if self._paces else 0.0
        self._looked_s = now_s
        if not now_s - self._window_s <= WINDOW_S:
            if not math.isnan(self._window_s):
                self._longest_s = (self._longest_s[-1], 0.0)
            self._window_s = now_s
        for rank, reading in readings.items():
            self._look_at(self._paces.setdefault(rank, _Pace(reading)), reading, gap_s, now_s)
        if any(pace.in_phase for pace in self._paces.values()):
            self.forgive()
        return any(one.is_late for one in self.ranks())

    def forgive(self) -> None:
        """What has passed until now is no silence: a rank is in a long phase."""
        for pace in self._paces.values():
            pace.still_s = 0.0

    def _look_at(self, pace: _Pace, reading: Reading, gap_s: float, now_s: float) -> None:
        before, pace.reading = pace.reading, reading
        pace.in_phase = now_s < reading.until_s
        is_news = (reading.until_s, reading.arrived) != (before.until_s, before.arrived)
        if pace.in_phase or reading.closed or is_news:
            pace.still_s = 0.0
        elif reading.calls != before.calls:
            if before.calls >= LEARNS_FROM:
                old_s, recent_s = self._longest_s
                self._longest_s = (old_s, max(recent_s, pace.still_s))
            pace.still_s = 0.0
        else:
            pace.still_s += gap_s

    def ranks(self) -> tuple[RankStill, ...]:
        """How each rank stands that has a Snapshotter, and has not closed it."""
        return tuple(
            RankStill(
                rank=rank,
                calls=pace.reading.calls,
                still_s=pace.still_s,
                limit_s=self.start_limit_s if starts else self.limit_s,
                starts=starts,
                phase=pace.reading.phase if pace.in_phase else "",
            )
            for rank, pace in self._paces.items()
            if pace.reading.arrived and not pace.reading.closed
            for starts in (pace.reading.calls < CALLS_MIN,)
        )


def is_suspected(still: Mapping[str, HostStill]) -> bool:
    """Does any host say that one of its ranks is late?"""
    return any(rank.is_late for host in still.values() for rank in host.ranks)


def who_is_late(still: Mapping[str, HostStill]) -> frozenset[tuple[str, int, int]]:
    """The hosts that have said something, and what they say of ranks that are late: (host, rank,
    calls), with rank -1 for a host itself."""
    late = {
        (name, rank.rank, rank.calls)
        for name, host in still.items()
        for rank in host.ranks
        if rank.is_late
    }
    return frozenset(late | {(name, -1, 0) for name in still})


def find_hang(
    generation: Generation, still: Mapping[str, HostStill], waited_s: float, same_s: float
) -> Fault | None:
    """The hang, if it is one.

    Args:
        generation: that the ranks are of.
        still: what its hosts have said.
        waited_s: for how long there has been a suspicion.
        same_s: for how long `who_is_late` has been the same.
    """
    hosts = [member.host for member in generation.hosts]
    if waited_s < GATHER_S and any(host not in still for host in hosts):
        return None
    if same_s < CONFIRM_S:
        return None
    standing = [(host, rank) for host in hosts if host in still for rank in still[host].ranks]
    late = [rank for _, rank in standing if rank.is_late]
    if not late or any(rank.phase for _, rank in standing):
        return None
    least = min(rank.calls for _, rank in standing)
    behind = [(host, rank) for host, rank in standing if rank.calls == least]
    # One that has hardly begun may be what those wait for that are past that.
    is_awaited = any(not rank.starts for rank in late)
    if not all(rank.is_late or (rank.starts and is_awaited) for _, rank in behind):
        return None
    host, culprit = min(behind, key=lambda one: one[1].state not in STOPPED)
    others = [rank for _, rank in standing if rank.calls > least]
    same = not others and len(standing) > 1
    if same and culprit.state not in STOPPED:
        detail = (
            f"all {len(standing)} ranks hang: none has called save for {culprit.still_s:.0f} s, "
            f"and none is behind: all stand at call {least}"
        )
        tail = _innermost(standing)
    else:
        detail = _of_one(host, culprit, others)
        tail = culprit.stack
    # How long it lived is left out: it has always lived long, which would make no hang one in vain.
    return Fault(
        generation=generation.number,
        host=host,
        kind="hung",
        detail=detail,
        rank=culprit.rank,
        tail=tail,
    )


def _of_one(host: str, culprit: RankStill, others: list[RankStill]) -> str:
    since = f"since call {culprit.calls}" if culprit.calls else "not once"
    detail = (
        f"rank {culprit.rank} on {host} hangs: it has not called save for {culprit.still_s:.0f} s, "
        f"{since}"
    )
    if others:
        low, high = min(one.calls for one in others), max(one.calls for one in others)
        detail += f" (the other ranks are at call {low if low == high else f'{low} to {high}'})"
    if culprit.state in STOPPED:
        detail += f"; {STOPPED[culprit.state]}"
    if culprit.stack:
        detail += f"; it is in {culprit.stack.splitlines()[0].strip()}"
    return detail


def _innermost(standing: list[tuple[str, RankStill]]) -> str:
    """Where each rank is, in a line."""
    lines = [
        f"rank {rank.rank} on {host}: {rank.stack.splitlines()[0].strip()}"
        for host, rank in standing
        if rank.stack
    ]
    return "\n".join(lines[:RANKS_NAMED])
