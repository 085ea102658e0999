"""What is particular to the store in a SQLite file."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jaxft.launch.sqlite
from jaxft.errors import StoreError
from jaxft.launch.sqlite import SqliteLease, SqliteStore, network_file_system
from jaxft.launch.store import LeaseObserver, Pulse, Store
from jaxft.launch.stores import open_store
from tests.launch.store_site import takes_at_most, values


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = open_store(str(path), job="job")
    yield store
    store.close()


@pytest.fixture
def plain(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection beside the store's, past its rules."""
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


def test_a_locked_store_is_an_absent_store(
    store: Store, plain: sqlite3.Connection, path: Path
) -> None:
    lease = store.lease("hosts/a", b"", 60.0)
    plain.execute("BEGIN IMMEDIATE")
    takes_at_most(2.0, lambda: store.commit({}, {"a": b""}), "locked by another process")
    takes_at_most(2.0, lease.renew, f"{path} is locked")
    takes_at_most(2.0, lease.release, "locked")
    assert values(store) == {"hosts/a": b""}  # readers need no lock
    plain.execute("ROLLBACK")
    assert lease.renew()
    assert store.commit({"a": None}, {"a": b""})


def test_a_store_held_exclusively_cannot_be_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxft.launch.sqlite, "OPEN_S", 0.5)
    open_store(str(path), job="job").close()
    script = (
        "import sqlite3, sys\n"
        f"c = sqlite3.connect({str(path)!r}, isolation_level=None)\n"
        "c.execute('PRAGMA locking_mode = EXCLUSIVE')\n"
        "c.execute('BEGIN EXCLUSIVE')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        takes_at_most(2.0, lambda: open_store(str(path), job="job"), "locked")
        holder.kill()
    open_store(str(path), job="job").close()


def test_a_process_killed_within_a_transaction(store: Store, path: Path) -> None:
    store.commit({}, {"a": b"1"})
    script = (
        "import sqlite3, sys\n"
        f"c = sqlite3.connect({str(path)!r}, isolation_level=None)\n"
        "c.execute('PRAGMA cache_size = 1')  # so that half of it reaches the file\n"
        "c.execute('BEGIN IMMEDIATE')\n"
        "c.execute(\"UPDATE entries SET value = x'32'\")\n"
        "for i in range(200):\n"
        "    c.execute('INSERT INTO entries (job, key, value, revision) VALUES (?, ?, ?, 9)',"
        " ('job', str(i), bytes(4096)))\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
    assert values(store) == {"a": b"1"}
    assert store.commit({}, {"a": b"3"})
    assert values(store) == {"a": b"3"}


class Verdict(LeaseObserver):
    """Says that all leases are dead; something may happen just before."""

    def __init__(self, meanwhile: Callable[[], object] = bool) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def observe(self, now_s: float, pulses: Mapping[str, Pulse]) -> frozenset[str]:
        self.meanwhile()
        return frozenset(pulses)


def test_a_renewal_between_the_verdict_and_the_deletion_wins(path: Path) -> None:
    store = SqliteStore(path, job="job")
    lease = store.lease("hosts/a", b"", 60.0)
    store._observer = Verdict(lease.renew)
    assert set(store.read()) == {"hosts/a"}
    assert lease.renew()
    store.close()


def test_a_renewal_writes_neither_the_database_nor_its_log(store: Store, path: Path) -> None:
    """So nobody who waits for a change is woken by it."""
    leases = [store.lease(f"hosts/{name}", b"", 60.0) for name in "ab"]
    files = [path, path.with_name(f"{path.name}-wal")]
    before = [(file.stat().st_mtime_ns, file.read_bytes()) for file in files]
    for lease in leases * 3:
        assert lease.renew()
    assert [(file.stat().st_mtime_ns, file.read_bytes()) for file in files] == before


def quiet_lease(store: SqliteStore) -> SqliteLease:
    """A lease of a thread that knows all that is written."""
    lease = store.lease("hosts/a", b"", 60.0)
    store.read()
    assert not store.changed(0.0)
    assert store._is_quiet()
    return lease


def test_a_renewal_of_a_quiet_thread_asks_no_database(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (SqliteStore(path, job="job") for _ in range(2))
    lease = quiet_lease(store)
    monkeypatch.setattr(store, "_transaction", None)
    assert lease.renew()
    assert store._pulses.read(1) == [1]
    monkeypatch.undo()
    other.commit({}, {"key": b""})
    assert lease.renew()
    assert store._pulses.read(1) == [2]
    store.close()
    other.close()


@pytest.mark.parametrize("when", ["before", "between", "read"])
def test_a_quiet_renewal_never_succeeds_without_its_row(
    path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expired by another process before the renewal, within it, or before the last read."""
    store, other = (SqliteStore(path, job="job") for _ in range(2))
    lease = quiet_lease(store)

    def expire(*_: object) -> None:
        other.commit({}, {}, ["hosts/a"])

    if when == "between":
        monkeypatch.setattr(store, "_check_same_file", expire)
        assert not store._tick_unseen("hosts/a", lease._owner, lease._place, 1)
        monkeypatch.undo()
    else:
        expire()
    if when == "read":
        store.read()
        while store.changed(0.0) or not store._is_quiet():
            store.read()
    assert not lease.renew()
    store.close()
    other.close()


def test_a_quiet_renewal_fails_where_another_use_of_the_store_has(
    store: Store, plain: sqlite3.Connection
) -> None:
    """An absent store takes no renewal: how long it has been away is counted from the last one."""
    assert isinstance(store, SqliteStore)
    plain.execute("SELECT * FROM entries").fetchall()  # it touches the files when it opens them
    lease = quiet_lease(store)
    plain.execute("BEGIN IMMEDIATE")
    assert lease.renew()
    with ThreadPoolExecutor(1) as threads, pytest.raises(StoreError, match="locked"):
        threads.submit(store.commit, {}, {"key": b""}).result()
    store.read()
    with pytest.raises(StoreError, match="locked"):
        lease.renew()
    plain.execute("ROLLBACK")
    assert lease.renew()
    assert store._is_quiet()


def test_leases_count_at_places_of_their_own(path: Path) -> None:
    """Also those of several jobs in one file; a place is given again once its lease is gone."""
    one, other = (SqliteStore(path, job=job) for job in ("one", "other"))
    first = one.lease("a", b"", 60.0)
    second = other.lease("a", b"", 60.0)
    one.read(), other.read()
    before = (one._read_pulses(), other._read_pulses())
    assert first.renew()
    assert one._read_pulses() != before[0]
    assert other._read_pulses() == before[1]
    first.release()
    third = one.lease("b", b"", 60.0)
    assert not first.renew()
    assert (first._place, second._place, third._place) == (0, 1, 0)
    one.close()
    other.close()


def test_a_store_whose_counters_are_deleted_or_replaced_is_lost(store: Store, path: Path) -> None:
    lease = store.lease("a", b"", 60.0)
    path.with_name(f"{path.name}-pulses").unlink()
    for act in (store.read, lease.renew):
        with pytest.raises(StoreError, match=r"store\.db-pulses was deleted or replaced"):
            act()


def test_a_lease_that_one_reader_expires_wakes_the_others(path: Path, store: Store) -> None:
    store.lease("hosts/a", b"", 60.0)
    store.read()
    judge = SqliteStore(path, job="job")
    judge._observer = Verdict()
    assert judge.read() == {}
    assert store.changed(5.0)
    judge.close()


def test_a_lease_that_one_thread_expires_wakes_the_others(path: Path) -> None:
    store = SqliteStore(path, job="job")
    store.lease("hosts/a", b"", 60.0)
    store.read()
    assert not store.changed(0.0)
    store._observer = Verdict()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.read).result() == {}
    assert store.changed(5.0)
    store.close()


def test_a_reader_that_paused_expires_nobody(path: Path, store: Store) -> None:
    other = open_store(str(path), job="job")
    lease = other.lease("hosts/a", b"", 0.3)
    for _ in range(3):
        assert "hosts/a" in store.read()
        time.sleep(0.4)  # longer than the lease, and the owner was paused as well
    assert lease.renew()
    other.close()


def test_many_open_a_new_store_at_once(path: Path) -> None:
    def work(number: int) -> None:
        store = open_store(str(path), job="job")
        assert store.commit({str(number): None}, {str(number): b""})
        store.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    store = open_store(str(path), job="job")
    assert len(store.read()) == 8
    store.close()


def test_files_belong_to_one_user(store: Store, path: Path) -> None:
    store.commit({}, {"a": b""})
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    path.chmod(0o644)
    with pytest.raises(StoreError, match=r"mode 0644.*chmod 600"):
        open_store(str(path), job="job")


def test_refuses_what_is_not_its_own(path: Path) -> None:
    path.touch(0o600)
    path.write_bytes(b"#!/bin/sh\n" * 1000)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="damaged or not a SQLite database"):
        open_store(str(path), job="job")
    assert path.read_bytes() == before


def test_refuses_another_applications_database(path: Path, plain: sqlite3.Connection) -> None:
    plain.execute("CREATE TABLE theirs (a)")
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another application"):
        open_store(str(path), job="job")
    assert path.read_bytes() == before


def test_refuses_another_schema(store: Store, path: Path, plain: sqlite3.Connection) -> None:
    plain.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=r"schema version 99.*expects 2"):
        open_store(str(path), job="job")


@pytest.mark.parametrize("start", [0, 100, 4096])
def test_names_a_damaged_file(path: Path, start: int) -> None:
    """Damage in the first page is noticed when the file is opened, any other when it is read."""
    store = open_store(str(path), job="job")
    store.commit({}, {str(number): bytes(1000) for number in range(50)})
    store.close()
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * (path.stat().st_size - start))
    with pytest.raises(StoreError, match=r"damaged.*delete it"):  # noqa: PT012
        store = open_store(str(path), job="job")
        with contextlib.closing(store):
            store.read()


def test_a_new_file_in_its_place_would_be_a_second_store(store: Store, path: Path) -> None:
    store.commit({}, {"a": b""})
    store.read()
    path.unlink()
    for act in (store.read, lambda: store.commit({}, {}), lambda: store.changed(0.0)):
        with pytest.raises(StoreError, match="deleted or replaced"):
            act()


def test_needs_its_directory_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"No such file or directory.*directory has to be"):
        open_store(str(tmp_path / "nowhere" / "store.db"), job="job")
    with pytest.raises(StoreError, match="not a regular file"):
        open_store(str(tmp_path), job="job")


def test_after_close(path: Path) -> None:
    store = open_store(str(path), job="job")
    lease = store.lease("hosts/a", b"", 60.0)
    store.close()
    store.close()
    for act in (store.read, lease.renew, lambda: store.commit({}, {"a": b""})):
        with pytest.raises(StoreError, match="closed"):
            act()


def test_refuses_network_file_systems(tmp_path: Path) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\nfiler:/export {tmp_path} nfs4 rw,vers=4.2 0 0\n"
    with pytest.raises(StoreError, match=r"store.db is on a network file system \(nfs4\).*etcd://"):
        SqliteStore(tmp_path / "store.db", job="job", mounts=mounts)
    assert list(tmp_path.iterdir()) == []


MOUNTS = r"""
sysfs /sys sysfs rw 0 0
/dev/sda / ext4 rw 0 0
server:/home /home nfs rw 0 0
tmpfs /home/me/ram tmpfs rw 0 0
//server/share /mnt/my\040share cifs rw 0 0
mds@tcp:/scratch /scratch lustre rw 0 0
me@server: /mnt/sshfs fuse.sshfs rw 0 0
bucket /mnt/bucket fuse.mount-s3 rw 0 0
fuse-overlayfs /var/lib/containers fuse.fuse-overlayfs rw 0 0
/dev/sdb /mnt/usb fuseblk rw 0 0
auto /mnt/auto autofs rw 0 0
server:/auto /mnt/auto nfs4 rw 0 0
server:/hidden /mnt/hidden nfs4 rw 0 0
/dev/sdc /mnt/hidden xfs rw 0 0
host /mnt/9 9p rw 0 0
ceph:/ /mnt/ceph ceph rw 0 0
gluster:/v /mnt/gluster fuse.glusterfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/store.db", None),
        ("/homes/store.db", None),
        ("/home/me/store.db", "nfs"),
        ("/home/me/ram/store.db", None),
        ("/mnt/my share/store.db", "cifs"),
        ("/scratch/store.db", "lustre"),
        ("/mnt/sshfs/a/store.db", "fuse.sshfs"),
        ("/mnt/bucket/store.db", "fuse.mount-s3"),
        ("/var/lib/containers/store.db", None),
        ("/mnt/usb/store.db", None),
        ("/mnt/auto/store.db", "nfs4"),
        ("/mnt/hidden/store.db", None),
        ("/mnt/9/store.db", "9p"),
        ("/mnt/ceph/store.db", "ceph"),
        ("/mnt/gluster/store.db", "fuse.glusterfs"),
    ],
)
def test_network_file_system(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind
