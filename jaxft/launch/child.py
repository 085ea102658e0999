"""A child process with a session of its own, which dies with its parent and takes all it started
with it.

Rules
- Nothing runs between fork and exec: the child becomes `rank_exec`, which asks for the death signal
  and then becomes the command. The signal comes when the thread that started the child ends, so
  children are started by main threads.
- The group is killed before its leader is reaped: until then its number cannot be used again.
- A group is dead when no process in it lives, seen in /proc; a closed socket or pipe is no proof.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from jaxft.errors import LaunchError

_EXEC = Path(__file__).with_name("rank_exec.py")
_POLL_S = 0.005


class Child:
    """A running command.

    Args:
        command: the program, looked for on PATH, and its arguments.
        env: all of its environment.
        log: file that its output is appended to (None: it goes where this process's goes).
        stdin: a descriptor, its standard input; by default there is none.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        launcher = [sys.executable, "-I", "-S", str(_EXEC), str(os.getpid())]
        output = (
            None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        )
        try:
            self._popen = subprocess.Popen(
                [*launcher, *command],
                env=dict(env),
                stdin=stdin,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            if output is not None:
                os.close(output)
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.log = log
        self.started_s = time.monotonic()
        self.lived_s = 0.0

    def begin(self, log: Path) -> None:
        """What it was started for begins now, with this name for its log."""
        assert self.log is not None
        with contextlib.suppress(FileNotFoundError):  # somebody has taken it away
            self.log.replace(log)
        self.log = log
        self.started_s = time.monotonic()

    def status(self) -> int | None:
        """None while it runs; else its exit status, or minus the signal that killed it.

        What it left of its group is killed when its end is seen.
        """
        if self._popen.returncode is None and self._has_ended():
            self.lived_s = time.monotonic() - self.started_s
            self.signal(signal.SIGKILL)
            self._popen.wait()
            os.close(self.pidfd)
            self.pidfd = -1
        return self._popen.returncode

    def signal(self, number: int) -> None:
        """To the whole group, if it was not reaped yet."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _has_ended(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None


def kill_all(children: Iterable[Child], timeout_s: float) -> None:
    """SIGKILL to their groups, and waits until all in them are dead.

    Raises:
        LaunchError: a process that does not die (it waits for a device, for example).
    """
    children = list(children)
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        child.signal(signal.SIGKILL)
    while True:
        left = [child.pid for child in children if child.status() is None]
        # A process that was being forked while its group was killed is killed by itself.
        for pid in living({child.pid for child in children} - set(left)):
            left.append(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"processes {left} did not die within {timeout_s:g} s of SIGKILL: they may still "
                "write into this host's memory, so this host counts as lost"
            )
        time.sleep(_POLL_S)


def end_all(
    children: Iterable[Child],
    number: int,
    grace_s: float,
    kill_s: float,
    hurried: Callable[[], bool] = lambda: False,
) -> None:
    """The signal to their groups, some time to end (or until it is `hurried`), then SIGKILL.

    Raises:
        LaunchError: as `kill_all`.
    """
    children = list(children)
    deadline_s = time.monotonic() + grace_s
    for child in children:
        child.signal(number)
    while time.monotonic() < deadline_s and any(child.status() is None for child in children):
        if hurried():
            break
        time.sleep(_POLL_S)
    kill_all(children, kill_s)


def living(groups: set[int]) -> list[int]:
    """The processes of these process groups that are not dead (zombies are)."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        stat = _stat(int(name))
        if stat is not None and int(stat[2]) in groups and stat[0] not in "ZX":
            found.append(int(name))
    return found


def start_ticks(pid: int) -> int | None:
    """When this process was started, in clock ticks since boot; None if there is no such one."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def state_of(pid: int) -> str:
    """The state of a process, a letter as in proc(5); "" if there is none."""
    stat = _stat(pid)
    return "" if stat is None else stat[0]


def is_in_group(pid: int, group: int) -> bool:
    """Does the process live, and belong to this process group?"""
    stat = _stat(pid)
    return stat is not None and int(stat[2]) == group and stat[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (the state) on, see proc(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
