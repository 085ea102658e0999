"""The processes of this host that are connected: the agent, ranks and helpers.

A rank that has connected is a writer: its process is held by a pidfd until it is known dead, for no
slot may be granted while a writer of an older generation lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Iterator, Sequence

from jaxft.errors import WireError
from jaxft.host import protocol as p
from jaxft.host.local import LocalChannel

_log = logging.getLogger(__name__)
SEND_S = 1.0


class Client:
    """One connection. `hello` is what it said it is; `seated` is set once it was welcomed, `left`
    once it has said that it goes."""

    def __init__(self, channel: LocalChannel) -> None:
        self.channel = channel
        self.hello: p.Hello | None = None
        self.seated = self.left = False
        self._pulse = -1

    @property
    def role(self) -> str:
        return "" if self.hello is None else self.hello.role

    def tell(self, message: p.ServerMessage, fds: Sequence[int] = ()) -> None:
        """Sends, or gives the client up if it does not take it."""
        try:
            self.channel.send(p.encode(message), fds, timeout_s=SEND_S)
        except WireError as error:
            _log.warning("%s (pid %d) is given up: %s", self.role, self.channel.peer_pid, error)
            self.channel.close()

    def keep_pulse(self, fd: int) -> None:
        """Takes a descriptor over; an agent's is an eventfd that each `beat` counts up."""
        self._drop_pulse()
        self._pulse = fd

    def beat(self) -> None:
        if self._pulse >= 0 and self.role == "agent":
            with contextlib.suppress(OSError):
                os.eventfd_write(self._pulse, 1)

    def close(self) -> None:
        self.channel.close()
        self._drop_pulse()

    def _drop_pulse(self) -> None:
        fd, self._pulse = self._pulse, -1
        if fd >= 0:
            os.close(fd)


class Clients:
    """All connections of one SMP."""

    def __init__(self) -> None:
        self._clients: dict[int, Client] = {}
        self._writers: dict[int, int] = {}

    def add(self, channel: LocalChannel) -> None:
        self._clients[channel.fileno()] = Client(channel)

    def fds(self) -> list[int]:
        return list(self._clients)

    def at(self, fd: int) -> Client | None:
        return self._clients.get(fd)

    def drop(self, fd: int) -> None:
        client = self._clients.pop(fd, None)
        if client is not None:
            client.close()

    def beat(self) -> None:
        """Lets those that watch it see that the loop turns; wakes nobody."""
        for client in self._clients.values():
            client.beat()

    def drop_ended(self) -> list[Client]:
        """Takes out the clients whose connection ended, and returns them."""
        ended = [(fd, client) for fd, client in self._clients.items() if client.channel.ended]
        for fd, _ in ended:
            self.drop(fd)
        return [client for _, client in ended]

    def seated(self, *roles: str) -> Iterator[Client]:
        for client in list(self._clients.values()):
            if client.seated and client.role in roles and not client.channel.ended:
                yield client

    def waiting(self) -> Iterator[Client]:
        """Clients that said hello and wait for their generation."""
        for client in list(self._clients.values()):
            if client.hello is not None and not client.seated:
                yield client

    def tell(self, message: p.ServerMessage, *roles: str) -> None:
        for client in self.seated(*roles):
            client.tell(message)

    def rank(self, rank: int) -> Client | None:
        for client in self.seated("rank"):
            if client.hello is not None and client.hello.rank == rank:
                return client
        return None

    # -------------------------------------------------------------------- writers

    def watch_writer(self, pid: int) -> None:
        """Remembers a process that may write into a slot."""
        if pid not in self._writers:
            with contextlib.suppress(ProcessLookupError):
                self._writers[pid] = os.pidfd_open(pid)

    def forget_writer(self, pid: int) -> None:
        """It said itself that it writes no more."""
        if pid in self._writers:
            os.close(self._writers.pop(pid))

    def writer_fds(self) -> list[int]:
        """Readable when the process is dead."""
        return list(self._writers.values())

    def living_writers(self) -> list[int]:
        """The processes that may still write; those that are dead are forgotten."""
        if not self._writers:
            return []
        poller = select.poll()
        for fd in self._writers.values():
            poller.register(fd, select.POLLIN)
        dead = {fd for fd, _ in poller.poll(0)}
        for pid in [pid for pid, fd in self._writers.items() if fd in dead]:
            os.close(self._writers.pop(pid))
        return list(self._writers)

    def kill_writers(self) -> None:
        for fd in self._writers.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def close(self) -> None:
        for fd in self.fds():
            self.drop(fd)
        for fd in self._writers.values():
            os.close(fd)
        self._writers.clear()
