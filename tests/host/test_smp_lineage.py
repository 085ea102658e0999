"""Which of the snapshots that hosts still hold is the one to go on from."""

from __future__ import annotations

from tests.host.test_smp_damage import flip
from tests.host.test_smp_losses import XOR
from tests.host.world import World, segments


def test_hosts_that_hold_different_newest_snapshots_agree_on_the_common_one_case_29(make_hosts):
    """Snapshot 2 is staged on two hosts, granted on one, and not begun on the last."""
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    newest = segments(4, 1)
    assert world.save(0, 0, segments(4)).ok
    assert world.save(1, 1, newest).ok
    for place in (0, 1, 2):
        world.ranks[place].do("want", 2, 2, 5000)
        world.ranks[place].do("granted", 2)
    for place in (0, 1):
        world.ranks[place].do("put", 2, bytes(5000))
        world.ranks[place].do("staged", 2)
    plan = World(hosts, 2, XOR).restore(newest)
    assert (plan.chosen.seq, plan.source) == (1, "own")
    assert "snapshot 1.2: group 0: 2 shares are missing (h2, h3)" in plan.reasons[0]


def test_the_same_and_lower_steps_are_saved_again_after_a_rollback_case_30(make_hosts):
    """The branch that was left stays left, even when its bytes are all there again."""
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    old, left = segments(4, 0), segments(4, 1)
    assert world.save(0, 10, old).ok
    assert world.save(1, 20, left).ok
    flip(hosts[1], 1, 10)
    flip(hosts[2], 1, 10)
    assert World(hosts, 2, XOR).restore(old).step == 10
    flip(hosts[1], 1, 10)
    flip(hosts[2], 1, 10)
    world = World(hosts, 3, XOR)
    plan = world.restore(old)
    assert plan.step == 10
    assert "snapshot 1.1: abandoned, generation 2 went on from snapshot 1.0" in plan.reasons
    again = segments(4, 2)
    assert world.save(0, 20, segments(4, 3)).ok
    assert world.save(1, 5, again).ok
    assert World(hosts, 4, XOR).restore(again).step == 5


def test_a_host_that_was_behind_comes_back_with_old_memory_case_31(make_hosts):
    hosts = make_hosts(4)
    spare = make_hosts(1, first=9)[0]
    world = World(hosts, 1, XOR)
    world.restore()
    old = segments(4)
    assert world.save(0, 1, old).ok
    hosts[3].end_ranks()
    world = World([*hosts[:3], spare], 2, XOR)
    assert world.restore(old).source == "rebuilt"
    new = segments(4, 1)
    assert world.save(0, 2, segments(4, 2)).ok
    assert world.save(1, 3, new).ok
    spare.lose()
    world = World(hosts, 3, XOR)
    plan = world.restore(new)
    assert (plan.step, plan.source) == (3, "rebuilt")
    assert plan.world.hosts == ("h0", "h1", "h2", "h9")
    assert world.save(0, 4, old).ok
    assert World(hosts, 4, XOR).restore(old).source == "own"


def test_a_fresh_start_leaves_all_that_was_there(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    assert world.save(0, 1, segments(4)).ok
    assert World(hosts, 2, XOR, fresh=True).restore().reasons == ("the job was started fresh",)
    plan = World(hosts, 3, XOR).restore()
    assert plan.newest_known is None
    assert "snapshot 1.0: abandoned, generation 2 went on from nothing" in plan.reasons
