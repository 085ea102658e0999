"""Descriptors: how many a process may have, and those on their way between processes, the ancillary
data of a Unix socket (SCM_RIGHTS, see unix(7) and cmsg(3)).

Whoever receives asks for MSG_CMSG_CLOEXEC, and looks for MSG_CTRUNC: then some did not arrive.
"""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Iterable, Sequence

Ancillary = tuple[int, int, bytes]

_FD = struct.Struct("i")


def allow_all() -> None:
    """Lets this process have as many as the system allows it to ask for (getrlimit(2)). By default
    that is 1024, and whoever connects to a port takes one, also before it has proved anything."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def space_bytes(count: int) -> int:
    """How much room so many descriptors need where they are received."""
    return socket.CMSG_SPACE(count * _FD.size)


def packed(fds: Sequence[int]) -> list[Ancillary]:
    """What `sendmsg` takes along; nothing for none."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(map(_FD.pack, fds)))] if fds else []


def unpacked(ancillary: Iterable[Ancillary]) -> list[int]:
    """The descriptors that came, which belong to the caller."""
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) // _FD.size * _FD.size
            fds += [fd for (fd,) in _FD.iter_unpack(data[:whole])]
    return fds
