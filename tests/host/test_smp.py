"""Real snapshot processes: a snapshot's way, and the loss of any host."""

from __future__ import annotations

import os
import time

from jaxft.group.world import Code
from jaxft.host.pace import BURST_S
from tests.host.world import World, segments, until

CODE = Code(data=3, parity=1)


def test_a_snapshot_is_committed_and_its_bytes_come_back(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODE)
    assert world.restore().chosen is None
    datas = segments(4)
    assert world.save(0, 10, datas).ok
    plan = World(hosts, 2, CODE).restore(datas)
    assert (plan.source, plan.step) == ("own", 10)


def test_coding_keeps_to_the_bandwidth_it_is_given(make_hosts):
    """Only that it is not faster can be said of a machine that may be busy."""
    rate = 4 << 20
    hosts = make_hosts(2, "--bandwidth-max", str(rate))
    world = World(hosts, 1, Code(data=1, parity=1))
    world.restore()
    datas = segments(2, chunks=8)
    began_s = time.monotonic()
    assert world.save(0, 1, datas).ok
    assert time.monotonic() - began_s > len(datas[0]) / rate - BURST_S - 0.01
    assert World(hosts, 2, Code(data=1, parity=1)).restore(datas).source == "own"


def test_memory_is_there_before_the_first_snapshot_wants_it(make_hosts):
    (host,) = make_hosts(1)
    world = World([host], 1, Code(data=1, parity=1))
    world.restore()
    nbytes = 24 << 20
    world.ranks[0].do("reserve", nbytes)
    for slot in (1, 2):
        until(lambda slot=slot: os.fstat(host.fds[slot]).st_blocks * 512 >= nbytes, "memory")


def test_any_lost_host_is_rebuilt(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODE)
    datas = segments(4)
    world.restore()
    for lost in range(4):
        assert world.save(0, lost, datas).ok
        hosts[lost].lose()
        hosts[lost] = make_hosts(1, first=10 + lost)[0]
        world = World(hosts, lost + 2, CODE)
        plan = world.restore(datas)
        assert (plan.source, plan.step) == ("rebuilt", lost)
