"""Ranks that die or are stopped while they write, and snapshots that cannot be."""

from __future__ import annotations

import signal

import pytest

from jaxft.group.world import Code
from jaxft.host import protocol as p
from tests.host.world import World, segments, until

CODES = (Code(data=3, parity=1), Code(data=2, parity=2))
PHASES = ("asked", "granted", "half copied", "staged")


def go_to(world: World, victim: int, phase: str, datas: list[bytes]) -> None:
    """Every other rank stages snapshot 1, this one comes as far as `phase`."""
    for rank, data in zip(world.ranks, datas, strict=True):
        rank.do("want", 1, 1, len(data))
    for place, (rank, data) in enumerate(zip(world.ranks, datas, strict=True)):
        if place != victim or phase == "staged":
            rank.do("put", 1, data)
            rank.do("staged", 1)
        elif phase == "granted":
            rank.do("granted", 1)
        elif phase == "half copied":
            rank.do("half", 1, data)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_rank_killed_at_each_phase_of_a_snapshot_case_24(make_hosts, code):
    hosts = make_hosts(4)
    number, world = 1, World(hosts, 1, code)
    world.restore()
    for phase in PHASES:
        for victim in (0, 3):
            old, new = segments(4, number), segments(4, number + 100)
            assert world.save(0, 0, old).ok
            go_to(world, victim, phase, new)
            world.ranks[victim].kill()
            number, world = number + 1, World(hosts, number + 1, code)
            plan = world.restore(new if phase == "staged" else old)
            assert plan.step == (phase == "staged")


@pytest.mark.parametrize("phase", ["granted", "half copied"])
def test_a_stopped_rank_is_dead_before_the_inventory_is_answered(make_hosts, phase):
    """Nobody but the SMPs ends the old ranks here: had one lived on, it would write later."""
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0])
    world.restore()
    old = segments(4)
    assert world.save(0, 0, old).ok
    go_to(world, 2, phase, segments(4, 1))
    world.ranks[2].stop()
    again = World(hosts, 2, CODES[0], kill=False)
    for rank in again.ranks:
        rank.do("plan", 0)
        assert not any(one.alive for one in world.ranks)
    again.restore(old)
    assert again.save(0, 5, segments(4, 2)).ok
    for rank in world.ranks:
        rank.kill()


def test_a_coding_job_that_stands_still_holds_back_the_inventory(make_hosts, tmp_path):
    go_on = tmp_path / "go-on"
    hosts = make_hosts(4, faults=f"smp.coding:host=h1,seq=1=wait:{go_on}")
    world = World(hosts, 1, CODES[0])
    world.restore()
    assert world.save(0, 0, segments(4)).ok
    new = segments(4, 1)
    world.begin(1, 1, new)
    world.put()
    world.all("staged", 1)
    again = World(hosts, 2, CODES[0])
    for rank in again.ranks:
        rank.ask("plan", 0)
    until(lambda: hosts[2].inspect()["generation"] == 2, "h2 enters")
    assert not again.ranks[0].answered(0.3)
    assert hosts[1].inspect()["generation"] == 1
    go_on.touch()
    assert [rank.answer().finish for rank in again.ranks] == [True] * 4
    again.restore(new)


def test_several_ranks_a_host_and_a_restart_within_a_snapshot(make_hosts):
    """Both ranks of a host say again what they had said, in whatever order."""
    code = Code(data=1, parity=1)
    hosts = make_hosts(2)
    world = World(hosts, 1, code, ranks=2)
    world.restore()
    for seq, phase in enumerate(["asked", "half copied", "granted"]):
        datas = segments(4, seq)
        for rank, data in zip(world.ranks, datas, strict=True):
            rank.do("want", seq, seq, len(data))
        world.ranks[0].do("put", seq, datas[0])
        if phase != "asked":
            world.ranks[1].do("granted", seq)
        if phase == "half copied":
            world.ranks[1].do("half", seq, datas[1])
        hosts[0].kill()
        world.restart(hosts[0])
        for rank, data in zip(world.ranks[1:], datas[1:], strict=True):
            rank.do("put", seq, data)
        assert world.outcome(seq).ok
    assert World(hosts, 2, code, ranks=2).restore(datas).step == 2


def test_a_rank_whose_connection_broke_goes_on_where_it_was(make_hosts):
    code = Code(data=1, parity=1)
    hosts = make_hosts(2)
    world = World(hosts, 1, code, ranks=2)
    world.restore()
    datas = segments(4)
    for rank, data in zip(world.ranks, datas, strict=True):
        rank.do("want", 0, 0, len(data))
    for number in (0, 2, 3):
        world.ranks[number].do("put", 0, datas[number])
    world.ranks[1].do("granted", 0)
    world.ranks[1].do("reconnect")
    world.ranks[1].do("put", 0, datas[1])
    assert world.outcome(0).ok
    assert World(hosts, 2, code, ranks=2).restore(datas).step == 0


# ------------------------------------------------------------------------------ aborts


def test_a_snapshot_that_cannot_be_is_aborted_everywhere_with_its_reason_case_4(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0])
    world.restore()
    kept = segments(4)
    assert world.save(0, 0, kept).ok
    seq = 0
    for fail, reason in {
        staging_fails: "host h2: leaf w could not be copied",
        steps_differ: "ranks disagree: h0 saved step 7, h3 saved step 8",
        plans_differ: "ranks disagree: the tree or its shardings on h1",
        no_memory: "host h2: no memory for the snapshot",
    }.items():
        seq += 1
        fail(world, seq)
        outcome = world.outcome(seq)
        assert (outcome.ok, outcome.committed.seq) == (False, seq - 1)
        assert reason in outcome.reason
        seq += 1
        kept = segments(4, seq)
        assert world.save(seq, seq, kept).ok
    staging_fails(world, seq + 1)
    assert not world.outcome(seq + 1).ok
    assert World(hosts, 2, CODES[0]).restore(kept).step == seq


def staging_fails(world: World, seq: int) -> None:
    for rank, data in zip(world.ranks, segments(4), strict=True):
        rank.do("want", seq, 7, len(data))
    world.ranks[2].do("staging_failed", seq, "leaf w could not be copied")


def steps_differ(world: World, seq: int) -> None:
    for rank, step in zip(world.ranks, (7, 7, 7, 8), strict=True):
        rank.do("want", seq, step, 1000)


def plans_differ(world: World, seq: int) -> None:
    for rank, plan in zip(world.ranks, ("a", "b", "a", "a"), strict=True):
        rank.do("want", seq, 7, 1000, plan)


def no_memory(world: World, seq: int) -> None:
    for rank, nbytes in zip(world.ranks, (1000, 1000, 1 << 50, 1000), strict=True):
        rank.do("want", seq, 7, nbytes)


# ------------------------------------------------------------------------------ silence


def test_an_smp_that_stands_still_aborts_the_snapshot_and_is_named(make_hosts):
    hosts = make_hosts(4, "--silence-s", "0.6", faults="smp.granted:host=h2,seq=1=stop")
    world = World(hosts, 1, CODES[0])
    world.restore()
    kept = segments(4)
    assert world.save(0, 0, kept).ok
    for rank, data in zip(world.ranks, segments(4, 1), strict=True):
        rank.do("want", 1, 1, len(data))
    # It stands still from before it grants the slot on, so its rank asks for nothing yet.
    for place in (0, 1, 3):
        world.ranks[place].do("put", 1, segments(4, 1)[place])
    outcome = world.ranks[0].do("outcome", 1)
    assert "host h2: its SMP has not answered" in outcome.reason
    told = hosts[0].until(p.Announced, kind="aborted")
    assert "h2" in told.detail["reason"]
    hosts[2].signal(signal.SIGCONT)
    assert world.outcome(1) == outcome
    assert world.save(2, 2, kept).ok


def test_an_smp_that_stands_still_and_lacks_an_outcome_holds_snapshots_and_is_named(make_hosts):
    """The next snapshot cannot be decided before it knows, so others must not wait for it."""
    hosts = make_hosts(4, "--silence-s", "0.6", faults="smp.outcome:host=h2,seq=0=stop")
    world = World(hosts, 1, CODES[0])
    world.restore()
    kept = segments(4)
    world.begin(0, 0, kept)
    world.put()
    for place in (0, 1, 3):
        assert world.ranks[place].do("outcome", 0).ok
        world.ranks[place].do("want", 1, 1, 1000)
    for place in (0, 1, 3):
        held = world.ranks[place].do("held")
        assert "host h2 is not known to have heard of snapshot 0" in held
    told = hosts[0].until(p.Announced, kind="held")
    assert told.detail["reason"] == held
    hosts[2].signal(signal.SIGCONT)
    assert world.ranks[2].do("outcome", 0).ok
    for rank in world.ranks:
        rank.do("not_held")
    hosts[0].until(p.Announced, kind="held_over")
    kept = segments(4, 1)
    assert world.save(1, 1, kept).ok
    assert not any(isinstance(one, p.FaultTold) for host in hosts for one in host.listen())
    assert World(hosts, 2, CODES[0]).restore(kept).step == 1


def test_a_root_that_stands_still_holds_snapshots_on_every_other_host(make_hosts):
    hosts = make_hosts(4, "--silence-s", "0.6", faults="smp.outcome:host=h0,seq=0=stop")
    world = World(hosts, 1, CODES[0])
    world.restore()
    world.begin(0, 0, segments(4))
    world.put()
    for rank in world.ranks[1:]:
        assert "has not heard that of h0, the root" in rank.do("held")
    for host in hosts[1:]:
        assert host.until(p.Announced, kind="held").detail["host"] == host.name
    hosts[0].signal(signal.SIGCONT)
    for rank in world.ranks[1:]:
        rank.do("not_held")
    assert world.outcome(0).ok
    assert world.save(1, 1, segments(4, 1)).ok


def test_a_rank_that_joins_an_smp_started_again_is_told_that_nothing_is_held_any_more(make_hosts):
    hosts = make_hosts(4, "--silence-s", "0.6")
    world = World(hosts, 1, CODES[0])
    world.restore()
    assert world.save(0, 0, segments(4)).ok
    hosts[0].signal(signal.SIGSTOP)
    world.ranks[1].do("held")
    hosts[1].kill()
    hosts[0].signal(signal.SIGCONT)
    world.restart(hosts[1])
    world.ranks[1].do("not_held")
    assert world.save(1, 1, segments(4, 1)).ok


def test_a_snapshot_that_a_rank_has_missed_is_aborted_and_names_it(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, CODES[0])
    world.restore()
    assert world.save(0, 0, segments(4)).ok
    for place in (0, 1, 3):
        world.ranks[place].do("want", 1, 4, 1000)
    world.ranks[2].do("missed", 1, 7, "it was held")
    outcome = world.outcome(1)
    assert outcome.reason == "host h2: rank 2 let step 7 pass: it was held"
    # It counts as the last of its steps, so that all have the next one before them.
    assert (outcome.ok, outcome.step) == (False, 7)
    assert world.save(2, 8, segments(4, 2)).ok


def test_an_smp_that_stands_still_in_a_recovery_is_a_fault_that_names_it(make_hosts):
    hosts = make_hosts(4, "--silence-s", "0.6")
    hosts[2].signal(signal.SIGSTOP)
    World(hosts, 1, CODES[0])
    fault = hosts[0].until(p.FaultTold)
    assert fault.host == "h2"
    assert "has not answered" in fault.reason
    hosts[2].signal(signal.SIGCONT)
    assert World(hosts, 2, CODES[0]).restore().chosen is None


def test_a_restore_that_fails_for_no_reason_given_is_a_fault_all_the_same(make_hosts):
    hosts = make_hosts(2)
    world = World(hosts, 1, CODES[1])
    for rank in world.ranks:
        attempt = rank.do("plan", 0).attempt
    world.ranks[1].do("failed", attempt, (), "")
    assert "did not say why" in hosts[0].until(p.FaultTold).reason


def test_a_root_that_was_stopped_itself_blames_nobody(make_hosts):
    hosts = make_hosts(4, "--silence-s", "0.6")
    world = World(hosts, 1, CODES[0])
    world.restore()
    for rank in world.ranks:
        rank.do("want", 0, 0, 1000)
    world.ranks[0].do("put", 0, bytes(1000))
    world.ranks[0].do("staged", 0)
    hosts[0].signal(signal.SIGSTOP)
    for rank in world.ranks[1:]:
        rank.ask("put", 0, bytes(1000))
    for rank in world.ranks[1:]:
        rank.answer()
        rank.do("staged", 0)
    world.ranks[0].ask("outcome", 0)
    assert not world.ranks[0].answered(1.0)
    hosts[0].signal(signal.SIGCONT)
    assert world.ranks[0].answer().ok
    assert world.outcome(0).ok
