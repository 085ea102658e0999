"""Lost memory is never silent: what all hosts have lost, the store still knows of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxft.group import membership
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Plan, StorageEntry
from jaxft.group.world import Generation
from tests.scenarios.stage import Stage, shown
from tests.sim.checker import Violation
from tests.sim.simulator import Setup, Simulator

Patch = pytest.MonkeyPatch


def _with_agents() -> Stage:
    """A job whose generations are formed by agents, from what the store says."""
    stage = Stage()
    stage.sim = Simulator(Setup(agents=True))
    stage.sim.start()
    return stage


def _lose_all(stage: Stage) -> SnapshotId:
    """Every host loses all that it had, and comes back. What had been told protected last."""
    told = stage.sim.checker.told
    assert told is not None
    for machine in stage.sim.machines:
        machine.lose()
        machine.boot()
    return told


def _plan(stage: Stage, number: int) -> Plan:
    """What the ranks of this generation are told to restore."""

    def planned() -> bool:
        ranks = [rank for rank in stage.sim.ranks() if rank.generation.number == number]
        return any(rank.plan is not None for rank in ranks)

    stage.until(planned, f"a plan of generation {number}")
    plans = [one.plan for one in stage.sim.ranks() if one.generation.number == number and one.plan]
    return plans[0]


def all_memory_is_lost() -> None:
    """A rank that is told of a snapshot that nothing gives back raises NothingRecoverable."""
    stage = _with_agents()
    stage.commits(2)
    told = _lose_all(stage)
    plan = _plan(stage, 2)
    assert plan.base is None
    if plan.newest_known != told:
        raise Violation("silent", f"{told} is lost, and the ranks are told {plan}")
    assert any(kind == "waiting_for_memory" for kind, _ in stage.sim.checker.announced)


def it_is_lost_again_before_the_next_world_has_settled() -> None:
    """Generation 2 ends before it has settled: that changes nothing of what is lost."""
    stage = _with_agents()
    stage.commits(2)
    told = _lose_all(stage)
    stage.until(lambda: stage.sim.generation is not None and stage.number == 2)
    stage.host("c").kill_agent()
    stage.host("c").lose()
    stage.host("c").boot()
    plan = _plan(stage, 3)
    if plan.newest_known != told:
        raise Violation("silent", f"{told} is lost, and the ranks are told {plan}")


def _forget(patch: Patch) -> None:
    real = membership.next_generation

    def forgetful(*args: Any, **options: Any) -> Generation:
        return msgspec.structs.replace(real(*args, **options), expected=None)

    patch.setattr(membership, "next_generation", forgetful)


def test_what_all_hosts_have_lost_is_missed(monkeypatch: Patch) -> None:
    shown(all_memory_is_lost, _forget, "silent", monkeypatch)


def test_it_is_missed_until_a_world_has_settled(monkeypatch: Patch) -> None:
    shown(it_is_lost_again_before_the_next_world_has_settled, _forget, "silent", monkeypatch)


def test_storage_gives_something_older_instead() -> None:
    stage = _with_agents()
    stage.commits(2)
    told = stage.sim.checker.told_commits[0]
    state, _ = next(iter(stage.sim.checker.saved_state[told]))
    stage.sim.stored[told] = state
    stage.sim.storage.append(StorageEntry(step=state.step, id=told))
    newest = _lose_all(stage)
    plan = _plan(stage, 2)
    assert (plan.base, plan.source, plan.newest_known) == (told, "orbax", newest)
    stage.peace()
    stage.run(1.0)
    assert stage.sim.checker.bases[2] == told
