"""Answers bulk reads over stream sockets; `stream_frames` says what goes over them.

Each connection has a thread of its own: one blocking call sends the header and the memory itself,
without the interpreter's lock, and whoever does not receive holds up nobody else. To a reader on
the same machine the memory is passed on instead, for it to map.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path

import msgspec

from jaxft.errors import JaxftError, WireError
from jaxft.host.descriptors import packed
from jaxft.host.priority import step_back
from jaxft.host.stream_frames import (
    ANSWER,
    ASKS,
    MAPS,
    REQUEST,
    REQUEST_BYTES_MAX,
    SAYS,
    BulkRequest,
    parse,
    prepare,
)
from jaxft.host.wire import PIECE_BYTES_MAX, BulkServer, Provider, Refused, Shared

_log = logging.getLogger(__name__)

_RETRY_S = 0.05
_CLOSE_S = 5.0
_BACKLOG = 128
_CONNECTIONS_MAX = 1024
_REASON_CHARS_MAX = 4096

_decode = msgspec.msgpack.Decoder(BulkRequest).decode


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
        family, place = parse(hint)
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
        passed: dict[tuple[int, int, int], int] = {}
        try:
            prepare(connected, receive_s=0.0)
            while not self._closing.is_set():
                request = self._next(connected)
                if request is None:
                    return
                self._answer(connected, request, passed)
        except OSError as error:
            if not self._closing.is_set():
                _log.debug("%s: a reader is gone: %s", self._address, error)
        finally:
            with self._lock:
                del self._connections[connected]
            connected.close()

    def _next(self, connected: socket.socket) -> BulkRequest | None:
        """The next request; None at the end of the connection, or of what makes sense on it."""
        header = _receive(connected, REQUEST.size)
        if header is None:
            return None
        magic, length = REQUEST.unpack(header)
        if magic == ASKS and length <= REQUEST_BYTES_MAX:
            body = _receive(connected, length)
            if body is None:
                return None
            with contextlib.suppress(msgspec.DecodeError):
                return _decode(body)
        _log.warning("%s: a request that is none", self._address)
        return None

    def _answer(
        self,
        connected: socket.socket,
        request: BulkRequest,
        passed: dict[tuple[int, int, int], int],
    ) -> None:
        """`passed` are the files whose descriptors the other side has, and their numbers."""
        given = self._look_up(request)
        if isinstance(given, Refused):
            reason = (given.reason or "refused")[:_REASON_CHARS_MAX].encode()
            _send(connected, ANSWER.pack(SAYS, len(reason), 0), memoryview(reason))
        elif isinstance(given, Shared) and connected.family == socket.AF_UNIX:
            _pass_on(connected, given, passed)
        else:
            data = given.data if isinstance(given, Shared) else given
            _send(connected, ANSWER.pack(SAYS, 0, data.nbytes), data.cast("B"))

    def _look_up(self, request: BulkRequest) -> memoryview | Shared | Refused:
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


def _pass_on(
    connected: socket.socket, given: Shared, passed: dict[tuple[int, int, int], int]
) -> None:
    """Says where the data lies, with the descriptor if the other side does not have it yet."""
    status = os.fstat(given.fd)
    # One that has grown is passed on again: the other side has mapped what there was.
    file = (status.st_dev, status.st_ino, status.st_size)
    fds = [] if file in passed else [given.fd]
    passed.setdefault(file, len(passed))
    header = ANSWER.pack(MAPS, passed[file], given.offset)
    sent = connected.sendmsg([header], packed(fds))
    if sent < len(header):
        _send(connected, header[sent:], memoryview(b""))


def _send(connected: socket.socket, header: bytes, data: memoryview) -> None:
    """Sends both. Raises OSError when the other side takes nothing for _SEND_S."""
    sent = connected.sendmsg([header, data])
    while sent < len(header) + len(data):
        # Interrupted, or the time is up: then this call raises.
        at = sent - len(header)
        parts: list[bytes | memoryview] = [header[sent:], data] if at < 0 else [data[at:]]
        sent += connected.sendmsg(parts)
