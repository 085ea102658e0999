"""The ranks of one host in one generation, and the process that persists for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxft import config
from jaxft.config import RankEnv
from jaxft.group.membership import Exit
from jaxft.group.world import Generation
from jaxft.host.calls_page import CallsPage
from jaxft.launch.child import Child, end_all, kill_all
from jaxft.launch.console import Console, LogFollower, last_lines
from jaxft.launch.filewatch import Writes
from jaxft.launch.hostdir import RankFile
from jaxft.launch.options import KILL_S, RunOptions
from jaxft.status.events import EventLog

CALLS = "JAXFT_CALLS"
PERSIST = "JAXFT_PERSIST"
EXPORT = "JAXFT_EXPORT"
STORE = "JAXFT_STORE"
EXPORTER = (sys.executable, "-m", "jaxft.exporter")
FULL_BYTES = 4096


class Watched(NamedTuple):
    """A rank that trains: its process group, its log, and the page in which it counts its calls."""

    rank: int
    group: int
    log: Path
    page: CallsPage


class Ranks:
    """Starts, watches and kills them.

    Args:
        options: of the run.
        smp: the socket of the host's SMP.
        rank_file: where their process numbers are written down.
        console, events: who is told.
    """

    def __init__(
        self,
        options: RunOptions,
        smp: Path,
        rank_file: RankFile,
        console: Console,
        events: EventLog,
    ) -> None:
        self._options = options
        self._smp = smp
        self._rank_file = rank_file
        self._console = console
        self._events = events
        self._children: dict[int, Child] = {}
        self._followers: list[LogFollower] = []
        self._writes: Writes | None = None
        self._chatty = False
        self._exits: dict[int, Exit] = {}
        self.generation = 0
        self.watched: tuple[Watched, ...] = ()  # replaced as a whole: another thread looks

    @property
    def running(self) -> int:
        """The generation whose ranks were started and not yet seen dead; 0: none."""
        return self.generation

    @property
    def exits(self) -> tuple[Exit, ...]:
        """Those that ended by themselves, the first one first."""
        return tuple(self._exits.values())

    def fds(self) -> list[int]:
        """Readable when one ends, or prints after a while of silence."""
        fds = [child.pidfd for child in self._children.values() if child.pidfd >= 0]
        return fds if self._writes is None or self.is_chatty else [*fds, self._writes.fileno()]

    @property
    def is_chatty(self) -> bool:
        """Is what they print to be looked for now and then? Else `fds` tells of it. So a rank that
        prints without a pause wakes nobody for each line."""
        return self._writes is not None and (self._chatty or self._writes.fileno() < 0)

    def start(self, generation: Generation, index: int) -> None:
        """Starts the ranks of the host with this index, the job's own or, in an export, one that
        writes to storage; all earlier ones are dead."""
        assert not self._children
        self.generation = generation.number
        first, logs, watched = generation.first_rank(index), [], []
        more = export_environment(generation, self._options)
        command = EXPORTER if more else self._options.command
        quiet = self._console.quiet or generation.export is not None
        for rank in range(first, first + generation.hosts[index].ranks):
            log = self._options.logs() / f"gen{generation.number}-rank{rank}.log"
            env = rank_environment(generation, self._options.host, rank, self._smp) | more
            _fresh_log(log)
            page = CallsPage.create() if self._options.hang_s and not more else None
            env |= {} if page is None else {CALLS: page.path}
            child = Child(command, env=env, log=log)
            self._children[rank] = child
            logs.append(log)
            watched += [] if page is None else [Watched(rank, child.pid, log, page)]
            if not quiet:
                self._followers.append(LogFollower(self._console, rank, log))
            self._events.emit(
                "rank_started", rank=rank, pid=child.pid, generation=generation.number
            )
        self._rank_file.write(list(self._children.values()))
        self.watched = tuple(watched)
        self._writes = None if quiet else Writes(logs)
        self._chatty = True

    def poll(self) -> None:
        """Notes who has ended, and shows what they print."""
        for rank, child in self._children.items():
            code = child.status()
            if code is None or rank in self._exits:
                continue
            assert child.log is not None
            self._exits[rank] = Exit(
                rank=rank, code=code, lived_s=child.lived_s, tail=_last_words(child.log)
            )
            self._say_exit(rank, code)
        self.follow()

    def follow(self) -> None:
        if self._writes is not None:
            self._writes.clear()
        came = [follower.poll() for follower in self._followers]
        self._chatty = any(came)

    def kill(self) -> None:
        """SIGKILL at once, and until all are dead. Raises LaunchError if one does not die."""
        self._end(lambda children: kill_all(children, KILL_S))

    def end(self, number: int, grace_s: float, hurried: Callable[[], bool]) -> None:
        """The signal, some time to end (or until it is `hurried`), then SIGKILL. Raises LaunchError
        if one does not die."""
        self._end(lambda children: end_all(children, number, grace_s, KILL_S, hurried))

    def _end(self, way: Callable[[list[Child]], None]) -> None:
        began_s = time.monotonic()
        left = any(child.status() is None for child in self._children.values())
        way(list(self._children.values()))
        for rank, child in self._children.items():
            if rank not in self._exits:
                self._say_exit(rank, child.status() or 0)
        for follower in self._followers:
            follower.close()
        if self._writes is not None:
            self._writes.close()
        self._writes = None
        if left:
            self._events.emit(
                "ranks_killed",
                generation=self.generation,
                took_s=round(time.monotonic() - began_s, 3),
            )
        self._rank_file.clear()
        watched, self.watched = self.watched, ()
        for one in watched:
            one.page.close()
        self._children, self._followers, self._exits = {}, [], {}
        self.generation = 0

    def _say_exit(self, rank: int, code: int) -> None:
        self._events.emit(
            "rank_exited",
            rank=rank,
            generation=self.generation,
            code=max(code, 0),
            signal=max(-code, 0),
        )


def _last_words(log: Path) -> str:
    """The end of a log, and why it may have ended too soon."""
    words = last_lines(log)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(log.parent).free < FULL_BYTES:
            words += f"\n(the disk of {log.parent} is full: the last words may be missing)"
    return words.lstrip("\n")


def _fresh_log(log: Path) -> None:
    """An empty log; that of an earlier run of the job, which had this generation too, stays beside
    it until the next one."""
    if log.exists():
        log.replace(log.with_suffix(".log.old"))
    log.touch(mode=0o600)


def export_environment(generation: Generation, options: RunOptions) -> dict[str, str]:
    """What an exporter has beside a rank's environment; nothing where the generation trains."""
    if generation.export is None:
        return {}
    where = msgspec.json.encode(generation.export).decode()
    return {EXPORT: where, STORE: options.store, **options.store_access().to_environ()}


def rank_environment(
    generation: Generation,
    host: str,
    rank: int,
    smp: Path,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a rank: this process's own, in which this generation's variables win.

    Python's output is not buffered (unless that was asked for otherwise), so that the last lines
    of a rank that is killed are in its log. It has no secrets of the agent's.
    """
    env = dict(os.environ if environ is None else environ)
    for name in (CALLS, PERSIST, EXPORT, STORE, *config.SECRETS):
        env.pop(name, None)
    env.setdefault("PYTHONUNBUFFERED", "1")
    place = RankEnv(
        job=generation.job,
        host=host,
        generation=generation.number,
        nonce=generation.nonce,
        rank=rank,
        ranks=generation.rank_count,
        coordinator=generation.coordinator,
        smp=str(smp),
        address=next((one.ip for one in generation.hosts if one.host == host), ""),
    )
    return env | place.to_environ()
