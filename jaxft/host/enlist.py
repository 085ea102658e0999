"""A rank that somebody else has started (srun, mpirun, a pod's command) gets its place in a world.

All ranks of one start of a script are a *crew*. JAX knows who they are (`jax.distributed`), and on
which host each is (`device.roll_call`). What is left is to bring those of one host to their agent
(`jaxft.launch.crew`), which keeps the host's snapshot memory and meets the other hosts' agents in
the job's store. The host's first rank starts it, unless JAXFT_KEPT says that `jaxft keep` runs
here, whose life is not bound to the ranks'.

The connection to the agent is the rank's place: its end without a word is the rank's failure, after
which the crew cannot go on. Its memory stays for the crew after it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxft import config
from jaxft.errors import (
    ChannelClosed,
    ConfigError,
    JobInUse,
    LaunchError,
    PeerUnreachable,
    WireError,
)
from jaxft.host.attach import Seat
from jaxft.host.local import LocalChannel, connect, make_private

SOCKET = "crew.sock"
# How long the agent of this host is waited for, and then a world of all hosts.
START_S = 60.0
FORM_S = 600.0
ANSWER_S = 10.0
# An agent that was started here and found another one ends with this status.
IN_USE = 2
_POLL_S = 0.05


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of one start of a script: `run` is random, `hosts` are the names of their hosts in
    the order of the ranks, and `ranks` how many each of these has."""

    run: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, run: str, places: Sequence[str]) -> Crew:
        """The crew whose rank i is on host `places[i]`.

        Raises:
            ConfigError: the ranks of a host are not numbered one after the other.
        """
        hosts: list[str] = []
        for host in places:
            if not hosts or hosts[-1] != host:
                hosts.append(host)
        for host in hosts:
            if hosts.count(host) > 1:
                numbers = [str(rank) for rank, place in enumerate(places) if place == host]
                raise ConfigError(
                    f"the ranks of host {host} are {', '.join(numbers)}: a host's ranks have to be "
                    "numbered one after the other (srun --distribution=block)"
                )
        ranks = tuple(sum(place == host for place in places) for host in hosts)
        return cls(run=run, hosts=tuple(hosts), ranks=ranks)

    def host_of(self, rank: int) -> int:
        """The place in `hosts` of the host of this rank."""
        return next(at for at in range(len(self.hosts)) if rank < sum(self.ranks[: at + 1]))

    def first(self, host: int) -> int:
        """The first rank of the host with this place."""
        return sum(self.ranks[:host])


class Enlist(msgspec.Struct, frozen=True, kw_only=True, tag="enlist"):
    """Rank: I am of this crew. `floor` is the newest generation that its storage knows of; the rest
    is what the job asks for, the same of all ranks."""

    crew: Crew
    rank: int
    floor: int
    store: str
    code: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Rank: I have come to the end."""


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag="heard"):
    """You are waited for no more; the world comes when all its hosts are there."""


class Enlisted(msgspec.Struct, frozen=True, kw_only=True, tag="enlisted"):
    """You are a rank of this generation; this is where you stand."""

    env: config.RankEnv


class Busy(msgspec.Struct, frozen=True, kw_only=True, tag="busy"):
    """Another crew is still here."""

    reason: str


class Dismissed(msgspec.Struct, frozen=True, kw_only=True, tag="dismissed"):
    """It cannot be; `usage`: not with these options."""

    reason: str
    usage: bool = False


RankMessage = Enlist | Done
AgentMessage = Heard | Enlisted | Busy | Dismissed


def encode(message: RankMessage | AgentMessage) -> bytes:
    return msgspec.msgpack.encode(message)


class Berth:
    """A rank's connection to its host's agent."""

    def __init__(self, channel: LocalChannel) -> None:
        self._channel = channel

    def let_go(self, *, finished: bool = False) -> None:
        """Leaves, at the end if `finished`. May be repeated."""
        if finished and not self._channel.ended:
            with contextlib.suppress(WireError):
                self._channel.send(encode(Done()))
        self._channel.close()


def enlist(wish: Enlist, job: str) -> Seat:
    """The place of this rank, once all hosts of its crew have one.

    Raises:
        JobInUse: another crew, or `jaxft run`, has the job here.
        ConfigError: options that cannot work, or the run directory cannot be used.
        LaunchError: the agent could not be started, or no world was formed; says why.
    """
    host = wish.crew.hosts[wish.crew.host_of(wish.rank)]
    directory = config.host_dir(config.run_dir().absolute(), job, host)
    channel = _arrive(wish, job, host, directory)
    try:
        return Seat(_placed(channel, host, directory), Berth(channel))
    except BaseException:
        channel.close()
        raise


def _arrive(wish: Enlist, job: str, host: str, directory: Path) -> LocalChannel:
    """A connection to the host's agent, which has heard the wish and is not another crew's."""
    starts = wish.rank == wish.crew.first(wish.crew.host_of(wish.rank)) and not config.is_kept()
    started: subprocess.Popen[bytes] | None = None
    busy = ""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            channel = connect(directory / SOCKET, 0.0)
            told = _ask(channel, wish)
            if isinstance(told, Heard):
                return channel
            channel.close()
            if isinstance(told, Dismissed):
                raise _refusal(told)
            busy = told.reason if isinstance(told, Busy) else busy
        except WireError:
            if starts and (started is None or started.poll() == IN_USE):
                started = _start(job, host, directory)
            elif started is not None and started.poll() is not None:
                break
        time.sleep(_POLL_S)
    if busy:
        raise JobInUse(f"job {job} is in use on host {host} by another start of it: {busy}")
    what = "`jaxft keep`, which JAXFT_KEPT says runs here," if config.is_kept() else "the agent"
    raise LaunchError(
        f"job {job}: {what} does not answer at {directory / SOCKET}: {_last_line(directory)}"
    )


def _ask(channel: LocalChannel, wish: Enlist) -> AgentMessage:
    """What the agent says to it at once. Raises WireError."""
    try:
        channel.send(encode(wish))
        received = channel.receive(ANSWER_S)
        if received is None:
            raise PeerUnreachable(f"the agent does not answer within {ANSWER_S:g} s")
        return msgspec.msgpack.decode(received.payload, type=AgentMessage)
    except BaseException:
        channel.close()
        raise


def _placed(channel: LocalChannel, host: str, directory: Path) -> config.RankEnv:
    """Waits for the world."""
    deadline_s = time.monotonic() + FORM_S
    try:
        while time.monotonic() < deadline_s:
            received = channel.receive(1.0)
            if received is None:
                continue
            told = msgspec.msgpack.decode(received.payload, type=AgentMessage)
            if isinstance(told, Enlisted):
                return told.env
            if isinstance(told, Dismissed):
                raise _refusal(told)
    except ChannelClosed as error:
        raise LaunchError(f"the agent of host {host} has ended: {_last_line(directory)}") from error
    raise LaunchError(f"host {host}: no world was formed within {FORM_S:g} s")


def _refusal(told: Dismissed) -> ConfigError | LaunchError:
    return ConfigError(told.reason) if told.usage else LaunchError(told.reason)


def log_of(directory: Path) -> Path:
    """What an agent that a rank has started says."""
    return directory / "logs" / "crew.log"


def _last_line(directory: Path) -> str:
    log = log_of(directory)
    try:
        words = log.read_text(errors="replace").rstrip().splitlines() or ["it said nothing"]
    except OSError:
        return "it has no log here"
    return f"{words[-1]} (log: {log})"


def _start(job: str, host: str, directory: Path) -> subprocess.Popen[bytes]:
    """Starts the agent, in a session of its own."""
    make_private(directory / "logs")
    with log_of(directory).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxft.launch.crew", "--job", job, "--host", host],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
