"""Ranks that somebody else has started, as they come to their host's agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from jaxft.errors import ConfigError, JobInUse, LaunchError
from jaxft.host import enlist
from jaxft.host.enlist import Crew, Dismissed, Enlist, Heard
from jaxft.host.local import LocalChannel, connect
from jaxft.launch import crew as crews
from jaxft.launch.crew import Door, keep, options_of
from jaxft.launch.hostdir import Lock
from tests.launch.local_runs import ROOT

CREW = Crew(run="r", hosts=("a", "b"), ranks=(1, 2))
WAIT_S = 20.0


def wish(rank: int, crew: Crew = CREW, store: str = "s", code: str = "") -> Enlist:
    return Enlist(crew=crew, rank=rank, floor=0, store=store, code=code)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    one = Door(tmp_path / "private" / "crew.sock", "b")
    yield one
    one.close()


class Rank:
    """A rank in this process: what it says, and what it hears at once."""

    def __init__(self, tmp_path: Path, said: Enlist) -> None:
        self.channel: LocalChannel = connect(tmp_path / "private" / "crew.sock", WAIT_S)
        self.channel.send(enlist.encode(said))

    def hears(self) -> enlist.AgentMessage:
        received = self.channel.receive(WAIT_S)
        assert received is not None
        return msgspec.msgpack.decode(received.payload, type=enlist.AgentMessage)


@pytest.fixture
def come(tmp_path: Path) -> Iterator[Callable[[Enlist], Rank]]:
    """Brings a rank to the door."""
    ranks: list[Rank] = []

    def one(said: Enlist) -> Rank:
        ranks.append(Rank(tmp_path, said))
        return ranks[-1]

    yield one
    for rank in ranks:
        rank.channel.close()


class Muster(threading.Thread):
    """The agent, which waits for ranks."""

    def __init__(self, door: Door, wait_s: float = WAIT_S) -> None:
        super().__init__()
        self._door, self._wait_s = door, wait_s
        self.came: list[int] = []
        self.start()

    def run(self) -> None:
        ranks = self._door.muster(self._wait_s)
        self.came = [one.wish.rank for one in ranks]
        crews.dismiss(ranks, Dismissed(reason="enough"))


def test_who_is_where_follows_from_the_ranks_places() -> None:
    crew = Crew.of("r", ("n2", "n2", "n1", "n3", "n3", "n3"))
    assert (crew.hosts, crew.ranks) == (("n2", "n1", "n3"), (2, 1, 3))
    assert [crew.host_of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [crew.first(host) for host in range(3)] == [0, 2, 3]


def test_ranks_that_are_dealt_out_over_the_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks of host n1 are 0, 2: .*--distribution=block"):
        Crew.of("r", ("n1", "n2", "n1", "n2"))


def test_the_ranks_of_a_host_come_in_any_order(door: Door, come: Callable[[Enlist], Rank]) -> None:
    muster = Muster(door)
    ranks = [come(wish(rank)) for rank in (2, 1)]
    assert [one.hears() for one in ranks] == [Heard(), Heard()]
    muster.join(WAIT_S)
    assert muster.came == [1, 2]


def test_who_does_not_belong_is_told_why(door: Door, come: Callable[[Enlist], Rank]) -> None:
    muster = Muster(door)
    first = come(wish(1))
    assert first.hears() == Heard()
    for said, kind, why in (
        (wish(1, msgspec.structs.replace(CREW, run="other")), enlist.Busy, "has come before"),
        (wish(1), Dismissed, "rank 1 is not one that host b waits for"),
        (wish(2, store="t"), Dismissed, "another store or code than rank 1"),
    ):
        told = come(said).hears()
        assert isinstance(told, kind)
        assert why in told.reason
    come(wish(2)).hears()
    muster.join(WAIT_S)
    assert muster.came == [1, 2]
    late = come(wish(1))
    door.turn_away("rank 1 of it still runs")
    assert late.hears() == enlist.Busy(reason="rank 1 of it still runs")


def test_one_that_leaves_before_the_others_are_there_takes_them_with_it(
    door: Door, come: Callable[[Enlist], Rank]
) -> None:
    muster = Muster(door, wait_s=0.5)
    one = come(wish(1))
    assert one.hears() == Heard()
    one.channel.close()
    muster.join(WAIT_S)
    assert muster.came == []


def test_another_crew_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("JAXFT_KEPT", "1")
    monkeypatch.setattr(enlist, "START_S", 0.3)
    door = Door(tmp_path / "j" / "b" / "crew.sock", "b")
    ending = threading.Event()

    def turn_away() -> None:
        while not ending.wait(0.01):
            door.turn_away("rank 7 (process 77) of it still runs")

    agent = threading.Thread(target=turn_away)
    agent.start()
    try:
        with pytest.raises(JobInUse, match=r"another start of it: rank 7 \(process 77\)"):
            enlist.enlist(wish(1), "j")
    finally:
        ending.set()
        agent.join(WAIT_S)
        door.close()
    with pytest.raises(LaunchError, match=r"`jaxft keep`, which JAXFT_KEPT says runs here"):
        enlist.enlist(wish(1), "j")


def test_one_keeper_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path))
    lock = Lock(tmp_path / "j" / "b" / crews.LOCK, "it")
    with pytest.raises(JobInUse, match="job j on host b is in use by process"):
        keep("j", "b", crews=True)
    lock.release()


def test_a_crew_is_a_world_of_all_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(wish(1, store="/s", code="1+1"), "j", "b")
    assert (options.hosts_min, options.hosts_max, options.ranks_per_host) == (2, 2, 2)
    with pytest.raises(ConfigError, match="needs at least 3 hosts"):
        options_of(wish(1, store="/s", code="2+2"), "j", "b")


def test_a_keeper_that_nobody_comes_to_ends_when_it_is_told_to(tmp_path: Path) -> None:
    environ = {**os.environ, "JAXFT_RUN_DIR": str(tmp_path / "run"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxft", "keep", "--job", "j", "--host", "a"]
    first = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not (tmp_path / "run/j/a" / enlist.SOCKET).exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        second = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=30, check=False
        )
        assert second.returncode == 2
        assert f"is in use by process {first.pid}" in second.stderr
        first.send_signal(signal.SIGTERM)
        assert first.wait(WAIT_S) == 128 + signal.SIGTERM
        assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    finally:
        first.kill()
        first.communicate()
