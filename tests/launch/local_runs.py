"""Runs of `jaxft run` with trivial ranks, for tests: started, watched, struck, and looked after."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxft.status.events import Event, EventReader

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0

# A rank that obeys files: `go` ends all ranks well, `exit-RANK` ends one with the status in it.
RANK = """
import os, pathlib, sys, time
base, rank = pathlib.Path(sys.argv[1]), os.environ["JAXFT_RANK"]
print("rank", rank, "of generation", os.environ["JAXFT_GENERATION"], flush=True)
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    if (base / "go").exists():
        sys.exit(0)
    order = base / f"exit-{rank}"
    if order.exists():
        status = int(order.read_text())
        order.unlink()
        sys.exit(status)
    time.sleep(0.01)
"""


class Run:
    """A `jaxft run` in a directory of its own.

    Args:
        options: of the command line; the job's name is "j". Nobody waits to follow a rank, which
            takes a processor a second, unless they say --warm.
        command: of the ranks, "BASE" for `base`; by default one that obeys files in it.
        env: more environment variables.
    """

    def __init__(self, *options: str, command: tuple[str, ...] = (), **env: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="jx-"))
        self.run_dir = self.base / "run"
        self.seen: list[Event] = []
        self._reader = EventReader(self.base / "events")
        (self.base / "events").mkdir()
        self.command = tuple(str(self.base) if one == "BASE" else one for one in command) or (
            sys.executable,
            "-S",
            "-c",
            RANK,
            str(self.base),
        )
        self.out = (self.base / "out").open("w+")
        self.err = (self.base / "err").open("w+")
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAXFT_RUN_DIR": str(self.run_dir),
            "JAXFT_EVENTS": str(self.base / "events"),
            **env,
        }
        self.started_s = time.monotonic()
        self.process = self.start(*options, command=self.command)

    def start(self, *options: str, command: tuple[str, ...]) -> subprocess.Popen[str]:
        """Another `jaxft run` of the same job, with the same output."""
        run = (sys.executable, "-m", "jaxft", "run", "--job", "j", "--no-warm")
        return subprocess.Popen(
            [*run, *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
            env=self.environ,
            text=True,
        )

    # What happens

    def wait(self, event: str, count: int = 1, **fields: Any) -> Event:
        """The `count`th event of this name and with these fields."""
        found: list[Event] = []

        def there() -> bool:
            self.seen += self._reader.poll()
            found[:] = self.events(event, **fields)
            return len(found) >= count

        self.until(there, f"event {event} {fields}")
        return found[count - 1]

    def events(self, event: str, **fields: Any) -> list[Event]:
        """Those seen so far."""
        return [
            one
            for one in self.seen
            if one["event"] == event and all(one.get(key) == val for key, val in fields.items())
        ]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what}\n{self.text()}"
            assert self.process.poll() is None or condition(), f"ended: no {what}\n{self.text()}"
            time.sleep(0.01)

    def until_gone(self, pids: set[int]) -> None:
        """Waits until none of these processes of the run lives."""
        deadline_s = time.monotonic() + WAIT_S
        while pids & set(self.processes()):
            assert time.monotonic() < deadline_s, f"still there: {pids}\n{self.text()}"
            time.sleep(0.01)

    def running(self, generation: int, ranks: int) -> None:
        """Waits until so many ranks of the generation print."""
        self.wait("rank_started", ranks, generation=generation)
        said = f"of generation {generation}"
        self.until(lambda: self.printed().count(said) >= ranks, f"{ranks} ranks that print")

    def printed(self) -> str:
        return (self.base / "out").read_text()

    def errors(self) -> str:
        return (self.base / "err").read_text()

    def text(self) -> str:
        return f"{self.printed()}\n{self.errors()}\n" + "\n".join(map(str, self.seen))

    # What is done to it

    def pid(self, host: str, role: str) -> int:
        """The newest process of a host: "agent", "smp" or "rank"."""
        self.seen += self._reader.poll()
        names = {
            "agent": ("agent_started",),
            "smp": ("smp_started", "smp_restarted", "smp_adopted"),
            "rank": ("rank_started",),
        }[role]
        return int([e for e in self.seen if e["event"] in names and e["host"] == host][-1]["pid"])

    def kill(self, host: str, *roles: str) -> float:
        """Kills processes of a host, all held still first; returns when."""
        pids = [self.pid(host, role) for role in roles]
        now_s = time.time()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        return now_s

    def exit_rank(self, rank: int, status: int) -> float:
        now_s = time.time()
        (self.base / "order").write_text(str(status))
        (self.base / "order").rename(self.base / f"exit-{rank}")
        return now_s

    def go(self) -> None:
        (self.base / "go").touch()

    def finish(self, timeout_s: float = WAIT_S) -> int:
        """Lets all ranks end well; the exit status."""
        self.go()
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = WAIT_S) -> int:
        """The exit status, once it has ended by itself."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s\n{self.text()}") from None
        self.seen += self._reader.poll()
        return status

    # What it leaves

    def processes(self) -> dict[int, str]:
        """All living processes of this run."""
        found = {}
        mark = f"JAXFT_RUN_DIR={self.run_dir}\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().decode()
        return found

    def files(self) -> list[str]:
        """All files and directories that are left of the run, logs aside, and the notes for the
        next one."""
        return [
            str(path.relative_to(self.run_dir))
            for path in self.run_dir.rglob("*")
            if "logs" not in path.parts
            and not path.name.startswith((".checkpoints", ".generation"))
            and not (path.is_dir() and any(path.iterdir()))
        ]

    def assert_nothing_left(self) -> None:
        assert not self.processes(), self.text()
        assert not self.files(), self.text()

    def close(self) -> None:
        """Kills what the test has left."""
        for _ in range(100):
            left = self.processes()
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait(10)
        self.out.close()
        self.err.close()
        shutil.rmtree(self.base, ignore_errors=True)


@contextlib.contextmanager
def run(*options: str, command: tuple[str, ...] = (), **env: str) -> Iterator[Run]:
    """A run that leaves nothing behind, whatever the test does."""
    one = Run(*options, command=command, **env)
    try:
        yield one
    finally:
        one.close()
