"""The store in a SQLite file: for the hosts of one machine.

Rules
- Write-ahead logging: readers never wait for a writer, a process killed at any moment leaves a
  whole file, and no renewal waits for the disk (synchronous=NORMAL syncs at checkpoints only, so
  a training job that floods the disk with a checkpoint expires nobody). After a power failure the
  file is whole and may lack the last commits; the memory they spoke of is gone as well.
- Who finds the file locked waits `BUSY_S`, then raises: a locked store is an absent store.
- One number, the store's revision, goes up with each commit and marks what the commit wrote.
- A renewal counts in a file beside the database, FILE-pulses, eight bytes for each lease: so it
  changes neither the database nor its log, and nobody who waits for a change is woken. It is
  written while the write lock is held and the lease's row is there, or while nobody has written to
  the database since the row was seen there.
- Readers expire leases (`LeaseObserver`): the row is deleted if its counter still is what was seen,
  so a renewal that comes in between wins, and one that comes after is told.
- Both files belong to one user (0600), lie on a local file system (locks and shared memory do not
  work over a network), and are the same files all the time: one that was deleted or replaced while
  in use would be two stores.
- It can be deleted when no agent runs: generation numbers are found again in the hosts' memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from jaxft.errors import StoreError
from jaxft.launch.filewatch import FileWatch
from jaxft.launch.pulses import PulseFile
from jaxft.launch.store import Entry, LeaseObserver, Pulse

BUSY_S = 0.5
OPEN_S = 2.0
POLL_S = 0.025
# A write is heard of before it is to be seen: the log is written to, then the index in shared
# memory, of which nobody hears, however long that takes. So who has found somebody writing looks
# again every SOON_S.
SOON_S = 0.005
APPLICATION_ID = 0x6A786674  # "jxft": in the file's header, so that no other database is taken
SCHEMA_VERSION = 2
SCHEMA = (
    """CREATE TABLE entries (
        job TEXT NOT NULL,
        key TEXT NOT NULL,
        value BLOB NOT NULL,
        revision INTEGER NOT NULL,
        owner TEXT,  -- random for each lease, NULL for ordinary keys
        place INTEGER,  -- of a lease's counter, no other lease of the file has it
        ttl_s REAL NOT NULL DEFAULT 0,
        PRIMARY KEY (job, key)
    ) WITHOUT ROWID""",
    "CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL)",
    "INSERT INTO store VALUES (1, 0)",
)

# What mounts through FUSE is a network or an object store, with few exceptions.
NETWORK_FILE_SYSTEM = re.compile(
    r"9p|afs|beegfs|ceph|cifs|coda|fuse|fuse\.(?!fuse-overlayfs$|lxcfs$).*|glusterfs|gpfs|lustre|"
    r"ncpfs|nfs4?|ocfs2|orangefs|panfs|pvfs2|smb[23]?|smbfs|vboxsf|virtiofs|wekafs"
)


def network_file_system(path: Path, mounts: str) -> str | None:
    """The type of the network file system that `path` lies on, or None if it is a local one.

    Args:
        path: an absolute path without symbolic links.
        mounts: a mount table in the form of /proc/self/mounts (see fstab(5)).
    """
    kind, depth = "", 0
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        # Blanks in a mount point are written as octal escapes.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        # The later of two mounts on one point hides the earlier.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = fields[2], len(point.parts)
    return kind if NETWORK_FILE_SYSTEM.fullmatch(kind) else None


class SqliteStore:
    """A `Store` in a file on this machine; see `jaxft.launch.store` for the contract.

    Args:
        path: the file, made if it is not there; its directory has to be.
        job: the job whose keys this is about.
        mounts: the mount table; that of this machine unless a test gives another. Where there is
            none (no /proc), network file systems are not told apart.
    """

    def __init__(self, path: Path, *, job: str, mounts: str | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self._log = self.path.with_name(f"{self.path.name}-wal")
        self._job = job
        self._observer = LeaseObserver()
        self._look_s = 0.0  # when the leases have to be looked at again, monotonic
        self._slack_s = 0.0  # by how much that may be later
        self._leases: dict[str, _Row] = {}  # as they were last read
        self._seen = _Seen()
        self._failed = False  # the last transaction: an absent store takes no renewal
        # Held for a read or a write: SQLite's own deadline bounds these.
        self._lock = threading.RLock()
        self._refuse_network(_mount_table() if mounts is None else mounts)
        self._file_ids = {self.path: _own_file(self.path)}
        with _mapped_errors(self.path):
            self._connection = sqlite3.connect(
                self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
        try:
            self._prepare()
            pulses = self.path.with_name(f"{self.path.name}-pulses")
            self._file_ids[pulses] = _own_file(pulses)
            self._pulses = PulseFile(pulses)
        except BaseException:
            self._connection.close()
            raise

    def read(self, prefix: str = "") -> dict[str, Entry]:
        with self._lock:
            now_s = time.monotonic()
            with self._transaction("DEFERRED"):
                entries, revision = self._snapshot()
            pulses = self._read_pulses()
            dead = self._observe(now_s, pulses)
            if dead:
                with self._transaction("IMMEDIATE"):
                    self._expire({key: pulses[key] for key in dead})
                    entries, revision = self._snapshot()
            self._seen.revision = revision
        return {key: entry for key, entry in entries.items() if key.startswith(prefix)}

    def commit(
        self,
        expect: Mapping[str, int | None],
        put: Mapping[str, bytes],
        delete: Iterable[str] = (),
    ) -> bool:
        gone = list(delete)
        assert not set(gone) & set(put), "a key is both written and deleted"
        with self._transaction("IMMEDIATE") as connection:
            for key, revision in expect.items():
                found = connection.execute(
                    "SELECT revision FROM entries WHERE job = ? AND key = ?", (self._job, key)
                ).fetchone()
                if (found[0] if found else None) != revision:
                    return False
            if put or gone:
                self._write(put, gone)
        return True

    def changed(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        seen = self._seen
        # Every commit is appended to the log.
        watch = seen.watch = seen.watch or FileWatch(self._log, POLL_S)
        wait_s = 0.0
        while True:
            if watch.wait(wait_s):
                seen.quiet = False
            self._check_same_file()
            now_s = time.monotonic()
            if (not seen.quiet and self._look(watch)) or self._has_dead(now_s):
                return True
            if now_s >= deadline_s:
                return False
            until_s = max(now_s, self._look_s)
            if until_s > deadline_s - self._slack_s:
                until_s = deadline_s
            if watch.is_watching and not seen.quiet:
                until_s = min(until_s, now_s + SOON_S)
            wait_s = until_s - now_s

    def lease(self, key: str, value: bytes, ttl_s: float) -> SqliteLease:
        assert ttl_s > 0
        owner = secrets.token_hex(8)
        with self._transaction("IMMEDIATE") as connection:
            self._write({key: value}, [])
            place = self._free_place()
            connection.execute(
                "UPDATE entries SET owner = ?, place = ?, ttl_s = ? WHERE job = ? AND key = ?",
                (owner, place, ttl_s, self._job, key),
            )
        return SqliteLease(self, key, owner, place)

    @property
    def is_private(self) -> bool:
        return True  # on this machine

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            self._pulses.close()

    # Opening

    def _refuse_network(self, mounts: str) -> None:
        kind = network_file_system(self.path, mounts)
        if kind is not None:
            raise StoreError(
                f"store {self.path} is on a network file system ({kind}), where SQLite's locks "
                "cannot be trusted: for hosts of one machine name a file on a local disk, for "
                "several machines use --store etcd://host:2379"
            )

    def _prepare(self) -> None:
        """Sets the file up, or finds it set up. Several processes may do so at once."""
        deadline_s = time.monotonic() + OPEN_S
        while True:
            try:
                return self._prepare_once()
            except _Locked:
                # Changing the journal mode fails at once, without SQLite's own patience, where
                # another process does it at this moment.
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(POLL_S)

    def _prepare_once(self) -> None:
        with self._transaction("DEFERRED"):
            ours = self._check_schema()
        with _mapped_errors(self.path):
            (mode,) = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
            self._connection.execute("PRAGMA synchronous = NORMAL")
        if mode != "wal":
            raise StoreError(
                f"store {self.path}: its file system gives no write-ahead log (journal mode is "
                f"{mode}): name a file on a local disk"
            )
        if ours:
            return
        with self._transaction("IMMEDIATE") as connection:
            if self._check_schema():
                return
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_schema(self) -> bool:
        """Whether the tables are there; False if the database is empty, an error if not ours."""
        execute = self._connection.execute
        (application,) = execute("PRAGMA application_id").fetchone()
        (version,) = execute("PRAGMA user_version").fetchone()
        (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application == 0 and tables == 0:
            return False
        if application != APPLICATION_ID:
            raise StoreError(
                f"store {self.path} is a database of another application (id {application:#x}, "
                f"{tables} tables): name another path"
            )
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"store {self.path} has schema version {version}, this jaxft expects "
                f"{SCHEMA_VERSION}: run the same version on all agents, or stop them and delete it"
            )
        return True

    # Reading and writing, within a transaction

    @contextlib.contextmanager
    def _transaction(self, kind: str) -> Iterator[sqlite3.Connection]:
        with self._lock, _mapped_errors(self.path):
            try:
                self._check_same_file()
                self._connection.execute(f"BEGIN {kind}")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                self._failed = True
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            # Whoever reads needs no lock, and says nothing of those who do.
            self._failed = self._failed and kind == "DEFERRED"

    def _check_same_file(self) -> None:
        for path, known in self._file_ids.items():
            try:
                found = os.stat(path)
            except OSError:
                found = None
            if found is None or (found.st_dev, found.st_ino) != known:
                raise StoreError(
                    f"store {path} was deleted or replaced while in use, so agents may see "
                    "different stores: run the job again"
                )

    def _snapshot(self) -> tuple[dict[str, Entry], int]:
        """All entries of the job, those that are leases noted as well; the store's revision."""
        entries: dict[str, Entry] = {}
        leases: dict[str, _Row] = {}
        for key, value, revision, owner, place, ttl_s in self._connection.execute(
            "SELECT key, value, revision, owner, place, ttl_s FROM entries WHERE job = ?",
            (self._job,),
        ):
            entries[key] = Entry(value, revision, owner is not None)
            if owner is not None:
                leases[key] = _Row(owner, place, ttl_s)
        revision = self._revision()
        self._leases = leases
        return entries, revision

    def _revision(self) -> int:
        (revision,) = self._connection.execute("SELECT revision FROM store").fetchone()
        assert isinstance(revision, int)
        return revision

    def _next_revision(self) -> int:
        self._connection.execute("UPDATE store SET revision = revision + 1")
        return self._revision()

    def _write(self, put: Mapping[str, bytes], delete: Iterable[str]) -> None:
        revision = self._next_revision()
        self._connection.executemany(
            "REPLACE INTO entries (job, key, value, revision) VALUES (?, ?, ?, ?)",
            [(self._job, key, bytes(value), revision) for key, value in put.items()],
        )
        self._connection.executemany(
            "DELETE FROM entries WHERE job = ? AND key = ?", [(self._job, key) for key in delete]
        )

    def _free_place(self) -> int:
        """Where a new lease counts: a place that no living one of any job has."""
        rows = self._connection.execute("SELECT place FROM entries WHERE owner IS NOT NULL")
        taken = {place for (place,) in rows}
        return next(place for place in itertools.count() if place not in taken)

    def _expire(self, dead: Mapping[str, Pulse]) -> None:
        now = self._read_pulses()
        deleted = 0
        for key, pulse in dead.items():
            if now.get(key) != pulse:
                continue
            deleted += self._connection.execute(
                "DELETE FROM entries WHERE job = ? AND key = ? AND owner = ?",
                (self._job, key, pulse.owner),
            ).rowcount
        if deleted:
            self._next_revision()

    def _look(self, watch: FileWatch) -> bool:
        """Whether somebody has written. If not, nobody is writing, and more would be heard of, the
        thread is quiet."""
        watch.clear()
        with self._lock, _mapped_errors(self.path):
            nobody_writes = watch.is_watching and self._keep_writers_away()
            try:
                moved = self._moved()
            finally:
                if nobody_writes:
                    self._connection.execute("ROLLBACK")
        self._seen.quiet = watch.is_watching and nobody_writes and not moved
        return moved

    def _keep_writers_away(self) -> bool:
        """Begins a transaction, unless somebody is within one that writes."""
        execute = self._connection.execute
        execute("PRAGMA busy_timeout = 0")
        try:
            execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        finally:
            execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")
        return True

    def _moved(self) -> bool:
        """Whether the revision is another than at the last read; cheap when nobody wrote."""
        with self._lock, _mapped_errors(self.path):
            self._check_same_file()
            (others,) = self._connection.execute("PRAGMA data_version").fetchone()
            writes = (others, self._connection.total_changes)
            if writes == self._seen.writes:
                return False
            if self._revision() != self._seen.revision:
                return True
            self._seen.writes = writes
            return False

    # Leases, as a reader sees them; the lock is held

    def _read_pulses(self) -> dict[str, Pulse]:
        """Of the leases that there were at the last read."""
        leases = self._leases
        counts = self._pulses.read(max((row.place for row in leases.values()), default=-1) + 1)
        return {key: Pulse(row.owner, counts[row.place], row.ttl_s) for key, row in leases.items()}

    def _observe(self, now_s: float, pulses: Mapping[str, Pulse]) -> frozenset[str]:
        dead = self._observer.observe(now_s, pulses)
        self._look_s = self._observer.look_s
        self._slack_s = min((pulse.ttl_s for pulse in pulses.values()), default=0.0) / 12
        return dead

    def _has_dead(self, now_s: float) -> bool:
        """Whether a lease is dead, if it is about time to look: then the next read deletes it. Who
        is awake looks a little sooner, or later, than need be, so that looks wake nobody."""
        with self._lock:
            due = now_s >= self._look_s - 2 * self._slack_s
            return due and bool(self._observe(now_s, self._read_pulses()))

    # What a lease does with its row, if the row still is its own

    def _tick_unseen(self, key: str, owner: str, place: int, count: int) -> bool:
        """As `_tick`, without a look into the database, where that is enough: nobody wrote between
        the last read, which found the row, and the end of this. It may have counted in any case."""
        with self._lock:
            row = self._leases.get(key)
            if not self._is_quiet() or row is None or (row.owner, row.place) != (owner, place):
                return False
            self._check_same_file()
            self._pulses.write(place, count)
            return self._is_quiet()

    def _is_quiet(self) -> bool:
        """Is what this thread has read last all that was written, and does the store answer, as far
        as is known? A commit is heard of before anybody can see it."""
        seen = self._seen
        if self._failed or not seen.quiet or seen.watch is None:
            return False
        return not seen.watch.wait(0.0)

    def _tick(self, key: str, owner: str, place: int, count: int) -> bool:
        with self._transaction("IMMEDIATE") as connection:
            # Nothing is written to the database: the lock keeps whoever would delete the row away.
            row = connection.execute(
                "SELECT place FROM entries WHERE job = ? AND key = ? AND owner = ?",
                (self._job, key, owner),
            ).fetchone()
            if row is not None:
                self._pulses.write(place, count)
            return row is not None

    def _rewrite(self, key: str, owner: str, value: bytes) -> bool:
        with self._transaction("IMMEDIATE") as connection:
            return _touched(
                connection.execute(
                    "UPDATE entries SET value = ?, revision = ? "
                    "WHERE job = ? AND key = ? AND owner = ?",
                    (bytes(value), self._next_revision(), self._job, key, owner),
                )
            )

    def _drop(self, key: str, owner: str) -> None:
        with self._transaction("IMMEDIATE") as connection:
            connection.execute(
                "DELETE FROM entries WHERE job = ? AND key = ? AND owner = ?",
                (self._job, key, owner),
            )
            self._next_revision()


def read_file(path: Path, job: str) -> dict[str, Entry]:
    """The keys of a job in this file, which is only read. Leases are as their owners left them.

    Raises:
        StoreError: it is not there, locked, or no store.
    """
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT key, value, revision, owner FROM entries WHERE job = ?", (job,)
        )
        return {
            key: Entry(value, revision, owner is not None) for key, value, revision, owner in rows
        }


def jobs_in(path: Path) -> set[str]:
    """The jobs that have keys in this file, which is only read; raises as `read_file` does."""
    with _reading(path) as connection:
        return {job for (job,) in connection.execute("SELECT DISTINCT job FROM entries")}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise StoreError(f"store {path} is not there: no agent has made it, or its job has ended")
    address = f"file:{quote(os.path.realpath(path))}?mode=ro"
    with _mapped_errors(path):
        connection = sqlite3.connect(address, timeout=BUSY_S, isolation_level=None, uri=True)
        with contextlib.closing(connection):
            yield connection


class SqliteLease:
    """A `Lease`: a row whose counter its owner keeps counting."""

    def __init__(self, store: SqliteStore, key: str, owner: str, place: int) -> None:
        self.key = key
        self._owner = owner
        self._place = place
        self._count = 0
        self._store = store

    def renew(self) -> bool:
        self._count += 1
        lease = (self.key, self._owner, self._place, self._count)
        return self._store._tick_unseen(*lease) or self._store._tick(*lease)

    def update(self, value: bytes) -> bool:
        return self._store._rewrite(self.key, self._owner, value)

    def release(self) -> None:
        self._store._drop(self.key, self._owner)


class _Row(NamedTuple):
    """A lease's."""

    owner: str
    place: int
    ttl_s: float


class _Seen(threading.local):
    """What a thread knows: what one has read, another has not.

    `revision` is the store's at the thread's last read; `writes` counts those of other connections
    and of this one, up to which the revision was still the same. `quiet` is set when its last look
    saw all that was written, and it would be told of more: then nothing has to be looked for.
    """

    watch: FileWatch | None = None
    revision: int | None = None
    writes: tuple[int, int] | None = None
    quiet: bool = False


class _Locked(StoreError):
    """Another process holds the file's lock for longer than this one may wait."""


@contextlib.contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        # The low byte is the primary result code (sqlite.org/rescode.html).
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise _Locked(
                f"store {path} is locked by another process for longer than {BUSY_S} s: look for "
                "a stopped process that has it open"
            ) from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreError(
                f"store {path} is damaged or not a SQLite database ({error}): stop the agents and "
                "delete it with its -wal, -shm and -pulses files, or name another path"
            ) from error
        raise StoreError(f"store {path}: {error}") from error


def _own_file(path: Path) -> tuple[int, int]:
    """Makes the file if need be; returns its device and inode numbers."""
    try:
        # Opened only when it is new: closing a second descriptor of a file drops the locks
        # that SQLite holds on it in this process.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        found = os.stat(path)
    except OSError as error:
        raise StoreError(
            f"store {path} cannot be made: {error.strerror}; its directory has to be "
            "there and writable"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"store {path} is not a regular file: name another path")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreError(
            f"store {path} has owner {found.st_uid} and mode "
            f"{stat.S_IMODE(found.st_mode):04o}, expected owner {os.geteuid()} and mode 0600: "
            "others could command this job's agents; chmod 600 it, or name another path"
        )
    return found.st_dev, found.st_ino


def _touched(cursor: sqlite3.Cursor) -> bool:
    return cursor.rowcount == 1


def _mount_table() -> str:
    try:
        return Path("/proc/self/mounts").read_text(errors="surrogateescape")
    except OSError:
        return ""
