"""The local channel: between the processes of one host, over a Unix socket of this user alone.

A message is bytes (never a pickle) and up to FDS_MAX descriptors. A plain socket carries it, not
multiprocessing.connection: that has no deadline for a send, reads a whole message at once even
from a sender that was stopped in the middle of it, and hands over descriptors outside of its
messages. On the socket:

    offset  size
         0     3  "JXF"
         3     1  number of descriptors, sent with the first byte (SCM_RIGHTS, see unix(7))
         4     4  length of the payload in bytes, little-endian
         8     -  payload

Rules:

- Nobody waits for a message in pieces. Reading takes the bytes that are there and keeps the part of
  a message for later, so one main loop can serve many channels, stopped senders among them.
- Every send has a deadline, after which the channel is closed: the other side has half a message.
- One thread at a time receives; any thread may send. Both sides must not send much (more than a
  socket's buffer, about 200 KB) to each other at the same time without receiving.
- Who may connect is decided by the kernel's word on who it is (SO_PEERCRED): this user only.
- The other side's end is reported after its last whole message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxft import config
from jaxft.errors import (
    ChannelClosed,
    ConfigError,
    JobInUse,
    PeerUnreachable,
    ProtocolError,
    WireError,
)
from jaxft.host.descriptors import packed, space_bytes, unpacked

FRAME_BYTES_MAX = 256 << 20
FDS_MAX = 16
SEND_S = 5.0

# What one `drain` takes before other channels get their turn.
_DRAIN_MAX = 64
_RETRY_S = 0.01
_BACKLOG = 64
# sun_path of unix(7) has 108 bytes, the last of which is zero.
_PATH_BYTES_MAX = 107

_HEADER = struct.Struct("<3sBI")
_MAGIC = b"JXF"
_CREDENTIALS = struct.Struct("3i")
_CMSG_BYTES = space_bytes(FDS_MAX)


class Received(NamedTuple):
    """A message. Its descriptors belong to whoever takes it."""

    payload: bytes
    fds: tuple[int, ...]


class LocalChannel:
    """One end of a connection, made by `connect` or `LocalListener.accept`."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._peer_pid, self._peer_uid, _ = _credentials(connected)
        self._sending = threading.Lock()
        self._header = bytearray(_HEADER.size)
        self._payload: bytearray | None = None
        self._filled = 0
        self._fds: list[int] = []
        self._ended = False

    @property
    def peer_pid(self) -> int:
        """The process at the other end when it connected or began to listen."""
        return self._peer_pid

    @property
    def peer_uid(self) -> int:
        return self._peer_uid

    @property
    def ended(self) -> bool:
        """Whether this end was closed, or the other one was and all it sent has been taken."""
        return self._ended

    def fileno(self) -> int:
        """Readable when there is something to `drain`, the end included; -1 when closed."""
        return self._socket.fileno()

    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout_s: float = SEND_S) -> None:
        """Sends a message. The descriptors are copied to the other process and stay ours.

        Raises:
            ChannelClosed: the other side is gone.
            WireError: it did not take the message in time. The channel is closed.
            ProtocolError: longer than FRAME_BYTES_MAX, or more than FDS_MAX descriptors.
        """
        if len(payload) > FRAME_BYTES_MAX or len(fds) > FDS_MAX:
            raise ProtocolError(
                f"a message to process {self._peer_pid} has {len(payload)} bytes and {len(fds)} "
                f"descriptors, at most {FRAME_BYTES_MAX} and {FDS_MAX} go"
            )
        deadline = time.monotonic() + timeout_s
        header = _HEADER.pack(_MAGIC, len(fds), len(payload))
        if not self._sending.acquire(timeout=timeout_s):
            raise WireError(
                f"process {self._peer_pid} has not taken earlier messages for "
                f"{timeout_s:g} s: it is stopped or hangs"
            )
        try:
            self._write(header, payload, fds, deadline)
        except WireError:
            self.close()
            raise
        except OSError as error:
            # Not closed: what the other side sent before its end is still to be taken.
            raise ChannelClosed(f"process {self._peer_pid} is gone: {error}") from error
        finally:
            self._sending.release()

    def receive(self, timeout_s: float) -> Received | None:
        """The next message, or None if it is not there in time.

        Raises:
            ChannelClosed: either side closed the channel.
            ProtocolError: what came is no message of this protocol. The channel is closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._next()
            if message is not None:
                return message
            if self._ended:
                raise ChannelClosed(f"process {self._peer_pid} closed the channel")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            _wait(self._socket, select.POLLIN, left_s)

    def drain(self) -> list[Received]:
        """The whole messages that are there, without waiting; look at `ended` afterwards.

        Raises:
            ProtocolError: what came is no message of this protocol. The channel is closed.
        """
        messages: list[Received] = []
        while len(messages) < _DRAIN_MAX and (message := self._next()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Lets the other side see the end, and ends a `receive` in another thread. Repeatable."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._drop_fds()

    def _write(self, header: bytes, payload: bytes, fds: Sequence[int], deadline: float) -> None:
        ancillary = packed(fds)
        parts = [memoryview(header), memoryview(payload)]
        while any(part.nbytes for part in parts):
            try:
                sent = self._socket.sendmsg(parts, ancillary)
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not _wait(self._socket, select.POLLOUT, left_s):
                    raise WireError(
                        f"process {self._peer_pid} did not take a message of {len(payload)} bytes "
                        "in time: it is stopped or hangs"
                    ) from None
                continue
            ancillary = []
            for index, part in enumerate(parts):
                taken = min(sent, part.nbytes)
                parts[index] = part[taken:]
                sent -= taken

    def _next(self) -> Received | None:
        """One whole message if its bytes are there; sets `ended` at the end."""
        try:
            if self._payload is None:
                if not self._fill(self._header):
                    return None
                self._payload = self._begin()
                self._filled = 0
            if not self._fill(self._payload):
                return None
            return self._finish(self._payload)
        except ProtocolError:
            self.close()
            raise

    def _begin(self) -> bytearray:
        """Room for the payload that the header announces."""
        magic, count, length = _HEADER.unpack(self._header)
        if magic != _MAGIC or length > FRAME_BYTES_MAX or count != len(self._fds):
            raise ProtocolError(
                f"process {self._peer_pid} sent what is no message: begins with {magic!r} for "
                f"{_MAGIC!r}, length {length} of at most {FRAME_BYTES_MAX}, "
                f"{len(self._fds)} of {count} descriptors came"
            )
        return bytearray(length)

    def _finish(self, payload: bytearray) -> Received:
        message = Received(bytes(payload), tuple(self._fds))
        self._payload, self._filled, self._fds = None, 0, []
        return message

    def _fill(self, target: bytearray) -> bool:
        """Reads up to the end of `target` and not beyond; whether it is full.

        Descriptors come with the first byte of a message, so a read that does not go beyond one
        message cannot take another one's.
        """
        view = memoryview(target)
        while self._filled < len(target):
            if self._ended:
                return False
            try:
                count, ancillary, flags, _ = self._socket.recvmsg_into(
                    [view[self._filled :]], _CMSG_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return False
            except OSError:
                # Reset by the other side, or closed by another thread of this one.
                count, ancillary, flags = 0, [], 0
            self._fds += unpacked(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError(
                    f"process {self._peer_pid} sent more than {FDS_MAX} descriptors, or this "
                    "process has as many open as it may"
                )
            if count == 0:
                self._ended = True
                self._drop_fds()
            self._filled += count
        return True

    def _drop_fds(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


class LocalListener:
    """Where the processes of this host connect to: a socket file that only this user can open.

    A file that a dead process left is replaced. Whoever starts listeners for the same path in
    several processes at once holds a lock meanwhile.

    Raises:
        ConfigError: the path is too long, or its directory is open to other users.
        JobInUse: a living process listens there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        address = private_socket_path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind(address)
            path.chmod(0o600)
            self._inode = path.stat().st_ino
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    @property
    def is_reachable(self) -> bool:
        """Does the socket's file still lead here? False when it was deleted or replaced."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def fileno(self) -> int:
        """Readable when there is someone to `accept`; -1 when closed."""
        return self._socket.fileno()

    def accept(self, timeout_s: float = 0.0) -> LocalChannel | None:
        """The next one to connect, or None if there is none in time.

        Another user's process is turned away, and None returned.
        """
        if timeout_s > 0:
            _wait(self._socket, select.POLLIN, timeout_s)
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        if _credentials(connected)[1] != os.geteuid():
            connected.close()
            return None
        return LocalChannel(connected)

    def close(self) -> None:
        """Removes the socket file unless it is a successor's by now. May be repeated."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _bind(self, address: str) -> None:
        try:
            self._socket.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not self._path.is_socket():
                raise ConfigError(f"cannot listen at {address}: {error}") from error
            if _is_alive(address):
                raise JobInUse(
                    f"another process listens at {address}: this job already runs on this host. "
                    "Wait for it to end, or choose another job name"
                ) from None
            self._path.unlink(missing_ok=True)
            self._socket.bind(address)


def connect(path: Path, timeout_s: float) -> LocalChannel:
    """Connects to a `LocalListener`, waiting for it to be there.

    Raises:
        ConfigError: the path is too long, or its directory is open to other users.
        PeerUnreachable: nobody of this user listened there in time.
    """
    address = private_socket_path(path, make=False)
    deadline = time.monotonic() + timeout_s
    while True:
        reason = "another user listens there"
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connecting.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            connecting.connect(address)
            if _credentials(connecting)[1] == os.geteuid():
                return LocalChannel(connecting)
        except OSError as error:
            reason = str(error)
        connecting.close()
        if time.monotonic() >= deadline:
            raise PeerUnreachable(f"nobody answered at {path} within {timeout_s:g} s: {reason}")
        time.sleep(_RETRY_S)


def private_socket_path(path: Path, *, make: bool = True) -> str:
    """The address of a Unix socket at `path`, in a directory that is this user's alone.

    A directory that is not there is made, if `make`.

    Raises:
        ConfigError: too long for a Unix socket, or the directory is open to other users.
    """
    address = str(path)
    if not path.is_absolute():
        raise ConfigError(f'socket path "{address}" is not absolute')
    if len(os.fsencode(address)) > _PATH_BYTES_MAX:
        raise ConfigError(
            f'socket path "{address}" has {len(os.fsencode(address))} bytes and Unix sockets take '
            f"{_PATH_BYTES_MAX}: use a directory with a shorter name"
        )
    if make or path.parent.exists():
        make_private(path.parent)
    return address


def make_private(directory: Path) -> None:
    """Makes a directory, and those above it, for this user alone.

    Raises:
        ConfigError: that is not possible, or others may enter it, or the run directory above it.
    """
    run = config.run_dir().absolute()
    above = [path for path in directory.parents if path.is_relative_to(run)]
    try:
        for path in reversed([directory, *directory.parents]):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        for path in (directory, *above):
            _check_private(path, path.stat())
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    except OSError as error:
        raise ConfigError(f"directory {directory} cannot be used: {error}") from error


def _check_private(directory: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"directory {directory} belongs to user {status.st_uid} and has mode "
            f"{status.st_mode & 0o777:o}: it must belong to user {os.geteuid()} with mode 700; "
            f"change that (chmod 700), or name another directory in JAXFT_RUN_DIR"
        )


def _is_alive(address: str) -> bool:
    """Whether somebody listens; one with a full queue does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def _credentials(connected: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def _wait(waiting: socket.socket, event: int, timeout_s: float) -> bool:
    """Waits for an event on a socket, its end included; False if nothing came in time."""
    fd = waiting.fileno()
    if fd < 0:
        return True
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(timeout_s * 1000))
