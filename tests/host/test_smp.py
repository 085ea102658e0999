"""Real snapshot processes: a snapshot's way, and the loss of any host."""

from __future__ import annotations

from jaxft.group.world import Code
from tests.host.world import World, segments

CODE = Code(data=3, parity=1)


def test_a_snapshot_is_committed_and_its_bytes_come_back(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODE)
    assert world.restore().chosen is None
    datas = segments(4)
    assert world.save(0, 10, datas).ok
    plan = World(hosts, 2, CODE).restore(datas)
    assert (plan.source, plan.step) == ("own", 10)


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
