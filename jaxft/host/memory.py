"""A host's snapshot memory: pieces that several processes map, and how much of it there may be.

Rules:

- An `Arena` is a file without a name. It lives for as long as any process holds a descriptor or a
  mapping of it, and nothing is left behind after the last one.
- One process grows an arena: the one that owns the host's memory. Everyone else who was told of
  the growth calls `ensure` with the new size, which then only maps what is there.
- An arena never shrinks, and a view that was handed out stays valid for as long as it is
  referenced, also after growth and after `close`. So does what was lent of it.
- Memory comes into being when it is first written, and a write that finds none kills the process
  (SIGBUS, or the kernel's out-of-memory killer). So callers `check_fits` before they make arenas,
  and `touch` what they are going to use.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxft.errors import MemoryLimitError

Bytes = NDArray[np.uint8]

# linux/mman.h, since Linux 5.14: fault pages in without changing what they hold, for reading and
# for writing.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

# madvise keeps the interpreter's lock, so other threads run between two pieces of this size.
_TOUCH_BYTES = 2 << 20

# Kernels report "no limit" of a v1 control group as a number close to 2**63.
_UNLIMITED_BYTES = 1 << 62


class Arena:
    """One growable piece of shared memory.

    Made by `create`, or by `adopt` from a descriptor that another process passed on. Not
    thread-safe, but for `view`, `touch` and `ensure`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes: Bytes | None = None
        self._map: mmap.mmap | None = None
        self._entered: set[tuple[int, int]] = set()
        self._growing = threading.Lock()
        self._remap()

    @classmethod
    def create(cls, name: str, size_bytes: int, *, directory: Path | None = None) -> Arena:
        """A new arena of zeros of at least `size_bytes`, rounded up to whole pages.

        Args:
            name: shown in /proc/PID/maps, for people.
            directory: where the file lies if the kernel has no memfd_create (the system's
                directory for temporary files if None). It is unlinked at once.

        Raises:
            MemoryLimitError: the file could not be made or given its size.
        """
        try:
            fd = _open_memfd(name)
            if fd is None:
                fd, path = tempfile.mkstemp(prefix=f"{name}-", dir=directory)
                os.unlink(path)
        except OSError as error:
            raise MemoryLimitError(f"memory {name}: no shared memory to be had: {error}") from error
        try:
            os.ftruncate(fd, _whole_pages(max(size_bytes, 1)))
            return cls(fd)
        except OSError as error:
            os.close(fd)
            raise MemoryLimitError(
                f"memory {name}: {size_bytes} bytes could not be set aside: {error}"
            ) from error

    @classmethod
    def adopt(cls, fd: int) -> Arena:
        """The arena behind a descriptor, which from now on belongs to this object.

        Raises:
            MemoryLimitError: the file is empty or cannot be mapped, so it is not an arena.
        """
        os.set_inheritable(fd, False)
        try:
            return cls(fd)
        except (OSError, ValueError) as error:
            raise MemoryLimitError(f"descriptor {fd} is not an arena: {error}") from error

    @property
    def fd(self) -> int:
        """The descriptor, to be passed on (the receiver's copy is its own)."""
        return self._fd

    @property
    def size_bytes(self) -> int:
        """How much this object has mapped; the file may have grown since, see `ensure`."""
        return 0 if self._bytes is None else self._bytes.size

    def ensure(self, size_bytes: int) -> None:
        """Grows to at least `size_bytes` (whole pages) if smaller, and maps all there is.

        The content stays, new bytes are zero, and earlier views stay valid: they keep the earlier
        mapping, of the same memory, alive.

        Raises:
            MemoryLimitError: the file could not be grown or mapped.
        """
        try:
            with self._growing:
                if os.fstat(self._fd).st_size < size_bytes:
                    os.ftruncate(self._fd, _whole_pages(size_bytes))
                if os.fstat(self._fd).st_size != self.size_bytes:
                    self._remap()
        except OSError as error:
            raise MemoryLimitError(
                f"memory of {self.size_bytes} bytes could not grow to {size_bytes}: {error}"
            ) from error

    def view(self, offset: int, nbytes: int) -> Bytes:
        """A writable uint8 array of shape (nbytes,) over the memory itself, from `offset` on.

        Raises:
            ValueError: outside of what is mapped.
        """
        mapped = self._mapped()
        if offset < 0 or nbytes < 0 or offset + nbytes > mapped.size:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are outside of an arena of {mapped.size}"
            )
        return mapped[offset : offset + nbytes]

    def touch(self, offset: int, nbytes: int) -> None:
        """Makes the pages of a range exist, so that the first write to them is fast and safe.

        Changes no content. On kernels before Linux 5.14 it reads and writes back one byte of every
        page, which is only safe while nobody else writes to the range.

        Raises:
            MemoryLimitError: there is not that much memory.
            ValueError: outside of what is mapped.
        """
        self.view(offset, nbytes)
        mapped, mapping = self._mapped(), self._map
        assert mapping is not None
        stop = offset + nbytes
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        populates = True
        for at in range(start, stop, _TOUCH_BYTES):
            length = min(_TOUCH_BYTES, stop - at)
            populates = populates and _populate(mapping, at, length)
            if not populates:
                mapped[at : at + length : mmap.PAGESIZE] |= 0

    def map_pages(self, offset: int, nbytes: int) -> None:
        """Enters pages that exist into this process's page tables, many at a time: a fault for each
        of them takes longer than to read it. Where the kernel cannot, faults do it. It is done once
        for each range.

        Raises:
            ValueError: outside of what is mapped.
        """
        self.view(offset, nbytes)
        assert self._map is not None
        _enter_pages(self._map, self._entered, offset, nbytes)

    def close(self) -> None:
        """Lets go of the descriptor and of the mapping, once no view is left. May be repeated."""
        self._bytes = self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _mapped(self) -> Bytes:
        if self._bytes is None:
            raise ValueError("the arena is closed")
        return self._bytes

    def _remap(self) -> None:
        self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        self._entered = set()
        # Huge pages make first writes three times as fast where the system allows them for shared
        # memory; where it does not, small ones do.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)


class Lent:
    """Another process's arena, to be read: as large as it was when its descriptor was passed on.

    It is mapped for as long as this object or a view of it is referenced. Pages are entered into
    this process's page tables when they are first looked at, and stay there, so it pays to keep it.

    Args:
        fd: stays the caller's.

    Raises:
        OSError, ValueError: the file is empty or cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._map)
        self._entered: set[tuple[int, int]] = set()

    @property
    def size_bytes(self) -> int:
        return len(self._bytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Its bytes, read-only. Whoever owns them may write to them at any time.

        Raises:
            ValueError: outside of what is mapped.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are outside of {self.size_bytes} lent ones"
            )
        _enter_pages(self._map, self._entered, offset, nbytes)
        return self._bytes[offset : offset + nbytes]


def _enter_pages(
    mapping: mmap.mmap, entered: set[tuple[int, int]], offset: int, nbytes: int
) -> None:
    """Enters a range's pages into the page tables, unless it is among those `entered` before."""
    if (offset, nbytes) in entered:
        return
    entered.add((offset, nbytes))
    stop = offset + nbytes
    for at in range(offset // mmap.PAGESIZE * mmap.PAGESIZE, stop, _TOUCH_BYTES):
        try:
            mapping.madvise(MADV_POPULATE_READ, at, min(_TOUCH_BYTES, stop - at))
        except OSError:
            return


def available_bytes(root: Path | str = "/", *, directory: Path | None = None) -> int:
    """How many more bytes of memory this process can count on, in bytes.

    The smallest of what the machine has left (MemAvailable) and, for the control group of this
    process and every one above it, its limit less its use, where cached files do not count as used.
    Where there is no memfd, also the free space of the file system that arenas lie on.

    Args:
        root: where /proc and /sys are looked for.
        directory: as for `Arena.create`.

    Raises:
        MemoryLimitError: the machine does not say how much memory it has.
    """
    root = Path(root)
    found = [_machine_bytes(root), *_cgroup_bytes(root)]
    fd = _open_memfd("probe")
    if fd is None:
        found.append(shutil.disk_usage(directory or tempfile.gettempdir()).free)
    else:
        os.close(fd)
    return max(0, min(found))


def check_fits(wanted_bytes: int, available_bytes: int, what: str) -> None:
    """Refuses what does not fit, before anything is allocated.

    Raises:
        MemoryLimitError: with both sizes and what can be done.
    """
    if wanted_bytes > available_bytes:
        raise MemoryLimitError(
            f"{what}: needs {_readable(wanted_bytes)} of memory, and this host has "
            f"{_readable(available_bytes)} left within its limits. Raise the memory limit of the "
            "container or job, end what else uses memory on this host, use more hosts (each then "
            "holds less), or a code with more data fragments for each parity fragment"
        )


def _open_memfd(name: str) -> int | None:
    """A new file in memory, or None where the kernel has no such thing."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


def _populate(mapping: mmap.mmap, offset: int, nbytes: int) -> bool:
    """Whether the kernel faulted the pages in; False if it does not know how."""
    try:
        mapping.madvise(MADV_POPULATE_WRITE, offset, nbytes)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise MemoryLimitError(
            f"no memory for bytes {offset} to {offset + nbytes} of an arena: {error}"
        ) from error
    return True


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _readable(size_bytes: int) -> str:
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _machine_bytes(root: Path) -> int:
    meminfo = _numbers(root / "proc/meminfo", scale=1024)
    if "MemAvailable:" not in meminfo:
        raise MemoryLimitError(f"{root / 'proc/meminfo'} does not say how much memory is available")
    return meminfo["MemAvailable:"]


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """What each memory limit above this process leaves."""
    for directory in _cgroup_directories(root):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit_bytes = _number(directory / limit)
            used_bytes = _number(directory / used)
            if limit_bytes is None or used_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
                continue
            stat = _numbers(directory / "memory.stat")
            # A v1 group counts its children's pages under total_ only. Shared memory is in neither
            # of the two: it is on the lists of anonymous pages.
            prefix = "total_" if "total_inactive_file" in stat else ""
            cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            yield limit_bytes - max(0, used_bytes - cached)


def _cgroup_directories(root: Path) -> Iterator[Path]:
    """This process's control groups that can limit memory, each with all that contain it.

    /proc/self/cgroup gives paths inside a hierarchy, /proc/self/mountinfo where a hierarchy is
    mounted and which of its directories is seen there (in a container often not its top); see
    proc(5) and cgroups(7).
    """
    v1: str | None = None
    v2: str | None = None
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        seen, mounted_at = mount.split()[3:5]
        filesystem, _, options = kind.split()[:3]
        if filesystem == "cgroup2":
            group = v2
        elif filesystem == "cgroup" and "memory" in options.split(","):
            group = v1
        else:
            continue
        if group is None:
            continue
        top = root / mounted_at.lstrip("/")
        inside = Path(group)
        below = inside.relative_to(seen) if inside.is_relative_to(seen) else Path()
        yield from (top / part for part in (below, *below.parents))


def _lines(path: Path) -> list[str]:
    """The lines of a kernel's file; none if there is no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _numbers(path: Path, scale: int = 1) -> dict[str, int]:
    """Files of lines "name number"."""
    pairs: list[Any] = [line.split() for line in _lines(path)]
    return {pair[0]: int(pair[1]) * scale for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
