"""An SMP that hangs, as its agent finds it, without a world around them."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxft.host import protocol
from jaxft.host.job_key import JobKey
from jaxft.host.trust import Trust
from jaxft.launch import smp_process
from jaxft.launch.options import RunOptions
from jaxft.launch.smp_process import Died, Happening, SnapshotProcess, Up

WAIT_S = 20.0
SILENCE_S = 0.8
OPTIONS = RunOptions(job="j", host="a", command=("true",), store="", silence_s=SILENCE_S)


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

    def __init__(
        self, directory: Path, options: RunOptions = OPTIONS, trust: Trust | None = None
    ) -> None:
        self.said: list[str] = []
        self.smp = SnapshotProcess(options, directory, directory / "smp.log", self.said.append)
        self.smp.begin(trust)
        up = self.until(lambda one: isinstance(one, Up))
        assert isinstance(up, Up)
        self.up = up

    def until(self, wanted: Callable[[Happening], bool]) -> Happening:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            for happening in self.smp.poll():
                if wanted(happening):
                    return happening
            time.sleep(0.01)
        raise AssertionError(self.said)

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s
            assert not self.smp.poll()
            time.sleep(0.01)

    def stands_still(self) -> bool:
        return self.smp._turns.still_s > 0.2

    def turns(self) -> bool:
        return self.smp._turns.still_s == 0.0

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
    assert (again.how, again.welcome.arena) == ("restarted", watched.up.welcome.arena)
    assert watched.said == [f"the SMP (pid {hanging}) does not answer and is killed"]


def test_one_at_an_address_is_found_there_again_on_its_memory(tmp_path: Path) -> None:
    """After its death, and by an agent that has another key for it. No key can be seen."""
    options = RunOptions(job="j", host="a", command=("true",), store="", address="127.0.0.1")
    keys = [JobKey.make(), JobKey.make()]
    first = Watched(tmp_path, options, Trust(keys[0]))
    second: Watched | None = None
    try:
        up = first.up
        assert re.fullmatch(r"(tcp://127\.0\.0\.1:\d+,?){2}", up.welcome.address)
        assert up.welcome.trust == Trust(keys[0]).name
        process = Path(f"/proc/{first.smp.pid}")
        for seen in ("cmdline", "environ"):
            content = (process / seen).read_bytes()
            assert keys[0].text.encode() not in content
            assert bytes.fromhex(keys[0].text) not in content
        first.signal(signal.SIGKILL)
        again = first.until(lambda one: isinstance(one, Up))
        assert isinstance(again, Up)
        second = Watched(tmp_path, options, Trust(keys[1], clear=True))
        assert second.up.welcome.trust == Trust(keys[1], clear=True).name
        assert [one.removesuffix(")").split(") ")[1] for one in second.said] == [
            "has another job key, or another way to use it: it is started again"
        ]
        for other in (again, second.up):
            assert other.how == "restarted"
            assert other.welcome.address == up.welcome.address
            assert other.welcome.arena == up.welcome.arena
    finally:
        if second is not None:
            second.smp.stop()
        first.smp.stop()


def test_one_whose_port_is_taken_is_started_at_others_on_its_memory(tmp_path: Path) -> None:
    """And that is no death on its memory, of which three would cost it that."""
    options = RunOptions(job="j", host="a", command=("true",), store="", address="127.0.0.1")
    one = Watched(tmp_path, options, Trust(JobKey.make()))
    place = one.up.welcome.address.partition(",")[0].removeprefix("tcp://")
    host, _, port = place.rpartition(":")
    one.signal(signal.SIGKILL)
    assert select.select([one.smp.fds()[0]], [], [], WAIT_S)[0]
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind((host, int(port)))
        thief.listen()
        again = one.until(lambda one: isinstance(one, Up))
    try:
        assert isinstance(again, Up)
        assert (again.how, again.welcome.arena) == ("restarted", one.up.welcome.arena)
        assert place not in again.welcome.address
        (said,) = one.said
        assert f"the SMP cannot listen at {place}" in said
        assert len(one.smp._deaths) == 1
    finally:
        one.smp.stop()


def test_one_that_has_nothing_to_do_is_left_alone(watched: Watched) -> None:
    """It is calm all the time: its agent need not look often, and does not ask."""
    pid, began_s = watched.smp.pid, time.monotonic()
    sent: list[protocol.ClientMessage] = []
    watched.smp.send = sent.append  # type: ignore[method-assign]
    watched.poll_until(lambda: time.monotonic() - began_s > 4 * SILENCE_S)
    assert watched.smp.is_calm
    assert (watched.smp.pid, watched.said, sent) == (pid, [], [])


def test_one_that_is_looked_at_seldom_is_left_alone(watched: Watched, clock: Clock) -> None:
    """The looks are further from each other than the time that it may stand still."""
    pid = watched.smp.pid
    for _ in range(5):
        watched.poll_until(watched.turns)
        turned = select.poll()
        turned.register(watched.smp._turns, select.POLLIN)
        assert turned.poll(WAIT_S * 1000)
        clock.ahead_s += 4 * SILENCE_S
    assert not watched.smp.look()
    assert not watched.smp.poll()
    assert (watched.smp.pid, watched.said) == (pid, [])


def test_an_agent_that_stood_still_itself_kills_nobody(watched: Watched, clock: Clock) -> None:
    watched.signal(signal.SIGSTOP)
    watched.poll_until(watched.stands_still)
    clock.ahead_s = 100.0
    assert not watched.smp.poll()
    watched.signal(signal.SIGCONT)
    watched.poll_until(watched.turns)
    assert watched.said == []


def test_who_only_looks_is_told_that_it_stands_still_and_poll_ends_it(
    watched: Watched, clock: Clock
) -> None:
    """As the agent's other thread does while its loop sleeps; pauses count as one look each."""
    watched.signal(signal.SIGSTOP)
    watched.poll_until(watched.stands_still)
    looks = 0
    while not watched.smp.look():
        clock.ahead_s += 50.0
        looks += 1
    assert looks == 2
    assert not watched.smp.is_calm
    while not watched.said:
        clock.ahead_s += 50.0
        looks += 1
        assert not watched.smp.poll()
    assert looks == 5
    assert watched.said == [f"the SMP (pid {watched.smp.pid}) does not answer and is killed"]
