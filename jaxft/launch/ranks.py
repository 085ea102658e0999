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
from jaxft.group.causes import error_in
from jaxft.group.membership import Exit
from jaxft.group.world import Generation
from jaxft.host.calls_page import CallsPage
from jaxft.launch.child import Child, end_all, kill_all
from jaxft.launch.console import Console, LogFollower, last_lines
from jaxft.launch.filewatch import Writes
from jaxft.launch.hostdir import RankFile
from jaxft.launch.options import KILL_S, RunOptions
from jaxft.launch.warm import AFTER_S, CALLS_MIN, WarmRanks
from jaxft.status.events import EventLog

CALLS = "JAXFT_CALLS"
PERSIST = "JAXFT_PERSIST"
EXPORT = "JAXFT_EXPORT"
STORE = "JAXFT_STORE"
EXPORTER = (sys.executable, "-m", "jaxft.exporter")
FULL_BYTES = 4096
# Where the error of a rank is looked for: what breaks after it may say much.
ERROR_LINES = 1000
ERROR_BYTES = 1 << 16


class Watched(NamedTuple):
    """A rank that trains: its process group, its log, and the page in which it counts its calls."""

    rank: int
    group: int
    log: Path
    page: CallsPage


class Ranks:
    """Starts, watches and kills them, and those that wait to come after them (`warm`).

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
        self._warm = WarmRanks(options.command if options.warm else (), options.logs(), console.say)
        self._pages: list[CallsPage] = []
        self._began: list[tuple[dict[str, str], CallsPage]] = []  # until others wait to follow
        self.surroundings = ""  # what JAX goes by in those that train, once others wait to follow
        self._spare_in = 0
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
        fds += self._warm.fds()
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
            log = self._options.logs() / f"gen{generation.number}" / f"rank{rank}.log"
            env = rank_environment(generation, self._options.host, rank, self._smp) | more
            _fresh_log(log)
            page = None
            if (self._options.hang_s or self._warm.may_be) and not more:
                page = CallsPage.create()
                env[CALLS] = page.path
                self._pages.append(page)
                self._began.append((env, page))
            warm = None if more else self._warm.take(env, log)
            child = warm or Child(command, env=env, log=log)
            self._children[rank] = child
            logs.append(log)
            if page is not None and self._options.hang_s:
                watched.append(Watched(rank, child.pid, log, page))
            if not quiet:
                self._followers.append(LogFollower(self._console, rank, log))
            self._events.emit(
                "rank_started",
                rank=rank,
                pid=child.pid,
                generation=generation.number,
                warm=warm is not None,
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
                rank=rank,
                code=code,
                lived_s=child.lived_s,
                tail=_last_words(child.log),
                error=error_in(last_lines(child.log, ERROR_LINES, ERROR_BYTES)),
            )
            self._say_exit(rank, code)
        self._warm.poll()
        self._mind_warm()
        self.follow()

    def _mind_warm(self) -> None:
        """Once all train, others wait to come after them."""
        if not self._began or not self._warm.may_be or self._warm.pids or self._exits:
            return
        youngest_s = max(child.started_s for child in self._children.values())
        if time.monotonic() - youngest_s < AFTER_S:
            return
        told = [(env, page.surroundings) for env, page in self._began]
        if all(page.counter[0] >= CALLS_MIN and page.surroundings for _, page in self._began):
            self._began.clear()  # once in a generation
            self.surroundings = told[0][1]
            self._start_warm(told)

    def wait_as_spare(self, generation: int, surroundings: str) -> None:
        """On a host that has no ranks, as many wait as it would have, for a place in the world.

        Args:
            generation: the world in which it has none.
            surroundings: what JAX goes by in the ranks of other hosts.
        """
        is_new, self._spare_in = generation != self._spare_in, generation
        if not is_new or self._children or self._warm.pids or not self._warm.may_be:
            return
        env = _inherited(os.environ)
        self._start_warm([(env, surroundings)] * self._options.ranks_per_host)

    def _start_warm(self, ranks: list[tuple[dict[str, str], str]]) -> None:
        self._warm.start(ranks)
        self._events.emit("warm_started", pids=self._warm.pids, generation=self.generation)

    def follow(self) -> None:
        if self._writes is not None:
            self._writes.clear()
        came = [follower.poll() for follower in self._followers]
        self._chatty = any(came)

    def kill(self) -> None:
        """SIGKILL at once, and until all are dead. Raises LaunchError if one does not die."""
        self._end(lambda children: kill_all(children, KILL_S))

    def close(self) -> None:
        """Kills all, also those that wait. Raises LaunchError if one does not die."""
        try:
            self.kill()
        finally:
            self._warm.kill()

    def end(
        self, number: int, grace_s: float, hurried: Callable[[], bool], *, quietly: bool = False
    ) -> None:
        """The signal, some time to end (or until it is `hurried`), then SIGKILL; what they print
        from now on is not shown if that is to be done `quietly`. Raises LaunchError if one does not
        die."""
        if quietly:
            self._unfollow()
        self._end(lambda children: end_all(children, number, grace_s, KILL_S, hurried))

    def _end(self, way: Callable[[list[Child]], None]) -> None:
        began_s = time.monotonic()
        left = any(child.status() is None for child in self._children.values())
        way(list(self._children.values()))
        for rank, child in self._children.items():
            if rank not in self._exits:
                self._say_exit(rank, child.status() or 0)
        self._unfollow()
        if left:
            self._events.emit(
                "ranks_killed",
                generation=self.generation,
                took_s=round(time.monotonic() - began_s, 3),
            )
        self._rank_file.clear()
        self.watched = ()
        for page in self._pages:
            page.close()
        self._pages, self._began = [], []
        self._children, self._followers, self._exits = {}, [], {}
        self.generation = 0

    def _unfollow(self) -> None:
        """Shows what they have printed, and nothing after that."""
        for follower in self._followers:
            follower.close()
        if self._writes is not None:
            self._writes.close()
        self._writes, self._followers = None, []

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
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    env = _inherited(os.environ if environ is None else environ)
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


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank has of its agent's environment."""
    env = dict(environ)
    for name in (CALLS, PERSIST, EXPORT, STORE, *config.SECRETS):
        env.pop(name, None)
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env
