"""Real snapshot processes: a snapshot's way, the loss of any host, and flipped bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxft.group.world import Code
from tests.host.world import Host, World, segments


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[[int], list[Host]]]:
    made: list[Host] = []

    def make(count: int, first: int = 0) -> list[Host]:
        fresh = [Host(f"h{first + i}", tmp_path) for i in range(count)]
        made.extend(fresh)
        return fresh

    yield make
    for host in made:
        host.close()


CODE = Code(data=3, parity=1)


def test_a_snapshot_is_committed_and_its_bytes_come_back(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODE)
    assert world.settle().chosen is None
    datas = segments(4)
    assert world.save(0, 10, datas).ok
    again = World(hosts, 2, CODE)
    plan = again.plan()
    assert (plan.source, plan.step) == ("own", 10)
    again.check(datas)


@pytest.mark.parametrize("lost", range(4))
def test_any_lost_host_is_rebuilt(make_hosts, lost):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODE)
    world.settle()
    datas = segments(4)
    assert world.save(0, 10, datas).ok
    hosts[lost].lose()
    hosts[lost] = make_hosts(1, first=10)[0]
    again = World(hosts, 2, CODE)
    assert again.plan().source == "rebuilt"
    again.check(datas)
    again.settle()
    assert again.save(0, 11, datas).ok
