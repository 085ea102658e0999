"""Worlds that are struck, and the trail of events that they leave until they train again."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.baseline_orbax import TMPFS
from bench.measure import cpu_s
from bench.processes import end_run, until
from bench.recovery_loop import RestartLoop
from jaxft.status.events import Event, EventReader

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("recovery_train.py")
WAIT_S = 180.0
# What it takes at least to import JAX, and for how long nothing is used then by one that waits.
LOADED_S = 0.3
STILL_S = 0.3


class Trail:
    """What is in the event log of a world, by name and generation."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self._reader = EventReader(directory)
        self._seen: list[Event] = []

    def all(self, event: str, **fields: Any) -> list[Event]:
        """Those of this name and with these fields, in the order of their time."""
        self._seen += self._reader.poll()
        return [
            one
            for one in self._seen
            if one["event"] == event and all(one.get(key) == value for key, value in fields.items())
        ]

    def wait(self, event: str, count: int = 1, **fields: Any) -> list[Event]:
        """The first `count` of these, once they are there."""
        found: list[Event] = until(
            lambda: len(found := self.all(event, **fields)) >= count and found[:count],
            f"{count} events {event} {fields}",
            WAIT_S,
        )
        return found

    def first_s(self, event: str, ranks: int, generation: int) -> float:
        """When the last of the ranks' scripts had first come to this."""
        first: dict[int, float] = {}
        for one in self.all(event, generation=generation, role="script"):
            first.setdefault(int(one["rank"]), float(one["t"]))
        if len(first) < ranks:
            raise RuntimeError(f"only ranks {sorted(first)} of {ranks} have come to {event}")
        return max(first.values())

    def until_steps(self, ranks: int, generation: int) -> None:
        """Every rank has finished a step."""
        until(
            lambda: len({one["rank"] for one in self.all("step", generation=generation)}) >= ranks,
            f"{ranks} ranks in generation {generation}",
            WAIT_S,
        )


def environment(directory: Path, cache: Path) -> dict[str, str]:
    """Of everything in a world: this process's own, and that of the world."""
    kept = {name: one for name, one in os.environ.items() if not name.startswith("JAXFT_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAXFT_RUN_DIR": str(directory / "run"),
        "JAXFT_EVENTS": str(directory / "events"),
    }


class Struck:
    """A world of jaxft's.

    Args:
        hosts: how many agents.
        options: more of `jaxft run`.
        nbytes: of the state.
        way: of the script.
        cache: JAX's directory of compiled programs.
    """

    def __init__(
        self, hosts: int, options: Sequence[str], nbytes: int, way: str, cache: Path
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="jaxft-bench-"))
        self.trail = Trail(self.directory / "events")
        self._log = (self.directory / "log").open("wb")
        command = [sys.executable, "-m", "jaxft", "run", "--local-hosts", str(hosts)]
        command += ["--job", "bench", "--quiet", *options]
        command += ["--", sys.executable, str(SCRIPT), str(nbytes), way]
        self._process = subprocess.Popen(
            command,
            env=environment(self.directory, cache),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def pid(self, host: str, role: str) -> int:
        """The newest process of a host."""
        names = {"agent": "agent_started", "rank": "rank_started", "smp": "smp_started"}
        return int(self.trail.all(names[role], host=host)[-1]["pid"])

    def kill(self, host: str, *roles: str) -> float:
        """Ends these of a host as if at once; when."""
        pids = [self.pid(host, role) for role in roles]
        for number in (signal.SIGSTOP, signal.SIGKILL) if pids[1:] else (signal.SIGKILL,):
            for pid in pids:
                at_s = time.time()
                os.kill(pid, number)
        return at_s

    def until_warm(self, hosts: int) -> None:
        """Processes wait on all hosts."""
        for one in self.trail.wait("warm_started", hosts):
            for pid in one["pids"]:
                until(functools.partial(_waits, pid), "a process that waits", WAIT_S)

    def log(self) -> str:
        self._log.flush()
        files = [self.directory / "log", *sorted(self.directory.rglob("*.log"))]
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in files)

    def close(self) -> None:
        end_run(self._process, self.directory / "run")
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _waits(pid: int) -> bool:
    """Has it been loaded, and used no time for a while?"""
    before_s = cpu_s(pid)
    time.sleep(STILL_S)
    return before_s > LOADED_S and cpu_s(pid) == before_s


@contextlib.contextmanager
def struck(
    hosts: int, options: Sequence[str], nbytes: int, way: str, cache: Path
) -> Iterator[Struck]:
    """A world; what it has said is in the error, if there is one."""
    world = Struck(hosts, options, nbytes, way, cache)
    try:
        yield world
    except (TimeoutError, RuntimeError, IndexError) as error:
        raise RuntimeError(f"{error}\n{world.log()}") from error
    finally:
        world.close()


def loop_s(ranks: int, nbytes: int, cache: Path) -> float:
    """Seconds from a rank's SIGKILL to the next step in a plain restart loop with Orbax."""
    directory = Path(tempfile.mkdtemp(prefix="jaxft-bench-", dir=TMPFS))
    trail = Trail(directory / "events")
    more: Mapping[str, str] = {"BENCH_CHECKPOINTS": str(directory / "checkpoints")}
    command = (str(SCRIPT), str(nbytes), "orbax")
    environ = {**environment(directory, cache), **more}
    with (directory / "log").open("wb") as log, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        loop = RestartLoop(command, ranks, environ, log.fileno())
        stack.callback(loop.close)
        try:
            trail.wait("committed", ranks, generation=1)
            struck_s = time.time()
            os.kill(loop.pids[-1], signal.SIGKILL)
            loop.turn(WAIT_S)
            trail.until_steps(ranks, 2)
        except (TimeoutError, RuntimeError) as error:
            raise RuntimeError(f"{error}\n{(directory / 'log').read_text()[-4000:]}") from error
        return trail.first_s("step", ranks, 2) - struck_s
