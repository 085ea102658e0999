"""A rank's (or helper's) connection to the SMP of its host. Imports no JAX.

A thread of its own holds the connection. It keeps what the SMP pushes as state that others wait on,
and connects again when the SMP was killed and started on its memory; then it says everything that
is still open again. The slots stay mapped here meanwhile, so a snapshot in the making goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxft.errors import (
    ChannelClosed,
    JaxftError,
    PeerUnreachable,
    ProtocolError,
    SnapshotLost,
    WireError,
)
from jaxft.group.messages import Outcome, PersistOrder, RankOptions
from jaxft.host import protocol as p
from jaxft.host.local import LocalChannel, connect
from jaxft.host.memory import Arena

_log = logging.getLogger(__name__)
T = TypeVar("T")
RECONNECT_S = 60.0
# The end of the connection, closing it included, ends the wait for a message.
POLL_S = 5.0
RETRY_S = 0.02
BYE_S = 2.0
# Beside the SMP's socket, held by whoever keeps that SMP, and removed with it (`launch.hostdir`).
LOCK = "lock"
ADVICE = (
    "Training goes on, and nothing protects this script any more: end this Snapshotter with "
    "close(failing=True) and make another one, which protects what it saves"
)


class SmpClient:
    """Connected to the SMP at `path` until closed.

    Args:
        path: its Unix socket.
        hello: who this is; the process id is filled in.
        connect_s: how long the SMP may take to let this process in.
        reconnect_s: how long it may be away.

    Raises:
        PeerUnreachable: nobody let this process in.
        ProtocolError: the SMP refused it; says why.

    Attributes:
        plan: the newest plan told, `settled` that everybody has restored it.
        outcomes: of this generation's snapshots, by seq (the newest ones).
        held: why no snapshot can be decided for now; "" while they can.
        failure: why the connection is lost for good; None while it is not.
        arrivals: how often this process was let in: once more after the SMP was started again.
        listeners, failure_listeners: called in the connection's thread with every message, and with
            the failure.
    """

    def __init__(
        self,
        path: Path,
        hello: p.Hello,
        *,
        connect_s: float = 60.0,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.path = path
        self.hello = hello
        self.reconnect_s = reconnect_s
        self.plan: p.PlanTold | None = None
        self.settled: p.SettledTold | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.held = ""
        self.granted: dict[int, p.Granted] = {}
        self.staged_seq = -1
        self.reserved: p.Reserved | None = None
        self.manifests: dict[str, p.ManifestsTold] = {}
        self.fetched: dict[int, tuple[p.Fetched, Arena | None]] = {}
        self.persist: PersistOrder | None = None
        self.persist_told: p.PersistTold | None = None
        self.listeners: list[Callable[[p.ServerMessage], None]] = []
        self.failure_listeners: list[Callable[[JaxftError], None]] = []
        self.failure: JaxftError | None = None
        self.arrivals = 1
        self._open: dict[str, p.ClientMessage] = {}
        self._slots: list[Arena] = []
        self._closing = False
        self._is_kept = path.with_name(LOCK).exists()
        self._changed = threading.Condition()
        self._channel, self.welcome = self._arrive(connect_s)
        self._thread = threading.Thread(target=self._run, daemon=True, name="jaxft-smp-client")
        self._thread.start()

    # -------------------------------------------------------------------- for other threads

    def say(self, message: p.ClientMessage, *, open_as: str = "") -> None:
        """Sends. With `open_as` it is said again after a reconnect, until `close_open`."""
        with self._changed:
            if open_as:
                self._open[open_as] = message
            channel = self._channel
        try:
            channel.send(p.encode(message))
        except WireError as error:
            _log.info("the SMP is away, %s is said again later: %s", type(message).__name__, error)

    def close_open(self, *names: str) -> None:
        with self._changed:
            for name in names:
                self._open.pop(name, None)

    def wait(self, ready: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Waits until `ready()` gives something.

        Raises:
            PeerUnreachable: not within `timeout_s`; names `what`.
            ChannelClosed: this client was closed meanwhile.
            JaxftError: the connection is lost for good.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = ready()
                if found is not None:
                    return found
                if self.failure is not None:
                    raise self.failure
                if self._closing:
                    raise ChannelClosed(f"{what} did not come before this process closed")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise PeerUnreachable(
                        f"host {self.welcome.host}: {what} did not come within {timeout_s:.3g} s"
                    )
                self._changed.wait(min(left_s, 1.0))

    def notify(self) -> None:
        """Makes waiting threads look again."""
        with self._changed:
            self._changed.notify_all()

    def slot(self, number: int, size_bytes: int) -> Arena:
        """The mapped slot, at least `size_bytes` of it."""
        arena = self._slots[number]
        arena.ensure(size_bytes)
        return arena

    def close(self) -> None:
        """Ends the connection. No thread of the caller may write into a slot any more.

        Waits until the SMP has taken note of that (it closes the connection): before, it would
        kill this process when it enters another generation.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.say(p.Bye())
        self._thread.join(BYE_S)
        self._channel.close()
        self._thread.join(BYE_S)
        for arena in self._slots:
            arena.close()

    # -------------------------------------------------------------------- the thread

    def _arrive(self, timeout_s: float) -> tuple[LocalChannel, p.Welcome]:
        """The first time: an SMP that dies before it has answered is started again."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._let_in(max(RETRY_S, left_s))
            except ChannelClosed:
                if left_s <= 0:
                    raise
                time.sleep(RETRY_S)

    def _let_in(self, timeout_s: float) -> tuple[LocalChannel, p.Welcome]:
        """Connects and says hello; keeps the slots' descriptors the first time."""
        deadline = time.monotonic() + timeout_s
        channel = connect(self.path, timeout_s)
        try:
            channel.send(p.encode(self.hello))
            received = channel.receive(max(0.1, deadline - time.monotonic()))
            if received is None:
                raise PeerUnreachable(
                    f"the snapshot process at {self.path} did not let rank {self.hello.rank} of "
                    f"generation {self.hello.generation} in within {timeout_s:g} s"
                )
            message = p.decode_server(received.payload)
            if isinstance(message, p.Refused):
                raise ProtocolError(f"the snapshot process at {self.path}: {message.reason}")
            if not isinstance(message, p.Welcome):
                raise ProtocolError(f"the snapshot process at {self.path} did not say welcome")
            self._keep(message, received.fds)
        except BaseException:
            channel.close()
            raise
        return channel, message

    def _keep(self, welcome: p.Welcome, fds: tuple[int, ...]) -> None:
        """Maps the slots, or sees that they are the ones mapped already."""
        by_name = dict(zip(welcome.fds, fds, strict=True))
        if self._slots:
            for fd in fds:
                os.close(fd)
            if welcome.arena != self.welcome.arena:
                raise ProtocolError(
                    f"host {welcome.host}: the snapshot process came back with other memory"
                )
            return
        os.close(by_name["ledger"])
        self._slots = [Arena.adopt(by_name["slot0"]), Arena.adopt(by_name["slot1"])]

    def _run(self) -> None:
        while self.failure is None:
            try:
                received = self._channel.receive(POLL_S)
                if received is not None:
                    self._take(p.decode_server(received.payload), received.fds)
            except WireError as error:
                if self._closing:
                    return
                self._come_back(error)

    def _come_back(self, error: WireError) -> None:
        """The SMP is gone: waits for it to be started again, and repeats what is open."""
        _log.warning("host %s: the snapshot process is away: %s", self.welcome.host, error)
        self._channel.close()
        deadline = time.monotonic() + self.reconnect_s
        while not self._closing and time.monotonic() < deadline and self.failure is None:
            if self._is_kept and not self.path.with_name(LOCK).exists():
                self._fail(
                    SnapshotLost(
                        f"the snapshot process of host {self.welcome.host} has ended with the "
                        f"process that kept it, and the snapshots in its memory are gone. {ADVICE}"
                    )
                )
                return
            try:
                channel, welcome = self._let_in(2.0)
            except ProtocolError as refusal:
                self._fail(refusal)
            except WireError:
                time.sleep(RETRY_S)
            else:
                with self._changed:
                    self._channel, self.welcome = channel, welcome
                    self.arrivals += 1
                    again = list(self._open.values())
                for message in again:
                    self.say(message)
                return
        if not self._closing and self.failure is None:
            self._fail(
                PeerUnreachable(
                    f"host {self.welcome.host}: the snapshot process has been away for "
                    f"{self.reconnect_s:g} s"
                )
            )

    def _fail(self, error: JaxftError) -> None:
        _log.error("%s", error)
        with self._changed:
            self.failure = error
            self._closing = True
            self._changed.notify_all()
        for listener in self.failure_listeners:
            listener(error)

    def _take(self, message: p.ServerMessage, fds: tuple[int, ...]) -> None:
        with self._changed:
            match message:
                case p.PlanTold():
                    self.plan = message
                case p.SettledTold():
                    self.settled = message
                case p.Granted():
                    self.granted = {message.seq: message}
                case p.StagedTold():
                    self.staged_seq = max(self.staged_seq, message.seq)
                case p.OutcomeTold():
                    self.outcomes[message.outcome.seq] = message.outcome
                    self.outcomes.pop(message.outcome.seq - 8, None)
                case p.HeldTold():
                    self.held = message.reason
                case p.TurnTold():
                    pass  # for the listeners
                case p.Reserved():
                    self.reserved = message
                case p.ManifestsTold():
                    self.manifests = {str(message.id): message}
                case p.Fetched():
                    arena = Arena.adopt(fds[0]) if fds else None
                    self.fetched[message.number] = (message, arena)
                case p.PersistTold():
                    self.persist, self.persist_told = message.order, message
                case p.Refused() | p.Ended():
                    pass
                case _:
                    _log.warning("the snapshot process said %s", type(message).__name__)
            self._changed.notify_all()
        if isinstance(message, p.Refused):
            self._fail(ProtocolError(f"the snapshot process: {message.reason}"))
        elif isinstance(message, p.Ended):
            self._fail(SnapshotLost(message.reason))
        for listener in self.listeners:
            listener(message)


def greeting(
    role: str, *, generation: int, nonce: str, rank: int, options: RankOptions | None = None
) -> p.Hello:
    """The greeting of this process."""
    return p.Hello(
        role=role,
        pid=os.getpid(),
        generation=generation,
        nonce=nonce,
        rank=rank,
        options=options,
    )
