"""Bulk reads over stream sockets, TCP or Unix sockets: what goes over a connection, once it is
proved where it has to be (`stream_links`).

Why not over ZeroMQ, as the control messages: there a byte passes through another thread on each
side and lands in memory that was never touched before, which costs about twice as much processor
time for each byte as what is done here.

Little-endian; answers come in the order of the requests:

    request   "JXR1"  u32 length, then as many bytes of msgpack: [key, offset, nbytes]
    answer    "JXA1"  u32 length of a refusal (0: none), u64 length of the data, then the one or
                      the other
    answer    "JXM1"  u32 number of a file, u64 where in it the data lies. The file's descriptor
                      comes with the first such answer of a connection (SCM_RIGHTS, see unix(7)).

Data in memory that can be passed on is never sent over a Unix socket: both ends are on one machine,
and the reader maps it.
"""

from __future__ import annotations

import socket
import struct

import msgspec

# As much of a piece as the kernel holds between the two (it gives what its own limit allows).
_BUFFER_BYTES = 4 << 20
# A reader that takes nothing for so long is let go; it connects again if it still lives.
SEND_S = 30.0

REQUEST = struct.Struct("<4sI")
ANSWER = struct.Struct("<4sIQ")
ASKS, SAYS, MAPS = b"JXR1", b"JXA1", b"JXM1"
REQUEST_BYTES_MAX = 1 << 16
REFUSAL_BYTES_MAX = 1 << 16


class BulkRequest(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    offset: int
    nbytes: int


def prepare(connected: socket.socket, receive_s: float) -> None:
    """A blocking socket whose calls end by themselves."""
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _seconds(SEND_S))
    if receive_s:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(receive_s))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _seconds(value: float) -> bytes:
    """A timeval for SO_RCVTIMEO and SO_SNDTIMEO (socket(7))."""
    return struct.pack("@ll", int(value), int(value % 1 * 1_000_000))


def parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Of an address that was checked: what `socket` wants to know of it."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return family, (host, 0 if port == "*" else int(port))
