"""Whole hosts that are lost, with their memory: at each phase of a snapshot, and more than one."""

from __future__ import annotations

import itertools

import pytest

from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import StorageEntry
from jaxft.group.world import Code
from tests.host.conftest import MakeHosts
from tests.host.test_smp_restarts import PHASES
from tests.host.world import Host, World, segments

XOR = Code(data=3, parity=1)
TWO = Code(data=2, parity=2)
_numbers = itertools.count(100)


def replace(make_hosts: MakeHosts, hosts: list[Host], place: int, **options: str) -> None:
    """The host at this place is lost, and an empty one comes in its stead."""
    hosts[place].lose()
    hosts[place] = make_hosts(1, first=next(_numbers), **options)[0]


@pytest.mark.parametrize("code", [XOR, TWO], ids=str)
def test_any_host_lost_at_each_phase_of_a_snapshot_case_24_34(make_hosts, code):
    """Host 0, with the root and process 0, is like any other."""
    hosts = make_hosts(4)
    number, world = 1, World(hosts, 1, code)
    world.restore()
    turns = [(phase, victim) for n, phase in enumerate(PHASES) for victim in (0, 1 + n % 3)]
    for phase, victim in turns:
        old, new = segments(4, number), segments(4, number + 100, chunks=5)
        hosts[victim].kill()
        fault = PHASES[phase].format(seq=1, next=2)
        world.restart(hosts[victim], faults=fault.replace(":", f":generation={number},"))
        assert world.save(0, 0, old).ok
        world.begin(1, 1, new)
        hosts[victim].reaped()
        replace(make_hosts, hosts, victim)
        number, world = number + 1, World(hosts, number + 1, code)
        plan = world.restore(old, new)
        assert plan.source == "rebuilt"
        if phase == "the outcome is told":
            assert plan.step == 1
    assert world.save(0, 2, old).ok


def test_any_two_hosts_lost_at_once(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, TWO)
    world.restore()
    for number, lost in enumerate(itertools.combinations(range(4), 2), start=2):
        datas = segments(4, number)
        assert world.save(0, number, datas).ok
        for place in lost:
            replace(make_hosts, hosts, place)
        world = World(hosts, number, TWO)
        assert world.restore(datas).step == number


def test_a_host_lost_while_another_is_rebuilt_case_32(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, TWO)
    world.restore()
    datas = segments(4)
    assert world.save(0, 5, datas).ok
    replace(make_hosts, hosts, 1, faults="smp.piece:generation=1,piece=1=kill")
    World(hosts, 2, TWO).ask_restore()
    hosts[1].reaped()
    replace(make_hosts, hosts, 1)
    replace(make_hosts, hosts, 3)
    world = World(hosts, 3, TWO)
    assert world.restore(datas).source == "rebuilt"
    assert world.save(0, 6, datas).ok


@pytest.mark.parametrize("code", [XOR, TWO], ids=str)
def test_more_hosts_lost_than_parity_says_so_and_goes_to_storage_case_33(make_hosts, code):
    hosts = make_hosts(4)
    world = World(hosts, 1, code)
    world.restore()
    datas = segments(4)
    assert world.save(0, 20, datas).ok
    stored = SnapshotId(1, 0, world.generation.nonce)
    newest = SnapshotId(1, 1, world.generation.nonce)
    assert world.save(1, 30, datas).ok
    for place in range(code.parity + 1):
        replace(make_hosts, hosts, place)
    plan = World(hosts, 2, code).plan()
    assert (plan.chosen, plan.storage, plan.source) == (None, None, "none")
    assert plan.newest_known == newest
    assert f"{code.parity + 1} shares are missing (h0, h1" in plan.reasons[0]
    entry = StorageEntry(step=20, id=stored, lineage=())
    plan = World(hosts, 3, code, storage=(entry,)).plan()
    assert (plan.chosen, plan.storage, plan.source) == (None, entry, "orbax")
    assert (plan.step, plan.newest_known) == (20, newest)
    assert "shares are missing" in plan.reasons[0]


def test_a_host_outside_of_the_world_gives_what_it_holds(make_hosts):
    """Host 2 is left out and gives its memory; host 3 is lost: both are needed to lose nothing."""
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    datas = segments(4)
    assert world.save(0, 7, datas).ok
    hosts[3].lose()
    world = World(hosts[:2], 2, XOR, holders=[hosts[2]])
    plan = world.restore(datas)
    assert plan.source == "rebuilt"
    assert plan.segments[2].address == hosts[2].welcome.address
    assert world.save(0, 8, segments(2)).ok


class _Unheard(World):
    """The agents of the holders are cut off from the store: they know nothing of this world."""

    def enter(self, host: Host) -> None:
        if host not in self.holders:
            super().enter(host)


def test_an_smp_whose_agent_is_cut_off_gives_what_it_holds(make_hosts):
    """Its old rank trains on until the root invites the SMP, which kills it before it answers."""
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    datas = segments(4)
    assert world.save(0, 7, datas).ok
    trains_on = world.ranks[2]
    hosts[3].lose()
    world = _Unheard(hosts[:2], 2, XOR, holders=[hosts[2]], kill=False)
    assert world.restore(datas).source == "rebuilt"
    assert not trains_on.alive
    assert world.save(0, 8, segments(2)).ok


def test_worlds_that_shrink_and_grow_keep_every_byte(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, TWO)
    world.restore()
    datas = segments(4)
    assert world.save(0, 1, datas).ok
    hosts[1].lose()
    world = World([hosts[0], hosts[2], hosts[3]], 2, TWO)
    assert world.restore(datas).source == "rebuilt"
    datas = segments(3, 1)
    assert world.save(0, 2, datas).ok
    hosts[0].lose()
    world = World([hosts[3], hosts[2]], 3, TWO)
    assert world.restore(datas).step == 2
    datas = segments(2, 2)
    assert world.save(0, 3, datas).ok
    grown = [*make_hosts(2, first=20), hosts[2], hosts[3]]
    world = World(grown, 4, TWO)
    assert world.restore(datas).source == "peer"
    datas = segments(4, 3)
    assert world.save(0, 4, datas).ok
    grown[3].lose()
    grown[2].lose()
    again = World([*grown[:2], *make_hosts(2, first=30)], 5, TWO)
    assert again.restore(datas).source == "rebuilt"


def test_two_groups_lose_a_host_each(make_hosts):
    hosts = make_hosts(8)
    world = World(hosts, 1, XOR)
    world.restore()
    datas = segments(8)
    assert world.save(0, 1, datas).ok
    groups = world.generation.groups
    assert [len(group.hosts) for group in groups] == [4, 4]
    for group in groups:
        replace(make_hosts, hosts, group.hosts[1])
    world = World(hosts, 2, XOR)
    assert world.restore(datas).source == "rebuilt"
    assert world.save(0, 2, datas).ok
