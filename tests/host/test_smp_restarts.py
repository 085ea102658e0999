"""A snapshot process that is killed is started again on its memory, and nothing is lost."""

from __future__ import annotations

import time

import psutil
import pytest

from jaxft.group.world import Code
from tests.host.world import Host, World, restored, segments

CODES = (Code(data=3, parity=1), Code(data=2, parity=2))

# The phases of snapshot {seq} at one host, {next} is the one after it.
PHASES = {
    "the slot means nothing": "smp.written:seq={seq},state=writing=kill",
    "room was made": "smp.granted:seq={seq}=kill",
    "the manifest is in the slot": "smp.sealed:seq={seq}=kill",
    "the segment is whole": "smp.written:seq={seq},state=staged=kill",
    "coding begins": "smp.coding:seq={seq}=kill",
    "half coded": "smp.piece:seq={seq},piece=1=kill",
    "the parity is in the slot": "smp.coded:seq={seq}=kill",
    "the share is whole": "smp.written:seq={seq},state=coded=kill",
    "the outcome is in the ledger": "smp.written:seq={next},state=none=kill",
    "the outcome is told": "smp.outcome:seq={seq}=kill",
}


def fault(phase: str, seq: int) -> str:
    return PHASES[phase].format(seq=seq, next=seq + 1)


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_between_snapshots_and_at_each_phase_of_one_case_25(make_hosts, victim, code):
    hosts = make_hosts(4)
    world = World(hosts, 1, code)
    world.restore()
    seq, datas = 0, segments(4)
    assert world.save(seq, 100, datas).ok
    for phase in PHASES:
        hosts[victim].kill()
        world.restart(hosts[victim], faults=fault(phase, seq + 1))
        before, datas = datas, segments(4, seq + 1)
        seq += 1
        world.begin(seq, 100 + seq, datas)
        world.restart(hosts[victim])
        world.put()
        outcome = world.outcome(seq)
        assert outcome.ok or outcome.reason, phase
        datas = datas if outcome.ok else before
    seq += 1
    assert world.save(seq, 200, segments(4, seq)).ok
    assert World(hosts, 2, code).restore(segments(4, seq)).step == 200


# What an SMP is doing while its generation (number {number}) recovers.
RECOVERING = {
    "frozen": "smp.written:generation={number},settled=False=kill",
    "giving its bytes": "smp.serving=kill",
    "settled": "smp.written:generation={number},settled=True=kill",
}


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_while_its_generation_recovers_case_25(make_hosts, victim):
    """Another host has lost its memory, so that all have something to read and to rebuild."""
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0])
    world.restore()
    for number, phase in enumerate(RECOVERING, start=2):
        datas = segments(4, number)
        assert world.save(0, number, datas).ok
        hosts[1].lose()
        hosts[1] = make_hosts(1, first=10 * number)[0]
        hosts[victim].kill()
        hosts[victim].start(faults=RECOVERING[phase].format(number=number))
        world = World(hosts, number, CODES[0]).ask_restore()
        world.restart(hosts[victim])
        assert restored(world, datas).step == number


def test_killed_while_it_rebuilds_a_lost_segment_case_25(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0])
    world.restore()
    datas = segments(4)
    assert world.save(0, 7, datas).ok
    hosts[1].lose()
    hosts[1] = make_hosts(1, first=10, faults="smp.piece:piece=1=kill")[0]
    world = World(hosts, 2, CODES[0]).ask_restore()
    world.restart(hosts[1])
    assert restored(world, datas).source == "rebuilt"
    assert world.save(0, 8, datas).ok


def test_a_root_killed_when_it_has_told_only_some_that_all_have_restored_case_25(make_hosts):
    hosts = make_hosts(4)
    hosts[0].kill()
    hosts[0].start(faults="smp.sent:body=Directive,settled=True=kill")
    world = World(hosts, 1, CODES[0]).ask_restore()
    world.restart(hosts[0])
    assert restored(world).chosen is None
    assert world.save(0, 1, segments(4)).ok


def test_a_root_that_comes_back_before_its_rank_keeps_the_interval_case_25(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0], every=7)
    world.restore()
    hosts[0].kill()
    world.restart(hosts[0], faults="smp.written:seq=0,state=coded=kill")
    datas = segments(4)
    world.begin(0, 0, datas)
    world.put()
    for place in (1, 2, 3):
        world.ranks[place].do("staged", 0)
    hosts[0].reaped()
    world.ranks[0].stop()
    world.restart(hosts[0])
    outcome = world.ranks[1].do("outcome", 0)
    assert (outcome.ok, outcome.interval) == (True, 7)
    world.ranks[0].go_on()
    assert world.outcome(0) == outcome


def test_a_peer_killed_while_others_pull_from_it_case_26(make_hosts):
    """Whoever pulls waits without spinning, the snapshot is aborted, the next one committed."""
    hosts = make_hosts(4, "--silence-s", "1")
    hosts[2].kill()
    hosts[2].start(faults="smp.serving=kill")
    world = World(hosts, 1, CODES[0])
    world.restore()
    datas = segments(4, chunks=24)
    world.begin(0, 1, datas)
    world.put()
    hosts[2].reaped()
    began_s, spent_s = time.monotonic(), cpu_s(hosts[0])
    outcome = hosts[0].ranks[0].do("outcome", 0)
    assert "host h2: its SMP has not answered" in outcome.reason
    waited_s = time.monotonic() - began_s
    assert waited_s < 5
    assert cpu_s(hosts[0]) - spent_s < 0.3 * waited_s
    world.restart(hosts[2])
    assert world.outcome(0) == outcome
    assert world.save(1, 2, datas).ok


def test_a_peer_killed_while_others_pull_and_soon_back_case_26(make_hosts):
    """The pulls go on where they were, and the snapshot is committed."""
    hosts = make_hosts(4)
    hosts[2].kill()
    hosts[2].start(faults="smp.serving=kill")
    world = World(hosts, 1, CODES[0])
    world.restore()
    datas = segments(4, chunks=24)
    world.begin(0, 1, datas)
    world.restart(hosts[2])
    world.put()
    assert world.outcome(0).ok
    assert World(hosts, 2, CODES[0]).restore(datas).step == 1


def cpu_s(host: Host) -> float:
    times = psutil.Process(host.process.pid).cpu_times()
    return times.user + times.system


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_or_lost_while_it_finishes_the_coding_of_the_last_generation_case_25(
    make_hosts, victim
):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0])
    world.restore()
    old, new = segments(4), segments(4, 1, chunks=5)
    assert world.save(0, 0, old).ok
    hosts[victim].kill()
    world.restart(hosts[victim], faults="smp.coding:seq=1=kill")
    world.begin(1, 1, new)
    hosts[victim].reaped()
    hosts[victim].start(faults="smp.piece:seq=1,piece=1=kill")
    world = World(hosts, 2, CODES[0]).ask_restore()
    world.restart(hosts[victim], faults="smp.coded:seq=1=kill")
    world.restart(hosts[victim])
    plan = restored(world, new)
    assert (plan.step, plan.finish) == (1, True)
    hosts[victim].lose()
    hosts[victim] = make_hosts(1, first=9)[0]
    assert World(hosts, 3, CODES[0]).restore(new).source == "rebuilt"


def test_a_host_lost_while_it_finishes_the_coding_of_the_last_generation(make_hosts):
    """What was staged everywhere and is not protected yet is given up for what is."""
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0])
    world.restore()
    old, new = segments(4), segments(4, 1, chunks=5)
    assert world.save(0, 0, old).ok
    hosts[2].kill()
    world.restart(hosts[2], faults="smp.coding:seq=1=kill")
    world.begin(1, 1, new)
    hosts[2].reaped()
    hosts[2].start(faults="smp.piece:seq=1,piece=1=kill")
    World(hosts, 2, CODES[0]).ask_restore()
    hosts[2].reaped()
    hosts[2].lose()
    hosts[2] = make_hosts(1, first=9)[0]
    world = World(hosts, 3, CODES[0])
    plan = world.restore(old, new)
    assert plan.step == (0 if "had not finished its parity" in str(plan.reasons) else 1)
    assert world.save(0, 3, old).ok
