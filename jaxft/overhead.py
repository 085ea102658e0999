"""What snapshots cost the training thread, measured where it runs.

    save, due:      ready ──── stall ────► left      a snapshot is on its way from here ...
    steps:          left ── a step ──► ready, left ── a step ──► ready        ... to its outcome
    one more:       left ── a step that finds cold caches and new pages ──► ready
    then:           left ── an undisturbed step ──► ready                     as many of these
    save, due:      the next snapshot: what the last one cost is known

Rules
- A snapshot's cost is its stall, the time in `save` (waiting for the outcome before is in it), plus
  what the steps while it was on its way, and the one after, took beyond as many undisturbed ones.
- A call that is not due costs some time too, most where it is one that is measured. What all of
  them take beyond the usual one is the snapshot's; the usual one comes with every step.
- A call that is measured is timed from when the state was there: whoever calls `save` while the
  device still computes does not pay for that twice.
- Medians of the last WINDOW snapshots: a pause, an evaluation, a checkpoint is one figure of many.
- On a noisy machine steps beside a snapshot may seem faster than others. They never pay for the
  stall: the two have medians of their own, neither of which is below zero.
- The first WARMUP snapshots do not count: programs are compiled, and slots get their pages.
- A snapshot that was aborted, or a due call that was let pass, says nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from jaxft.errors import ConfigError
from jaxft.group.interval import AFTER_STEPS, PROBE_STEPS
from jaxft.group.messages import Measured

WINDOW = 25
WARMUP = 2


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Takes snapshots as often as a budget allows: `Snapshotter(every=Auto(overhead=0.01))`.

    The interval is the smallest number N of steps for which

        (cost_s + N * call_s) / (N * step_s) <= overhead    and    N * step_s >= protect_s

    where, in seconds, `cost_s` is what a snapshot costs the training thread (its stall in `save`,
    and how much slower steps are while it is on its way), `call_s` what a call of `save` takes that
    is not due, `step_s` what an undisturbed step takes, and `protect_s` the time from `save` to
    `protected`. (Where calls alone use up more than half of the budget, N is the smallest for the
    other half.) All are medians of recent snapshots of each
    rank; the dearest host decides for all. Until they are known, which takes four snapshots, the
    interval is 10 steps. It then at most halves or doubles (and one step) from one snapshot to the
    next, and one interval in eight is long enough for undisturbed steps.

    To be able to tell steps apart, `save` waits for the state to be computed when it is due, while
    a snapshot is on its way, and for as many steps after.

    Args:
        overhead: how much longer training may take, as a fraction: 0.01 is 1 %.

    Raises:
        ConfigError: not above 0, or above 1.
    """

    overhead: float = 0.01

    def __post_init__(self) -> None:
        value = self.overhead
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigError(
                f"Auto(overhead={value!r}): expected a fraction above 0 and up to 1, for example "
                "0.01 for 1 %"
            )


@dataclass
class _Cycle:
    """From one snapshot's begin to the next one's. The outcome came at `decided_s`, and `after`
    calls of `save` since. `flight` are the disturbed steps and `calm` the undisturbed ones;
    `calls` are those of `save` that were looked at closely and were not due."""

    seq: int
    began_s: float
    stall_s: float | None = None
    calls_s: float = 0.0
    calls: int = 0
    decided_s: float | None = None
    after: int = 0
    flight_s: float = 0.0
    flight_steps: int = 0
    calm_s: float = 0.0
    calm_steps: int = 0

    @property
    def landed(self) -> bool:
        return self.after > AFTER_STEPS


class Meter:
    """Measures one rank. Times are of one monotonic clock, in seconds; it has none of its own.

    For every call of `save`: `called`, then `begins` if it begins a snapshot or `spoil` if it was
    let pass, then `left`; or `skipped` alone, where it is not due and nothing is `watching`.
    `decided` comes at any time.
    """

    def __init__(self) -> None:
        self._skips_s: deque[float] = deque(maxlen=WINDOW)
        self._stalls_s: deque[float] = deque(maxlen=WINDOW)
        self._slower_s: deque[float] = deque(maxlen=WINDOW)
        self._protects_s: deque[float] = deque(maxlen=WINDOW)
        self._calm_step_s: deque[float] = deque(maxlen=WINDOW)
        self._flight_step_s: deque[float] = deque(maxlen=WINDOW)
        self._cycle: _Cycle | None = None
        self._called: tuple[int, float] = (0, 0.0)
        self._left_s: float | None = None

    @property
    def watching(self) -> bool:
        """Does the step before this call count? Then its state has to be waited for."""
        cycle = self._cycle
        if cycle is None:
            return False
        return not cycle.landed or cycle.calm_steps < max(cycle.flight_steps, PROBE_STEPS)

    def called(self, step: int, now_s: float) -> None:
        """`save` was called with `step`, and that state is computed."""
        last, self._called = self._called, (step, now_s)
        cycle, left_s = self._cycle, self._left_s
        if cycle is None or left_s is None or step <= last[0] or not self.watching:
            return
        steps, taken_s = step - last[0], now_s - left_s
        if cycle.landed:
            cycle.calm_steps += steps
            cycle.calm_s += taken_s
        else:
            cycle.flight_steps += steps
            cycle.flight_s += taken_s
            cycle.after += cycle.decided_s is not None

    def begins(self, seq: int) -> None:
        """This call is snapshot `seq`: what the one before it cost is complete."""
        if self._cycle is not None:
            self._take(self._cycle)
        self._cycle = _Cycle(seq, self._called[1])

    def skipped(self, taken_s: float) -> None:
        """A call took so long that was not due."""
        self._skips_s.append(taken_s)

    def left(self, now_s: float, *, skipped: bool) -> None:
        """The call returns; `skipped`: it was not due."""
        cycle = self._cycle
        if cycle is not None and skipped:
            cycle.calls_s += now_s - self._called[1]
            cycle.calls += 1
        elif cycle is not None and cycle.stall_s is None:
            cycle.stall_s = now_s - cycle.began_s
        self._left_s = now_s

    def decided(self, seq: int, now_s: float, *, ok: bool) -> None:
        """The outcome of snapshot `seq` is known here."""
        cycle = self._cycle
        if cycle is None or cycle.seq != seq:
            return
        if ok:
            cycle.decided_s = now_s
        else:
            self.spoil()

    def spoil(self) -> None:
        """What happens between this snapshot and the next one says nothing."""
        self._cycle = None

    def measured(self) -> Measured:
        """The medians so far; nothing while no snapshot has been measured."""
        if not self._stalls_s:
            return Measured()
        stall_s = max(0.0, statistics.median(self._stalls_s))
        return Measured(
            cost_s=stall_s + max(0.0, statistics.median(self._slower_s)),
            protect_s=statistics.median(self._protects_s),
            step_s=self._step_s(),
            call_s=self._call_s(),
        )

    def _take(self, cycle: _Cycle) -> None:
        if cycle.seq < WARMUP or cycle.stall_s is None or cycle.decided_s is None:
            return
        if cycle.flight_steps == 0 or cycle.flight_s <= 0:
            return
        self._protects_s.append(cycle.decided_s - cycle.began_s)
        self._flight_step_s.append(cycle.flight_s / cycle.flight_steps)
        if cycle.calm_steps:
            self._calm_step_s.append(cycle.calm_s / cycle.calm_steps)
        usual_s = (1 + cycle.calls) * self._call_s()
        self._stalls_s.append(cycle.stall_s + cycle.calls_s - usual_s)
        self._slower_s.append(cycle.flight_s - cycle.flight_steps * self._step_s())

    def _call_s(self) -> float:
        """What a call takes that is not due and not looked at closely."""
        return statistics.median(self._skips_s) if self._skips_s else 0.0

    def _step_s(self) -> float:
        """What a step takes. While none was seen that no snapshot disturbed, one that was."""
        return statistics.median(self._calm_step_s or self._flight_step_s)
