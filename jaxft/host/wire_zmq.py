"""The peer channel over ZeroMQ: TCP, or Unix sockets in a directory of this user alone.

ZeroMQ brings framing, queues, reconnecting and heartbeats. Control messages go from one PUSH socket
for each receiver to the receiver's PULL socket. Whispers go between Unix sockets past ZeroMQ, whose
own thread would wake up for them on both sides (`_Quiet`). Bulk reads have plain sockets of their
own, at addresses of the same form (`stream_frames`).

Who may listen where, and what a connection has to prove, is said in `trust`. Over TCP, with the
job's key, messages are encrypted by CURVE (`wire_curve`), or carry a proof each.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import select
import socket as sockets
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import zmq

from jaxft.errors import (
    ConfigError,
    ProtocolError,
    WireError,
)
from jaxft.host.local import private_socket_path
from jaxft.host.stream_links import Links
from jaxft.host.stream_reader import StreamBulkReader
from jaxft.host.stream_server import StreamBulkServer
from jaxft.host.trust import MAC_BYTES, MessageSeal, Trust, check_address, is_secured
from jaxft.host.wire import (
    MESSAGE_BYTES_MAX,
    BulkReader,
    BulkServer,
    Endpoint,
    Network,
    Provider,
    Waker,
)
from jaxft.host.wire_curve import Curve, Doorkeeper

_log = logging.getLogger(__name__)

# What is queued for one receiver at most: messages (more than a round of the protocol ever has
# under way), and bytes of large ones, since a host that is gone is told them again and again.
_SEND_QUEUE = 64
_SEND_QUEUE_BYTES = 32 << 20
_RECEIVE_QUEUE = 256
# Nobody takes more of them at once, or more bytes by much, whether they are proved or not.
_RECEIVE_BYTES = 64 << 20
# Receivers that an endpoint holds sockets for; the one used longest ago makes room.
PEERS_MAX = 4096

_LINGER_MS = 200
# Whoever connects has so long to prove the key: those who say nothing take a descriptor each.
_PROOF_MS = 10_000
# A whisper that is longer is said aloud.
_WHISPER_BYTES_MAX = 1 << 16
# A plain number: ZeroMQ's Python side makes objects of its own of any other.
_READABLE = int(zmq.POLLIN)


class ZmqNetwork(Network):
    """ZeroMQ with its own context for messages, stream sockets for bulk reads.

    Args:
        trust: what peers on other machines know each other by; without it there are none.

    Raises:
        ConfigError: a package is missing that it takes.
    """

    def __init__(self, trust: Trust | None = None) -> None:
        self._trust = trust
        self._links = Links(trust)
        self._sockets = _Sockets(trust)

    def endpoint(self, hint: str) -> Endpoint:
        return ZmqEndpoint(self._sockets, hint)

    def serve(self, hint: str, provider: Provider) -> BulkServer:
        check_address(hint, self._trust)
        return StreamBulkServer(hint, provider, self._links)

    def reader(self) -> BulkReader:
        check = functools.partial(check_address, trust=self._trust)
        return StreamBulkReader(check, self._links)

    def close(self) -> None:
        self._sockets.close()


class _Sockets:
    """Makes ZeroMQ's sockets, each with what it needs at its address.

    Args:
        trust: of the network.
    """

    def __init__(self, trust: Trust | None) -> None:
        self._context = zmq.Context(1)
        self._context.set(zmq.MAX_SOCKETS, 4 * PEERS_MAX)
        self._trust = trust
        self._curve: Curve | None = None
        self._doorkeeper: Doorkeeper | None = None
        self.seal = MessageSeal(trust) if trust is not None and trust.clear else None
        if trust is not None and not trust.clear:
            self._curve = Curve(trust)
            self._doorkeeper = Doorkeeper(self._context, self._curve)

    def listening(self, hint: str) -> zmq.Socket[bytes]:
        """A socket for messages of all peers that does not listen yet. Raises ConfigError."""
        socket = self._socket(zmq.PULL, hint)
        if self._curve is not None and is_secured(hint, self._trust):
            self._curve.guard(socket)
        return socket

    def sending(self, address: str) -> zmq.Socket[bytes]:
        """A socket for messages to one peer that is not connected yet. Raises ConfigError."""
        socket = self._socket(zmq.PUSH, address)
        if self._curve is not None and is_secured(address, self._trust):
            self._curve.introduce(socket)
        return socket

    def seal_of(self, address: str) -> MessageSeal | None:
        """What proves each message to or at this address, if something does."""
        return self.seal if is_secured(address, self._trust) else None

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """One that notices within seconds that the other machine is gone, and tries again."""
        check_address(address, self._trust)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        # A machine that is gone closes nothing. Of a Unix socket the kernel closes the other end.
        if not address.startswith("ipc:"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
            socket.setsockopt(zmq.IPV6, address.startswith("tcp://["))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _PROOF_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        return socket

    def close(self) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        # Also what was left open, since waiting for it to be closed could take for ever.
        self._context.destroy()


class _Outbox:
    """The socket for one receiver, and the large messages that it still holds."""

    def __init__(self, sockets: _Sockets, address: str) -> None:
        self.address = address
        self.socket = sockets.sending(address)
        self._seal = sockets.seal_of(address)
        self.socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self.socket.connect(address)
        self.quiet_path = _quiet_path(address)
        self._large: list[tuple[zmq.MessageTracker, int]] = []

    def send(self, payload: bytes) -> bool:
        """Whether there was room."""
        if self._seal is not None:
            payload = self._seal.close(self.address, payload)
        self._large = [(tracker, size) for tracker, size in self._large if not tracker.done]
        held_bytes = sum(size for _, size in self._large)
        try:
            if len(payload) < zmq.COPY_THRESHOLD:
                self.socket.send(payload, zmq.NOBLOCK)
            elif held_bytes and held_bytes + len(payload) > _SEND_QUEUE_BYTES:
                return False
            else:
                tracker = self.socket.send(payload, zmq.NOBLOCK, copy=False, track=True)
                self._large.append((tracker, len(payload)))
        except zmq.Again:
            return False
        return True


class _Quiet:
    """A datagram socket that nobody waits for, in a file beside the Unix socket of the endpoint.

    What does not find its way says so: no such file, nobody there, a full queue (unix(7), the
    system's max_dgram_qlen).
    """

    def __init__(self, address: str) -> None:
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._path: Path | None = None
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        name = _quiet_path(address)
        if name:
            # Without one, others speak aloud: where its name is too long, for example.
            path = Path(name)
            with contextlib.suppress(OSError, ConfigError):
                private_socket_path(path)
                path.unlink(missing_ok=True)  # an earlier one's, that was killed
                self._socket.bind(name)
                self._path = path

    def send(self, path: str, payload: bytes) -> bool:
        """Whether it lies in the queue of the receiver at `path`."""
        if not path or len(payload) > _WHISPER_BYTES_MAX:
            return False
        try:
            self._socket.sendto(payload, path)
        except OSError:
            return False
        return True

    def receive(self) -> list[bytes]:
        messages: list[bytes] = []
        if self._path is None:
            return messages
        # Asking first: to be told by an exception that there is none costs more than all the rest.
        while len(messages) < _RECEIVE_QUEUE and self._poller.poll(0):
            messages.append(self._socket.recv(_WHISPER_BYTES_MAX))
        return messages

    def close(self) -> None:
        self._socket.close()
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)


class ZmqEndpoint(Endpoint):
    def __init__(self, sockets: _Sockets, hint: str) -> None:
        self._sockets = sockets
        self._inbox = sockets.listening(hint)
        self._seal = sockets.seal_of(hint)
        sealed_bytes = MAC_BYTES if self._seal is not None else 0
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX + sealed_bytes)
        self._inbox.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        self._address = _bind(self._inbox, hint)
        self._outboxes: OrderedDict[str, _Outbox] = OrderedDict()
        self._quiet = _Quiet(self._address)
        self._waker = Waker()
        self._poller = select.poll()
        self._polled: frozenset[int] = frozenset()
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._dropped = 0
        self._unproved = 0

    @property
    def address(self) -> str:
        return self._address

    @property
    def dropped(self) -> int:
        return self._dropped

    def send(self, address: str, payload: bytes) -> None:
        if len(payload) > MESSAGE_BYTES_MAX:
            raise ProtocolError(
                f"a message to {address} has {len(payload)} bytes, at most {MESSAGE_BYTES_MAX} go"
            )
        self._dropped += not self._outbox(address).send(payload)

    def whisper(self, address: str, payload: bytes) -> None:
        if not self._quiet.send(self._outbox(address).quiet_path, payload):
            self.send(address, payload)

    def receive(self, timeout_s: float) -> list[bytes]:
        messages = self._quiet.receive()
        if timeout_s > 0 and not messages:
            self._inbox.poll(_milliseconds(timeout_s))
        taken, taken_bytes = len(messages), 0
        # Asking first, as above.
        while taken < _RECEIVE_QUEUE and taken_bytes < _RECEIVE_BYTES and self._has_message:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            taken, taken_bytes = taken + 1, taken_bytes + sum(map(len, frames))
            if len(frames) == 1:
                messages += self._opened(frames[0])
            else:
                _log.warning("%s: a message of %d frames is none", self._address, len(frames))
        return messages

    def _opened(self, message: bytes) -> list[bytes]:
        """What was said, or nothing if whoever said it did not prove the job's key."""
        payload = message if self._seal is None else self._seal.open(self._address, message)
        if payload is not None:
            return [payload]
        self._unproved += 1
        if self._unproved == 1:  # Whoever sends one may send many.
            _log.warning(
                "%s: messages without a proof of this job's key arrive and are thrown away: a host "
                "with another job key, or without --trust-network, or somebody else",
                self._address,
            )
        return []

    def wait(self, fds: Iterable[int], timeout_s: float) -> list[int]:
        self._poll_for(frozenset((self._inbox_fd, self._waker.fileno(), *fds)))
        deadline_s = time.monotonic() + timeout_s
        # The inbox's descriptor is readable when ZeroMQ has something to do, which need not be a
        # message, and tells of changes only (ZMQ_FD in zmq_getsockopt(3)).
        while not self._has_message:
            ready = {fd for fd, _ in self._poller.poll(_milliseconds(timeout_s))}
            if ready != {self._inbox_fd}:
                break
            timeout_s = deadline_s - time.monotonic()
        else:
            ready = {fd for fd, _ in self._poller.poll(0)}
        if self._waker.fileno() in ready:
            self._waker.clear()
        return [fd for fd in ready if fd not in (self._inbox_fd, self._waker.fileno())]

    def _poll_for(self, fds: frozenset[int]) -> None:
        for fd in self._polled - fds:
            self._poller.unregister(fd)
        for fd in fds - self._polled:
            self._poller.register(fd, select.POLLIN)
        self._polled = fds

    @property
    def _has_message(self) -> bool:
        events = self._inbox.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & _READABLE)

    def wake(self) -> None:
        self._waker.wake()

    def forget(self, address: str) -> None:
        outbox = self._outboxes.pop(address, None)
        if outbox is not None:
            outbox.socket.close(linger=0)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.socket.close(linger=_LINGER_MS)
        self._outboxes.clear()
        self._quiet.close()
        self._waker.close()
        _close_bound(self._inbox, self._address)

    def _outbox(self, address: str) -> _Outbox:
        outbox = self._outboxes.get(address)
        if outbox is None:
            if len(self._outboxes) >= PEERS_MAX:
                self.forget(next(iter(self._outboxes)))
            outbox = self._outboxes[address] = _Outbox(self._sockets, address)
        self._outboxes.move_to_end(address)
        return outbox


def _bind(socket: zmq.Socket[bytes], hint: str) -> str:
    """Binds, and returns the address with what `hint` left open."""
    try:
        socket.bind(hint)
    except zmq.ZMQError as error:
        socket.close()
        raise WireError(f'cannot listen at "{hint}": {error}') from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _quiet_path(address: str) -> str:
    """Where an endpoint hears whispers; "" if it does not."""
    scheme, _, path = address.partition("://")
    return f"{path}q" if scheme == "ipc" else ""


def _close_bound(socket: zmq.Socket[bytes], address: str) -> None:
    """Closes a listening socket and removes a Unix socket's file, which ZeroMQ leaves."""
    if socket.closed:
        return
    socket.close()
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        Path(path).unlink(missing_ok=True)


def _milliseconds(seconds: float) -> int:
    """Rounded up, so that a short wait is not a busy one."""
    return math.ceil(max(0.0, seconds) * 1000)
