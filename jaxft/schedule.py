"""When the next snapshot is due: the same answer on every rank, without asking anyone.

Snapshot k + 1 is due at the first call of `save` whose step is at least that of snapshot k plus the
interval between them. That interval came with the outcome of snapshot k - 1, which was known here
before k began (the first one came with the word that everybody has restored).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxft.errors import ConfigError
from jaxft.group.messages import Outcome

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}

# Weight of the newest step in the running mean of the time a step takes.
_NEWEST = 0.2


def parse_interval(every: int | str) -> tuple[int, float]:
    """Reads how often: a number of steps, or a time such as "500ms".

    Returns:
        (steps, 0) or (0, seconds).

    Raises:
        ConfigError: neither, or not above zero.
    """
    if isinstance(every, bool) or not isinstance(every, int | str):
        raise ConfigError(f'every={every!r}: expected a number of steps or a time like "10s"')
    if isinstance(every, int):
        if every < 1:
            raise ConfigError(f"every={every}: expected at least 1 step")
        return every, 0.0
    match = _DURATION.fullmatch(every)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f'every="{every}": expected a time like "500ms", "10s", "2min" or "1h"')
    return 0, float(match[1]) * _SECONDS[match[2]]


class Schedule:
    """Counts a generation's snapshots and the time that steps take.

    Attributes:
        seq: of the next snapshot.
        step_s: how long a step takes here, in seconds; 0 while that is not known.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.step_s = 0.0
        self._begun_step = 0
        self._last_call: tuple[float, int] | None = None

    def called(self, step: int, now_s: float) -> None:
        """`save` was called with this step at monotonic time `now_s`."""
        if self._last_call is not None and step > self._last_call[1]:
            taken_s = (now_s - self._last_call[0]) / (step - self._last_call[1])
            first = self.step_s == 0.0
            self.step_s = taken_s if first else self.step_s + _NEWEST * (taken_s - self.step_s)
        self._last_call = (now_s, step)

    def due_step(self, first_interval: int, outcomes: Mapping[int, Outcome]) -> int | None:
        """The first step at which the next snapshot is due; None for the very first snapshot."""
        if self.seq == 0:
            return None
        before = outcomes.get(self.seq - 2)
        interval = first_interval if self.seq == 1 or before is None else before.interval
        last = outcomes.get(self.seq - 1)
        # Where ranks called the snapshot before by different steps, it was aborted, and what the
        # root calls it brings them together again.
        return (self._begun_step if last is None else last.step) + interval

    def begin(self, step: int) -> int:
        """This call is the next snapshot; returns its seq."""
        self._begun_step = step
        self.seq += 1
        return self.seq - 1
