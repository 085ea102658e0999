"""The snapshot process of this host, as its agent keeps it: started or adopted, heard, restarted.

Rules
- The agent keeps descriptors of the SMP's memory. A dead SMP is started again with them, and
  only after it is seen dead: two never write to the same memory.
- An SMP that dies again and again on its memory gets new memory, which counts as a lost host. One
  that dies on new memory too ends the agent.
- One that finds its ports taken by another process says so by its status. That says nothing of the
  memory: it is started on it again, at other ports, which is another world.
- One that does not answer within a deadline is killed, and then is a dead one. So is one whose loop
  has not turned for twice `silence_s`: it counts the turns in an eventfd that was passed to it,
  which is looked at when this process is awake anyway, and wakes nobody. That time is longer than
  a busy machine keeps it from its loop, for three deaths in a row cost the host its memory, and far
  shorter than a rank waits for an outcome. From `silence_s` on snapshots are held, so no other
  host's ranks wait for it.
- The time that this process itself stood still counts against nobody.
- `look` is to be called every `look_s`, by any thread. `poll` is to be called when that says so, or
  one of `fds` is readable, and every fraction of a second while it is not calm.
- Whoever calls holds the host's lock, so nobody else starts one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from jaxft import config
from jaxft.errors import LaunchError, WireError
from jaxft.group.world import Generation
from jaxft.host import protocol
from jaxft.host.job_key import JobKey
from jaxft.host.local import LocalChannel, connect
from jaxft.host.trust import Trust
from jaxft.launch.console import last_lines
from jaxft.launch.hostdir import ReservedPort, with_port
from jaxft.launch.options import RunOptions

SOCKET = "smp.sock"
START_S = 30.0
ANSWER_S = 5.0
CHECK_S = 2.0
LOOK_S_MAX = 2.0
PAUSE_S = 1.0
STOP_S = 3.0
SEND_S = 1.0
QUICK_S = 60.0
DEATHS_ON_MEMORY = 3
DEATHS_MAX = 6
MOVES_MAX = 5
# For control messages, and for bytes.
PORTS = 2


class Up(msgspec.Struct, frozen=True):
    """It has answered. `how` is "started", "restarted" (on its memory) or "adopted"."""

    welcome: protocol.Welcome
    how: str


class Died(msgspec.Struct, frozen=True):
    """It is dead, and another one is on its way."""

    pid: int


Happening = Up | Died | protocol.ServerMessage


class Turns:
    """Counts for how long the loop of an SMP has not turned, by looks of any thread.

    Args:
        look_s: what a look counts at most, so that a pause of this process counts as one.
    """

    def __init__(self, look_s: float) -> None:
        self.still_s = 0.0
        self._fd = -1
        self._look_s = look_s
        self._looked_s = time.monotonic()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The eventfd that it counts its turns in."""
        if self._fd < 0:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._fd

    def look(self) -> float:
        """For how long it has not turned, as far as is known now."""
        with self._lock:
            now_s = time.monotonic()
            gap_s, self._looked_s = now_s - self._looked_s, now_s
            self.still_s += min(gap_s, self._look_s)
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._fd)
                    self.still_s = 0.0
            return self.still_s

    def begin(self) -> None:
        """Another one's turns count from now on, or this one's again."""
        with self._lock:
            self.still_s = 0.0

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SnapshotProcess:
    """One SMP, whichever process it is at present.

    Args:
        options: of the run.
        directory: holds the socket.
        log: file for its output.
        say: tells a person.
    """

    def __init__(
        self, options: RunOptions, directory: Path, log: Path, say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._socket = directory / SOCKET
        self._directory = directory
        self._log = log
        self._say = say
        self._channel: LocalChannel | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._fds: tuple[int, ...] = ()
        self._how = "started"
        self._deadline_s: float | None = None
        self._turns = Turns(self.look_s)
        self._polled_s = time.monotonic()
        self._deaths: deque[float] = deque(maxlen=DEATHS_MAX)
        self._unheard = 0
        self._moves = 0
        self._trust: Trust | None = None
        self._address = ""  # where it was last, its ports are kept
        self._ports: list[ReservedPort] = []
        self.pid = 0
        self.welcome: protocol.Welcome | None = None

    def begin(self, trust: Trust | None = None) -> None:
        """Adopts the SMP that a dead agent left, or starts one.

        Args:
            trust: by what it and its peers on other machines are to know each other.
        """
        self._trust = trust
        if not self.adopt():
            self._start()

    def adopt(self) -> bool:
        """Adopts the SMP that a dead agent left, if there is one."""
        if not self._socket.exists():
            return False
        with contextlib.suppress(WireError, ProcessLookupError):
            channel = connect(self._socket, 0.0)
            self._pidfd = os.pidfd_open(channel.peer_pid)
            self.pid = channel.peer_pid
            self._how = "adopted"
            self._expect_answer(ANSWER_S)
            self._hello(channel)
            return True
        return False

    @property
    def socket(self) -> Path:
        return self._socket

    @property
    def is_up(self) -> bool:
        """Has it answered, and is it there as far as is known?"""
        return self.welcome is not None

    @property
    def is_sure(self) -> bool:
        """Is it up, with no answer outstanding?"""
        return self.is_up and self._deadline_s is None

    @property
    def is_calm(self) -> bool:
        """Is it up, with no answer outstanding, and does its loop turn?"""
        return self.is_sure and self._turns.still_s < self._options.silence_s

    @property
    def look_s(self) -> float:
        """How often to look whether its loop turns."""
        return min(LOOK_S_MAX, 0.4 * self._options.silence_s)

    def look(self) -> bool:
        """Looks whether its loop has turned, from any thread; whether it has not for long."""
        return self._turns.look() >= self._options.silence_s

    def fds(self) -> list[int]:
        """What to wait for: its death, and its messages."""
        fds = [self._pidfd] if self._pidfd >= 0 else []
        if self._channel is not None and self._channel.fileno() >= 0:
            fds.append(self._channel.fileno())
        return fds

    def poll(self) -> list[Happening]:
        """What has happened since the last call. Never waits.

        Raises:
            LaunchError: it does not stay alive.
        """
        self._wake()
        if _is_readable(self._pidfd):
            died = Died(self.pid)
            self._listen_to_the_end()
            self._bury()
            self._start()
            return [died]
        if self._channel is None:
            self._greet()
            happened = []
        else:
            happened = self._listen(self._channel)
            if self._channel.ended:
                # Dead in a moment, or it has given this connection up: then it is greeted again.
                self._channel.close()
                self._channel, self.welcome = None, None
                self._expect_answer(ANSWER_S)
        self._mind_silence()
        return happened

    def _wake(self) -> None:
        """After a pause of this process itself, every answer has that much more time."""
        now_s = time.monotonic()
        gap_s, self._polled_s = now_s - self._polled_s, now_s
        if gap_s > PAUSE_S:
            self._deadline_s = self._deadline_s and self._deadline_s + gap_s
        self.look()

    def _mind_silence(self) -> None:
        """Kills one that has not answered in time, or stands still."""
        late = self._deadline_s is not None and time.monotonic() > self._deadline_s
        still = self.is_up and self._turns.still_s > 2 * self._options.silence_s
        if late or still:
            self._say(f"the SMP (pid {self.pid}) does not answer and is killed")
            self.kill()

    def send(self, message: protocol.ClientMessage) -> None:
        """Tells it, if it is up; what it must know is repeated when it is `Up` again."""
        if self._channel is not None and self.is_up:
            with contextlib.suppress(WireError):
                self._channel.send(protocol.encode(message), timeout_s=SEND_S)

    def enter(self, generation: Generation) -> None:
        self.send(protocol.Enter(generation=generation))

    def check(self) -> None:
        """Somebody doubts that it answers: it must, within CHECK_S, or it is killed."""
        if self.is_up:
            self._expect_answer(CHECK_S)
            self.send(protocol.Inspect())

    def kill(self) -> None:
        """SIGKILL; `poll` then sees it dead."""
        self._deadline_s = None
        self._turns.begin()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def stop(self) -> None:
        """Ends it within STOP_S and a moment, also one that hangs, and lets its memory go."""
        if self._channel is None:  # it cannot be told, and has nothing to do before it ends
            self.kill()
        else:
            with contextlib.suppress(WireError):
                self._channel.send(protocol.encode(protocol.Stop()), timeout_s=SEND_S)
        if self._pidfd >= 0 and not _is_readable(self._pidfd, STOP_S):
            self._say(f"the SMP (pid {self.pid}) does not end and is killed")
            self.kill()
            _is_readable(self._pidfd, STOP_S)
        self._bury()
        self._let_memory_go()
        for port in self._ports:
            port.close()
        self._turns.close()

    def leave(self) -> None:
        """Leaves it as it is, with its memory, to the agent after this one."""
        if self._channel is not None:
            self._channel.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._channel, self._pidfd, self.welcome = None, -1, None
        if self._child is not None:
            self._child.returncode = 0  # Nobody waits for it: it outlives this.
        self._let_memory_go()
        for port in self._ports:
            port.close()
        self._turns.close()

    # -------------------------------------------------------------------- starting

    def _start(self) -> None:
        self._mind_deaths()
        command = [sys.executable, "-m", "jaxft.host.smp"]
        command += ["--job", self._options.job, "--host", self._options.host]
        command += ["--dir", str(self._directory)]
        command += ["--orphan-s", str(self._options.orphan_s)]
        command += ["--silence-s", str(self._options.silence_s)]
        command += ["--rejoin-s", str(self._options.rejoin_s)]
        command += ["--bandwidth-max", str(self._options.bandwidth_bytes_per_s)]
        if self._fds:
            command += ["--fds", ",".join(map(str, self._fds))]
        if self._options.address:
            command += ["--listen", self._places()]
        with self._log.open("ab") as log, contextlib.ExitStack() as stack:
            passed = self._fds
            if self._trust is not None:
                key = stack.enter_context(_in_pipe(self._trust.key))
                command += ["--key-fd", str(key)]
                command += ["--trust-network"] * self._trust.clear
                passed += (key,)
            self._child = subprocess.Popen(
                command,
                env=_without_secrets(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=passed,
                start_new_session=True,
            )
        self.pid = self._child.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._how = "restarted" if self._fds else "started"
        self._expect_answer(START_S)

    def _places(self) -> str:
        """Where it is to listen: always at the same ports, which its peers know."""
        host = self._options.address
        if not self._ports:
            known = _ports_at(self._address, host)
            try:
                for one in known:
                    self._ports.append(ReservedPort(host, one, socket.SO_REUSEADDR))
            except LaunchError as error:
                self._say(f"{error}: the SMP is started at other ports, on its memory")
        while len(self._ports) < PORTS:
            self._ports.append(ReservedPort(host, 0, socket.SO_REUSEADDR))
        return ",".join(f"tcp://{port.address}" for port in self._ports)

    def _mind_deaths(self) -> None:
        now_s = time.monotonic()
        quick = [at_s for at_s in self._deaths if now_s - at_s < QUICK_S]
        # One that never gets as far as an answer may take long to die, on a busy machine.
        vain = f"{self._unheard} times before it had answered"
        if len(quick) >= DEATHS_MAX:
            vain = f"{len(quick)} times within {QUICK_S:g} s"
        if self._moves > MOVES_MAX:
            vain = f"{self._moves} times because it could not listen"
        if max(len(quick), self._unheard) >= DEATHS_MAX or self._moves > MOVES_MAX:
            raise LaunchError(
                f"host {self._options.host}: the SMP died {vain}. The end of its log {self._log}:\n"
                f"{last_lines(self._log)}"
            )
        if max(len(quick), self._unheard) >= DEATHS_ON_MEMORY and self._fds:
            self._say("the SMP keeps dying on its memory: it is started with new, empty memory")
            self._let_memory_go()

    def _bury(self) -> None:
        """Reaps a dead SMP; its memory is kept."""
        if self._channel is not None:
            self._channel.close()
        if self._child is not None and self._child.wait() == protocol.CANNOT_LISTEN:
            self._move()
        else:
            self._deaths.append(time.monotonic())
            self._unheard += 1
        if self._child is None:  # One that was adopted may be a child of an earlier agent here.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._channel, self._child, self._pidfd, self.welcome = None, None, -1, None

    def _move(self) -> None:
        """Another process listens where it was to listen: the next one listens elsewhere."""
        places = ", ".join(port.address for port in self._ports) or str(self._directory)
        self._moves += 1
        self._say(f"the SMP cannot listen at {places}: it is started at other ports, on its memory")
        for port in self._ports:
            port.close()
        self._ports, self._address = [], ""

    def _let_memory_go(self) -> None:
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    # -------------------------------------------------------------------- talking

    def _greet(self) -> None:
        with contextlib.suppress(WireError):
            channel = connect(self._socket, 0.0)
            if channel.peer_pid != self.pid:
                channel.close()
                return
            self._hello(channel)

    def _hello(self, channel: LocalChannel) -> None:
        self._channel = channel
        with contextlib.suppress(WireError):
            hello = protocol.Hello(role="agent", pid=os.getpid())
            channel.send(protocol.encode(hello), (self._turns.fileno(),), timeout_s=SEND_S)

    def _listen(self, channel: LocalChannel) -> list[Happening]:
        happened: list[Happening] = []
        try:
            for payload, fds in channel.drain():
                message = protocol.decode_server(payload)
                if isinstance(message, protocol.Welcome):
                    self._let_memory_go()
                    self._fds, self._address = fds, message.address
                    if wrong := self._is_wrong(message):
                        self._say(f"the SMP (pid {self.pid}) {wrong}: it is started again")
                        self.kill()
                        continue
                    self.welcome = message
                    self._unheard = self._moves = 0
                    self._deadline_s = None
                    self._turns.begin()
                    happened.append(Up(message, self._how))
                    continue
                for fd in fds:
                    os.close(fd)
                if isinstance(message, protocol.Inspection):
                    self._deadline_s = None
                else:
                    happened.append(message)
        except (WireError, msgspec.MsgspecError) as error:
            self._say(f"the SMP (pid {self.pid}) said what cannot be understood: {error}")
            self.kill()
        return happened

    def _is_wrong(self, welcome: protocol.Welcome) -> str:
        """Why one that was adopted cannot stay as it is; its memory can."""
        host, name = self._options.address, self._trust.name if self._trust is not None else ""
        if bool(host) != bool(_ports_at(welcome.address, host)):
            return f"is at {welcome.address}, and this host is at {host or 'a Unix socket'} now"
        return "has another job key, or another way to use it" if welcome.trust != name else ""

    def _listen_to_the_end(self) -> None:
        """What a dead SMP has said last may carry descriptors, which are closed."""
        if self._channel is not None:
            self._listen(self._channel)

    def _expect_answer(self, within_s: float) -> None:
        self._deadline_s = time.monotonic() + within_s


@contextlib.contextmanager
def _in_pipe(key: JobKey) -> Iterator[int]:
    """The descriptor of a pipe that the job's key is in, for a child that inherits it."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(writing, bytes.fromhex(key.text))
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def _without_secrets() -> dict[str, str]:
    """This process's environment, as far as it is anybody else's business."""
    return {name: value for name, value in os.environ.items() if name not in config.SECRETS}


def _ports_at(address: str, host: str) -> tuple[int, ...]:
    """The ports of "control,bulk" addresses, if they are TCP addresses of this host."""
    places = [place.rpartition(":") for place in address.split(",")]
    return tuple(
        int(port) for at, _, port in places if host and at == f"tcp://{with_port(host, 0)[:-2]}"
    )


def _is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Of a pidfd: is the process dead?"""
    if fd < 0:
        return False
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
