"""A host's directory of a job: the lock that one agent holds, its port, and the ranks it started.

DIR/lock       held (flock) by the agent, with its process number
DIR/smp.sock   the SMP's socket (and those for its peers)
DIR/ranks      the processes that the agent has started, for the agent after it
DIR/store      where the job's store is, for `jaxft status`
DIR/logs/      logs, unless they go elsewhere
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jaxft import config
from jaxft.errors import JobInUse, LaunchError
from jaxft.host.local import make_private
from jaxft.launch.child import Child, living, start_ticks

LOOPBACK = "127.0.0.1"
_POLL_S = 0.01
_STORE = "store"


class Lock:
    """A lock file that one living process holds.

    Raises:
        JobInUse: another one does; `what` says what it is.
        ConfigError: the directory cannot be made, or is not this user's alone.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        make_private(path.parent)
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._fd, 32).decode(errors="replace").strip() or "?"
                os.close(self._fd)
                raise JobInUse(
                    f"{what} is in use by process {holder} (lock {path}): wait for it to end, "
                    "stop it, or choose another name, for another job with --job, for another "
                    "host of this one with --host"
                ) from None
            # Whoever held it before may have removed the file between the two calls.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(self._fd).st_ino == path.stat().st_ino:
                    break
            os.close(self._fd)
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Removes the file. May be repeated."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class ReservedPort:
    """A TCP port that nobody else can get before whoever it is for listens there.

    The socket is bound and does not listen. JAX's coordinator binds the same port beside it, since
    both ask for SO_REUSEPORT and belong to the same user (socket(7)); connections go to the one
    that listens. An SMP does, since both ask for SO_REUSEADDR and this one does not listen.

    Args:
        host: an IP address of this machine.
        number: the port; 0: any.
        option: SO_REUSEPORT or SO_REUSEADDR, as whoever it is for sets it.

    Raises:
        LaunchError: it is taken, or the address is not this machine's.
    """

    def __init__(
        self, host: str = LOOPBACK, number: int = 0, option: int = socket.SO_REUSEPORT
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
            self._socket.bind((host, number))
        except OSError as error:
            self._socket.close()
            raise LaunchError(f"no port to be had on {host}: {error}") from error
        self.address = with_port(host, self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


def with_port(host: str, port: int) -> str:
    """HOST:PORT, or [HOST]:PORT if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RankFile:
    """Which processes run here, written down for the agent that comes after this one dies."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, children: list[Child]) -> None:
        started = {str(child.pid): start_ticks(child.pid) for child in children}
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(started))
        fresh.replace(self._path)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def kill_left(self, timeout_s: float) -> None:
        """Kills what is left of a dead agent's ranks: they die with it, their children do not.

        A group whose leader's number belongs to a younger process by now is another one.

        Raises:
            LaunchError: some of it does not die.
        """
        try:
            started = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return
        groups = {
            int(pid) for pid, ticks in started.items() if start_ticks(int(pid)) in (None, ticks)
        }
        deadline_s = time.monotonic() + timeout_s
        while left := living(groups) if groups else []:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline_s:
                raise LaunchError(f"processes {left} of an earlier agent do not die")
            time.sleep(_POLL_S)
        self.clear()


class StoreNote(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job's store is, and with which files it is reached."""

    url: str
    ca: str = ""
    cert: str = ""
    key: str = ""


def note_store(directory: Path, note: StoreNote) -> None:
    """Writes it down for whoever looks at this host, who would have to say it otherwise."""
    with contextlib.suppress(OSError):
        (directory / _STORE).write_bytes(msgspec.json.encode(note))


def noted_store(directory: Path) -> StoreNote | None:
    """Of the job whose host's directory this is; None if it is not known."""
    try:
        return msgspec.json.decode((directory / _STORE).read_bytes(), type=StoreNote)
    except (OSError, msgspec.MsgspecError):
        return None


def remove(directory: Path, lock: Lock, *, keep_logs: bool) -> None:
    """Takes a host's directory away, its lock last, and the job's if that is empty then."""
    for path in directory.iterdir() if directory.exists() else ():
        if path.name == "logs" and keep_logs:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != lock.path:
            path.unlink(missing_ok=True)
    lock.release()
    for path in (directory, directory.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def local_store(job: str) -> str:
    """The store of a job whose hosts are all on this machine: beside their directories."""
    config.check_name("job", job)
    return f"sqlite://{config.run_dir().absolute() / job}/store.db"


@contextlib.contextmanager
def local_job(job: str, store: str) -> Iterator[None]:
    """Holds the job's lock on this machine, and takes away what is the job's alone afterwards.

    What an earlier run left in its own store is cleared: generations are found again in the hosts'
    memory.

    Raises:
        JobInUse: the job runs here already.
    """
    directory = config.run_dir().absolute() / job
    lock = Lock(directory / ".lock", f"job {job} on this machine")
    try:
        clear_local_store(job, store)
        yield
    finally:
        clear_local_store(job, store)
        lock.release()
        with contextlib.suppress(OSError):
            directory.rmdir()


def clear_local_store(job: str, url: str) -> None:
    """Removes that store, if it is the one that is used. The job's lock is held."""
    directory = config.run_dir().absolute() / job
    if url == local_store(job):
        for name in ("", "-wal", "-shm", "-pulses"):
            (directory / f"store.db{name}").unlink(missing_ok=True)
