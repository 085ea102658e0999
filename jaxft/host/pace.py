"""How fast a host may pull: a token bucket that leaves room for the training's own traffic.

`Bucket` is the arithmetic, under a clock that is handed in; `Pace` is what all coding of one SMP
goes by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# What may be taken at once after a pause, as time at the full rate.
BURST_S = 0.05


class Bucket:
    """Lets `bytes_per_s` through on average.

    A take may run into debt, so a piece that is larger than the bucket passes; whoever took it
    waits until the debt is paid.

    Args:
        bytes_per_s: more than 0.
    """

    def __init__(self, bytes_per_s: float) -> None:
        assert bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self._level_bytes = self._burst_bytes = bytes_per_s * BURST_S
        self._at_s: float | None = None

    def take(self, nbytes: int, now_s: float) -> float:
        """Takes `nbytes` at monotonic time `now_s`; returns how long to wait before using them."""
        if self._at_s is not None:
            gained_bytes = max(0.0, now_s - self._at_s) * self.bytes_per_s
            self._level_bytes = min(self._burst_bytes, self._level_bytes + gained_bytes)
        self._at_s = now_s
        self._level_bytes -= nbytes
        return max(0.0, -self._level_bytes / self.bytes_per_s)


class Pace:
    """A bucket that several threads take from, and wait.

    Args:
        bytes_per_s: what they may take together; more than 0.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = Bucket(bytes_per_s)
        self._clock = clock
        self._lock = threading.Lock()

    def wait(self, nbytes: int, cancel: threading.Event) -> None:
        """Returns when `nbytes` may be asked for, or `cancel` is set."""
        with self._lock:
            wait_s = self._bucket.take(nbytes, self._clock())
        if wait_s > 0:
            cancel.wait(wait_s)

    def lasts_s(self, nbytes: int) -> float:
        """How long `nbytes` take at the full rate."""
        return nbytes / self._bucket.bytes_per_s
