"""A job whose store is an etcd of three members, of which one is lost. Collected only where etcd is
installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.launch.conftest import answers, free_ports, start_etcd
from tests.launch.training import Training, train

NAMES = ("m0", "m1", "m2")


class Members:
    """Three members of one etcd."""

    def __init__(self, base: Path) -> None:
        program = shutil.which("etcd")
        assert program, "etcd is not installed: apt-get install etcd-server"
        self._program = program
        self._base = base
        ports = free_ports(2 * len(NAMES))
        clients, peers = ports[: len(NAMES)], ports[len(NAMES) :]
        self._clients = [f"http://127.0.0.1:{port}" for port in clients]
        self._peers = [f"http://127.0.0.1:{port}" for port in peers]
        self.url = "etcd://" + ",".join(f"127.0.0.1:{port}" for port in clients)
        self.processes: list[subprocess.Popen[bytes]] = []
        for at in range(len(NAMES)):
            self.processes.append(self._start(at))

    def _start(self, at: int) -> subprocess.Popen[bytes]:
        cluster = ",".join(f"{name}={url}" for name, url in zip(NAMES, self._peers, strict=True))
        options = ("--name", NAMES[at], "--initial-cluster", cluster)
        options += ("--listen-peer-urls", self._peers[at])
        options += ("--initial-advertise-peer-urls", self._peers[at])
        directory = self._base / NAMES[at]
        return start_etcd(self._program, directory, self._clients[at], options)[0]

    def is_whole(self) -> bool:
        urls = [one.replace("http", "etcd") for one in self._clients]
        return all(map(answers, self.processes, urls))

    def leader(self) -> int:
        """Which one decides."""
        for at, url in enumerate(self._clients):
            if self.processes[at].poll() is None:
                told = requests.post(f"{url}/v3/maintenance/status", json={}, timeout=5.0).json()
                if told["header"]["member_id"] == told["leader"]:
                    return at
        raise AssertionError("nobody leads")

    def kill(self, at: int) -> None:
        self.processes[at].kill()
        self.processes[at].wait(10)

    def start(self, at: int) -> None:
        """One that was killed comes back, with what it had written."""
        self.processes[at] = self._start(at)
        assert answers(self.processes[at], self._clients[at].replace("http", "etcd"))

    def close(self) -> None:
        for at in range(len(self.processes)):
            self.kill(at)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    for attempt in range(3):  # a port may have been taken meanwhile
        base = tmp_path / str(attempt)
        base.mkdir()
        three = Members(base)
        try:
            if three.is_whole():
                yield three
                return
        finally:
            three.close()
    pytest.fail(f"etcd did not start; its logs are in {tmp_path}")


def goes_on(training: Training) -> None:
    """Ranks train, and snapshots are protected, from here on."""
    training.until("step", max(training.newest(rank, "step") for rank in (0, 1)) + 20)
    known = len(training.world.events("committed"))
    training.world.wait("committed", known + 3)


def test_a_job_does_not_notice_the_loss_of_any_one_member_and_forms_worlds_without_it(
    members: Members,
) -> None:
    with train(5, "--store", members.url) as training:
        world = training.world
        world.wait("committed", 2)
        leader = members.leader()
        members.kill(leader)
        goes_on(training)
        assert not world.events("fault")

        # What has to be written is: a rank is lost, and a new world formed.
        world.kill("host1", "rank")
        world.wait("generation_formed", generation=2)
        goes_on(training)

        # It comes back, and another one may be lost.
        members.start(leader)
        members.kill(members.leader())
        goes_on(training)
        assert len(world.events("generation_formed")) == 2
        assert training.end() == 0, world.text()
