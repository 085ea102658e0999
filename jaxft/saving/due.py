"""Due: which calls of `save` are snapshots, and what those wait for before they are.

Every rank decides by what all ranks know at that call (`schedule`): the steps of the snapshots
before, and the intervals that came with their outcomes. So all ranks begin the same snapshots, and
nobody is asked. A due call waits for the outcome of the snapshot before. While snapshots are held
(a host's SMP cannot hear the root's) no call waits and none is begun.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple

from jaxft.device.transfer import wait_computed
from jaxft.errors import JaxftError, PeerUnreachable, SnapshotAborted
from jaxft.group.messages import Measured, Outcome, Turn
from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.calls_page import CallsPage
from jaxft.host.client import SmpClient
from jaxft.overhead import Meter
from jaxft.receipt import Receipt, SkippedReceipt
from jaxft.saving.open_receipts import OpenReceipts
from jaxft.schedule import AwaitTurn, Begin, Missed, Schedule, Skip
from jaxft.status.events import EventLog

_log = logging.getLogger(__name__)


class _Quiet(NamedTuple):
    """Until something is learned, no call of `save` before step `until` is due, and `why`."""

    until: int
    why: str
    code: Code


class DueCalls:
    """The calls of one rank: `skip`, or else `enter`, `decide`, perhaps `begin`, and `leave`, in
    the thread that trains; what is learned comes in the connection's.

    Args:
        page: where the agent looks how many calls there were.
        meter: measures for an interval that keeps to a budget; None where there is no such.
        wait_s: how long a due call waits for the outcome of the snapshot before.

    Attributes:
        schedule: what is known of snapshots.
    """

    def __init__(
        self,
        client: SmpClient,
        receipts: OpenReceipts,
        events: EventLog,
        page: CallsPage,
        meter: Meter | None,
        wait_s: float,
    ) -> None:
        self.schedule = Schedule()
        self.meter = meter
        self._client = client
        self._receipts = receipts
        self._events = events
        self._counter = page.counter
        self._wait_s = wait_s
        self._quiet: _Quiet | None = None
        self._held = ""
        self._lock = threading.Lock()  # guards schedule, meter and _quiet

    @property
    def code(self) -> Code:
        """What protects this host's snapshots: the code of its group."""
        return Code.parse(self._client.welcome.code)

    # -------------------------------------------------------------------- a call

    def skip(self, step: int, now_s: float) -> Receipt | None:
        """A call that is known not to be due. Most calls are, each just after a step that has left
        cold caches: nothing is touched that is not needed."""
        with self._lock:
            quiet = self._quiet
            if quiet is None or step >= quiet.until:
                return None
            self.schedule.skip(step, now_s)
            self._counter[0] = self.schedule.calls
        if self._events.is_on:
            self._events.emit("save_skipped", step=step, due_step=quiet.until)
        receipt = SkippedReceipt(step, quiet.code, quiet.why, self._receipts.last_failure)
        receipt.stall_s = time.monotonic() - now_s
        if self.meter is not None:
            self.meter.skipped(receipt.stall_s)
        return receipt

    def enter(self, step: int, state: Any, now_s: float, *, forced: bool) -> None:
        """A call that may be due begins, at monotonic time `now_s`."""
        self.schedule.called(step, now_s)
        with self._lock:
            self._quiet = None
            self.schedule.enter(forced=forced)
            self._counter[0] = self.schedule.calls
        if self.meter is None:
            return
        # A step that is measured ends when its state is there.
        is_measured = self.meter.watching or self.schedule.is_due(step)
        if is_measured and wait_computed(state):
            now_s = time.monotonic()
        with self._lock:
            self.meter.called(step, now_s)

    def decide(self, step: int) -> tuple[Skip | Begin | None, Receipt]:
        """What this call is. One that is due waits for the outcome of the snapshot before, unless
        snapshots are held; None: it ends without, and its receipt says why."""
        assert self._client.settled is not None, "it is waited for before the first save"
        self.schedule.first_interval = self._client.settled.interval
        began_s = time.monotonic()
        wait_s = 0.0
        while True:
            with self._lock:
                decision = self.schedule.decide(step, held=bool(self._client.held))
            if isinstance(decision, Skip | Begin):
                return decision, self._receipt(step, wait_s, decision)
            error: JaxftError | None = None
            try:
                if isinstance(decision, AwaitTurn):
                    self._wait_for_turn(decision.number, began_s + self._wait_s)
                else:
                    self._wait_for(decision.seq, began_s + self._wait_s)
            except JaxftError as failure:
                error = failure
            wait_s = time.monotonic() - began_s
            if error is not None:
                receipt = self._receipt(step, wait_s)
                self._let_pass(receipt, error)
                return None, receipt

    def begin(self, seq: int, *, within: bool) -> Measured:
        """The snapshot that this call is begins.

        Args:
            within: what follows is a step, which is slower for the snapshot.
        """
        if self.meter is None:
            return Measured()
        with self._lock:
            self.meter.begins(seq)
            measured = self.meter.measured()
            if within:
                self.meter.left(time.monotonic(), skipped=False)
        return measured

    def leave(self, decision: Skip | Begin | None, receipt: Receipt, *, within: bool) -> None:
        """The call ends. Are the calls after it, if it was skipped, known not to be due?"""
        if isinstance(decision, Skip):
            self._events.emit("save_skipped", step=receipt.step, due_step=decision.due_step)
        with self._lock:
            if self.meter is not None and not (within and isinstance(decision, Begin)):
                self.meter.left(time.monotonic(), skipped=isinstance(decision, Skip))
            until = self.schedule.due_step
            if receipt.skipped is None or until is None or not self.schedule.quiet:
                return
            if self.meter is None or not self.meter.watching:
                self._quiet = _Quiet(until, _why_not(until), receipt.code)

    def stop(self) -> None:
        """No call is skipped any more without a look at what it is."""
        with self._lock:
            self._quiet = None

    def is_due(self, step: int) -> bool:
        """Would a call with this step take a snapshot, unless what is on its way now, or one out of
        turn, changes that?"""
        with self._lock:
            return self.schedule.is_due(step)

    def _receipt(self, step: int, wait_s: float, decision: Skip | Begin | None = None) -> Receipt:
        receipt: Receipt
        last_failure = self._receipts.last_failure
        if isinstance(decision, Skip):
            receipt = SkippedReceipt(step, self.code, _why_not(decision.due_step), last_failure)
        else:
            receipt = Receipt(step, self.code, last_failure=last_failure)
        receipt.wait_s = wait_s
        return receipt

    def _wait_for_turn(self, number: int, deadline_s: float) -> None:
        """Waits until it is known which call snapshot out of turn `number` is to be. If that does
        not come, this call goes on without.

        Raises:
            JaxftError: the connection is lost.
        """

        def known_or_held() -> bool | None:
            return self.schedule.knows_turn(number) or bool(self._client.held) or None

        what = f"the word which call of save is snapshot out of turn {number}"
        try:
            self._client.wait(known_or_held, max(0.0, deadline_s - time.monotonic()), what)
        except PeerUnreachable as error:
            if self._client.failure is not None:
                raise
            _log.warning("%s", error)
        with self._lock:
            if not self.schedule.knows_turn(number):
                self.schedule.break_promise()

    def _wait_for(self, seq: int, deadline_s: float) -> None:
        """Waits until this rank has learned the outcome of `seq`.

        Raises:
            SnapshotAborted: snapshots are held.
            JaxftError: none came by then, or the connection is lost.
        """

        def known_or_held() -> bool | None:
            return seq in self.schedule.outcomes or bool(self._client.held) or None

        what = f"the outcome of snapshot {seq} (every rank has to call save with the same steps)"
        self._client.wait(known_or_held, max(0.0, deadline_s - time.monotonic()), what)
        if self._client.held:
            raise SnapshotAborted(f"no snapshot is begun for now: {self._client.held}")

    def _let_pass(self, receipt: Receipt, error: JaxftError) -> None:
        """A due call ends without a snapshot; training goes on."""
        # What holds snapshots was said when it began; not again with every call.
        self._receipts.fail(receipt, error, loud=not isinstance(error, SnapshotAborted))
        with self._lock:
            missed = self.schedule.let_pass(receipt.step)
            if self.meter is not None:
                self.meter.spoil()
        self._say_missed(missed, str(error))

    def _say_missed(self, missed: Missed | None, reason: str) -> None:
        if missed is not None:
            told = p.Missed(seq=missed.seq, step=missed.step, reason=reason, call=missed.call)
            self._client.say(told, open_as="missed")

    # -------------------------------------------------------------------- what the SMP says

    def learn(self, outcome: Outcome) -> None:
        """What the schedule makes of an outcome; calls that wait for it go on."""
        with self._lock:
            self._quiet = None
            if outcome.seq >= self.schedule.seq and not outcome.ok:
                self._receipts.pass_over(outcome)
            missed = self.schedule.learn(outcome)
            if self.meter is not None:
                self.meter.decided(outcome.seq, time.monotonic(), ok=outcome.ok)
        self._client.notify()
        # It was due at a call that is over: other ranks may have begun it there.
        self._say_missed(missed, f"the outcome of snapshot {outcome.seq} was not known here yet")

    def hear(self, turn: Turn) -> None:
        """The root asks for the last call of `save`, or names the one that is to be a snapshot."""
        with self._lock:
            self._quiet = None
            answer, missed = self.schedule.hear(turn)
        self._client.notify()
        if answer is not None:
            told = p.LastCall(number=answer.number, call=answer.call)
            self._client.say(told, open_as="turn")
        self._say_missed(missed, f"its call {turn.call} of save was to be a snapshot out of turn")

    def hold(self, host: str, reason: str) -> None:
        """Snapshots are held, or go on (`reason` is "" then): said once each time, not with every
        call."""
        if reason and not self._held:
            _log.warning(
                "host %s: no snapshot can be protected for now, training goes on: %s", host, reason
            )
        elif self._held and not reason:
            _log.warning("host %s: snapshots go on", host)
        self._held = reason


def _why_not(due_step: int) -> str:
    return f"the next snapshot is due at step {due_step}"
