"""The peer channel over ZeroMQ: loopback TCP, or Unix sockets in a directory of this user alone.

ZeroMQ brings framing, queues, reconnecting and heartbeats. Control messages go from one PUSH socket
for each receiver to the receiver's PULL socket. Bulk reads go from a DEALER for each server to its
ROUTER, which sends the memory itself without copying it first.

    request   [BulkRequest]
    answer    [BulkAnswer, the bytes (empty if refused)]

Nothing here is authenticated, so every address that other machines could reach is refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic

import msgspec
import zmq

from jaxft.errors import (
    ConfigError,
    JaxftError,
    PeerUnreachable,
    ProtocolError,
    ReadCancelled,
    WireError,
)
from jaxft.host.local import private_socket_path
from jaxft.host.wire import (
    CANCEL_POLL_S,
    MESSAGE_BYTES_MAX,
    PIECE_BYTES_MAX,
    WINDOW_BYTES,
    BulkReader,
    BulkServer,
    Endpoint,
    Network,
    Provider,
    ReadRequest,
    Refused,
    T,
    Waker,
)

_log = logging.getLogger(__name__)

# What is queued for one receiver at most: messages (more than a round of the protocol ever has
# under way), and bytes of large ones, since a host that is gone is told them again and again.
_SEND_QUEUE = 64
_SEND_QUEUE_BYTES = 32 << 20
_RECEIVE_QUEUE = 256
# Receivers that an endpoint holds sockets for; the one used longest ago makes room.
PEERS_MAX = 4096
# Reads under way at once, whatever their size.
_READS_MAX = 256
# First silence after which what a server owes is asked for again; doubled each time.
_RETRY_S = 1.0
# A process that was stopped finds its clock far ahead, and its servers are not to blame for it.
_TICK_S_MAX = 1.0

_CLOSE_S = 5.0
_LINGER_MS = 200
_FRAME_SLACK_BYTES = 4096


class BulkRequest(msgspec.Struct, frozen=True, array_like=True):
    """`number` comes back in the answer."""

    number: int
    key: bytes
    offset: int
    nbytes: int


class BulkAnswer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    refused: str = ""


_decode_request = msgspec.msgpack.Decoder(BulkRequest).decode
_decode_answer = msgspec.msgpack.Decoder(BulkAnswer).decode
_encode = msgspec.msgpack.encode


class ZmqNetwork(Network):
    """ZeroMQ with its own context and `io_threads` threads that move bytes (3 GB/s each, about)."""

    def __init__(self, *, io_threads: int = 1) -> None:
        self._context = zmq.Context(io_threads)
        self._context.set(zmq.MAX_SOCKETS, 4 * PEERS_MAX)

    def endpoint(self, hint: str) -> Endpoint:
        return ZmqEndpoint(self._context, hint)

    def serve(self, hint: str, provider: Provider) -> BulkServer:
        return ZmqBulkServer(self._context, hint, provider)

    def reader(self) -> BulkReader:
        return ZmqBulkReader(self._context)

    def close(self) -> None:
        # Also what was left open, since waiting for it to be closed could take for ever.
        self._context.destroy()


def check_address(address: str) -> None:
    """Refuses what is neither loopback TCP nor a Unix socket in a private directory.

    Raises:
        ConfigError: says what is wrong with it.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        private_socket_path(Path(rest))
        return
    if scheme != "tcp":
        raise ConfigError(f'address "{address}" is neither tcp://127.0.0.1:PORT nor ipc:///PATH')
    host, _, port = rest.rpartition(":")
    if not (port == "*" or port.isdigit()):
        raise ConfigError(f'address "{address}" has no port: a number, or * for any')
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f'address "{address}" can be reached from other machines, which needs authentication, '
            "and there is none yet: use tcp://127.0.0.1:PORT or ipc:///PATH"
        )


class _Outbox:
    """The socket for one receiver, and the large messages that it still holds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = _socket(context, zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self.socket.connect(address)
        self._large: list[tuple[zmq.MessageTracker, int]] = []

    def send(self, payload: bytes) -> bool:
        """Whether there was room."""
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


class ZmqEndpoint(Endpoint):
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], hint: str) -> None:
        self._context = context
        self._inbox = _socket(context, zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self._inbox.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        self._address = _bind(self._inbox, hint)
        self._outboxes: OrderedDict[str, _Outbox] = OrderedDict()
        self._waker = Waker()
        self._dropped = 0

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

    def receive(self, timeout_s: float) -> list[bytes]:
        if not self._inbox.poll(_milliseconds(timeout_s)):
            return []
        messages: list[bytes] = []
        while len(messages) < _RECEIVE_QUEUE:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1:
                messages.append(frames[0])
            else:
                _log.warning("%s: a message of %d frames is none", self._address, len(frames))
        return messages

    def wait(self, fds: Iterable[int], timeout_s: float) -> list[int]:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        wanted = {self._waker.fileno(), *fds}
        for fd in wanted:
            poller.register(fd, zmq.POLLIN)
        ready = {where for where, _ in poller.poll(_milliseconds(timeout_s))}
        if self._waker.fileno() in ready:
            self._waker.clear()
        return [fd for fd in wanted - {self._waker.fileno()} if fd in ready]

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
        self._waker.close()
        _close_bound(self._inbox, self._address)

    def _outbox(self, address: str) -> _Outbox:
        outbox = self._outboxes.get(address)
        if outbox is None:
            check_address(address)
            if len(self._outboxes) >= PEERS_MAX:
                self.forget(next(iter(self._outboxes)))
            outbox = self._outboxes[address] = _Outbox(self._context, address)
        self._outboxes.move_to_end(address)
        return outbox


class ZmqBulkServer(BulkServer):
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], hint: str, provider: Provider
    ) -> None:
        self._provider = provider
        self._socket = _socket(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_SLACK_BYTES)
        # A reader has _READS_MAX under way, and may ask for each of them a few times.
        self._socket.setsockopt(zmq.SNDHWM, 8 * _READS_MAX)
        self._address = _bind(self._socket, hint)
        self._waker = Waker()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="jaxft-bulk", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._closing = True
        self._waker.wake()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise WireError(
                f"the server at {self._address} did not end within {_CLOSE_S} s: what it serves "
                "from does not answer"
            )
        self._waker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        try:
            while not self._closing:
                if self._socket in dict(poller.poll(_milliseconds(1.0))):
                    self._answer_all()
        finally:
            _close_bound(self._socket, self._address)

    def _answer_all(self) -> None:
        while not self._closing:
            try:
                reader, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = _decode_request(b"".join(frames))
            except msgspec.DecodeError as error:
                _log.warning("%s: a request that is none: %s", self._address, error)
                continue
            given = self._look_up(request)
            if isinstance(given, Refused):
                answer = BulkAnswer(request.number, given.reason or "refused")
                self._socket.send_multipart([reader, _encode(answer), b""])
            else:
                answer = BulkAnswer(request.number)
                self._socket.send_multipart([reader, _encode(answer), given], copy=False)

    def _look_up(self, request: BulkRequest) -> memoryview | Refused:
        if not 0 <= request.nbytes <= PIECE_BYTES_MAX or request.offset < 0:
            return Refused(f"{request.nbytes} bytes at {request.offset} cannot be asked for")
        try:
            return self._provider(request.key, request.offset, request.nbytes)
        except JaxftError as error:
            return Refused(str(error))
        except Exception as error:  # noqa: BLE001
            # A fault of ours must not end the server for everybody, nor go unseen.
            _log.exception("%s: reading %r failed", self._address, request)
            return Refused(f"the server failed: {error!r}")


class ZmqBulkReader(BulkReader):
    """Connects anew for each read, so that no answer to an earlier one can arrive in it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context

    def read_many(
        self,
        requests: Iterable[ReadRequest[T]],
        *,
        peer_s: float,
        deadline_s: float,
        window_bytes: int = WINDOW_BYTES,
        cancel: threading.Event | None = None,
    ) -> Iterator[tuple[T, memoryview | Refused]]:
        reading = _Reading(self._context, requests, window_bytes, peer_s, deadline_s, cancel)
        try:
            while reading.ask():
                for request, answer in reading.receive():
                    reading.release(request)
                    reading.ask()
                    yield request.tag, answer
        finally:
            reading.close()


class _Server(Generic[T]):
    """What one server owes to one read, and how long it has been silent while it owed it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        check_address(address)
        self.address = address
        self.socket = _socket(context, zmq.DEALER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES_MAX + _FRAME_SLACK_BYTES)
        self.socket.connect(address)
        self.owes: dict[int, ReadRequest[T]] = {}
        self.heard()

    def heard(self) -> None:
        self.silent_s = 0.0
        self.retry_at_s = _RETRY_S

    def ask(self, number: int, request: ReadRequest[T]) -> None:
        if not self.owes:
            self.heard()
        self.owes[number] = request
        self._send(number, request)

    def silent(self, seconds: float, peer_s: float) -> None:
        """Counts silence; asks again for all that is owed when there has been enough of it.

        The server may have been started anew, and not know what it was asked.
        """
        self.silent_s += seconds
        if self.silent_s >= peer_s:
            raise PeerUnreachable(
                f"the host at {self.address} owes {len(self.owes)} reads and has not answered for "
                f"{self.silent_s:.1f} s (limit {peer_s:g} s): it is down or cut off"
            )
        if self.silent_s >= self.retry_at_s:
            self.retry_at_s *= 2
            for number, request in self.owes.items():
                self._send(number, request)

    def take(self) -> tuple[ReadRequest[T], memoryview | Refused] | None:
        """The next answer to something still owed, or None."""
        while self.owes:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            try:
                header, data = frames
                answer = _decode_answer(header.buffer)
            except (ValueError, msgspec.DecodeError) as error:
                raise ProtocolError(
                    f"the host at {self.address} sent an answer that is none: {error}"
                ) from error
            request = self.owes.pop(answer.number, None)
            # One that was asked for twice may be answered twice.
            if request is not None:
                return request, _checked(request, answer, data.buffer)
        return None

    def _send(self, number: int, request: ReadRequest[T]) -> None:
        wanted = BulkRequest(number, request.key, request.offset, request.nbytes)
        # With a full queue the server is gone; it is asked again if it comes back in time.
        with contextlib.suppress(zmq.Again):
            self.socket.send(_encode(wanted), zmq.NOBLOCK)


class _Reading(Generic[T]):
    """One call of `read_many`: what was asked for, of whom, and what of the window that takes."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        requests: Iterable[ReadRequest[T]],
        window_bytes: int,
        peer_s: float,
        deadline_s: float,
        cancel: threading.Event | None,
    ) -> None:
        self._context = context
        self._requests = iter(requests)
        self._coming = next(self._requests, None)
        self._window_bytes = window_bytes
        self._peer_s = peer_s
        self._deadline_s = deadline_s
        self._cancel = cancel
        self._started = self._last_tick = time.monotonic()
        self._servers: dict[str, _Server[T]] = {}
        self._poller = zmq.Poller()
        self._number = 0
        self._held = 0
        self._held_bytes = 0

    def ask(self) -> bool:
        """Asks for as much as there is room for; whether anything is still to come."""
        while self._coming is not None and self._has_room(self._coming.nbytes):
            request = self._coming
            if not 0 <= request.nbytes <= PIECE_BYTES_MAX:
                raise ProtocolError(
                    f"{request.nbytes} bytes are to be read from {request.address} at once, "
                    f"at most {PIECE_BYTES_MAX} are given"
                )
            self._held += 1
            self._held_bytes += request.nbytes
            self._number += 1
            self._server(request.address).ask(self._number, request)
            self._coming = next(self._requests, None)
        return self._held > 0

    def release(self, request: ReadRequest[T]) -> None:
        self._held -= 1
        self._held_bytes -= request.nbytes

    def receive(self) -> list[tuple[ReadRequest[T], memoryview | Refused]]:
        """What has arrived, after waiting CANCEL_POLL_S at most for the first of it."""
        ready = dict(self._poller.poll(_milliseconds(CANCEL_POLL_S)))
        arrived = []
        for server in self._servers.values():
            if server.socket in ready:
                server.heard()
                while (answer := server.take()) is not None:
                    arrived.append(answer)
        # Arrivals first: who was busy elsewhere for long must not take that for silence.
        self._check(ready)
        return arrived

    def close(self) -> None:
        for server in self._servers.values():
            server.socket.close(linger=0)

    def _has_room(self, nbytes: int) -> bool:
        if self._held == 0:
            return True
        return self._held < _READS_MAX and self._held_bytes + nbytes <= self._window_bytes

    def _server(self, address: str) -> _Server[T]:
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = _Server(self._context, address)
            self._poller.register(server.socket, zmq.POLLIN)
        return server

    def _check(self, ready: dict[Any, int]) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise ReadCancelled("the read was cancelled")
        now = time.monotonic()
        seconds, self._last_tick = min(now - self._last_tick, _TICK_S_MAX), now
        owing = [server for server in self._servers.values() if server.owes]
        if owing and now - self._started > self._deadline_s:
            names = ", ".join(server.address for server in owing)
            raise PeerUnreachable(
                f"reading did not end within {self._deadline_s:g} s: {names} still owe answers"
            )
        for server in owing:
            if server.socket not in ready:
                server.silent(seconds, self._peer_s)


def _checked(request: ReadRequest[T], answer: BulkAnswer, data: memoryview) -> memoryview | Refused:
    if answer.refused:
        return Refused(answer.refused)
    if data.nbytes != request.nbytes:
        return Refused(f"{request.address} gave {data.nbytes} bytes for {request.nbytes}")
    return data.toreadonly()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that notices within seconds that the other machine is gone, and tries again."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    return socket


def _bind(socket: zmq.Socket[bytes], hint: str) -> str:
    """Binds, and returns the address with what `hint` left open."""
    try:
        check_address(hint)
        socket.bind(hint)
    except zmq.ZMQError as error:
        socket.close()
        raise WireError(f'cannot listen at "{hint}": {error}') from error
    except ConfigError:
        socket.close()
        raise
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


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
