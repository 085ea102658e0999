"""A world on one machine: an agent for each simulated host, each of which can be killed as a whole.

Rules
- Agents die with this process, ranks with their agents; an SMP without an agent ends by itself.
- An agent that was killed is started again, as a machine that comes back would; if its SMP is dead
  too, that is an empty host. One that ended by itself is not started again, unless it failed and
  the job goes on.
- The result of the job is what the agents wrote into the store.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from types import FrameType

import msgspec

from jaxft import config
from jaxft.errors import ConfigError, JaxftError, LaunchError, StoreError
from jaxft.group.records import JobEnd, read_view
from jaxft.host.local import make_private, private_socket_path
from jaxft.launch.agent import Interrupted
from jaxft.launch.child import Child, end_all, kill_all
from jaxft.launch.console import Console
from jaxft.launch.hostdir import Lock, RankFile, remove
from jaxft.launch.options import KILL_S, RunOptions
from jaxft.launch.preemption import PreemptionNotice
from jaxft.launch.smp_process import SOCKET, SnapshotProcess
from jaxft.launch.store import Store
from jaxft.launch.stores import open_store
from jaxft.status.events import EventLog

POLL_S = 0.02
LOOK_S = 1.0
END_S = 30.0
RESPAWN_S = 0.2
QUICK_S = 60.0
QUICK_DEATHS_MAX = 10
EXIT_USAGE = 2
EXIT_STORE = 4


class LocalWorld:
    """All agents of a job on this machine, whose lock is held.

    Args:
        options: for all of them. `host` is replaced, and so is `store`, unless one is named.
        count: how many hosts, named host0, host1, ...
        respawn: start agents that were killed again.
    """

    def __init__(self, options: RunOptions, count: int, *, respawn: bool) -> None:
        self._options = msgspec.structs.replace(options, shares_console=True)
        self._respawn = respawn
        self._events = EventLog(config.events_dir(), host="local", role="launcher")
        self._console = Console("launcher", quiet=False)
        self._hosts = [f"host{index}" for index in range(count)]
        self._agents: dict[str, Child] = {}
        self._ended: dict[str, int] = {}
        self._deaths: dict[str, list[float]] = {host: [] for host in self._hosts}
        self._due: dict[str, float] = {}
        self._over_s: float | None = None
        self._failed = True
        self._signals: list[int] = []
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> JobEnd:
        """Runs the job to its end and takes everything away but, after a failure, the logs.

        Raises:
            Interrupted: by SIGINT or SIGTERM.
            ConfigError: an agent was refused what it asked for.
            StoreError: the store cannot be used, or could not any more.
            LaunchError: all agents are gone and none of them wrote an end.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            self._check()
            for host in self._hosts:
                self._start(host, self._options.fresh)
            while self._agents or self._due:
                if self._signals:
                    self._end_agents()
                    raise Interrupted(self._signals[0])
                if self._over_s is not None and time.monotonic() - self._over_s > END_S:
                    names = ", ".join(self._agents)
                    self._console.say(f"the job is over; the agents of {names} are killed")
                    kill_all(self._agents.values(), KILL_S)
                    break
                self._look()
                self._wait()
            return self._result()
        finally:
            with contextlib.suppress(LaunchError):
                # An agent ends its SMP itself, also where nobody else could find it any more.
                end_all(self._agents.values(), signal.SIGTERM, END_S / 2, KILL_S)
            for host in self._hosts:
                self._clear_host(host)
            self._events.close()
            wake, self._wake_w = self._wake_w, -1
            os.close(wake)
            os.close(self._wake_r)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        with contextlib.suppress(OSError):  # It is closed in the end.
            os.write(self._wake_w, b"!")

    def _wait(self) -> None:
        """Until an agent ends, a signal comes, or one is to be started again."""
        poller = select.poll()
        ends = [agent.pidfd for agent in self._agents.values() if agent.pidfd >= 0]
        for fd in (self._wake_r, *ends):
            poller.register(fd, select.POLLIN)
        poller.poll(1000 * (POLL_S if self._due or self._over_s is not None else LOOK_S))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def _end_agents(self) -> None:
        """Passes the signals on, also those that come while the agents end, and waits."""
        agents = list(self._agents.values())
        deadline_s = time.monotonic() + self._options.grace_s + END_S / 2
        told = 0
        while time.monotonic() < deadline_s and any(agent.status() is None for agent in agents):
            for number in self._signals[told:]:
                told += 1
                for agent in agents:
                    agent.signal(number)
            time.sleep(POLL_S)
        kill_all(agents, KILL_S)

    def _check(self) -> None:
        """What every agent would fail at is said once, and before any of them is started."""
        for options in map(self._of, self._hosts):
            private_socket_path(options.directory() / SOCKET)
            make_private(options.logs())
        self._open_store().close()

    def _of(self, host: str) -> RunOptions:
        return msgspec.structs.replace(self._options, host=host)

    def _start(self, host: str, fresh: bool) -> None:
        options = msgspec.structs.replace(self._options, host=host, fresh=fresh)
        command = [sys.executable, "-m", "jaxft.launch.run", msgspec.json.encode(options).decode()]
        self._agents[host] = Child(command, env=os.environ)

    def _look(self) -> None:
        """Sees who has ended, and starts again who was killed."""
        for host, agent in list(self._agents.items()):
            status = agent.status()
            if status is not None:
                del self._agents[host]
                self._gone(host, status)
        for host, at_s in list(self._due.items()):
            if time.monotonic() >= at_s:
                del self._due[host]
                self._start(host, fresh=False)

    def _gone(self, host: str, status: int) -> None:
        self._ended[host] = status
        self._events.emit("agent_ended", of=host, status=status)
        if status in (0, 1) or self._over_s is not None or self._end() is not None:
            # The job is over: the others see that too, and end.
            self._due.clear()
            self._over_s = self._over_s or time.monotonic()
            return
        if status == EXIT_USAGE:
            raise ConfigError(f"the agent of {host} could not start; its message is above")
        if status == EXIT_STORE:
            # A new agent might begin anew in another store, with all that is in memory gone.
            raise StoreError(
                f"store {self._options.store} did not answer, or is lost, so the agent of {host} "
                "has ended; its message is above"
            )
        notice = PreemptionNotice(self._options.preemption_file, host)
        if notice.is_there():
            self._console.say(f"{host} is gone, and stays away: {notice}")
            return
        how = f"signal {-status}" if status < 0 else f"status {status}"
        now_s = time.monotonic()
        deaths = [at_s for at_s in self._deaths[host] if now_s - at_s < QUICK_S] + [now_s]
        self._deaths[host] = deaths
        if self._respawn and len(deaths) <= QUICK_DEATHS_MAX:
            self._console.say(f"the agent of {host} ended with {how}; it is started again")
            self._due[host] = now_s + RESPAWN_S * len(deaths)
        else:
            self._console.say(f"the agent of {host} ended with {how}; this host stays away")

    def _open_store(self) -> Store:
        access = self._options.store_access()
        return open_store(self._options.store, job=self._options.job, access=access)

    def _end(self) -> JobEnd | None:
        """What the agents wrote, if they did."""
        with contextlib.suppress(StoreError):
            store = self._open_store()
            try:
                return read_view(store.read()).end
            finally:
                store.close()
        return None

    def _clear_host(self, host: str) -> None:
        """Ends what an agent that was killed, and not started again, has left."""
        options = self._of(host)
        directory = options.directory()
        if not directory.exists():
            return
        with contextlib.suppress(JaxftError):
            lock = Lock(directory / "lock", f"host {host}")
            try:
                RankFile(directory / "ranks").kill_left(KILL_S)
                smp = SnapshotProcess(
                    options, directory, options.logs() / "smp.log", self._console.say
                )
                if smp.adopt():
                    smp.stop()
            finally:
                remove(directory, lock, keep_logs=self._failed)

    def _result(self) -> JobEnd:
        end = self._end()
        if end is None:
            ends = ", ".join(f"{host}: {status}" for host, status in sorted(self._ended.items()))
            raise LaunchError(f"all agents are gone before the job was over ({ends})")
        self._failed = not end.ok
        return end
