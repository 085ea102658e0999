"""An SMP that hangs, as its agent finds it, without a world around them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxft.host import protocol
from jaxft.launch import smp_process
from jaxft.launch.options import RunOptions
from jaxft.launch.smp_process import Died, Happening, SnapshotProcess, Up

WAIT_S = 20.0


class Clock:
    """The monotonic clock, which can be put forward."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(smp_process, "time", clock)
    return clock


class Watched:
    """The agent's loop, as far as it looks after its SMP."""

    def __init__(self, directory: Path) -> None:
        options = RunOptions(job="j", host="a", command=("true",), store="", silence_s=0.5)
        self.said: list[str] = []
        self.smp = SnapshotProcess(options, directory, directory / "smp.log", self.said.append)
        self.asked = 0
        send = self.smp.send

        def counting(message: protocol.ClientMessage) -> None:
            self.asked += isinstance(message, protocol.Inspect)
            send(message)

        self.smp.send = counting  # type: ignore[method-assign]
        self.smp.begin()
        self.up = self.until(lambda one: isinstance(one, Up))
        assert isinstance(self.up, Up)

    def until(self, wanted: Callable[[Happening], bool]) -> Happening:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            for happening in self.smp.poll():
                if wanted(happening):
                    return happening
            time.sleep(0.01)
        raise AssertionError(self.said)

    def poll_until_asked(self) -> None:
        """One question more, and no answer to it yet."""
        before, deadline_s = self.asked, time.monotonic() + WAIT_S
        while self.asked == before:
            assert time.monotonic() < deadline_s
            assert not self.smp.poll()
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.smp.pid, number)


@pytest.fixture
def watched(tmp_path: Path, clock: Clock) -> Iterator[Watched]:
    one = Watched(tmp_path)
    yield one
    one.smp.stop()


def test_one_that_hangs_is_killed_and_started_on_its_memory(watched: Watched) -> None:
    hanging = watched.smp.pid
    watched.signal(signal.SIGSTOP)
    died = watched.until(lambda one: isinstance(one, Died))
    assert isinstance(died, Died)
    assert died.pid == hanging
    again = watched.until(lambda one: isinstance(one, Up))
    assert isinstance(again, Up)
    assert (again.how, again.welcome.arena) == ("restarted", watched.up.welcome.arena)  # type: ignore[union-attr]
    assert watched.said == [f"the SMP (pid {hanging}) does not answer and is killed"]


def test_one_that_answers_is_asked_again_and_again_and_left_alone(watched: Watched) -> None:
    pid = watched.smp.pid
    for _ in range(3):
        watched.poll_until_asked()
    assert (watched.smp.pid, watched.said) == (pid, [])


def test_an_agent_that_stood_still_itself_kills_nobody(watched: Watched, clock: Clock) -> None:
    watched.signal(signal.SIGSTOP)
    watched.poll_until_asked()
    clock.ahead_s = 100.0
    assert not watched.smp.poll()
    watched.signal(signal.SIGCONT)
    watched.poll_until_asked()
    assert watched.said == []
