"""Persisting: a snapshot on its way to storage keeps its slot until every helper has its copy."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from jaxft.group import events as e
from jaxft.group.keeper import Keeper
from jaxft.group.messages import Directive
from jaxft.group.world import Generation
from tests.scenarios.stage import Stage, shown

Patch = pytest.MonkeyPatch


def _copying(stage: Stage, name: str) -> bool:
    helper = stage.host(name).helper
    return helper is not None and helper.copying is not None and helper.state == "ready"


def a_slow_copy() -> None:
    """The helper of b takes long, and two snapshots later its slot would be the next to use."""
    stage = Stage(every_steps=1, persist_every=1)
    stage.host("b").copy_s = 3.0
    stage.until(lambda: _copying(stage, "b"))
    stage.run(2.0)
    stage.peace()


def test_what_is_persisted_is_pinned(monkeypatch: Patch) -> None:
    def without(patch: Patch) -> None:
        def pinned(self: Keeper) -> set[object]:
            outcome = self.ledger.outcome
            return set() if outcome is None else {outcome.committed}

        patch.setattr(Keeper, "pinned", property(pinned))

    shown(a_slow_copy, without, "I3", monkeypatch)


def an_smp_is_started_again_while_its_slot_is_copied() -> None:
    """The SMP of b is started again two snapshots later, and hears the root late."""
    stage = Stage(every_steps=1, persist_every=1)
    stage.host("b").copy_s = 3.0
    stage.until(lambda: _copying(stage, "b"))
    stage.run(1.0)
    late = stage.hold(Directive, to="b")
    stage.host("b").kill_smp()
    stage.run(1.0)
    late.release()
    stage.peace()


def test_the_pin_outlives_the_smp(monkeypatch: Patch) -> None:
    real = Keeper._resume

    def forgetful(self: Keeper, generation: Generation) -> list[e.Effect]:
        self.ledger = msgspec.structs.replace(self.ledger, persist=None)
        return real(self, generation)

    shown(
        an_smp_is_started_again_while_its_slot_is_copied,
        lambda patch: patch.setattr(Keeper, "_resume", forgetful),
        "I3",
        monkeypatch,
    )


def test_a_persist_goes_on_when_the_root_is_started_again() -> None:
    stage = Stage(every_steps=1, persist_every=1)
    stage.host("b").copy_s = 2.0
    stage.until(lambda: _copying(stage, "b"))
    helper = stage.host("b").helper
    stage.host("a").kill_smp()
    stage.run(1.5)
    assert stage.host("b").helper is helper
    stage.until(lambda: any(kind == "persisted" for kind, _ in stage.sim.checker.announced))
    stage.peace()


def test_a_new_generation_counts_from_the_newest_checkpoint_that_it_goes_on_from() -> None:
    """A job that fails again and again does not write a checkpoint after each start: the newest
    ones would push good older ones out."""
    stage = Stage(every_steps=1, persist_every=12)
    stored = stage.sim.storage
    stage.until(lambda: len(stored) == 1)
    for _ in range(2):
        number = stage.number
        stage.fault()
        stage.until(stage.settled(number + 1))
        stage.commits(2)
    stage.until(lambda: len(stored) == 2)
    assert stored[1].step >= stored[0].step + 12
    stage.peace()


def test_checkpoints_are_never_nearer_to_each_other_than_was_asked_for() -> None:
    """The first helper takes long to start, so what it writes is some steps after it was due."""
    stage = Stage(every_steps=1, persist_every=7)
    stored = stage.sim.storage
    stage.host("b").helper_start_s = 2.0
    stage.until(lambda: len(stored) == 1)
    stage.host("b").helper_start_s = 0.05
    stage.until(lambda: len(stored) == 2)
    assert stored[1].step - stored[0].step >= 7
    stage.peace()


def test_helpers_are_ready_when_the_snapshot_that_is_due_commits() -> None:
    """Once a persist has shown how long they take to start, they are started that much sooner."""
    stage = Stage(every_steps=1, persist_every=30)
    stored = stage.sim.storage
    for name in ("a", "b", "c"):
        stage.host(name).helper_start_s = 2.0
    stage.until(lambda: len(stored) == 3)
    assert [after.step - before.step for before, after in itertools.pairwise(stored)] == [30, 30]
    stage.peace()


def test_a_persist_that_failed_is_tried_again_before_the_next_is_due() -> None:
    stage = Stage(every_steps=1, persist_every=2000)
    stage.until(lambda: _copying(stage, "b"))
    helper = stage.host("b").helper
    assert helper is not None
    helper._say("failed", "killed")
    stage.until(lambda: any(kind == "persist_failed" for kind, _ in stage.sim.checker.announced))
    failed_s = stage.sim.now
    stage.run(55.0)
    assert stage.sim.storage == []
    stage.until(lambda: len(stage.sim.storage) == 1)
    assert stage.sim.now - failed_s < 75.0
    stage.peace()
