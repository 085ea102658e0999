"""Bulk reads from many servers at once; `stream_frames` says what goes over the connections.

Several pieces are asked for ahead on each connection. What is sent is received with one call for
each piece, into huge pages that are used again as soon as the last view of what was in them is
gone; what a server on the same machine passes on is mapped, and once it is known where something
lies, the rest of it is not asked for.

A connection that breaks is made again, and what is owed is asked for again.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic

import msgspec
import numpy as np

from jaxft.errors import ConfigError, PeerUnreachable, ProtocolError, ReadCancelled, WireError
from jaxft.host.descriptors import space_bytes, unpacked
from jaxft.host.memory import Lent
from jaxft.host.stream_frames import (
    ANSWER,
    ASKS,
    MAPS,
    REFUSAL_BYTES_MAX,
    REQUEST,
    SAYS,
    BulkRequest,
    parse,
)
from jaxft.host.stream_links import Link, Links
from jaxft.host.wire import (
    CANCEL_POLL_S,
    PIECE_BYTES_MAX,
    WINDOW_BYTES,
    BulkReader,
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
_HUGE_BYTES = 2 << 20
_ANCILLARY_BYTES = space_bytes(1)

_encode = msgspec.msgpack.encode


class StreamBulkReader(BulkReader):
    """Connects anew for each read, so that no answer to an earlier one can arrive in it. What was
    mapped stays so for the next one.

    Args:
        check_address: raises ConfigError for an address that is not to be read from.
        links: how connections are proved.
    """

    def __init__(self, check_address: Callable[[str], None], links: Links) -> None:
        self.check_address = check_address
        self.links = links
        self.lent = _LentFiles()

    def read_many(
        self,
        requests: Iterable[ReadRequest[T]],
        *,
        peer_s: float,
        deadline_s: float,
        window_bytes: int = WINDOW_BYTES,
        cancel: threading.Event | None = None,
    ) -> Iterator[tuple[T, memoryview | Refused]]:
        reading = _Reading(self, requests, window_bytes, peer_s, deadline_s, cancel)
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


class _LentFiles:
    """What servers on this machine have passed on, each file mapped once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Lent] = {}

    def take(self, fd: int) -> Lent:
        """The file behind a descriptor, which is closed.

        Raises:
            ProtocolError: it cannot be mapped.
        """
        try:
            status = os.fstat(fd)
            file = (status.st_dev, status.st_ino)
            lent = self._known.get(file)
            if lent is None or lent.size_bytes < status.st_size:
                lent = self._known[file] = Lent(fd)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"memory that was passed on cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return lent


class _Server(Generic[T]):
    """The connection to one server, what it owes, and how long it has been silent meanwhile."""

    def __init__(self, address: str, buffers: _Buffers, lent: _LentFiles, links: Links) -> None:
        self.address = address
        self.owes: deque[ReadRequest[T]] = deque()
        self._buffers = buffers
        self._links = links
        self._socket: socket.socket | None = None  # while it is being connected
        self._link: Link | None = None
        self._wants = select.POLLOUT  # until it is connected
        self._header = memoryview(bytearray(ANSWER.size))
        self._refusal = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._fds: list[int] = []
        self._files: list[Lent] = []
        self._lent = lent
        # Where what a key stands for begins, in which file.
        self._places: dict[bytes, tuple[Lent, int]] = {}
        self._retry_at_s = 0.0
        self._retry_s = _RETRY_S
        self.silent_s = 0.0
        self.broke = ""  # why the last connection ended

    # What to wait for: readable when there is something to take, or what connecting waits for.

    def fileno(self) -> int:
        holder = self._link.socket if self._link is not None else self._socket
        return -1 if holder is None else holder.fileno()

    @property
    def is_connected(self) -> bool:
        """Is the connection there, and proved?"""
        return self._link is not None and self._wants == 0

    @property
    def wants(self) -> int:
        return self._wants or select.POLLIN

    @property
    def has_more(self) -> bool:
        """Has anything come that the descriptor does not tell of?"""
        return self.is_connected and self._link is not None and self._link.has_more

    def ask(self, request: ReadRequest[T]) -> memoryview | None:
        """Asks, unless the server has said before where it lies: then that is returned."""
        view = self._find(request)
        if view is not None:
            return view
        if not self.owes:
            self.silent_s = 0.0
        self.owes.append(request)
        if self.is_connected:
            self._send(request)
        return None

    def _find(self, request: ReadRequest[T]) -> memoryview | None:
        file, base = self._places.get(request.key, (None, 0))
        if file is None:
            return None
        try:
            return file.view(base + request.offset, request.nbytes)
        except ValueError:  # the server's to refuse
            return None

    def mind_connection(self, now_s: float) -> None:
        """Connects, if it is time to; asks again for all that is owed once connected."""
        if self._socket is None and self._link is None and now_s >= self._retry_at_s:
            family, place = parse(self.address)
            self._socket, self._wants = socket.socket(family, socket.SOCK_STREAM), select.POLLOUT
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
                self.go_on()

    def go_on(self) -> None:
        """What connecting, or its proof, waited for has come."""
        try:
            if self._link is None:
                self._link = self._take_socket()
            self._wants = self._link.prove()
            if self._wants == 0:
                self._link.begin(CANCEL_POLL_S)
        except OSError as error:
            self._lose(error)
            return
        if self._wants == 0:
            for request in list(self.owes):
                self._send(request)

    def _take_socket(self) -> Link:
        """The link of the socket, which has been connected, or not. Raises OSError."""
        assert self._socket is not None
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        connected, self._socket = self._socket, None
        return self._links.of(self.address, connected, is_server=False)

    def _send(self, request: ReadRequest[T]) -> None:
        if self._link is None:
            return
        body = _encode(BulkRequest(request.key, request.offset, request.nbytes))
        try:
            self._link.send(REQUEST.pack(ASKS, len(body)), body)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError | None) -> None:
        """The connection is no more; a piece that came half is asked for again as a whole."""
        self.broke = str(error or "the connection ended")
        _log.debug("%s: %s", self.address, self.broke)
        self.close()
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
            self._filled = 0
            magic, number, offset = ANSWER.unpack(self._header)
            if magic == MAPS and self.owes:
                return self._map(number, offset)
            self._target = self._begin()
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

    def _map(self, number: int, offset: int) -> tuple[ReadRequest[T], memoryview]:
        """The next answer lies at `offset` of a file of the server's.

        Raises:
            ProtocolError: there is no such file or place.
        """
        fds, self._fds = self._fds, []
        self._files += [self._lent.take(fd) for fd in fds]
        request = self.owes.popleft()
        try:
            view = self._files[number].view(offset, request.nbytes)
        except (IndexError, ValueError) as error:
            raise ProtocolError(
                f"the host at {self.address} passed on memory that is none: {error}"
            ) from error
        self._places[request.key] = (self._files[number], offset - request.offset)
        return request, view

    def _begin(self) -> memoryview:
        """Where the answer goes whose header has come."""
        magic, refusal, nbytes = ANSWER.unpack(self._header)
        if (
            magic != SAYS
            or refusal > REFUSAL_BYTES_MAX
            or nbytes > PIECE_BYTES_MAX
            or not self.owes
        ):
            raise ProtocolError(f"the host at {self.address} sent an answer that is none")
        self._refusal = refusal
        return self._buffers.take(refusal or nbytes)

    def _fill(self, target: memoryview) -> bool:
        """Receives the rest of `target`; whether it is full now."""
        if self._link is None:  # lost since it was seen to have something to say
            return False
        left = target[self._filled :]
        try:
            count = self._receive(self._link, left, takes_fds=target is self._header)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(error)
            return False
        if count == 0:
            self._lose(None)
            return False
        self.silent_s, self._retry_s, self.broke = 0.0, _RETRY_S, ""
        self._filled += count
        return self._filled == len(target)

    def _receive(self, link: Link, into: memoryview, *, takes_fds: bool) -> int:
        if not takes_fds or link.socket.family != socket.AF_UNIX:
            return link.receive(into)
        flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        count, ancillary, found, _ = link.socket.recvmsg_into([into], _ANCILLARY_BYTES, flags)
        self._fds += unpacked(ancillary)
        if found & socket.MSG_CTRUNC:
            raise WireError(
                f"the memory of the host at {self.address} cannot be mapped: this process has too "
                "many files open; raise its limit (ulimit -n)"
            )
        return count

    def close(self) -> None:
        for holder in (self._socket, self._link):
            if holder is not None:
                holder.close()
        self._socket, self._link, self._wants = None, None, select.POLLOUT
        for fd in self._fds:
            os.close(fd)
        self._fds, self._files, self._places = [], [], {}


class _Reading(Generic[T]):
    """One call of `read_many`: what was asked for, of whom, and what of the window that takes."""

    def __init__(
        self,
        reader: StreamBulkReader,
        requests: Iterable[ReadRequest[T]],
        window_bytes: int,
        peer_s: float,
        deadline_s: float,
        cancel: threading.Event | None,
    ) -> None:
        self._reader = reader
        self._requests = iter(requests)
        self._coming = next(self._requests, None)
        self._window_bytes = window_bytes
        self._peer_s = peer_s
        self._deadline_s = deadline_s
        self._cancel = cancel
        self._started_s = self._last_tick_s = time.monotonic()
        self._servers: dict[str, _Server[T]] = {}
        self._ready: deque[_Server[T]] = deque()
        self._found: deque[tuple[ReadRequest[T], memoryview]] = deque()  # without being asked for
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
            view = self._server(request.address).ask(request)
            if view is not None:
                self._found.append((request, view))
            self._coming = next(self._requests, None)
        return self._held > 0

    def release(self, request: ReadRequest[T]) -> None:
        self._held -= 1
        self._held_bytes -= request.nbytes

    def receive(self) -> tuple[ReadRequest[T], memoryview | Refused] | None:
        """The next answer, after waiting about CANCEL_POLL_S at most for it. One that has arrived
        comes before what was found: so nobody is taken for silent while much is found elsewhere."""
        heard: set[str] = set()
        if not self._ready and any(server.owes for server in self._servers.values()):
            self._wait(0.0 if self._found else CANCEL_POLL_S)
        taken: tuple[ReadRequest[T], memoryview | Refused] | None = None
        while self._ready and taken is None:
            server = self._ready.popleft()
            heard.add(server.address)
            taken = server.take()
        if taken is None and self._found:
            taken = self._found.popleft()
        # Arrivals first: who was busy elsewhere for long must not take that for silence.
        self._check(heard | {server.address for server in self._ready})
        return taken

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def _wait(self, timeout_s: float) -> None:
        """Waits until servers have something to say, in turn."""
        now_s = time.monotonic()
        poller = select.poll()
        by_fd: dict[int, _Server[T]] = {}
        for server in self._servers.values():
            if server.owes:
                server.mind_connection(now_s)
            if server.has_more:
                self._ready.append(server)
            elif server.fileno() >= 0:
                by_fd[server.fileno()] = server
                poller.register(server.fileno(), server.wants)
        for fd, _ in poller.poll(0 if self._ready else timeout_s * 1000):
            server = by_fd[fd]
            if server.is_connected:
                self._ready.append(server)
            else:
                server.go_on()

    def _has_room(self, nbytes: int) -> bool:
        if self._held == 0:
            return True
        return self._held < _READS_MAX and self._held_bytes + nbytes <= self._window_bytes

    def _server(self, address: str) -> _Server[T]:
        server = self._servers.get(address)
        if server is None:
            self._reader.check_address(address)
            if address.endswith(":*"):
                raise ConfigError(f'address "{address}" has no port to read from')
            server = _Server(address, self._buffers, self._reader.lent, self._reader.links)
            self._servers[address] = server
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
                    "or cut off" + (f" ({server.broke})" if server.broke else "")
                )
