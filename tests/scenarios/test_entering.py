"""Entering a generation: what is old has to have ended before anybody says what it holds."""

from __future__ import annotations

import msgspec
import pytest

from jaxft.group import events as e
from jaxft.group.keeper import Keeper
from jaxft.group.messages import Directive, Status
from jaxft.group.world import Generation
from tests.scenarios.stage import Stage, shown
from tests.sim.smp import Smp

Patch = pytest.MonkeyPatch


def _no_freeze(patch: Patch) -> None:
    real = Keeper._enter

    def hasty(self: Keeper, generation: Generation) -> list[e.Effect]:
        effects = real(self, generation)
        return self._froze(generation.number) if effects else []

    patch.setattr(Keeper, "_enter", hasty)


def a_rank_that_dies_slowly() -> None:
    """The rank of b is in the middle of its slot, and its end takes a while after the kill."""
    stage = Stage()
    stage.commits(2)
    stage.until(stage.writing("b", 2))
    stage.rank("b").stop()
    stage.host("b").kill_s = 0.5
    stage.rank("a").crash()
    stage.until(lambda: stage.number == 2)
    stage.until(lambda: stage.host("b").generation is stage.sim.generation)
    stage.rank("b").wake()
    stage.peace()


def test_old_ranks_are_dead_before_the_inventory_is_answered(monkeypatch: Patch) -> None:
    shown(a_rank_that_dies_slowly, _no_freeze, "I4", monkeypatch)


def a_stopped_coder_in_an_old_generation() -> None:
    """The coder of b stands still in the middle of a piece, and wakes up in the next generation."""
    stage = Stage()
    stage.commits(2)
    stage.until(stage.coding("b"))
    stage.stick("b")
    stage.rank("a").crash()
    stage.until(lambda: stage.number == 2)
    stage.run(1.0)
    stage.unstick("b")
    stage.peace()


def test_old_coding_has_ended_before_the_inventory_is_answered(monkeypatch: Patch) -> None:
    shown(a_stopped_coder_in_an_old_generation, _no_freeze, "I4", monkeypatch)


def a_segment_is_sealed_while_entering() -> None:
    """The last part of b is in its slot when b is told to enter the next generation; b then waits
    for its old rank to die, and only its own segment is whole."""
    stage = Stage()
    stage.commits(2)
    stage.stick("a", "b", "c")
    stage.host("b").kill_s = 0.5
    stage.until(stage.writing("b", 2))
    generation = stage.sim.generation
    assert generation is not None
    smp = stage.host("b").smp
    assert smp is not None
    real = smp.deliver

    def sealed_late(event: e.Event) -> None:
        """The agent's word comes between the seal and the event that tells of it."""
        if isinstance(event, e.SegmentSealed):
            later = msgspec.structs.replace(generation, number=2, nonce="n2")
            real(e.EnterWanted(later))
        real(event)

    smp.deliver = sealed_late  # type: ignore[method-assign]
    stage.until(stage.slot("b", 2, "staged", "coded"))
    smp.deliver = real  # type: ignore[method-assign]
    stage.fault()
    stage.peace()


def test_a_segment_sealed_while_entering_is_not_a_whole_share(monkeypatch: Patch) -> None:
    real = Keeper._sealed

    def careless(self: Keeper, event: e.SegmentSealed) -> list[e.Effect]:
        effects = real(self, event)
        number = self.slot_of(event.id)
        if number is None or self._group_mates():
            return effects
        slot = msgspec.structs.replace(self.ledger.slots[number], state="coded")
        self._set_slot(number, slot)
        return [e.WriteLedger(self.ledger), *effects[1:]]

    shown(
        a_segment_is_sealed_while_entering,
        lambda patch: patch.setattr(Keeper, "_sealed", careless),
        "I6",
        monkeypatch,
    )


def a_late_word_of_an_old_generation() -> None:
    """The agent's word to enter generation 1 comes once more, in generation 2."""
    stage = Stage()
    stage.commits(1)
    first = stage.sim.generation
    stage.fault()
    stage.until(stage.settled(2))
    smp = stage.host("b").smp
    assert smp is not None
    assert first is not None
    smp.deliver(e.EnterWanted(first))
    stage.peace()


def test_an_older_generation_is_not_entered(monkeypatch: Patch) -> None:
    def careless(self: Keeper, generation: Generation) -> list[e.Effect]:
        if self.generation is not None and self.generation.number == generation.number:
            return []
        self.frozen, self.generation, self._entering = False, None, generation
        return [e.Freeze(generation.number)]

    shown(
        a_late_word_of_an_old_generation,
        lambda patch: patch.setattr(Keeper, "_enter", careless),
        "I4",
        monkeypatch,
    )


def messages_of_an_old_generation_come_late() -> None:
    """Directives and statuses of generation 1 arrive in generation 2."""
    stage = Stage()
    stage.commits(1)
    late = stage.hold((Directive, Status))
    stage.rank("c").stop()
    stage.run(0.6)
    stage.fault()
    late.drop()
    stage.until(stage.settled(2))
    for envelope, address in late.kept:
        stage.sim.send(envelope, address)
    stage.peace()


def an_outcome_of_an_old_generation_comes_late() -> None:
    stage = Stage()
    stage.commits(1)
    late = stage.hold(Directive, to="b")
    stage.until(stage.knows("a", 1))
    stage.run(0.3)
    stage.fault()
    late.drop()
    stage.until(stage.settled(2))
    for envelope, address in late.kept:
        stage.sim.send(envelope, address)
    stage.peace()


def _accept_foreign(patch: Patch) -> None:
    """The check is the driver's, and here the simulator's."""
    patch.setattr(Smp, "is_ours", lambda self, envelope: True)


def test_an_old_generation_decides_nothing_any_more(monkeypatch: Patch) -> None:
    messages_of_an_old_generation_come_late()
    shown(an_outcome_of_an_old_generation_comes_late, _accept_foreign, "I4", monkeypatch)


def an_smp_with_new_memory_in_an_old_generation() -> None:
    """Agent and SMP of c die; c is told to enter the generation it was a member of before."""
    stage = Stage()
    stage.commits(1)
    old = stage.sim.generation
    machine = stage.host("c")
    machine.lose_agent_and_smp()
    machine.start_agent()
    assert old is not None
    machine.enter(old)
    stage.run(1.0)
    stage.sim.oracle.came_back(machine)
    stage.until(lambda: stage.number == 2)
    stage.peace()


class _Anything(list[str]):
    def __contains__(self, item: object) -> bool:
        return True


def test_new_memory_is_no_member_of_an_old_generation_case_31(monkeypatch: Patch) -> None:
    shown(
        an_smp_with_new_memory_in_an_old_generation,
        lambda patch: patch.setattr(
            "jaxft.group.keeper._arenas", lambda generation, host: _Anything()
        ),
        "I2",
        monkeypatch,
    )
