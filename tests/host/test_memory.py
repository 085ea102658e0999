"""Arenas that grow under their views, and how much memory there may be."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxft.errors import MemoryLimitError
from jaxft.host.memory import Arena, Lent, available_bytes, check_fits

MIB = 1 << 20
GIB = 1 << 30


def no_memfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, "no memfd_create")


@pytest.fixture(params=["memfd", "file"])
def backing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        monkeypatch.setattr(os, "memfd_create", no_memfd)
    return str(request.param)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_arena_is_whole_pages_of_zeros_and_leaves_no_file(backing: str, tmp_path: Path) -> None:
    arena = Arena.create("slot", 5000, directory=tmp_path)
    assert arena.size_bytes == 8192
    assert not arena.view(0, 8192).any()
    assert list(tmp_path.iterdir()) == []
    assert not os.get_inheritable(arena.fd)
    link = os.readlink(f"/proc/self/fd/{arena.fd}")
    assert link.startswith("/memfd:slot" if backing == "memfd" else str(tmp_path))
    arena.close()


def test_what_is_lent_is_read_only_and_outlives_its_owner(backing: str, tmp_path: Path) -> None:
    arena = Arena.create("slot", MIB, directory=tmp_path)
    arena.view(0, MIB)[:] = 5
    lent = Lent(arena.fd)
    view = lent.view(100, MIB - 100)
    assert view.readonly
    arena.view(100, 1)[0] = 6
    assert bytes(view[:2]) == b"\6\5"
    arena.ensure(2 * MIB)
    assert lent.size_bytes == MIB
    arena.close()
    del lent
    assert bytes(view[-1:]) == b"\5"


@pytest.mark.parametrize(("offset", "nbytes"), [(0, MIB + 1), (MIB, 1), (-1, 2), (5, -1)])
def test_nothing_is_lent_beyond_what_there_is(offset: int, nbytes: int) -> None:
    arena = Arena.create("slot", MIB)
    lent = Lent(arena.fd)
    with pytest.raises(ValueError, match="outside of 1048576 lent ones"):
        lent.view(offset, nbytes)
    arena.close()


def test_growth_keeps_content_and_earlier_views(backing: str, tmp_path: Path) -> None:
    arena = Arena.create("slot", 4096, directory=tmp_path)
    early = arena.view(0, 4096)
    early[:] = 7
    for size_bytes in (5000, MIB, 3 * MIB):
        arena.ensure(size_bytes)
        late = arena.view(0, size_bytes)
        assert (late[:4096] == early).all()
        assert not late[4096:].any()
        early[0], late[1] = 9, 8
        assert (int(late[0]), int(early[1])) == (9, 8)
        early[:2] = 7
    arena.ensure(10)
    assert arena.size_bytes == 3 * MIB
    arena.close()
    early[:] = 3
    assert (early == 3).all()
    assert (late[:4096] == 3).all()


def test_the_other_holder_sees_growth_after_ensure() -> None:
    mine = Arena.create("slot", 4096)
    other = Arena.adopt(os.dup(mine.fd))
    mine.ensure(2 * MIB)
    mine.view(MIB, 3)[:] = [1, 2, 3]
    assert other.size_bytes == 4096
    other.ensure(2 * MIB)
    assert other.view(MIB, 3).tolist() == [1, 2, 3]
    third = Arena.adopt(os.dup(mine.fd))
    assert third.size_bytes == 2 * MIB
    for arena in (mine, other, third):
        arena.close()


def test_views_are_bounded() -> None:
    arena = Arena.create("slot", 4096)
    assert arena.view(4096, 0).size == 0
    for offset, nbytes in ((0, 4097), (4096, 1), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside of an arena of 4096"):
            arena.view(offset, nbytes)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 1)


@pytest.mark.parametrize("populates", [True, False])
def test_touch_makes_pages_exist_and_changes_nothing(
    populates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not populates:
        monkeypatch.setattr("jaxft.host.memory.MADV_POPULATE_WRITE", 9999)
    arena = Arena.create("slot", 16 * MIB)
    arena.view(0, MIB)[:] = 5
    before = os.fstat(arena.fd).st_blocks * 512
    arena.touch(1000, 10 * MIB)
    after = os.fstat(arena.fd).st_blocks * 512
    assert before <= 2 * MIB
    assert 10 * MIB <= after <= 12 * MIB
    assert (arena.view(0, MIB) == 5).all()
    assert not arena.view(MIB, 15 * MIB).any()
    arena.close()


def test_other_threads_run_during_touch() -> None:
    arena = Arena.create("slot", 256 * MIB)
    touching = threading.Thread(target=arena.touch, args=(0, 256 * MIB))
    touching.start()
    turns = 0
    while touching.is_alive():
        turns += 1
        touching.join(0.001)
    assert turns >= 5
    arena.close()


def test_touch_without_memory_is_an_error_and_not_a_signal() -> None:
    arena = Arena.create("slot", 4 * MIB)
    os.ftruncate(arena.fd, MIB)  # as if the file system had no more to give
    with pytest.raises(MemoryLimitError, match="no memory for bytes"):
        arena.touch(0, 4 * MIB)
    arena.close()


def test_memory_that_cannot_be_had_is_a_memory_limit_error(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="could not be set aside"):
        Arena.create("slot", 1 << 62)
    arena = Arena.create("slot", 4096)
    with pytest.raises(MemoryLimitError, match="could not grow"):
        arena.ensure(1 << 62)
    assert arena.view(0, 4096).size == 4096
    arena.close()
    reading, writing = os.pipe()
    with pytest.raises(MemoryLimitError, match="not an arena"):
        Arena.adopt(reading)
    os.close(reading)
    os.close(writing)


def test_memory_and_descriptors_are_given_back() -> None:
    before_fds = psutil.Process().num_fds()
    before_bytes = resident_bytes()
    for _ in range(50):
        arena = Arena.create("slot", MIB)
        view = arena.view(0, MIB)
        arena.ensure(8 * MIB)
        arena.view(0, 8 * MIB)[:] = 1
        arena.close()
        del view
    assert psutil.Process().num_fds() == before_fds
    assert resident_bytes() - before_bytes < 32 * MIB


# How much there is


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    return tmp_path


def cgroup_v2(root: Path, path: str, seen: str = "/") -> None:
    write(root, "proc/self/cgroup", f"0::{path}\n")
    write(
        root,
        "proc/self/mountinfo",
        "22 1 0:20 / /proc rw - proc proc rw\n"
        f"30 22 0:26 {seen} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
    )


def test_without_limits_the_machine_decides(machine: Path) -> None:
    assert available_bytes(machine) == 32 * GIB
    cgroup_v2(machine, "/job")
    write(machine, "sys/fs/cgroup/job/memory.max", "max\n")
    write(machine, "sys/fs/cgroup/job/memory.current", f"{GIB}\n")
    assert available_bytes(machine) == 32 * GIB


def test_a_limit_anywhere_above_counts(machine: Path) -> None:
    cgroup_v2(machine, "/slice/job/step")
    for path, limit, used in (("slice/job/step", 20, 1), ("slice/job", 8, 3), ("slice", 16, 2)):
        write(machine, f"sys/fs/cgroup/{path}/memory.max", f"{limit * GIB}\n")
        write(machine, f"sys/fs/cgroup/{path}/memory.current", f"{used * GIB}\n")
    assert available_bytes(machine) == 5 * GIB


def test_cached_files_do_not_count_as_used(machine: Path) -> None:
    cgroup_v2(machine, "/job")
    write(machine, "sys/fs/cgroup/job/memory.max", f"{8 * GIB}\n")
    write(machine, "sys/fs/cgroup/job/memory.current", f"{8 * GIB}\n")
    write(
        machine,
        "sys/fs/cgroup/job/memory.stat",
        f"anon {3 * GIB}\nshmem {GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}\n",
    )
    assert available_bytes(machine) == 4 * GIB


def test_a_container_sees_its_own_group_as_the_top(machine: Path) -> None:
    cgroup_v2(machine, "/docker/abc", seen="/docker/abc")
    write(machine, "sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    write(machine, "sys/fs/cgroup/memory.current", "0\n")
    assert available_bytes(machine) == 2 * GIB


def test_version_1_groups(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "9:cpu,cpuacct:/\n4:memory:/job\n0::/\n")
    write(
        machine,
        "proc/self/mountinfo",
        "31 22 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 22 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    )
    top = "sys/fs/cgroup/memory"
    write(machine, f"{top}/memory.limit_in_bytes", "9223372036854771712\n")
    write(machine, f"{top}/memory.usage_in_bytes", f"{GIB}\n")
    write(machine, f"{top}/job/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(machine, f"{top}/job/memory.usage_in_bytes", f"{2 * GIB}\n")
    write(
        machine,
        f"{top}/job/memory.stat",
        f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    )
    assert available_bytes(machine) == 3 * GIB


def test_more_used_than_allowed_is_nothing_left(machine: Path) -> None:
    cgroup_v2(machine, "/")
    write(machine, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    write(machine, "sys/fs/cgroup/memory.current", f"{2 * GIB}\n")
    assert available_bytes(machine) == 0


def test_a_machine_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="does not say"):
        available_bytes(tmp_path)


def test_this_machine() -> None:
    assert mmap.PAGESIZE < available_bytes() <= psutil.virtual_memory().total


def test_small_shared_memory_is_refused_with_sizes_and_remedy_case_41(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memfd and a file system of 64 MB, as a container's /dev/shm: the slots do not fit."""
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("", (), {"free": 64 * MIB}))
    left = available_bytes(machine, directory=machine)
    assert left == 64 * MIB
    with pytest.raises(MemoryLimitError, match=r"host3: .*2\.00 GiB.*64\.0 MiB.*Raise the memory"):
        check_fits(2 * GIB, left, "host3: two slots of 1 GiB")
    check_fits(left, left, "what just fits")


def test_memory_limit_is_refused_with_sizes_and_remedy_case_41(machine: Path) -> None:
    cgroup_v2(machine, "/job")
    write(machine, "sys/fs/cgroup/job/memory.max", f"{GIB}\n")
    write(machine, "sys/fs/cgroup/job/memory.current", f"{GIB // 2}\n")
    with pytest.raises(MemoryLimitError, match=r"2\.00 GiB of memory.*512\.0 MiB left.*more hosts"):
        check_fits(2 * GIB, available_bytes(machine), "host0: two slots")


def test_views_are_the_memory_itself() -> None:
    arena = Arena.create("slot", 8192)
    view = arena.view(64, 128)
    assert view.dtype == np.uint8
    assert view.flags.writeable
    assert view.ctypes.data % 64 == 0
    view[:] = 1
    assert int(arena.view(0, 8192).sum()) == 128
    arena.close()


def test_pages_that_exist_are_mapped_without_changing_them() -> None:
    arena = Arena.create("pages", 1 << 22)
    arena.view(0, 1 << 22)[:] = 7
    other = Arena.adopt(os.dup(arena.fd))
    other.map_pages(5000, (1 << 22) - 5000)
    other.map_pages(5000, (1 << 22) - 5000)
    assert (other.view(0, 1 << 22) == 7).all()
    with pytest.raises(ValueError, match="outside"):
        other.map_pages(0, (1 << 22) + 1)
    other.close()
    arena.close()
