"""Wakes up when files are written to, where the system can tell (Linux, inotify(7)).

It may be wrong both ways: a wake is a hint to look, and who waits looks now and then in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import weakref
from collections.abc import Iterable
from pathlib import Path

# linux/inotify.h. What is not about the content may mean that another file has the name by now.
IN_MODIFY = 0x00000002
IN_ATTRIB = 0x00000004
IN_DELETE_SELF = 0x00000400
IN_MOVE_SELF = 0x00000800
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16


class _Inotify:
    """The system's word on files; `fd` is readable when there is some, -1 where it says nothing."""

    def __init__(self) -> None:
        self.fd = -1
        with contextlib.suppress(OSError, AttributeError):
            self._libc = ctypes.CDLL(None, use_errno=True)
            self.fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = weakref.finalize(self, os.close, self.fd) if self.fd >= 0 else None

    def add(self, path: Path, mask: int) -> bool:
        """Whether the file is watched from now on."""
        if self.fd < 0:
            return False
        added = self._libc.inotify_add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(mask))
        return bool(added >= 0)

    def take(self) -> list[int]:
        """What was said since, as masks."""
        masks: list[int] = []
        # Events of a file, not of a directory: they carry no names, so all are of one size.
        with contextlib.suppress(BlockingIOError):
            while self.fd >= 0 and (events := os.read(self.fd, _READ_BYTES)):
                masks += [mask for _, mask, _, _ in _EVENT.iter_unpack(events)]
        return masks

    def close(self) -> None:
        self.fd = -1
        if self._closing is not None:
            self._closing()


class Writes:
    """Hears of writes to any of some files, which are there and stay the same files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._inotify = _Inotify()
        if not all(self._inotify.add(path, IN_MODIFY) for path in paths):
            self._inotify.close()

    def fileno(self) -> int:
        """Readable when there was a write since `clear`; -1: the system cannot tell."""
        return self._inotify.fd

    def clear(self) -> None:
        """Forgets what was written so far; look at the files after this."""
        self._inotify.take()

    def close(self) -> None:
        self._inotify.close()


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
        self._inotify = _Inotify()

    @property
    def is_watching(self) -> bool:
        """Is every write from the last `clear` on heard of?"""
        return self._watched is not None

    def clear(self) -> None:
        """Forgets what was written so far; whoever waits looks after this and before `wait`."""
        if any(mask != IN_MODIFY for mask in self._inotify.take()):
            self._watched = None
        try:
            found = os.stat(self._path)
        except OSError:
            self._watched = None
            return
        if self._watched != (found.st_dev, found.st_ino):
            mask = IN_MODIFY | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF
            added = self._inotify.add(self._path, mask)
            self._watched = (found.st_dev, found.st_ino) if added else None

    def wait(self, timeout_s: float) -> bool:
        """Until the file was written to since `clear` (True), or `timeout_s` is over."""
        if self._watched is None:
            timeout_s = min(timeout_s, self._poll_s)
        poller = select.poll()
        if self._inotify.fd >= 0:
            poller.register(self._inotify.fd, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))
