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
)
from jaxft.host.stream_links import Link, Links, meet
from jaxft.host.wire import PIECE_BYTES_MAX, BulkServer, Provider, Refused, Shared

_log = logging.getLogger(__name__)

_RETRY_S = 0.05
_CLOSE_S = 5.0
# Whoever connects has so long to prove that it belongs to the job.
_PROOF_S = 10.0
_BACKLOG = 128
_CONNECTIONS_MAX = 1024
# So many of them may owe their proof; one more ends the one that has owed it longest, so that those
# who say nothing keep nobody out.
_PROVING_MAX = 128
_REASON_CHARS_MAX = 4096

_decode = msgspec.msgpack.Decoder(BulkRequest).decode


class StreamBulkServer(BulkServer):
    """Answers at `hint`.

    Args:
        hint: an address that was checked.
        provider: of the bytes.
        links: how connections are proved.

    Raises:
        WireError: the address is taken.
    """

    def __init__(self, hint: str, provider: Provider, links: Links) -> None:
        self._provider = provider
        self._links = links
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Link] = {}
        self._proving: dict[threading.Thread, Link] = {}  # the oldest first
        self._refused = False
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
        for link in connections.values():
            with contextlib.suppress(OSError):
                link.shut()
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in (self._thread, *connections):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                raise WireError(
                    f"the server at {self._address} did not end within {_CLOSE_S} s: what it "
                    "serves from does not answer"
                )

    def _accept(self) -> None:
        # And with it the threads that it starts.
        step_back()
        said = ""
        try:
            while not self._closing.is_set():
                try:
                    connected, peer = self._socket.accept()
                    self._let_in(connected, _place(peer))
                    said = ""
                except (OSError, RuntimeError) as error:
                    if self._closing.is_set():
                        return
                    # Out of descriptors or threads, or the other side has left already.
                    if str(error) != said:
                        said = str(error)
                        _log.warning("%s: nobody can be let in: %s", self._address, error)
                    time.sleep(_RETRY_S)
        finally:
            self._socket.close()
            if self._file is not None:
                self._file.unlink(missing_ok=True)

    def _let_in(self, connected: socket.socket, peer: str) -> None:
        """Raises RuntimeError when there are no more threads."""
        connected.setblocking(False)
        try:
            link = self._links.of(self._address, connected, is_server=True)
        except OSError as error:
            connected.close()
            _log.debug("%s: who came is gone: %s", self._address, error)
            return
        thread = threading.Thread(
            target=self._serve, args=(link, peer), name="jaxft-bulk-peer", daemon=True
        )
        with self._lock:
            if self._closing.is_set() or len(self._connections) >= _CONNECTIONS_MAX:
                link.close()
                return
            if len(self._proving) >= _PROVING_MAX:
                self._say_refused(peer, f"{_PROVING_MAX} others have not yet, either")
                oldest = self._proving.pop(next(iter(self._proving)))
                with contextlib.suppress(OSError):
                    oldest.shut()
            self._connections[thread] = self._proving[thread] = link
            try:
                thread.start()
            except BaseException:
                del self._connections[thread], self._proving[thread]
                link.close()
                raise

    def _serve(self, link: Link, peer: str) -> None:
        passed: dict[tuple[int, int, int], int] = {}
        try:
            if not self._meet(link, peer):
                return
            link.begin(receive_s=0.0)
            while not self._closing.is_set():
                request = self._next(link)
                if request is None:
                    return
                self._answer(link, request, passed)
        except OSError as error:
            if not self._closing.is_set():
                _log.debug("%s: a reader is gone: %s", self._address, error)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]
            link.close()

    def _meet(self, link: Link, peer: str) -> bool:
        """Whether the other side has proved what it must."""
        try:
            meet(link, _PROOF_S)
        except OSError as error:
            if not self._closing.is_set():
                self._say_refused(peer, str(error))
            return False
        finally:
            with self._lock:
                self._proving.pop(threading.current_thread(), None)
        return True

    def _say_refused(self, peer: str, why: str) -> None:
        """Once: whoever comes may come often."""
        if not self._refused:
            self._refused = True
            _log.warning(
                "%s: %s came and did not prove this job's key (%s): a host with another job key, "
                "or with and without --trust-network, or somebody else; this is said once",
                self._address,
                peer,
                why,
            )

    def _next(self, link: Link) -> BulkRequest | None:
        """The next request; None at the end of the connection, or of what makes sense on it."""
        header = _receive(link, REQUEST.size)
        if header is None:
            return None
        magic, length = REQUEST.unpack(header)
        if magic == ASKS and length <= REQUEST_BYTES_MAX:
            body = _receive(link, length)
            if body is None:
                return None
            with contextlib.suppress(msgspec.DecodeError):
                return _decode(body)
        _log.warning("%s: a request that is none", self._address)
        return None

    def _answer(
        self,
        link: Link,
        request: BulkRequest,
        passed: dict[tuple[int, int, int], int],
    ) -> None:
        """`passed` are the files whose descriptors the other side has, and their numbers."""
        given = self._look_up(request)
        if isinstance(given, Refused):
            reason = (given.reason or "refused")[:_REASON_CHARS_MAX].encode()
            link.send(ANSWER.pack(SAYS, len(reason), 0), reason)
        elif isinstance(given, Shared) and link.socket.family == socket.AF_UNIX:
            _pass_on(link, given, passed)
        else:
            data = given.data if isinstance(given, Shared) else given
            link.send(ANSWER.pack(SAYS, 0, data.nbytes), data.cast("B"))

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


def _place(peer: object) -> str:
    """Where a connection comes from, as `accept` says it."""
    return f"{peer[0]} port {peer[1]}" if isinstance(peer, tuple) else "a process of this user"


def _receive(link: Link, nbytes: int) -> bytearray | None:
    """So many bytes, however long they take to come; None if the connection ends before."""
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        count = link.receive(view)
        if count == 0:
            return None
        view = view[count:]
    return data


def _pass_on(link: Link, given: Shared, passed: dict[tuple[int, int, int], int]) -> None:
    """Says where the data lies, with the descriptor if the other side does not have it yet."""
    status = os.fstat(given.fd)
    # One that has grown is passed on again: the other side has mapped what there was.
    file = (status.st_dev, status.st_ino, status.st_size)
    fds = [] if file in passed else [given.fd]
    passed.setdefault(file, len(passed))
    header = ANSWER.pack(MAPS, passed[file], given.offset)
    sent = link.socket.sendmsg([header], packed(fds))
    if sent < len(header):
        link.send(header[sent:])
