"""Open receipts: those whose snapshots are on their way, until it is known what became of them.

Told of it by several threads: the training's, the one that fills slots, and the connection's.
"""

from __future__ import annotations

import logging
import threading

from jaxft.errors import JaxftError, SnapshotAborted, SnapshotError, SnapshotLost, SnapshotSkipped
from jaxft.group.messages import Outcome, PersistOrder
from jaxft.host.client import SmpClient
from jaxft.receipt import Receipt

_log = logging.getLogger(__name__)


class OpenReceipts:
    """The receipts of one rank.

    Attributes:
        last_failure: why the last snapshot that was decided failed; None if it did not.
        latest_step: the step of the newest snapshot that is protected; None before the first.
    """

    def __init__(self, host: str, client: SmpClient) -> None:
        self.last_failure: JaxftError | None = None
        self.latest_step: int | None = None
        self._host = host
        self._client = client
        self._open: dict[int, Receipt] = {}
        self._lock = threading.Lock()  # guards all three

    def open(self, seq: int, receipt: Receipt) -> None:
        """Snapshot `seq` has begun."""
        with self._lock:
            self._open[seq] = receipt

    def stage(self, seq: int) -> None:
        """This host's part of it is in its SMP."""
        with self._lock:
            receipt = self._open.get(seq)
        if receipt is not None:
            receipt.stage()

    def decide(self, outcome: Outcome) -> None:
        """Ends the snapshot's receipt; one that goes to storage stays open for that."""
        with self._lock:
            receipt = self._open.get(outcome.seq)
            if not (outcome.ok and outcome.persist):
                self._open.pop(outcome.seq, None)
            if outcome.ok:
                self.latest_step = outcome.step
                self.last_failure = None
        if receipt is None:
            return
        if not outcome.ok:
            what = f"snapshot {outcome.seq} was aborted: {outcome.reason}"
            self.fail(receipt, SnapshotAborted(what))
            return
        receipt.protect()
        if not outcome.persist:
            receipt.fail(SnapshotSkipped(f"step {outcome.step} was not chosen for storage"))

    def pass_over(self, outcome: Outcome) -> None:
        """A snapshot was aborted that has not begun here: it has no receipt to say so."""
        failure = SnapshotAborted(
            f"host {self._host}, step {outcome.step}: snapshot {outcome.seq} was "
            f"aborted before it began here: {outcome.reason}"
        )
        with self._lock:
            self.last_failure = failure
        _log.error("%s", failure)

    def persist(self, order: PersistOrder) -> None:
        """A snapshot is on storage, or is known not to get there."""
        if order.id is None or not order.result:
            return
        with self._lock:
            receipt = self._open.pop(order.id.seq, None)
        if receipt is None:
            return
        if order.result == "written":
            receipt.persist(order.step)
        else:
            receipt.fail(SnapshotError(f"step {order.step} was not persisted: {order.result}"))

    def fail(self, receipt: Receipt, error: JaxftError, *, loud: bool = True) -> None:
        """Ends a receipt with an error that names host and step; the first one is the cause."""
        kind = type(error) if isinstance(error, SnapshotError) else SnapshotLost
        failure = kind(f"host {self._host}, step {receipt.step}: {error}")
        if not receipt.protected.done():
            # What ended the connection for good was said when it did.
            if loud and error is not self._client.failure:
                _log.error("%s", failure)
            with self._lock:
                self.last_failure = failure
        receipt.fail(failure)

    def end_all(self, error: JaxftError) -> None:
        """Nothing that is still open can be known any more, for example: the SMP is lost."""
        with self._lock:
            receipts, self._open = self._open, {}
        for receipt in receipts.values():
            self.fail(receipt, error)
