"""The peer channel: what hosts tell each other, and how they read each other's memory.

This is the interface. `wire_zmq` carries the messages over ZeroMQ; `stream_server` and
`stream_reader` do the reads over plain sockets; `wire_inprocess` is the twin of all for tests, and
one conformance test holds for each.

Rules:

- Control messages are small and may be lost, doubled or overtaken, above all around reconnects.
  What they say is therefore state, said again until it is acknowledged. Sending never waits.
- Bulk reads are idempotent: bytes at an offset of something with a key. A read is asked for again
  when its server is silent, until the server has been silent for too long.
- Bytes that were read are not checked here: whoever reads has the manifest, and checks against it.
- They may be the server's own memory, mapped (`Shared`), and change when it is used again. So
  whoever reads checks them after their use, or what was made of them, and not before.
- Nor are messages: whoever receives decodes, and throws away what is no message of the protocol.
- An `Endpoint` belongs to one thread, as does a read in progress. `wake` may be called from any.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from jaxft.errors import ProtocolError

T = TypeVar("T")

MESSAGE_BYTES_MAX = 64 << 20
PIECE_BYTES_MAX = 64 << 20
WINDOW_BYTES = 24 << 20

# A caller that sets `cancel` can join its reader this much later.
CANCEL_POLL_S = 0.05


@dataclass(frozen=True)
class Refused:
    """Why a server does not give the bytes, or why what it gave cannot be right."""

    reason: str


class ReadRequest(NamedTuple, Generic[T]):
    """`nbytes` at `offset` of what the server at `address` knows as `key`.

    The answer comes with `tag`, which means nothing here.
    """

    address: str
    key: bytes
    offset: int
    nbytes: int
    tag: T


def check_size(request: ReadRequest[T]) -> None:
    """Refuses to ask for more than any server gives at once.

    Raises:
        ProtocolError: beyond PIECE_BYTES_MAX.
    """
    if not 0 <= request.nbytes <= PIECE_BYTES_MAX:
        raise ProtocolError(
            f"{request.nbytes} bytes are to be read from {request.address} at once, "
            f"at most {PIECE_BYTES_MAX} are given"
        )


class Shared(NamedTuple):
    """Bytes of a file in memory, which a reader on the same machine maps instead of copying them.

    `data` lies at `offset` of the file behind `fd`, which stays open for as long as the server does
    and never shrinks.

    All that one key stands for lies in one place of one file: a reader that knows where takes the
    rest of it without asking, for as long as its `read_many` lasts.
    """

    data: memoryview
    fd: int
    offset: int


# Called in the server's thread with (key, offset, nbytes). What it gives must not be written to or
# reused until it is sent; a reader that gets a mixture anyway will find its checksum wrong.
Provider = Callable[[bytes, int, int], memoryview | Shared | Refused]


class Endpoint(Protocol):
    """One host's mailbox for control messages, and the place where its main loop waits."""

    @property
    def address(self) -> str:
        """Where others send to."""

    @property
    def dropped(self) -> int:
        """How many messages were not sent because the queue for their receiver was full."""

    def send(self, address: str, payload: bytes) -> None:
        """Queues a message and returns at once; a full queue drops it.

        Raises:
            ConfigError: this transport does not send to such an address.
            ProtocolError: longer than MESSAGE_BYTES_MAX.
        """

    def whisper(self, address: str, payload: bytes) -> None:
        """As `send`, for what says nothing new: where the transport can, it wakes nobody who is in
        `wait`, and is received with whatever comes next."""
        self.send(address, payload)

    def receive(self, timeout_s: float) -> list[bytes]:
        """The messages that are there, waiting up to `timeout_s` for the first one."""

    def wait(self, fds: Iterable[int], timeout_s: float) -> list[int]:
        """Waits for a message, a `wake`, or any of `fds` to be readable or closed.

        Returns those of `fds` that are; call `receive(0)` afterwards in any case.
        """

    def wake(self) -> None:
        """Ends the `wait` in progress, or the next one; may be called from any thread."""

    def forget(self, address: str) -> None:
        """Lets go of what was held for sending to a peer that is gone, unsent messages included."""

    def close(self) -> None:
        """May be repeated."""


class BulkServer(Protocol):
    """Answers reads in a thread of its own until closed."""

    @property
    def address(self) -> str: ...

    def close(self) -> None:
        """Ends the thread. May be repeated."""


class BulkReader(Protocol):
    """Reads from many servers at once. It holds on to peers' memory that was mapped, so one is kept
    for reads that follow each other, and let go of when its peers may be gone."""

    def read_many(
        self,
        requests: Iterable[ReadRequest[T]],
        *,
        peer_s: float,
        deadline_s: float,
        window_bytes: int = WINDOW_BYTES,
        cancel: threading.Event | None = None,
    ) -> Iterator[tuple[T, memoryview | Refused]]:
        """Yields (tag, bytes or refusal) for each request, in the order in which answers come.

        Requests are taken from the iterable as room is made, so that what was asked for and not
        yet yielded stays within `window_bytes` (but for a single request that is larger). The
        bytes are read-only, and belong to whoever took them.

        Args:
            peer_s: how long a server that owes an answer may be silent.
            deadline_s: how long all of it may take.
            cancel: ends the read within CANCEL_POLL_S of being set.

        Raises:
            PeerUnreachable: naming the address, after either time.
            ReadCancelled: `cancel` was set.
            ProtocolError: an answer that is none, or a request beyond PIECE_BYTES_MAX.
            ConfigError: this transport does not read from such an address.
        """


class Network(Protocol):
    """A transport: makes the three of the above."""

    def endpoint(self, hint: str) -> Endpoint:
        """A mailbox at `hint`, which may leave the last part of its address open.

        Raises:
            ConfigError: an address that this transport does not use.
            WireError: it is taken.
        """

    def serve(self, hint: str, provider: Provider) -> BulkServer:
        """Starts to answer reads at `hint`; raises as `endpoint` does."""

    def reader(self) -> BulkReader: ...

    def close(self) -> None:
        """After everything made here is closed."""


class Waker:
    """A descriptor that becomes readable when any thread says so."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        # A closed one has nobody to wake: workers may outlive the loop that they report to.
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
