"""The agent of ranks that somebody else has started: `python -m jaxft.launch.crew`, `jaxft keep`.

A *crew* is all ranks of one start of a script (`host.enlist`). Once those of this host have come,
an agent like that of `jaxft run` takes part in the job for them: with the same store, by the same
decisions. What differs:

- The ranks have their numbers from elsewhere, so the world is the crew's hosts, all of them, in the
  order of the ranks.
- A rank that goes without a word ends the crew: the agents kill the ranks that are left, which
  would wait for it in a collective, and end. The memory stays in the snapshot process, for
  ORPHAN_S, and the next crew's agent adopts it. When and where that is started is the scheduler's
  business, and so is giving up.
- An agent has no signals: its life is the ranks'. `jaxft keep` outlives them, for the next crew.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import msgspec

from jaxft import config
from jaxft.errors import ConfigError, JaxftError, JobInUse, LaunchError, StoreError, WireError
from jaxft.group.membership import Exit
from jaxft.group.records import FAULT, Fault, HostRecord, JobEnd
from jaxft.group.restarts import EARLIER_MAX
from jaxft.group.world import Generation, encode
from jaxft.host import enlist, protocol
from jaxft.host.local import LocalChannel, LocalListener, make_private
from jaxft.launch.agent import Agent
from jaxft.launch.console import Console, now
from jaxft.launch.hostdir import Lock, remove
from jaxft.launch.options import KILL_S, RunOptions
from jaxft.launch.ranks import Ranks
from jaxft.launch.run import EXIT_OK, EXIT_SIGNAL, EXIT_WORLD, placed
from jaxft.launch.smp_process import SnapshotProcess
from jaxft.launch.store import Store

LOCK = "crew.lock"
# How long the other ranks of this host are waited for, once one has come.
MUSTER_S = 60.0
ORPHAN_S = 600.0
# Failures are the scheduler's to count.
NEVER = 1 << 30
# Hosts that come late are waited for before anything goes to storage.
SETTLE_S = 30.0
HEAR_S = 1.0
_TICK_S = 0.25


class CrewEnded(LaunchError):
    """A rank of the crew is gone, here or elsewhere, and the crew with it."""


class Stranger:
    """A rank that was not started here: its connection, and its process."""

    def __init__(self, channel: LocalChannel, wish: enlist.Enlist, pidfd: int) -> None:
        self.channel = channel
        self.wish = wish
        self.finished = False
        self._pidfd = pidfd

    @property
    def name(self) -> str:
        return f"rank {self.wish.rank} (process {self.channel.peer_pid})"

    def fds(self) -> list[int]:
        return [] if self.channel.ended else [self.channel.fileno(), self._pidfd]

    def is_dead(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def has_gone(self) -> bool:
        """Has it let go of its place? `finished` says how."""
        with contextlib.suppress(WireError, msgspec.MsgspecError):
            for payload, _ in self.channel.drain():
                said = msgspec.msgpack.decode(payload, type=enlist.RankMessage)
                self.finished = self.finished or isinstance(said, enlist.Done)
        return self.finished or self.channel.ended or self.is_dead()

    def tell(self, message: enlist.AgentMessage) -> None:
        with contextlib.suppress(WireError):
            self.channel.send(enlist.encode(message), timeout_s=1.0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.channel.close()
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)


class Strangers(Ranks):
    """A crew's ranks on this host, in place of those that an agent starts. (Those that write to
    storage when the job ends are started here.)"""

    def enrol(self, ranks: list[Stranger], door: Door) -> None:
        """Takes them over, in the order of their numbers; others are turned away from now on."""
        self._strangers = ranks
        self._door = door
        self._serves = self._is_over = False

    @property
    def serves(self) -> bool:
        """Do they run in the world of now?"""
        return self._serves

    @property
    def is_over(self) -> bool:
        """Were they killed, or have they gone?"""
        return self._is_over

    @property
    def gone(self) -> Stranger | None:
        """One that went without a word, while the world runs."""
        gone = (one for one in self._strangers if one.has_gone() and not one.finished)
        return next(gone, None) if self._serves else None

    def fds(self) -> list[int]:
        ranks = (fd for one in self._strangers for fd in one.fds())
        return [*super().fds(), self._door.fileno(), *ranks]

    def start(self, generation: Generation, index: int) -> None:
        if generation.export is not None:
            super().start(generation, index)
            return
        numbers = [one.wish.rank for one in self._strangers]
        first = generation.first_rank(index)
        if self._is_over or numbers != list(range(first, first + generation.hosts[index].ranks)):
            raise CrewEnded(f"generation {generation.number} is not this crew's")
        self.generation, self._serves = generation.number, True
        for one in self._strangers:
            env = config.RankEnv(
                job=generation.job,
                host=self._options.host,
                generation=generation.number,
                nonce=generation.nonce,
                rank=one.wish.rank,
                ranks=generation.rank_count,
                coordinator="",
                smp=str(self._smp),
                address=generation.hosts[index].ip,
            )
            one.tell(enlist.Enlisted(env=env))
            pid = one.channel.peer_pid
            self._events.emit("rank_enlisted", rank=env.rank, pid=pid, generation=env.generation)

    def poll(self) -> None:
        self._door.turn_away(f"{self._strangers[0].name} of it still runs")
        for one in [one for one in self._strangers if one.has_gone()]:
            rank = one.wish.rank
            if not one.finished and not self.generation and not self._is_over:
                raise CrewEnded(f"{one.name} has ended before there was a world")
            if one.finished and self._serves and rank not in self._exits:
                self._exits[rank] = Exit(rank=rank, code=0)
                self._say_exit(rank, 0)
        super().poll()

    def kill(self) -> None:
        """Those that have come to their end are left alone. Raises LaunchError if one of the others
        does not die."""
        left = [one for one in self._strangers if self._serves and not one.finished]
        for one in left:
            one.kill()
        deadline_s = time.monotonic() + KILL_S
        while alive := [one.name for one in left if not one.is_dead()]:
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"{', '.join(alive)} did not die within {KILL_S:g} s of SIGKILL, and may still "
                    "write into this host's memory"
                )
            time.sleep(0.005)
        self._is_over = self._is_over or bool(left)
        self._serves = False
        super().kill()


class CrewAgent(Agent):
    """The agent of one host for one crew.

    Args:
        options: of the run.
        console: who is told.
        ranks: of this host, in the order of their numbers.

    Raises:
        JobInUse: another agent of this job runs on this host.
    """

    def __init__(
        self, options: RunOptions, console: Console, ranks: list[Stranger], door: Door
    ) -> None:
        self._crew = ranks
        self._door = door
        super().__init__(options, console)
        self._keeps_memory = True
        self._floor = max(one.wish.floor for one in ranks)

    def _new_ranks(self) -> Strangers:
        self._strangers = Strangers(
            self.options, self._smp.socket, self._rank_file, self._console, self._events
        )
        self._strangers.enrol(self._crew, self._door)
        return self._strangers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Its life is the ranks'."""
        self._door.told = number

    def _record(self, welcome: protocol.Welcome) -> HostRecord:
        place = self._crew[0].wish.crew.hosts.index(self.options.host)
        return msgspec.structs.replace(
            super()._record(welcome), run=self._crew[0].wish.crew.run, place=place
        )

    def _take_turns(self, store: Store) -> JobEnd | None:
        with contextlib.suppress(StoreError):  # It is told again, or the store stays away.
            self._tell_gone(store)
        end = super()._take_turns(store)
        if end is not None:
            self._keeps_memory = not end.ok
        return end

    def _tell_gone(self, store: Store) -> None:
        """A rank that is gone is the end of the generation, for all hosts."""
        gone, view = self._strangers.gone, self._watcher.view() if self._watcher else None
        if gone is None or view is None or view.fault is not None or view.generation is None:
            return
        number, key = view.generation.number, f"{FAULT}{view.generation.number}"
        detail = f"{gone.name} on {self.options.host} is gone; whoever has started it knows why"
        fault = Fault(
            generation=number,
            host=self.options.host,
            kind="rank_gone",
            detail=detail,
            rank=gone.wish.rank,
            at_s=time.time(),
        )
        if number == self._entered and store.commit({key: None}, {key: encode(fault)}):
            facts = {"generation": number, "host": fault.host, "kind": fault.kind, "detail": detail}
            self._events.emit("fault", by=fault.host, **facts)

    def _leave(self, number: int, store: Store, fault: Fault | None) -> bool:
        served = self._strangers.serves
        again = super()._leave(number, store, fault)
        # Without a fault it is done, and what follows it writes its newest snapshot to storage.
        if (served and fault is not None) or self._strangers.is_over:
            raise CrewEnded(fault.detail if fault is not None else f"generation {number} is over")
        return again


# ------------------------------------------------------------------------------ mustering


class Door:
    """Where ranks of this host come in.

    Args:
        path: of the socket.
        host: whose ranks they have to be.

    Attributes:
        told: the number of a signal by which this process was told to end; 0: none.
    """

    def __init__(self, path: Path, host: str) -> None:
        self._listener = LocalListener(path)
        self._host = host
        self.told = 0

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()

    def turn_away(self, reason: str) -> None:
        """Whoever comes now is of another crew."""
        while (channel := self._listener.accept()) is not None:
            self._answer(channel, enlist.Busy(reason=reason))

    def muster(self, wait_s: float) -> list[Stranger]:
        """The ranks of this host of one crew, in the order of their numbers; none if nobody came
        within `wait_s`, or this process was told to end."""
        first_s = deadline_s = time.monotonic() + wait_s
        came: dict[int, Stranger] = {}
        while not self.told and time.monotonic() < deadline_s:
            fds = [self.fileno(), *(fd for one in came.values() for fd in one.fds())]
            select.select(fds, [], [], _TICK_S)
            gone = next((one for one in came.values() if one.has_gone()), None)
            if gone is not None:
                self._dismiss(came, f"{gone.name} has ended")
                deadline_s = first_s
            known = set(came)
            if (channel := self._listener.accept()) is not None:
                self._let_in(channel, came)
            if not came:
                continue
            if not known:
                deadline_s = time.monotonic() + MUSTER_S
            crew = next(iter(came.values())).wish.crew
            if len(came) == crew.ranks[crew.hosts.index(self._host)]:
                return [came[rank] for rank in sorted(came)]
        if came:
            numbers = ", ".join(map(str, sorted(came)))
            self._dismiss(came, f"of host {self._host} only ranks {numbers} came")
        return []

    def _let_in(self, channel: LocalChannel, came: dict[int, Stranger]) -> None:
        wish = self._heard(channel)
        if wish is None:
            return
        first = next((one.wish for one in came.values()), wish)
        if wish.crew.run != first.crew.run:
            reason = f"{next(iter(came.values())).name} of it has come before"
            self._tell(channel, enlist.Busy(reason=reason))
        elif wish.rank in came or self._host not in wish.crew.hosts:
            reason = f"rank {wish.rank} is not one that host {self._host} waits for"
            self._tell(channel, enlist.Dismissed(reason=reason))
        elif (wish.store, wish.code) != (first.store, first.code):
            reason = f"rank {wish.rank} has another store or code than rank {first.rank}"
            self._tell(channel, enlist.Dismissed(reason=reason, usage=True))
        else:
            try:
                came[wish.rank] = Stranger(channel, wish, os.pidfd_open(channel.peer_pid))
            except ProcessLookupError:
                channel.close()
                return
            came[wish.rank].tell(enlist.Heard())

    def _heard(self, channel: LocalChannel) -> enlist.Enlist | None:
        """What it wants; None if it says nothing that could be understood."""
        try:
            received = channel.receive(HEAR_S)
            if received is not None:
                return msgspec.msgpack.decode(received.payload, type=enlist.Enlist)
        except (WireError, msgspec.MsgspecError):
            pass
        channel.close()
        return None

    def _answer(self, channel: LocalChannel, answer: enlist.AgentMessage) -> None:
        if self._heard(channel) is not None:  # Unread words would take the answer with them.
            self._tell(channel, answer)

    def _tell(self, channel: LocalChannel, answer: enlist.AgentMessage) -> None:
        with contextlib.suppress(WireError):
            channel.send(enlist.encode(answer), timeout_s=HEAR_S)
        channel.close()

    def _dismiss(self, came: dict[int, Stranger], reason: str) -> None:
        dismiss(came.values(), enlist.Dismissed(reason=reason))
        came.clear()


def dismiss(ranks: Iterable[Stranger], word: enlist.Dismissed) -> None:
    """They have no place here."""
    for one in ranks:
        one.tell(word)
        one.close()


# ------------------------------------------------------------------------------ the process


def options_of(wish: enlist.Enlist, job: str, host: str) -> RunOptions:
    """What a crew asks of its agents.

    Raises:
        ConfigError: that cannot work.
        LaunchError: the store cannot be reached from here.
    """
    crew = wish.crew
    options = RunOptions(
        job=job,
        host=host,
        command=("crew",),
        store=wish.store,
        hosts_min=len(crew.hosts),
        hosts_max=len(crew.hosts),
        code=wish.code,
        ranks_per_host=crew.ranks[crew.hosts.index(host)],
        settle_s=SETTLE_S,
        orphan_s=ORPHAN_S,
        hang_s=0.0,
        max_restarts=EARLIER_MAX,
        same_step_max=NEVER,
        flap_s=0.0,
        warm=False,
    )
    options = placed(options, "", "", one_machine=False)
    domain = config.failure_domain(one_machine=not options.address)
    return msgspec.structs.replace(options, failure_domain=domain)


def keep(job: str, host: str, *, crews: bool) -> int:
    """Takes care of the crews of a job on this host; returns the exit status.

    Args:
        job, host: names.
        crews: of one after the other, until one has come to the end of the job, none comes for
            ORPHAN_S after the last one, or a signal tells this process to end.

    Raises:
        JobInUse: another such process is here.
        ConfigError: the run directory cannot be used.
    """
    directory = config.host_dir(config.run_dir().absolute(), job, host)
    make_private(directory / "logs")
    lock = Lock(directory / LOCK, f"job {job} on host {host}")
    door = Door(directory / enlist.SOCKET, host)
    console = Console(host, quiet=True)
    wait_s = math.inf if crews else MUSTER_S
    try:
        while True:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda number, _: setattr(door, "told", number))
            ranks = door.muster(wait_s)
            if not ranks:
                break
            is_over = _serve(ranks, door, job, console)
            if is_over or not crews:
                return EXIT_OK if is_over else EXIT_WORLD
            wait_s = ORPHAN_S
        if crews:
            _let_memory_go(job, host, directory, console)
        return EXIT_SIGNAL + door.told if door.told else EXIT_WORLD
    finally:
        door.close()
        if crews:
            remove(directory, lock, keep_logs=True)
        else:
            lock.release()


def _serve(ranks: list[Stranger], door: Door, job: str, console: Console) -> bool:
    """Takes care of one crew; whether the job is over with it."""
    reason, usage = "", False
    try:
        options = options_of(ranks[0].wish, job, console.host)
        end = CrewAgent(options, console, ranks, door).run()
        if end.ok:
            return True
        reason = end.reason
    except JaxftError as error:
        reason, usage = str(error), isinstance(error, ConfigError)
    finally:
        dismiss(ranks, enlist.Dismissed(reason=reason, usage=usage))
    console.say(f"{reason}. Its ranks are stopped; the snapshots wait {ORPHAN_S:g} s for others")
    return False


def _let_memory_go(job: str, host: str, directory: Path, console: Console) -> None:
    options = RunOptions(job=job, host=host, command=("crew",), store="")
    smp = SnapshotProcess(options, directory, directory / "logs" / "smp.log", console.say)
    if smp.adopt():
        smp.stop()


def main(argv: list[str] | None = None) -> int:
    """The agent that a rank has started, for its crew; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jaxft.launch.crew", description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--host", required=True)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return keep(args.job, args.host, crews=False)
    except JobInUse as error:
        print(now(), error, flush=True)
        return enlist.IN_USE
    except JaxftError as error:
        print(now(), error, flush=True)
        return EXIT_WORLD


if __name__ == "__main__":
    sys.exit(main())
