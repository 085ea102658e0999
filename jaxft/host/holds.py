"""Keeping a snapshot's slots while a process outside of the job reads it, as `jaxft export` does.

The reader asks every SMP that has a share, by a read of a hold's key, wherever that SMP is; and
again every `RENEW_S` until it has read. Each time the SMP keeps the slot for `keeper.HOLD_S` more,
and says whether it has it at all. So a reader that is gone holds nothing up for longer than that,
and no reader does for longer than `READ_S_MAX`. What a hold costs training: the snapshot after the
next finds no slot before it is over, and a call of `save` that is due waits for that snapshot, for
`save_wait_s` at most.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from jaxft.errors import JaxftError
from jaxft.group import events as e
from jaxft.group.manifest import SnapshotId
from jaxft.host.driver import Driver
from jaxft.host.wire import Network, ReadRequest, Refused

HOLD_PREFIX = msgspec.msgpack.encode("hold")
ANSWER_S = 1.5
RENEW_S = 3.0
READ_S_MAX = 300.0
_ASK_S = 3.0
_THREADS_MAX = 64
_HELD, _NOT_HERE = b"\1", b"\0"


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """Reader `who` (a random number) reads snapshot `id`; `over`: not any more."""

    who: int
    id: SnapshotId
    over: bool = False


# ------------------------------------------------------------------------------ the SMP


class Holds:
    """Between the server's threads and the loop, which alone knows what is granted.

    Args:
        wake: wakes the loop up; may be called from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asked: queue.SimpleQueue[tuple[Hold, Future[bool]]] = queue.SimpleQueue()

    def provide(self, key: bytes) -> memoryview | Refused:
        """In a server's thread: one byte, whether the slot is kept."""
        try:
            hold = msgspec.msgpack.decode(key[len(HOLD_PREFIX) :], type=Hold)
        except msgspec.MsgspecError as error:
            return Refused(f"a hold that is none: {error}")
        answer: Future[bool] = Future()
        self._asked.put((hold, answer))
        self._wake()
        try:
            return memoryview(_HELD if answer.result(ANSWER_S) else _NOT_HERE)
        except TimeoutError:
            return Refused(f"the loop of this SMP has not turned for {ANSWER_S:g} s: it hangs")

    def answer(self, driver: Driver) -> None:
        """In the loop: keeps what is asked for, and answers."""
        while not self._asked.empty():
            hold, answer = self._asked.get()
            answer.set_result(_keep(driver, hold))


def _keep(driver: Driver, hold: Hold) -> bool:
    number = driver.core.keeper.slot_of(hold.id)
    if hold.over or number is None or not driver.ledger.slots[number].readable:
        driver.happen(e.HoldOver(hold.who))
        return False
    driver.happen(e.HoldWanted(hold.who, hold.id))
    return True


# ------------------------------------------------------------------------------ the reader


@contextlib.contextmanager
def kept(network: Network, addresses: Sequence[str], identity: SnapshotId) -> Iterator[list[str]]:
    """Keeps the slots of a snapshot inside of the `with`.

    Args:
        network: to ask with.
        addresses: bulk addresses of the SMPs that have shares of it.
        identity: the snapshot.

    Yields:
        Those of the addresses where its slot was given away already. (One that does not answer is
        not among them: whoever reads there will hear why.)
    """
    who = secrets.randbits(62)
    ended = threading.Event()
    with ThreadPoolExecutor(min(_THREADS_MAX, len(addresses) or 1)) as pool:

        def ask(over: bool = False) -> list[str]:
            key = HOLD_PREFIX + msgspec.msgpack.encode(Hold(who, identity, over))
            answers = pool.map(lambda address: _is_kept(network, address, key), addresses)
            return [one for one, held in zip(addresses, answers, strict=True) if held is False]

        def renew() -> None:
            deadline_s = time.monotonic() + READ_S_MAX
            while not ended.wait(RENEW_S) and time.monotonic() < deadline_s:
                ask()

        lost = ask()
        thread = threading.Thread(target=renew, name="jaxft-hold", daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            ended.set()
            thread.join()
            ask(over=True)


def _is_kept(network: Network, address: str, key: bytes) -> bool | None:
    """None if it does not say."""
    request = ReadRequest(address, key, 0, 1, None)
    try:
        answers = network.reader().read_many([request], peer_s=_ASK_S, deadline_s=_ASK_S)
        [(_, answer)] = answers
    except JaxftError:
        return None
    return None if isinstance(answer, Refused) else bytes(answer) == _HELD
