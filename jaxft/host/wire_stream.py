"""Bulk reads over plain stream sockets: loopback TCP, or Unix sockets in a private directory.

Why not over ZeroMQ, as the control messages: there a byte passes through another thread on each
side and lands in memory that was never touched before, which costs about twice as much processor
time for each byte as what is done here:

- The server answers each connection in a thread of its own: one blocking call sends the header and
  the memory itself, without the interpreter's lock, and whoever does not receive holds up nobody
  else.
- The reader asks for several pieces ahead on each connection and receives each whole, with one
  call, into huge pages that are used again as soon as the last view of what was in them is gone.

On the connection, little-endian; answers come in the order of the requests:

    request   "JXR1"  u32 length, then as many bytes of msgpack: [key, offset, nbytes]
    answer    "JXA1"  u32 length of a refusal (0: none), u64 length of the data, then the one or
              the other

A connection that breaks is made again, and what is owed is asked for again.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic

import msgspec
import numpy as np

from jaxft.errors import (
    ConfigError,
    JaxftError,
    PeerUnreachable,
    ProtocolError,
    ReadCancelled,
    WireError,
)
from jaxft.host.priority import step_back
from jaxft.host.wire import (
    CANCEL_POLL_S,
    PIECE_BYTES_MAX,
    WINDOW_BYTES,
    BulkReader,
    BulkServer,
    Provider,
    ReadRequest,
    Refused,
    T,
    check_size,
)

_log = logging.getLogger(__name__)

# Reads under way at once, whatever their size.
_READS_MAX = 256
# A connection that could not be made is tried again after this; doubled each time.
_RETRY_S = 0.05
_RETRY_S_MAX = 1.0
# A process that was stopped finds its clock far ahead, and its servers are not to blame for it.
_TICK_S_MAX = 1.0
# A reader that takes nothing for so long is let go; it connects again if it still lives.
_SEND_S = 30.0
_CLOSE_S = 5.0
_BACKLOG = 128
_CONNECTIONS_MAX = 1024
# As much of a piece as the kernel holds between the two (it gives what its own limit allows).
_BUFFER_BYTES = 4 << 20
_HUGE_BYTES = 2 << 20

_REQUEST = struct.Struct("<4sI")
_ANSWER = struct.Struct("<4sIQ")
_ASKS, _SAYS = b"JXR1", b"JXA1"
_REQUEST_BYTES_MAX = 1 << 16
_REFUSAL_BYTES_MAX = 1 << 16
_REASON_CHARS_MAX = 4096


class BulkRequest(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    offset: int
    nbytes: int


_decode_request = msgspec.msgpack.Decoder(BulkRequest).decode
_encode = msgspec.msgpack.encode


def _seconds(value: float) -> bytes:
    """A timeval for SO_RCVTIMEO and SO_SNDTIMEO (socket(7))."""
    return struct.pack("@ll", int(value), int(value % 1 * 1_000_000))


def _prepare(connected: socket.socket, receive_s: float) -> None:
    """A blocking socket whose calls end by themselves."""
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _seconds(_SEND_S))
    if receive_s:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(receive_s))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Of an address that was checked."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return family, (host, 0 if port == "*" else int(port))


# ------------------------------------------------------------------------------ the server


class StreamBulkServer(BulkServer):
    """Answers at `hint`.

    Raises:
        WireError: the address is taken.
    """

    def __init__(self, hint: str, provider: Provider) -> None:
        self._provider = provider
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        family, place = _parse(hint)
        self._file = Path(place) if isinstance(place, str) else None
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self._file is not None:
                # A dead process left it; the job's lock keeps a living one away.
                self._file.unlink(missing_ok=True)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise WireError(f'cannot listen at "{hint}": {error}') from error
        self._address = hint
        if self._file is None:
            host, port = self._socket.getsockname()[:2]
            self._address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._thread = threading.Thread(target=self._accept, name="jaxft-bulk", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            connections = dict(self._connections)
        for connected in connections:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in (self._thread, *connections.values()):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                raise WireError(
                    f"the server at {self._address} did not end within {_CLOSE_S} s: what it "
                    "serves from does not answer"
                )

    def _accept(self) -> None:
        # And with it the threads that it starts.
        step_back()
        try:
            while not self._closing.is_set():
                try:
                    connected, _ = self._socket.accept()
                except OSError as error:
                    if self._closing.is_set():
                        return
                    # Out of descriptors, or the other side has left already.
                    _log.warning("%s: nobody could be let in: %s", self._address, error)
                    time.sleep(_RETRY_S)
                    continue
                self._let_in(connected)
        finally:
            self._socket.close()
            if self._file is not None:
                self._file.unlink(missing_ok=True)

    def _let_in(self, connected: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connected,), name="jaxft-bulk-peer", daemon=True
        )
        with self._lock:
            if self._closing.is_set() or len(self._connections) >= _CONNECTIONS_MAX:
                connected.close()
                return
            self._connections[connected] = thread
            thread.start()

    def _serve(self, connected: socket.socket) -> None:
        try:
            _prepare(connected, receive_s=0.0)
            while not self._closing.is_set():
                request = self._next(connected)
                if request is None:
                    return
                self._answer(connected, request)
        except OSError as error:
            if not self._closing.is_set():
                _log.debug("%s: a reader is gone: %s", self._address, error)
        finally:
            with self._lock:
                del self._connections[connected]
            connected.close()

    def _next(self, connected: socket.socket) -> BulkRequest | None:
        """The next request; None at the end of the connection, or of what makes sense on it."""
        header = _receive(connected, _REQUEST.size)
        if header is None:
            return None
        magic, length = _REQUEST.unpack(header)
        if magic == _ASKS and length <= _REQUEST_BYTES_MAX:
            body = _receive(connected, length)
            if body is None:
                return None
            with contextlib.suppress(msgspec.DecodeError):
                return _decode_request(body)
        _log.warning("%s: a request that is none", self._address)
        return None

    def _answer(self, connected: socket.socket, request: BulkRequest) -> None:
        given = self._look_up(request)
        if isinstance(given, Refused):
            reason = (given.reason or "refused")[:_REASON_CHARS_MAX].encode()
            _send(connected, _ANSWER.pack(_SAYS, len(reason), 0), memoryview(reason))
        else:
            _send(connected, _ANSWER.pack(_SAYS, 0, given.nbytes), given.cast("B"))

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


def _receive(connected: socket.socket, nbytes: int) -> bytearray | None:
    """So many bytes, however long they take to come; None if the connection ends before."""
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        count = connected.recv_into(view, len(view), socket.MSG_WAITALL)
        if count == 0:
            return None
        view = view[count:]
    return data


def _send(connected: socket.socket, header: bytes, data: memoryview) -> None:
    """Sends both. Raises OSError when the other side takes nothing for _SEND_S."""
    sent = connected.sendmsg([header, data])
    while sent < len(header) + len(data):
        # Interrupted, or the time is up: then this call raises.
        at = sent - len(header)
        parts: list[bytes | memoryview] = [header[sent:], data] if at < 0 else [data[at:]]
        sent += connected.sendmsg(parts)


# ------------------------------------------------------------------------------ the reader


class StreamBulkReader(BulkReader):
    """Connects anew for each read, so that no answer to an earlier one can arrive in it.

    Args:
        check_address: raises ConfigError for an address that is not to be read from.
    """

    def __init__(self, check_address: Callable[[str], None]) -> None:
        self._check_address = check_address

    def read_many(
        self,
        requests: Iterable[ReadRequest[T]],
        *,
        peer_s: float,
        deadline_s: float,
        window_bytes: int = WINDOW_BYTES,
        cancel: threading.Event | None = None,
    ) -> Iterator[tuple[T, memoryview | Refused]]:
        reading = _Reading(self._check_address, requests, window_bytes, peer_s, deadline_s, cancel)
        try:
            while reading.ask():
                taken = reading.receive()
                if taken is None:
                    continue
                request, answer = taken
                del taken
                reading.release(request)
                # Asked for before this one is worked on, so that it comes meanwhile.
                reading.ask()
                yield request.tag, answer
                # Else its memory would not be free before the next one has come.
                del answer
        finally:
            reading.close()


class _Buffers:
    """Memory to receive into, which comes back when the last view of it is gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, nbytes: int) -> memoryview:
        """A writable view of `nbytes`."""
        if nbytes < _HUGE_BYTES // 8:
            return memoryview(bytearray(nbytes))
        size = -(-nbytes // _HUGE_BYTES) * _HUGE_BYTES
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else _huge(size)
        # The array stands for the loan: views of it keep it alive, memoryviews have no weakrefs.
        loan = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(loan, free.append, memory).atexit = False
        return loan.data


def _huge(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Fewer first touches and address look-ups where the system gives huge pages.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Server(Generic[T]):
    """The connection to one server, what it owes, and how long it has been silent meanwhile."""

    def __init__(self, address: str, buffers: _Buffers) -> None:
        self.address = address
        self.owes: deque[ReadRequest[T]] = deque()
        self._buffers = buffers
        self._socket: socket.socket | None = None
        self._connected = False
        self._header = memoryview(bytearray(_ANSWER.size))
        self._refusal = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._retry_at_s = 0.0
        self._retry_s = _RETRY_S
        self.silent_s = 0.0

    # What to wait for: readable when there is something to take, writable when connected.

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def wants(self) -> int:
        return select.POLLIN if self._connected else select.POLLOUT

    def ask(self, request: ReadRequest[T]) -> None:
        if not self.owes:
            self.silent_s = 0.0
        self.owes.append(request)
        if self._connected:
            self._send(request)

    def mind_connection(self, now_s: float) -> None:
        """Connects, if it is time to; asks again for all that is owed once connected."""
        if self._socket is None and now_s >= self._retry_at_s:
            family, place = _parse(self.address)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            try:
                self._socket.connect(place)
            except BlockingIOError as error:
                # Of a Unix socket: its queue is full. Of TCP: under way.
                if family == socket.AF_UNIX:
                    self._lose(error)
            except OSError as error:
                self._lose(error)
            else:
                self._arrived()

    def ready(self) -> None:
        """Connecting has come to an end."""
        assert self._socket is not None
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._lose(OSError(error, os.strerror(error)))
        else:
            self._arrived()

    def _arrived(self) -> None:
        assert self._socket is not None
        _prepare(self._socket, CANCEL_POLL_S)
        self._connected = True
        for request in list(self.owes):
            self._send(request)

    def _send(self, request: ReadRequest[T]) -> None:
        if self._socket is None:
            return
        body = _encode(BulkRequest(request.key, request.offset, request.nbytes))
        try:
            self._socket.sendall(_REQUEST.pack(_ASKS, len(body)) + body)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError | None) -> None:
        """The connection is no more; a piece that came half is asked for again as a whole."""
        _log.debug("%s: %s", self.address, error or "the connection ended")
        if self._socket is not None:
            self._socket.close()
        self._socket, self._connected = None, False
        self._target, self._filled = None, 0
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _RETRY_S_MAX)

    def take(self) -> tuple[ReadRequest[T], memoryview | Refused] | None:
        """The next answer, or None if it is not whole within CANCEL_POLL_S.

        Raises:
            ProtocolError: what came is none.
        """
        if self._target is None:
            if not self._fill(self._header):
                return None
            self._target = self._begin()
            self._filled = 0
        if len(self._target) and not self._fill(self._target):
            return None
        data, self._target, self._filled = self._target, None, 0
        request = self.owes.popleft()
        if self._refusal:
            return request, Refused(bytes(data).decode(errors="replace"))
        if data.nbytes != request.nbytes:
            reason = f"{self.address} gave {data.nbytes} bytes for {request.nbytes}"
            return request, Refused(reason)
        return request, data.toreadonly()

    def _begin(self) -> memoryview:
        """Where the answer goes whose header has come."""
        magic, refusal, nbytes = _ANSWER.unpack(self._header)
        if (
            magic != _SAYS
            or refusal > _REFUSAL_BYTES_MAX
            or nbytes > PIECE_BYTES_MAX
            or not self.owes
        ):
            raise ProtocolError(f"the host at {self.address} sent an answer that is none")
        self._refusal = refusal
        return self._buffers.take(refusal or nbytes)

    def _fill(self, target: memoryview) -> bool:
        """Receives the rest of `target`; whether it is full now."""
        if self._socket is None:  # lost since it was seen to have something to say
            return False
        left = target[self._filled :]
        try:
            count = self._socket.recv_into(left, len(left), socket.MSG_WAITALL)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(error)
            return False
        if count == 0:
            self._lose(None)
            return False
        self.silent_s, self._retry_s = 0.0, _RETRY_S
        self._filled += count
        return self._filled == len(target)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._connected = None, False


class _Reading(Generic[T]):
    """One call of `read_many`: what was asked for, of whom, and what of the window that takes."""

    def __init__(
        self,
        check_address: Callable[[str], None],
        requests: Iterable[ReadRequest[T]],
        window_bytes: int,
        peer_s: float,
        deadline_s: float,
        cancel: threading.Event | None,
    ) -> None:
        self._check_address = check_address
        self._requests = iter(requests)
        self._coming = next(self._requests, None)
        self._window_bytes = window_bytes
        self._peer_s = peer_s
        self._deadline_s = deadline_s
        self._cancel = cancel
        self._started_s = self._last_tick_s = time.monotonic()
        self._servers: dict[str, _Server[T]] = {}
        self._ready: deque[_Server[T]] = deque()
        self._buffers = _Buffers()
        self._held = 0
        self._held_bytes = 0

    def ask(self) -> bool:
        """Asks for as much as there is room for; whether anything is still to come."""
        while self._coming is not None and self._has_room(self._coming.nbytes):
            request = self._coming
            check_size(request)
            self._held += 1
            self._held_bytes += request.nbytes
            self._server(request.address).ask(request)
            self._coming = next(self._requests, None)
        return self._held > 0

    def release(self, request: ReadRequest[T]) -> None:
        self._held -= 1
        self._held_bytes -= request.nbytes

    def receive(self) -> tuple[ReadRequest[T], memoryview | Refused] | None:
        """The next answer, after waiting about CANCEL_POLL_S at most for it."""
        heard: set[str] = set()
        if not self._ready:
            self._wait()
        taken = None
        while self._ready and taken is None:
            server = self._ready.popleft()
            heard.add(server.address)
            taken = server.take()
        # Arrivals first: who was busy elsewhere for long must not take that for silence.
        self._check(heard | {server.address for server in self._ready})
        return taken

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def _wait(self) -> None:
        """Waits until servers have something to say, in turn."""
        now_s = time.monotonic()
        poller = select.poll()
        by_fd: dict[int, _Server[T]] = {}
        for server in self._servers.values():
            if server.owes:
                server.mind_connection(now_s)
            if server.fileno() >= 0:
                by_fd[server.fileno()] = server
                poller.register(server.fileno(), server.wants)
        for fd, _ in poller.poll(CANCEL_POLL_S * 1000):
            server = by_fd[fd]
            if server.wants == select.POLLOUT:
                server.ready()
            else:
                self._ready.append(server)

    def _has_room(self, nbytes: int) -> bool:
        if self._held == 0:
            return True
        return self._held < _READS_MAX and self._held_bytes + nbytes <= self._window_bytes

    def _server(self, address: str) -> _Server[T]:
        server = self._servers.get(address)
        if server is None:
            self._check_address(address)
            if address.endswith(":*"):
                raise ConfigError(f'address "{address}" has no port to read from')
            server = self._servers[address] = _Server(address, self._buffers)
        return server

    def _check(self, heard: set[str]) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise ReadCancelled("the read was cancelled")
        now_s = time.monotonic()
        seconds, self._last_tick_s = min(now_s - self._last_tick_s, _TICK_S_MAX), now_s
        owing = [server for server in self._servers.values() if server.owes]
        if owing and now_s - self._started_s > self._deadline_s:
            names = ", ".join(server.address for server in owing)
            raise PeerUnreachable(
                f"reading did not end within {self._deadline_s:g} s: {names} still owe answers"
            )
        for server in owing:
            if server.address in heard:
                continue
            server.silent_s += seconds
            if server.silent_s >= self._peer_s:
                raise PeerUnreachable(
                    f"the host at {server.address} owes {len(server.owes)} reads and has not "
                    f"answered for {server.silent_s:.1f} s (limit {self._peer_s:g} s): it is down "
                    "or cut off"
                )
