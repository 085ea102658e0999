"""Who trains: hosts that cannot reach the store, leases that lapse, and one world at a time."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from jaxft.group import membership as m
from jaxft.group.absence import Absence, mind_absence
from jaxft.group.records import Fault, View
from jaxft.group.world import Generation
from tests.scenarios.stage import Patch as Without
from tests.scenarios.stage import Stage, shown
from tests.sim import store
from tests.sim.smp import Smp
from tests.sim.store import GRACE_S, KILL_S

Patch = pytest.MonkeyPatch


def _rules(**changes: Any) -> Without:
    """With these rules instead."""
    real = m.Observer.__init__

    def changed(self: m.Observer, rules: m.Rules) -> None:
        real(self, msgspec.structs.replace(rules, **changes))

    return lambda patch: patch.setattr(m.Observer, "__init__", changed)


def _never_killed(patch: Patch) -> None:
    patch.setattr(store, "mind_absence", lambda *args, **words: Absence("go on", ""))


# ------------------------------------------------------------------ the store is away


def the_store_is_away_for_a_moment() -> None:
    """Nobody reaches it for less than the grace, and longer than a lease: training goes on."""
    stage = Stage(agents=True)
    stage.commits(1)
    told = len(stage.sim.checker.told_commits)
    stage.store.go_away()
    stage.run(0.75 * GRACE_S)
    more = len(stage.sim.checker.told_commits) - told
    stage.keep(more > 1, "steady", f"only {more} snapshots were protected meanwhile")
    stage.store.come_back()
    stage.peace()
    stage.keep(stage.number == 1, "steady", "a short outage has ended the generation")


def test_a_short_outage_of_the_store_changes_nothing(monkeypatch: Patch) -> None:
    def hasty(silent_s: float, error: str, **words: Any) -> Absence:
        return mind_absence(silent_s, error, **(words | {"grace_s": store.LEASE_S}))

    shown(
        the_store_is_away_for_a_moment,
        lambda patch: patch.setattr(store, "mind_absence", hasty),
        "steady",
        monkeypatch,
    )


def the_store_is_away_for_long() -> None:
    """All kill their ranks; the next generation goes on from memory when the store is back."""
    stage = Stage(agents=True)
    stage.commits(2)
    told = stage.sim.checker.told
    stage.store.go_away()
    stage.run(GRACE_S + KILL_S)
    stage.keep(not any(rank.alive for rank in stage.sim.ranks()), "world", "ranks live on")
    stage.store.come_back()
    stage.until(stage.settled(2), "generation 2 settles")
    assert told is not None
    base = stage.base()
    stage.keep(base is not None and told <= base, "I1", f"{base} is older than {told}")
    stage.peace()


def test_who_killed_its_ranks_for_an_absent_store_says_so(monkeypatch: Patch) -> None:
    real = m.find_fault

    def deaf(view: View, me: m.Me, return_s: float) -> Fault | None:
        fault = real(view, me, return_s)
        return None if fault is not None and fault.kind == "cut_off" else fault

    shown(
        the_store_is_away_for_long,
        lambda patch: patch.setattr(m, "find_fault", deaf),
        "progress",
        monkeypatch,
    )


def a_host_is_lost_while_the_store_is_away() -> None:
    """No lease says so, and the others' ranks would wait for it until the grace is over."""
    stage = Stage(agents=True)
    stage.commits(2)
    stage.store.go_away()
    stage.lose("c")
    stage.run(GRACE_S / 2)
    stage.keep(not any(rank.alive for rank in stage.sim.ranks()), "world", "ranks wait in vain")
    stage.store.come_back()
    stage.peace()


def test_without_the_store_a_world_lives_while_every_member_answers(monkeypatch: Patch) -> None:
    def trusting(silent_s: float, error: str, **words: Any) -> Absence:
        return mind_absence(silent_s, error, **(words | {"unheard_s": {}}))

    shown(
        a_host_is_lost_while_the_store_is_away,
        lambda patch: patch.setattr(store, "mind_absence", trusting),
        "world",
        monkeypatch,
    )


def test_a_world_without_a_store_ends(monkeypatch: Patch) -> None:
    shown(the_store_is_away_for_long, _never_killed, "world", monkeypatch)


# ------------------------------------------------------------------ no second world


def _divide(stage: Stage, one: str, other: str) -> None:
    """The network falls in two; the store is on the side of `other`."""
    stage.cut_store(*one)
    for left in one:
        for right in other:
            stage.cut(left, right)


def a_whole_world_is_cut_off() -> None:
    """a and b train on and hear each other, and nobody else; c is a spare beside the store."""
    stage = Stage(hosts=2, code="1+1", spares=1, hosts_min=1, agents=True)
    stage.commits(2)
    _divide(stage, "ab", "c")
    stage.until(stage.settled(2), "c goes on without a and b")
    stage.run(1.0)
    stage.peace()


def test_a_world_that_is_cut_off_has_ended_before_the_next_begins(monkeypatch: Patch) -> None:
    shown(
        a_whole_world_is_cut_off,
        lambda patch: patch.setattr(store, "KILL_S", -GRACE_S),
        "world",
        monkeypatch,
    )


def test_a_host_that_is_cut_off_kills_its_ranks(monkeypatch: Patch) -> None:
    shown(a_whole_world_is_cut_off, _never_killed, "world", monkeypatch)


def a_host_of_an_earlier_world_comes_back() -> None:
    """Generation 1 was a and b. While a stands still, b goes on with c; these two are cut off when
    a wakes up, which was in the world before the last, and not in the last."""
    stage = Stage(hosts=2, code="1+1", spares=1, hosts_min=1, agents=True)
    stage.commits(2)
    stage.pause("a")
    stage.until(lambda: stage.number == 2 and stage.settled(2)(), "b goes on with c")
    assert stage.members() in ("bc", "cb")
    stage.commits(1)
    _divide(stage, "bc", "a")
    stage.wake("a")
    stage.until(stage.settled(3), "a goes on without b and c")
    stage.run(1.0)
    stage.peace()


def test_a_new_world_has_a_member_of_the_last_one_or_waits(monkeypatch: Patch) -> None:
    shown(
        a_host_of_an_earlier_world_comes_back,
        lambda patch: patch.setattr(m, "may_live_on", lambda last, ready: False),
        "world",
        monkeypatch,
    )


def one_host_is_cut_off() -> None:
    """a and b are members of the last world: with their ranks dead, that of c can do nothing. They
    go on without waiting for it."""
    stage = Stage(agents=True)
    stage.commits(1)
    stage.cut_store("c")
    began_s = stage.sim.now
    stage.until(stage.settled(2), "a and b go on")
    late = stage.sim.now - began_s > GRACE_S + KILL_S
    stage.keep(not late and stage.members() == "ab", "steady", f"{stage.members()} went on late")
    stage.peace()


def test_a_member_of_the_last_world_need_not_wait(monkeypatch: Patch) -> None:
    shown(
        one_host_is_cut_off,
        lambda patch: patch.setattr(m, "may_live_on", lambda last, ready: True),
        "steady",
        monkeypatch,
    )


def memory_behind_an_agent_that_is_cut_off() -> None:
    """b cannot reach the store, and c is lost: a alone goes on, with what the SMP of b holds."""
    stage = Stage(hosts_min=1, agents=True)
    stage.commits(2)
    told = stage.sim.checker.told
    stage.cut_store("b")
    stage.lose("c")
    stage.until(stage.settled(2), "a goes on alone")
    base = stage.base()
    assert told is not None
    stage.keep(base is not None and told <= base, "I1", f"{base} is older than {told}")
    stage.peace()


def test_an_smp_whose_agent_is_cut_off_lends_its_memory(monkeypatch: Patch) -> None:
    real = Smp._invited

    def shy(self: Smp, generation: Generation) -> None:
        """The invitation is the driver's matter, and here the simulator's."""
        if not self.machine.agent:
            real(self, generation)

    shown(
        memory_behind_an_agent_that_is_cut_off,
        lambda patch: patch.setattr(Smp, "_invited", shy),
        "I1",
        monkeypatch,
    )


# ------------------------------------------------------------------ who is waited for


def all_hosts_stand_still() -> None:
    """They are on one machine, which stops while b still has a rank to kill."""
    stage = Stage(agents=True)
    stage.commits(1)
    stage.host("b").kill_s = 2.5
    stage.rank("a").crash()
    stage.run(0.3)
    assert any(rank.alive for rank in stage.host("b").ranks)
    stage.store.go_away()
    for name in "abc":
        stage.host(name).pause()
    stage.run(1.5)
    stage.store.come_back()
    for name in "abc":
        stage.wake(name)
    stage.until(lambda: stage.number == 2)
    stage.keep(stage.members() == "abc", "left out", f"only {stage.members()} went on")
    stage.peace()


def test_a_late_look_begins_all_counts_again(monkeypatch: Patch) -> None:
    shown(all_hosts_stand_still, _rules(late_s=math.inf), "left out", monkeypatch)


def an_agent_is_started_again() -> None:
    """The lease of c ends, and its SMP still answers."""
    stage = Stage(agents=True)
    stage.commits(1)
    stage.host("c").kill_agent()
    stage.run(store.LEASE_S + 1.1)
    stage.host("c").start_agent()
    stage.until(lambda: stage.number == 2)
    stage.keep(stage.members() == "abc", "left out", f"only {stage.members()} went on")
    stage.peace()


def test_an_agent_whose_smp_answers_is_waited_for(monkeypatch: Patch) -> None:
    shown(an_agent_is_started_again, _rules(agent_grace_s=0.0), "left out", monkeypatch)


def a_rank_takes_long_to_die() -> None:
    """a has failed; b is still killing its rank."""
    stage = Stage(agents=True)
    stage.commits(1)
    stage.host("b").kill_s = 0.9
    stage.rank("a").crash()
    stage.until(lambda: stage.number == 2)
    stage.keep(stage.members() == "abc", "left out", f"only {stage.members()} went on")
    stage.peace()


def test_a_host_that_kills_its_ranks_is_waited_for(monkeypatch: Patch) -> None:
    shown(a_rank_takes_long_to_die, _rules(ack_s=0.0), "left out", monkeypatch)
