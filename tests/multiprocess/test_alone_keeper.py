"""A plain script or notebook whose keeper ends or is killed: what it hears, and how it goes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxft.host.attach import HOST
from tests.multiprocess.working import working

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
# What is said at once comes sooner; what waits for a deadline of the product takes 30 s or more.
SOON_S = 10.0


class Script:
    """A script of this test's job, told line by line what to do."""

    def __init__(self, run: Path, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.multiprocess.alone_keeper", *arguments],
                cwd=ROOT,
                env={**os.environ, "JAXFT_RUN_DIR": str(run), "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        """The next line that it prints."""
        out = self.process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], WAIT_S)
        line = out.readline().decode() if ready else ""
        assert line, f"status {self.process.poll()}: {self.log.read_text()}"
        return line.strip()

    def say(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()

    def tell(self, what: str) -> str:
        """Tells it to do something; the line that it answers with."""
        self.say(what)
        return self.hear()

    def timed(self, what: str) -> str:
        """As `tell`, and sees that it did not take long."""
        took_s, _, outcome = self.tell(what).partition(" ")
        assert float(took_s) < SOON_S, outcome
        return outcome

    def errors(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("ERROR")]

    def ends(self) -> int:
        return self.process.wait(WAIT_S)


class Place:
    """The directory of the job on this host, and who works there."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.directory = run / "j" / HOST
        self.scripts: list[Script] = []

    def script(self, *arguments: str) -> Script:
        log = self.run.with_name(f"script{len(self.scripts)}.log")
        script = Script(self.run, log, *arguments)
        self.scripts.append(script)
        return script

    @property
    def keeper(self) -> int:
        return int((self.directory / "lock").read_text())

    @property
    def smp(self) -> int:
        (found,) = self.working("jaxft.host.smp")
        return found

    def working(self, module: str = "jaxft") -> list[int]:
        """Processes below this run directory, but for the scripts."""
        scripts = [script.pid for script in self.scripts]
        return [pid for pid in working(str(self.run), module) if pid not in scripts]

    def another_keeper(self, times: int = 1) -> None:
        """Waits until another keeper has taken the script over, the `times`th one."""
        log = self.directory / "logs" / "solo.log"
        back = f"process {self.scripts[0].pid} has come back"
        until(lambda: log.read_text().count(back) >= times, "another keeper is there")

    def end(self) -> None:
        for script in self.scripts:
            script.process.kill()
            script.process.communicate()
        for pid in self.working("jaxft"):
            os.kill(pid, signal.SIGKILL)


def until(true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "r")
    yield place
    place.end()


def test_a_keeper_that_is_told_to_end_tells_its_script_at_once(place: Place) -> None:
    script = place.script()
    assert script.hear() == "from 0 none"
    assert script.timed("save") == "generation 1 protected"
    os.kill(place.keeper, signal.SIGTERM)
    until(lambda: not place.working(), "all is gone")
    for _ in range(3):
        failure = script.timed("save")
        assert failure.startswith("generation 1 SnapshotLost host alone, step "), failure
        assert "was told to end, and the snapshots in its memory are gone" in failure
    assert "make another" in script.errors()[0]
    assert "was told to end" in script.timed("fail")
    # The next one, in the same notebook, is protected by another keeper.
    assert script.tell("open") == "from 0 none"
    assert script.timed("save") == "generation 1 protected"
    assert script.timed("close") == "closed"
    assert script.ends() == 0
    until(lambda: not place.working(), "nothing is left")


def test_a_keeper_that_ends_beside_a_snapshot_process_that_hangs_tells_it_too(
    place: Place,
) -> None:
    script = place.script()
    assert script.hear() == "from 0 none"
    assert script.timed("save") == "generation 1 protected"
    os.kill(place.smp, signal.SIGSTOP)  # what it cannot say, the keeper's lock does
    os.kill(place.keeper, signal.SIGTERM)
    until(lambda: not place.working(), "all is gone")
    assert "has ended with the process that kept it" in script.timed("save")
    assert "make another" in script.errors()[0]
    assert "has ended with the process that kept it" in script.timed("close")


def test_a_killed_keeper_is_replaced_and_the_script_does_not_notice(place: Place) -> None:
    script = place.script()
    assert script.hear() == "from 0 none"
    assert script.timed("save") == "generation 1 protected"
    smp = place.smp
    for times in range(1, 3):
        keeper = place.keeper
        os.kill(keeper, signal.SIGKILL)
        assert script.timed("save") == "generation 1 protected"  # with or without the other one
        place.another_keeper(times)
        assert place.keeper != keeper
    assert place.smp == smp
    # The new keeper does what the old one did: it starts the snapshot process again.
    os.kill(smp, signal.SIGKILL)
    until(lambda: place.working("jaxft.host.smp") not in ([], [smp]), "it is started again")
    assert script.timed("save") == "generation 1 protected"
    assert script.errors() == []
    assert script.timed("close") == "closed"
    assert script.ends() == 0
    until(lambda: not place.working(), "nothing is left")
    assert not (place.directory / "smp.sock").exists()


def test_a_keeper_that_cannot_be_started_is_tried_again(place: Place) -> None:
    script = place.script()
    assert script.hear() == "from 0 none"
    place.run.chmod(0o755)  # which no keeper accepts
    os.kill(place.keeper, signal.SIGKILL)
    until(lambda: "it is tried again in" in script.log.read_text(), "one was tried")
    assert script.timed("save") == "generation 1 protected"
    place.run.chmod(0o700)
    place.another_keeper()
    assert script.timed("save") == "generation 1 protected"
    assert script.timed("close") == "closed"
    until(lambda: not place.working(), "nothing is left")


def test_a_script_killed_after_its_keeper_goes_on_from_memory(place: Place) -> None:
    script = place.script()
    assert script.hear() == "from 0 none"
    for _ in range(3):
        assert script.timed("save") == "generation 1 protected"
    os.kill(script.pid, signal.SIGSTOP)  # it can start no other keeper
    os.kill(place.keeper, signal.SIGKILL)
    os.kill(script.pid, signal.SIGKILL)
    assert script.ends() == -signal.SIGKILL
    again = place.script()
    assert again.hear() == "from 3 own"
    assert again.timed("close") == "closed"
    until(lambda: not place.working(), "nothing is left")


def test_a_script_whose_keeper_was_killed_keeps_its_place(place: Place) -> None:
    script = place.script()
    assert script.hear() == "from 0 none"
    assert script.timed("save") == "generation 1 protected"
    os.kill(script.pid, signal.SIGSTOP)
    os.kill(place.keeper, signal.SIGKILL)
    other = place.script()
    assert f"process {script.pid} runs this job already" in other.hear()
    assert other.ends() == 3
    os.kill(script.pid, signal.SIGCONT)
    assert script.timed("save") == "generation 1 protected"
    place.another_keeper()
    # What is closed in a living process, a notebook, is free again.
    assert script.timed("fail") == "closed"
    assert script.tell("open") == "from 2 own"
    assert script.timed("close") == "closed"
    until(lambda: not place.working(), "nothing is left")


def test_a_script_whose_keeper_and_memory_were_killed_is_told_at_once(place: Place) -> None:
    script = place.script()
    assert script.hear() == "from 0 none"
    assert script.timed("save") == "generation 1 protected"
    smp = place.smp
    os.kill(script.pid, signal.SIGSTOP)
    os.kill(place.keeper, signal.SIGKILL)
    os.kill(smp, signal.SIGKILL)
    os.kill(script.pid, signal.SIGCONT)
    for _ in range(3):
        failure = script.timed("save")
        assert failure.startswith("generation 1 SnapshotLost host alone, step "), failure
        assert "nothing protects this script any more" in failure
    assert "make another" in script.errors()[0]
    assert "nothing protects this script any more" in script.timed("fail")
    assert script.tell("open") == "from 0 none"
    assert script.timed("save") == "generation 3 protected"
    assert script.timed("close") == "closed"
    until(lambda: not place.working(), "nothing is left")


def test_a_persist_whose_helper_died_with_the_keeper_is_made_good(
    place: Place, tmp_path: Path
) -> None:
    script = place.script(str(tmp_path / "checkpoints"))
    assert script.hear() == "from 0 none"
    script.say("persist")
    until(lambda: len(place.working("jaxft.persist")) > 0, "a helper is at work")
    os.kill(place.keeper, signal.SIGKILL)
    assert script.hear().startswith("persisted ")
    assert script.timed("close") == "closed"
    until(lambda: not place.working(), "nothing is left")
