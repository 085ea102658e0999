"""When the next snapshot is due: the same answer on every rank, without asking anyone.

Snapshot k + 1 is due at the first call of `save` whose step is at least that of snapshot k plus the
interval between them. That interval came with the outcome of snapshot k - 1, which was known here
before k began (the first one came with the word that everybody has restored). A due call waits for
the outcome of k.

A rank may have to let a due call pass: snapshots are held, or the outcome does not come. Once it
learns the outcome and sees that k + 1 was due at a call that is over, it has *missed* k + 1, which
the others may have begun by then: it says so, and the root aborts k + 1 for all. So nobody waits
for a snapshot that some rank will not begin; what the root calls the aborted one brings the ranks
together again.

A snapshot *out of turn* is due at the call whose number the root names (`group.turn`). Calls are
counted from 1 in each generation. Once a rank has answered with its last call, the next one waits
for the name; a rank that could not keep that and is past the named call has missed the snapshot.

A *forced* call is due, whatever the interval says; all ranks say so of the same call.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxft.errors import ConfigError
from jaxft.group.messages import Outcome, Turn, TurnAnswer

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}

# Weight of the newest step in the running mean of the time a step takes.
_NEWEST = 0.2

KNOWN_MAX = 8


def parse_interval(every: int | str) -> tuple[int, float]:
    """Reads how often: a number of steps, or a time such as "500ms".

    Returns:
        (steps, 0) or (0, seconds).

    Raises:
        ConfigError: neither, or not above zero.
    """
    if isinstance(every, bool) or not isinstance(every, int | str):
        raise ConfigError(
            f'every={every!r}: expected a number of steps or a time like "10s", or jaxft.Auto'
        )
    if isinstance(every, int):
        if every < 1:
            raise ConfigError(f"every={every}: expected at least 1 step")
        return every, 0.0
    match = _DURATION.fullmatch(every)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f'every="{every}": expected a time like "500ms", "10s", "2min" or "1h"')
    return 0, float(match[1]) * _SECONDS[match[2]]


class Skip(NamedTuple):
    """This call is not due."""

    due_step: int


class Await(NamedTuple):
    """This call is due, and may have to wait for the outcome of `seq`."""

    seq: int


class AwaitTurn(NamedTuple):
    """This call may not end before it is known what becomes of turn `number`."""

    number: int


class Begin(NamedTuple):
    """This call is snapshot `seq`."""

    seq: int


class Missed(NamedTuple):
    """Snapshot `seq` will have no part of this rank, which is at `step` in its `call`th call."""

    seq: int
    step: int
    call: int


class Schedule:
    """Counts a generation's snapshots and the time that steps take.

    Attributes:
        seq: of the next snapshot.
        calls: how often `save` was called in this generation.
        step_s: how long a step takes here, in seconds; 0 while that is not known.
        first_interval: the steps from snapshot 0 to 1.
    """

    def __init__(self, first_interval: int = 1) -> None:
        self.seq = 0
        self.calls = 0
        self.step_s = 0.0
        self.first_interval = first_interval
        self.outcomes: dict[int, Outcome] = {}
        self._begun_step = 0
        self._over_step: int | None = None
        self._over_call = 0
        self._forced = False  # the present call
        self._over_forced = False  # was a forced call let pass, since the last snapshot?
        self._turn = Turn(number=0, result="none yet")
        self._promised_call = 0
        self._broken = 0
        self._taken = 0
        self._last_call: tuple[float, int] | None = None

    def called(self, step: int, now_s: float) -> None:
        """`save` was called with this step at monotonic time `now_s`."""
        if self._last_call is not None and step > self._last_call[1]:
            taken_s = (now_s - self._last_call[0]) / (step - self._last_call[1])
            first = self.step_s == 0.0
            self.step_s = taken_s if first else self.step_s + _NEWEST * (taken_s - self.step_s)
        self._last_call = (now_s, step)

    @property
    def taken(self) -> int:
        """The number of the last snapshot out of turn that has begun, or was decided; 0: none."""
        return self._taken

    @property
    def last_step(self) -> int | None:
        """The step that `save` was called with last."""
        return None if self._last_call is None else self._last_call[1]

    @property
    def due_step(self) -> int | None:
        """The first step at which the next snapshot is due; None for the very first snapshot."""
        if self.seq == 0:
            return None
        before = self.outcomes.get(self.seq - 2)
        interval = self.first_interval if self.seq == 1 or before is None else before.interval
        last = self.outcomes.get(self.seq - 1)
        # Where ranks called the snapshot before by different steps, it was aborted, and what the
        # root calls it brings them together again.
        return (self._begun_step if last is None else last.step) + interval

    def skip(self, step: int, now_s: float) -> None:
        """`save` is called once more, and is known not to be due: nothing was learned since
        `decide` said that calls before a later step are not."""
        self.called(step, now_s)
        self._over_step = step
        self._over_call = self.calls = self.calls + 1

    def enter(self, *, forced: bool = False) -> None:
        """`save` is called once more; what that call is, `decide` says."""
        self.calls += 1
        self._forced = forced

    def is_due(self, step: int) -> bool:
        """Is the present call, with this step, due, by what is known here now?"""
        by_step = self.due_step is None or step >= self.due_step
        return by_step or self._forced or self._named_by(self.calls)

    def _named_by(self, call: int) -> bool:
        """Is a snapshot out of turn, which has not begun here, due by this call?"""
        turn = self._turn
        return not turn.result and turn.number > self._taken and 0 < turn.call <= call

    def decide(self, step: int, *, held: bool = False) -> Skip | Await | AwaitTurn | Begin:
        """What the present call of `save` is; none begins while snapshots are `held`. After `Await`
        it is asked again, once the outcome is known; or the call is let pass. After `AwaitTurn` it
        is asked again once the turn is known; or the promise is broken."""
        if self._is_promised():
            return AwaitTurn(self._turn.number)
        due_step = self.due_step
        if due_step is not None and not self.is_due(step):
            self._over(step)
            return Skip(due_step)
        if held or (self.seq > 0 and self.seq - 1 not in self.outcomes):
            return Await(self.seq - 1)
        return Begin(self._begin(step, self.calls))

    def let_pass(self, step: int) -> Missed | None:
        """This call, which is due, ends without a snapshot. If the outcome before is not known here
        yet, what that means is found out when it is."""
        self._over_forced = self._over_forced or self._forced
        self._over(step)
        return self._find_missed()

    def learn(self, outcome: Outcome) -> Missed | None:
        """The root has decided, perhaps on a snapshot that never began here. Told again, it changes
        nothing."""
        if outcome.seq in self.outcomes:
            return None
        self.outcomes[outcome.seq] = outcome
        self.outcomes.pop(outcome.seq - KNOWN_MAX, None)
        if outcome.seq >= self.seq:  # what a forced call was to begin is over
            self._over_forced = False
        self.seq = max(self.seq, outcome.seq + 1)
        self._taken = max(self._taken, outcome.turn)
        return self._find_missed()

    def hear(self, turn: Turn) -> tuple[TurnAnswer | None, Missed | None]:
        """The root's word on a snapshot out of turn: what to answer, and what was missed by it."""
        known = self._turn
        if turn.number < known.number or (turn.number == known.number and turn.call < known.call):
            return None, None
        if turn.number > self._turn.number:
            self._promised_call = self.calls + 1
        self._turn = turn
        missed = self._find_missed()
        if turn.result or turn.call:
            return None, missed
        return TurnAnswer(number=turn.number, call=self._promised_call - 1), missed

    def break_promise(self) -> None:
        """The present call does not wait any longer to hear which call was named."""
        self._broken = self._turn.number

    def _is_promised(self) -> bool:
        turn = self._turn
        return (
            not (turn.result or turn.call)
            and turn.number > self._broken
            and self.calls >= self._promised_call
        )

    def knows_turn(self, number: int) -> bool:
        """Is it known what becomes of this turn?"""
        turn = self._turn
        return turn.number > number or bool(turn.result or turn.call)

    @property
    def quiet(self) -> bool:
        """No snapshot out of turn is asked for: until something is learned, no call is due before
        `due_step`."""
        return bool(self._turn.result) and self.due_step is not None

    def _find_missed(self) -> Missed | None:
        """Was the next snapshot due at a call that is over?"""
        if self._over_step is None or (self.seq > 0 and self.seq - 1 not in self.outcomes):
            return None
        due_step = self.due_step
        by_step = due_step is None or self._over_step >= due_step or self._over_forced
        if not by_step and not self._named_by(self._over_call):
            return None
        step, call = self._over_step, self._over_call
        return Missed(self._begin(step, call), step, call)

    def _over(self, step: int) -> None:
        self._over_step, self._over_call = step, self.calls
        self._forced = False

    def _begin(self, step: int, call: int) -> int:
        if self._named_by(call):
            self._taken = self._turn.number
        self._begun_step = self._over_step = step
        self._over_call = call
        self._forced = self._over_forced = False
        self.seq += 1
        return self.seq - 1
