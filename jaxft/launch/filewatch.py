"""Wakes up when a file is written to, where the system can tell (Linux, inotify(7)).

It may be wrong both ways: a wake is a hint to look, and who waits looks now and then in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import weakref
from pathlib import Path

# linux/inotify.h. What is not about the content may mean that another file has the name by now.
IN_MODIFY = 0x00000002
IN_ATTRIB = 0x00000004
IN_DELETE_SELF = 0x00000400
IN_MOVE_SELF = 0x00000800
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16


class FileWatch:
    """Watches one file, for one thread.

    Args:
        path: may be missing, and be made or replaced later.
        poll_s: how long a wait lasts at most while the file cannot be watched.
    """

    def __init__(self, path: Path, poll_s: float) -> None:
        self._path = path
        self._poll_s = poll_s
        self._watched: tuple[int, int] | None = None
        self._fd = -1
        with contextlib.suppress(OSError, AttributeError):
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            weakref.finalize(self, os.close, self._fd)

    def clear(self) -> None:
        """Forgets what was written so far; whoever waits looks after this and before `wait`."""
        if self._fd < 0:
            return
        # Events of a file, not of a directory: they carry no names, so all are of one size.
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self._fd, _READ_BYTES):
                if any(mask != IN_MODIFY for _, mask, _, _ in _EVENT.iter_unpack(events)):
                    self._watched = None
        try:
            found = os.stat(self._path)
        except OSError:
            self._watched = None
            return
        if self._watched != (found.st_dev, found.st_ino):
            mask = ctypes.c_uint32(IN_MODIFY | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF)
            added = self._libc.inotify_add_watch(self._fd, os.fsencode(self._path), mask)
            self._watched = (found.st_dev, found.st_ino) if added >= 0 else None

    def wait(self, timeout_s: float) -> bool:
        """Until the file was written to since `clear` (True), or `timeout_s` is over."""
        if self._watched is None:
            timeout_s = min(timeout_s, self._poll_s)
        poller = select.poll()
        if self._fd >= 0:
            poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))
