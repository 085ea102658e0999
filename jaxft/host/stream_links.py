"""Stream connections, and how the two ends of one find that both have the job's key.

Three kinds. In clear, for Unix sockets and loopback. In TLS (`stream_tls`). In clear after a proof,
where the network is trusted:

    opening   "JXH1", 32 random bytes A
    answer    32 random bytes B, HMAC("server", A, B)
    proof     HMAC("client", A, B)

with HMAC-SHA256 under a key derived from the job's. What follows can be read, and be changed by
whoever sits on the way.

A proof goes on in steps on a socket that does not block, so a reader of many servers waits for none
of them alone. After that the calls block, and end by themselves.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Protocol

from jaxft.host.stream_frames import prepare
from jaxft.host.trust import Trust, is_secured

OTHER_KEY = "the other side has another job key, and does not take this job key"

_OPENS = b"JXH1"
_NONCE_BYTES = 32
_MAC_BYTES = 32


class Link:
    """A connection in clear."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._receive_s = 0.0

    def prove(self) -> int:
        """Goes on with the proof as far as it can without waiting.

        Returns:
            What to wait for (POLLIN or POLLOUT) before the next call; 0 when both sides have
            proved what they must.

        Raises:
            OSError: the other side has not, or is gone.
        """
        return 0

    def begin(self, receive_s: float) -> None:
        """From now on calls block; a call of `receive` for about `receive_s` at most (0: for as
        long as it takes)."""
        self._receive_s = receive_s
        prepare(self.socket, receive_s)

    @property
    def has_more(self) -> bool:
        """Whether bytes have arrived that the socket's descriptor does not tell of."""
        return False

    def receive(self, into: memoryview) -> int:
        """Fills `into` as far as bytes come in time. Returns how many; 0: the connection's end.

        Raises:
            BlockingIOError: none came.
            OSError: the connection is broken.
        """
        return self.socket.recv_into(into, len(into), socket.MSG_WAITALL)

    def send(self, header: bytes, data: memoryview | bytes = b"") -> None:
        """Sends both. Raises OSError when the other side takes nothing for SEND_S."""
        sent = self.socket.sendmsg([header, data])
        while sent < len(header) + len(data):
            # Interrupted, or the time is up: then this call raises.
            at = sent - len(header)
            rest = data[max(0, at) :]
            sent += self.socket.sendmsg([header[sent:], rest] if at < 0 else [rest])

    def shut(self) -> None:
        """Ends what the other threads wait for. Raises OSError."""
        socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


class ProvenLink(Link):
    """In clear, after each side has proved the key to the other.

    Args:
        connected: does not block.
        key: of the HMAC.
        is_server: which of the two sides this is.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, is_server: bool) -> None:
        super().__init__(connected)
        self._key = key
        self._steps = self._as_server() if is_server else self._as_client()

    def prove(self) -> int:
        return next(self._steps, 0)

    def _as_client(self) -> Iterator[int]:
        mine = os.urandom(_NONCE_BYTES)
        yield from self._put(_OPENS + mine)
        answer = bytearray(_NONCE_BYTES + _MAC_BYTES)
        yield from self._get(answer)
        theirs = bytes(answer[:_NONCE_BYTES])
        self._check(answer[_NONCE_BYTES:], self._mac(b"server", mine, theirs))
        yield from self._put(self._mac(b"client", mine, theirs))

    def _as_server(self) -> Iterator[int]:
        opening = bytearray(len(_OPENS) + _NONCE_BYTES)
        yield from self._get(opening)
        if opening[: len(_OPENS)] != _OPENS:
            raise ConnectionRefusedError("the other side does not prove the job's key")
        mine, theirs = os.urandom(_NONCE_BYTES), bytes(opening[len(_OPENS) :])
        yield from self._put(mine + self._mac(b"server", theirs, mine))
        proof = bytearray(_MAC_BYTES)
        yield from self._get(proof)
        self._check(proof, self._mac(b"client", theirs, mine))

    def _mac(self, side: bytes, opening: bytes, answer: bytes) -> bytes:
        return hmac.digest(self._key, side + opening + answer, "sha256")

    def _check(self, proof: bytearray, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise ConnectionRefusedError(OTHER_KEY)

    def _put(self, data: bytes) -> Iterator[int]:
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                yield select.POLLOUT

    def _get(self, into: bytearray) -> Iterator[int]:
        left = memoryview(into)
        while left:
            try:
                count = self.socket.recv_into(left)
            except BlockingIOError:
                yield select.POLLIN
                continue
            if count == 0:
                raise ConnectionResetError("the other side ended the connection before its proof")
            left = left[count:]


class _Encrypted(Protocol):
    def link(self, connected: socket.socket, *, is_server: bool) -> Link: ...


class Links:
    """Makes links of connected sockets, as the address and the job's trust want them.

    Raises:
        ConfigError: the package `cryptography` is not installed.
    """

    def __init__(self, trust: Trust | None) -> None:
        self._trust = trust
        self._encrypted: _Encrypted | None = None
        if trust is not None and not trust.clear:
            from jaxft.host.stream_tls import Tls  # which most hosts never need

            self._encrypted = Tls(trust)

    def of(self, address: str, connected: socket.socket, *, is_server: bool) -> Link:
        """The socket's link; the socket does not block. Raises OSError."""
        if self._trust is None or not is_secured(address, self._trust):
            return Link(connected)
        if self._encrypted is not None:
            return self._encrypted.link(connected, is_server=is_server)
        return ProvenLink(connected, self._trust.key.derive("stream proof"), is_server=is_server)


def meet(link: Link, within_s: float) -> None:
    """Proves, and waits for the other side to.

    Raises:
        OSError: it has not, in time.
    """
    deadline_s = time.monotonic() + within_s
    while wanted := link.prove():
        poller = select.poll()
        poller.register(link.socket, wanted)
        if not poller.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
            raise TimeoutError(f"the other side has not proved the job's key within {within_s:g} s")
