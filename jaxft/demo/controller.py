"""Runs the demo's two trainings through `jaxft run`, and kills what the plan says.

A rank that reaches a step with a failure says "holding" and waits; the controller kills, and then
makes the file that lets go (whoever runs that step again finds it). So a failure strikes at exactly
its step, while the other hosts are already in the next one. Only processes that carry this run's
own directory in their environment are ever sent a signal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jaxft.demo.plan import DemoOptions, Failure, host_name
from jaxft.errors import LaunchError
from jaxft.status.events import Event, EventReader

POLL_S = 0.02
SILENCE_MAX_S = 150.0
STOP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A failure that was caused at time `t` (seconds since the epoch) to a world's generation."""

    failure: Failure
    t: float
    generation: int


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What a run left: its exit status, everything its processes said, and how long it took."""

    status: int
    events: tuple[Event, ...]
    strikes: tuple[Strike, ...]
    wall_s: float
    logs: Path


Watcher = Callable[[Event], None]


def run_training(
    name: str,
    options: DemoOptions,
    failures: tuple[Failure, ...],
    directory: Path,
    watch: Watcher,
) -> RunLog:
    """One training from its first step to its last.

    Args:
        name: the job's name; its logs and events go below `directory / name`.
        failures: what to kill, and when.
        watch: is told every event, in order.

    Raises:
        LaunchError: nothing happened for SILENCE_MAX_S.
    """
    started_s = time.monotonic()
    with _private_directory() as run_dir:
        world = _World(name, options, failures, directory / name, run_dir)
        try:
            status = _follow(world, watch)
        finally:
            world.stop()
    return RunLog(
        status=status,
        events=tuple(world.events),
        strikes=tuple(world.strikes),
        wall_s=time.monotonic() - started_s,
        logs=world.directory,
    )


@contextmanager
def _private_directory() -> Iterator[Path]:
    """Where sockets lie: short, because the names of Unix sockets are."""
    path = Path(tempfile.mkdtemp(prefix="jaxft-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _follow(world: _World, watch: Watcher) -> int:
    """Passes events on until the run has ended; returns its exit status."""
    heard_s = time.monotonic()
    while True:
        status = world.process.poll()
        for event in world.poll():
            heard_s = time.monotonic()
            watch(event)
        if status is not None:
            return status
        if time.monotonic() - heard_s > SILENCE_MAX_S:
            raise LaunchError(
                f"run {world.name}: nothing happened for {SILENCE_MAX_S:g} s; "
                f"its logs are in {world.directory}"
            )
        time.sleep(POLL_S)


class _World:
    """A `jaxft run`, the processes that belong to it, and the failures it still has before it."""

    def __init__(
        self,
        name: str,
        options: DemoOptions,
        failures: tuple[Failure, ...],
        directory: Path,
        run_dir: Path,
    ) -> None:
        self.name = name
        self.directory = directory
        self.events: list[Event] = []
        self.strikes: list[Strike] = []
        self._options = options
        self._run_dir = run_dir
        self._pending = list(failures)
        self._held: Failure | None = None
        self._paused = False
        self._pids: dict[tuple[str, str], int] = {}
        self._generation = 0
        self._persisted = False
        directory.mkdir(parents=True, exist_ok=True)
        self._reader = EventReader(directory / "events")
        self._console: IO[bytes] = (directory / "console.log").open("wb")
        self.process = subprocess.Popen(
            self._command(failures),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _command(self, failures: tuple[Failure, ...]) -> list[str]:
        options = self._options
        command = [sys.executable, "-m", "jaxft", "run", "--local-hosts", str(options.hosts)]
        command += ["--code", str(options.code), "--job", self.name]
        command += ["--log-dir", str(self.directory / "logs")]
        if options.elastic:
            command += ["--hosts", f"{options.hosts_min}:{options.hosts}", "--no-respawn"]
        command += ["--", sys.executable, "-m", "jaxft.demo.train"]
        command += ["--steps", str(options.steps), "--every", str(options.every)]
        command += ["--seed", str(options.seed), "--hold-dir", str(self._run_dir)]
        for failure in failures:
            command += ["--hold", f"{failure.at_step}:{failure.victim}"]
        if failures and options.pause_step is not None:
            command += ["--hold", f"{options.pause_step}:{failures[0].victim}"]
        if options.elastic:
            command.append("--digests")
        if options.wrap:
            command.append("--wrap")
        command += ["--parity", options.parity]
        if options.fallback and failures:
            command += ["--fallback", str(self.directory / "orbax")]
        return command

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if "JAXFT_" not in name}
        return inherited | {
            "JAX_PLATFORMS": "cpu",
            "JAXFT_RUN_DIR": str(self._run_dir),
            "JAXFT_EVENTS": str(self.directory / "events"),
            "JAXFT_FAULTS": ";".join(
                f"persist.ready:host={path.suffix[1:]}=touch:{path}" for path in self._helpers()
            ),
        }

    def _helpers(self) -> list[Path]:
        """The files that say that a host's persist helper is ready for the next snapshot."""
        hosts = self._options.hosts if self._options.pause_step is not None else 0
        return [self._run_dir / f"ready.{host_name(index)}" for index in range(hosts)]

    def poll(self) -> list[Event]:
        """What has happened since the last call, failures that were due by now among it."""
        fresh = self._reader.poll()
        for event in fresh:
            self._note(event)
        if self._paused and all(path.exists() for path in self._helpers()):
            self._let_go(self._options.pause_step)
            self._paused = False
        if self._held is not None and self._may_strike():
            fresh.append(self._strike(self._held))
            self._held = None
        self.events += fresh
        return fresh

    def _note(self, event: Event) -> None:
        host = str(event["host"])
        match event["event"]:
            case "agent_started":
                self._pids[host, "agent"] = int(event["pid"])
            case "smp_started" | "smp_restarted" | "smp_adopted":
                self._pids[host, "smp"] = int(event["pid"])
            case "rank_started":
                self._pids[host, "rank"] = int(event["pid"])
            case "generation_formed":
                self._generation = max(self._generation, int(event["number"]))
            case "persisted":
                self._persisted = True
            case "holding" if event["step"] == self._options.pause_step:
                self._paused = True
            case "holding":
                due = [f for f in self._pending if f.at_step == event["step"] and f.victim == host]
                self._held = due[0] if due else self._held

    def _may_strike(self) -> bool:
        """What is more than memory can give back, and what comes before it, waits for storage."""
        return self._persisted or self._options.pause_step is None

    def _let_go(self, step: int | None) -> None:
        (self._run_dir / f"go-{step}").touch()

    def _strike(self, failure: Failure) -> Event:
        """Kills, as close together as can be, and lets go whoever waits at that step."""
        roles = {"rank": ("rank",), "smp": ("smp",), "agent": ("agent",)}
        targets = [
            (host, role)
            for role in roles.get(failure.kind, ("smp", "rank", "agent"))
            for host in failure.hosts
        ]
        if failure.takes_hosts:
            # An agent that sees its own processes die would say so; a dead host says nothing.
            for host in failure.hosts:
                self._signal(host, "agent", signal.SIGSTOP)
        t = time.time()
        for host, role in targets:
            self._signal(host, role, signal.SIGKILL)
        self._let_go(failure.at_step)
        self._pending.remove(failure)
        self.strikes.append(Strike(failure=failure, t=t, generation=self._generation))
        return {
            "t": t,
            "host": failure.victim,
            "role": "demo",
            "event": "struck",
            "what": {"rank": "the rank", "smp": "the snapshot process", "agent": "the agent"}.get(
                failure.kind, "every process"
            ),
            "target": ", ".join(failure.hosts),
            "step": failure.at_step,
        }

    def _signal(self, host: str, role: str, number: int) -> None:
        pid = self._pids.get((host, role))
        if pid is not None and self._is_ours(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_ours(self, pid: int) -> bool:
        """Whether the process was started by this run: a number may have gone to somebody else."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"JAXFT_RUN_DIR={self._run_dir}".encode() in environment.split(b"\0")

    def stop(self) -> None:
        """Ends what is left of the run, and waits for its end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        deadline_s = time.monotonic() + STOP_S
        while (left := self._living()) and time.monotonic() < deadline_s:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)
        self._console.close()

    def _living(self) -> list[int]:
        return [
            int(name) for name in os.listdir("/proc") if name.isdigit() and self._is_ours(int(name))
        ]
