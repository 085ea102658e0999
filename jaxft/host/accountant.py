"""How an SMP is, told by its loop: to processes of its host, and to readers on others; and how
others are.

Readers are served by threads, which ask the loop and wait for it. So a loop that hangs is seen from
anywhere, and nothing is looked at while it changes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from jaxft.errors import PeerUnreachable, WireError
from jaxft.group.account import ACCOUNT_KEY, Account, from_block, to_block
from jaxft.group.messages import Ledger, RankOptions
from jaxft.group.root import stored_step
from jaxft.host.clients import Clients
from jaxft.host.diary import Diary
from jaxft.host.driver import Driver
from jaxft.host.wire import BulkReader, ReadRequest, Refused

ANSWER_S = 1.5
BLOCK_BYTES = 1 << 15
BLOCK_BYTES_MAX = 16 << 20


class Accountant:
    """Between the server's threads and the loop.

    Args:
        wake: wakes the loop up; may be called from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asked: queue.SimpleQueue[Future[Account]] = queue.SimpleQueue()

    def provide(self, nbytes: int) -> memoryview | Refused:
        """In a server's thread: the account as a block of so many bytes."""
        if nbytes > BLOCK_BYTES_MAX:
            return Refused(f"{nbytes} bytes of account, at most {BLOCK_BYTES_MAX} are given")
        answer: Future[Account] = Future()
        self._asked.put(answer)
        self._wake()
        try:
            return memoryview(to_block(answer.result(ANSWER_S), nbytes))
        except TimeoutError:
            return Refused(f"the loop of this SMP has not turned for {ANSWER_S:g} s: it hangs")

    def answer(self, account: Callable[[], Account]) -> None:
        """In the loop: answers whoever has asked."""
        while not self._asked.empty():
            self._asked.get().set_result(account())


def read_account(
    reader: BulkReader, address: str, timeout_s: float, cancel: threading.Event | None = None
) -> Account:
    """How the SMP is that serves reads at `address`.

    Raises:
        WireError: it does not say so in time.
        ConfigError: this is no address to read from.
    """
    size_bytes = BLOCK_BYTES
    deadline_s = time.monotonic() + timeout_s
    late = f"it does not answer within {timeout_s:g} s"
    while (left_s := deadline_s - time.monotonic()) > 0:
        request = ReadRequest(address, ACCOUNT_KEY, 0, size_bytes, None)
        try:
            answers = reader.read_many([request], peer_s=left_s, deadline_s=left_s, cancel=cancel)
            [(_, answer)] = answers
        except PeerUnreachable as error:
            raise PeerUnreachable(f"{late} ({error})") from error
        if isinstance(answer, Refused):
            raise WireError(answer.reason)
        try:
            found = from_block(bytes(answer))
        except msgspec.MsgspecError as error:
            raise WireError(f"it is of another version of jaxft ({error})") from error
        if isinstance(found, Account):
            return found
        size_bytes = 2 * found
    raise PeerUnreachable(late)


def account_of(driver: Driver, clients: Clients) -> Account:
    """How this SMP is now; called in its loop."""
    keeper, root, diary = driver.core.keeper, driver.core.root, driver.diary
    options = next(iter(keeper.options.values()), RankOptions())
    agents = [client.channel.peer_pid for client in clients.seated("agent")]
    ranks = [
        (client.hello.rank, client.channel.peer_pid)
        for client in clients.seated("rank")
        if client.hello is not None
    ]
    return Account(
        job=driver.job,
        host=driver.host,
        pid=os.getpid(),
        address=driver.address,
        now_s=time.time(),
        ledger=keeper.ledger,
        trust=driver.trust,
        generation=keeper.generation if keeper.frozen else None,
        settled=keeper.ledger.settled and keeper.frozen,
        is_root=root is not None,
        agent_pid=agents[-1] if agents else 0,
        ranks=tuple(sorted(ranks)),
        pinned=tuple(sorted(keeper.pinned)),
        held=keeper.held,
        silent={} if root is None else root.silent(time.monotonic()),
        helpers={} if root is None else root.persist_states(),
        directory=options.directory,
        stored=_stored(keeper.ledger, options, diary),
        entered_s=diary.entered_s,
        held_s=diary.held_s,
        committed=diary.committed,
        persisted=diary.persisted,
        notes=diary.notes,
    )


def _stored(ledger: Ledger, options: RankOptions, diary: Diary) -> int:
    """The step of the newest checkpoint: of those that the ranks found, or written since."""
    order = ledger.persist
    known = [stored_step(options, ledger.lineage[-1].base if ledger.settled else None)]
    if order is not None:
        known += [order.step if order.result == "written" else None]
        known += [diary.persisted.step if diary.persisted is not None else None]
    return max((step for step in known if step is not None), default=-1)
