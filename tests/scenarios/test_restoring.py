"""Restoring: candidates, lineage, pinning, and one decision for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jaxft.group import events as e
from jaxft.group import host, recovery, root
from jaxft.group.keeper import Keeper
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Damage, Directive, Ledger, ManifestNotice, Plan, Status
from jaxft.group.recovery import Holder
from jaxft.group.root import Root
from tests.scenarios.stage import Stage, shown
from tests.scenarios.test_saving import _own_words_last

Patch = pytest.MonkeyPatch


def _is(stage: Stage, seq: int, generation: int = 1) -> bool:
    base = stage.base()
    return base is not None and (base.generation, base.seq) == (generation, seq)


# ------------------------------------------------------------------ candidates


def half_coded_and_a_host_lost() -> None:
    """Snapshot 1 is staged everywhere and coded on all but a when d is lost: what is left could be
    rebuilt, but tolerates no further loss."""
    stage = Stage(hosts=4, code="2+2")
    stage.commits(1)
    late = stage.hold(ManifestNotice, to="a")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "bcd"))
    stage.lose("d")
    stage.until(lambda: stage.number == 2)
    late.drop()
    stage.until(stage.settled(2))
    stage.run(0.3)
    assert _is(stage, 0)
    stage.peace()


def test_recoverable_somehow_is_not_enough(monkeypatch: Patch) -> None:
    real = recovery._judge

    def careless(shares: Any, world: Any, damaged: Any) -> recovery.Verdict:
        return real(recovery._without_half_coded(shares, world, damaged), world, damaged)

    shown(
        half_coded_and_a_host_lost,
        lambda patch: patch.setattr(recovery, "_judge", careless),
        "I1",
        monkeypatch,
    )


def test_what_was_restored_is_pinned_until_the_next_commit(monkeypatch: Patch) -> None:
    def without(patch: Patch) -> None:
        def pinned(self: Keeper) -> set[SnapshotId | None]:
            outcome = self.ledger.outcome
            return set() if outcome is None else {outcome.committed}

        patch.setattr(Keeper, "pinned", property(pinned))

    shown(half_coded_and_a_host_lost, without, "I3", monkeypatch)


def an_aborted_snapshot_that_looks_whole() -> None:
    """b cannot code snapshot 1, which is aborted, and gives its slot to snapshot 2. a and c still
    hold whole shares of snapshot 1."""
    stage = Stage(hosts=3, code="2+1", every_steps=1)
    stage.commits(1)
    stage.stick("b")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "ac"))
    stage.run(0.5)
    stage.rank("a").stop()
    stage.rank("c").stop()
    smp = stage.host("b").smp
    assert smp is not None
    smp.deliver(e.GrantFailed(smp.core.keeper.next_id, "the manifest is damaged"))
    stage.unstick("b")
    stage.until(stage.slot("b", 2, "writing"), "that b goes on")
    stage.rank("a").crash()
    stage.until(stage.settled(2))
    assert _is(stage, 0)
    stage.peace()


def test_an_aborted_snapshot_is_no_candidate(monkeypatch: Patch) -> None:
    shown(
        an_aborted_snapshot_that_looks_whole,
        lambda patch: patch.setattr(Ledger, "knows_aborted", lambda self, identity: False),
        "I1",
        monkeypatch,
    )


def shares_that_do_not_belong_together() -> None:
    """The rank of b saves another tree, and the root does not hear of it."""
    stage = Stage()
    stage.sim.checker.odd = True
    stage.commits(1)
    stage.sim.digests["b"] = "another plan"
    stage.hold(Status, of="b", to="a")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "abc"))
    stage.sim.digests.clear()
    stage.rank("c").crash()
    stage.until(lambda: stage.number == 2)
    stage.sim.held.clear()
    stage.until(stage.settled(2))
    assert _is(stage, 0)
    stage.peace()


def test_shares_of_different_steps_are_no_candidate(monkeypatch: Patch) -> None:
    real = recovery._judge

    def careless(shares: Any, world: Any, damaged: Any) -> recovery.Verdict:
        same = {
            place: (address, msgspec.structs.replace(slot, step=0, plan=""))
            for place, (address, slot) in shares.items()
        }
        return real(same, world, damaged)

    shown(
        shares_that_do_not_belong_together,
        lambda patch: patch.setattr(recovery, "_judge", careless),
        "I2",
        monkeypatch,
    )


def a_member_comes_back_with_half_a_share() -> None:
    """d stands still with its segment of snapshot 1 staged; generation 2 goes on from that without
    d. Then d is there again, and c is lost."""
    stage = Stage(hosts=4, code="2+2")
    stage.commits(1)
    stage.stick("d")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "abc"))
    stage.pause("d")
    stage.until(stage.settled(2))
    assert _is(stage, 1)
    stage.until(stage.slot("a", 0, "writing", "staged"))
    stage.unstick("d")
    stage.lose("c")
    stage.wake("d")
    stage.peace()
    assert stage.sim.checker.bases[3] == SnapshotId(1, 1, "n1")


def test_what_a_generation_went_on_from_is_rebuilt_without_half_shares(monkeypatch: Patch) -> None:
    shown(
        a_member_comes_back_with_half_a_share,
        lambda patch: patch.setattr(
            recovery, "_without_half_coded", lambda shares, world, damaged: shares
        ),
        "I1",
        monkeypatch,
    )


def the_same_step_again() -> None:
    """Snapshot 0 of generation 2 is of the step that it was restored from."""
    stage = Stage()
    stage.commits(2)
    stage.fault()
    stage.until(stage.settled(2))
    stage.commits(1)
    stage.fault()
    stage.until(stage.settled(3))
    assert _is(stage, 0, generation=2)
    stage.peace()


def test_order_is_by_identity_never_by_step(monkeypatch: Patch) -> None:
    real = recovery.choose

    def by_step(holders: Sequence[Holder], **options: Any) -> Plan:
        slots = {slot.id: slot.step for h in holders for slot in h.ledger.slots if slot.readable}
        for identity in sorted(slots, key=lambda one: (-slots[one], one)):
            only = [
                holder._replace(
                    ledger=msgspec.structs.replace(
                        holder.ledger,
                        slots=tuple(
                            slot if slot.id == identity else type(slot)()
                            for slot in holder.ledger.slots
                        ),
                    )
                )
                for holder in holders
            ]
            plan = real(only, **options)
            if plan.chosen is not None:
                return plan
        return real(holders, **options)

    shown(
        the_same_step_again, lambda patch: patch.setattr(root, "choose", by_step), "I1", monkeypatch
    )


# ------------------------------------------------------------------ lineage


def a_branch_that_was_left() -> None:
    """c stands still with a whole share of snapshot 1, and a has not coded its own: generation 2
    goes on from snapshot 0. It ends before any slot is granted; with c there again, snapshot 1
    would be a candidate."""
    stage = Stage(every_steps=2)
    stage.commits(1)
    late = stage.hold(ManifestNotice, to="a")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "bc"))
    stage.pause("c")
    stage.until(lambda: 2 in stage.sim.checker.bases)
    assert _is(stage, 0)
    for name in "ab":
        stage.rank(name).stop()
    late.drop()
    stage.run(0.5)
    stage.wake("c")
    stage.until(stage.settled(3))
    stage.peace()


def test_an_abandoned_snapshot_is_no_candidate(monkeypatch: Patch) -> None:
    shown(
        a_branch_that_was_left,
        lambda patch: patch.setattr(recovery, "abandoned", lambda identity, lineages: None),
        "I2",
        monkeypatch,
    )


def a_root_that_was_the_only_one_to_settle() -> None:
    """Generation 2 (a and b) goes on from snapshot 0, and only its root a knows that. Generation 3
    (b and c) goes on from snapshot 1, whose whole shares they hold. Then a is there again."""
    stage = Stage(every_steps=2)
    stage.commits(1)
    late = stage.hold(ManifestNotice, to="a")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "bc"))
    stage.pause("c")
    stage.until(lambda: stage.number == 2)
    late.drop()
    stage.die_before("a", lambda effect: _settles(effect, "smp-b"))
    stage.until(lambda: not stage.sim.crash_points)
    assert _is(stage, 0)
    stage.pause("a")
    stage.wake("c")
    stage.until(stage.settled(3))
    assert _is(stage, 1)
    stage.until(stage.slot("b", 0, "writing", "staged"))
    stage.wake("a")
    stage.peace()


def _settles(effect: e.Effect, address: str) -> bool:
    return (
        isinstance(effect, e.Send)
        and isinstance(effect.body, Directive)
        and effect.body.settled
        and effect.address == address
    )


def test_the_record_of_a_generation_that_was_left_does_not_count(monkeypatch: Patch) -> None:
    shown(
        a_root_that_was_the_only_one_to_settle,
        lambda patch: patch.setattr(recovery, "in_force", list),
        "I1",
        monkeypatch,
    )


# ------------------------------------------------------------------ settling


def chosen_before_it_is_coded() -> None:
    """All ranks die while snapshot 1 is staged everywhere and coded nowhere."""
    stage = Stage()
    stage.commits(1)
    late = stage.hold(ManifestNotice)
    stage.until(lambda: all(stage.slot(name, 1, "staged")() for name in "abc"))
    stage.rank("a").crash()
    stage.until(lambda: stage.number == 2)
    late.drop()
    stage.stick("b")
    stage.run(0.8)
    stage.unstick("b")
    stage.until(stage.settled(2))
    assert _is(stage, 1)
    stage.peace()


def test_coding_is_finished_before_a_slot_is_granted(monkeypatch: Patch) -> None:
    shown(
        chosen_before_it_is_coded,
        lambda patch: patch.setattr(Root, "_all_finished", lambda self, plan, current: True),
        "I1",
        monkeypatch,
    )


def one_rank_restores_late() -> None:
    stage = Stage()
    stage.commits(1)
    stage.fault()
    stage.until(lambda: stage.number == 2 and bool(stage.host("c").ranks))
    stage.until(lambda: stage.rank("c").generation.number == 2)
    stage.rank("c").stop()
    stage.run(1.0)
    stage.peace()


def test_no_rank_returns_before_all_have_restored(monkeypatch: Patch) -> None:
    real = Keeper.status

    def hasty(self: Keeper) -> Status:
        status = real(self)
        if self.directive.plan is None:
            return status
        return msgspec.structs.replace(status, restored="verified")

    shown(
        one_rank_restores_late,
        lambda patch: patch.setattr(Keeper, "status", hasty),
        "I2",
        monkeypatch,
    )


def the_root_dies_while_it_tells_that_all_is_settled() -> None:
    stage = Stage()

    stage.die_before("a", lambda effect: _settles(effect, "smp-c"))
    stage.until(lambda: stage.host("a").memory is not None and not stage.sim.crash_points)
    stage.peace()


def test_that_all_is_settled_is_written_before_it_is_sent(monkeypatch: Patch) -> None:
    shown(
        the_root_dies_while_it_tells_that_all_is_settled,
        lambda patch: patch.setattr(host.HostCore, "_deliver_own", _own_words_last),
        "I2",
        monkeypatch,
    )


# ------------------------------------------------------------------ damage


def a_flipped_byte() -> None:
    """One piece of b is damaged: rebuilt, and all ranks restore by the second plan."""
    stage = Stage()
    stage.commits(2)
    stage.host("b").damage(stage.slot_number("b", 1), 1, "data")
    stage.fault()
    stage.until(stage.settled(2))
    assert _is(stage, 1)
    assert any(kind == "plan_failed" for kind, _ in stage.sim.checker.announced)
    stage.peace()


def test_damage_is_rebuilt_for_all_case_27(monkeypatch: Patch) -> None:
    real = Keeper._react

    def deaf(self: Keeper, event: e.Event, now_s: float) -> list[e.Effect]:
        return [] if isinstance(event, e.RankFailed) else real(self, event, now_s)

    shown(
        a_flipped_byte, lambda patch: patch.setattr(Keeper, "_react", deaf), "progress", monkeypatch
    )


def test_plans_are_counted_when_they_are_told_not_while_waiting(monkeypatch: Patch) -> None:
    """Two hosts are lost with the newest snapshot; while the root waits for them, it looks again
    and again. Damage found afterwards gets its plan all the same."""
    real = Root._choose

    def counting(self: Root, attempt: int) -> Plan:
        self._attempt += 1
        return real(self, self._attempt)

    def scenario() -> None:
        stage = Stage(hosts=4, code="3+1", every_steps=2)
        stage.commits(2)
        stage.host("b").damage(stage.slot_number("b", 1), 1, "manifest")
        stage.host("c").damage(stage.slot_number("c", 1), 1, "manifest")
        stage.host("b").damage(stage.slot_number("b", 0), 1, "data")
        stage.fault()
        stage.until(stage.settled(2), "generation 2 settles")

    shown(scenario, lambda patch: patch.setattr(Root, "_choose", counting), "progress", monkeypatch)


def damage_in_what_is_to_be_finished() -> None:
    """Snapshot 1 is staged everywhere and coded nowhere, and a byte of it is wrong: it cannot be
    finished, and the snapshot before is restored."""
    stage = Stage()
    stage.commits(1)
    late = stage.hold(ManifestNotice)
    stage.until(lambda: all(stage.slot(name, 1, "staged")() for name in "abc"))
    stage.host("b").damage(stage.slot_number("b", 1), 1, "data")
    stage.rank("a").crash()
    stage.until(lambda: stage.number == 2)
    late.drop()
    stage.until(lambda: max(stage.sim.checker.bases) > 1, "that a generation settles")
    assert _is(stage, 0)
    stage.peace()


def test_what_cannot_be_finished_is_passed_over(monkeypatch: Patch) -> None:
    real = Keeper._coding_failed

    def careless(self: Keeper, identity: SnapshotId, reason: str) -> list[e.Effect]:
        damaged = self._damaged
        effects = real(self, identity, reason)
        self._damaged = damaged
        return effects

    shown(
        damage_in_what_is_to_be_finished,
        lambda patch: patch.setattr(Keeper, "_coding_failed", careless),
        "progress",
        monkeypatch,
    )


def one_member_cannot_finish() -> None:
    """d alone has not coded snapshot 1, and a byte of b is wrong by now: d cannot finish. Without d
    the rest could be rebuilt, but would tolerate no further loss."""
    stage = Stage(hosts=4, code="2+2")
    stage.commits(1)
    late = stage.hold(ManifestNotice, to="d")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "abc"))
    stage.host("b").damage(stage.slot_number("b", 1), 1, "data")
    stage.rank("a").crash()
    stage.until(lambda: stage.number == 2)
    late.drop()
    stage.until(stage.settled(2))
    stage.run(0.3)
    assert _is(stage, 0)
    stage.peace()


def test_a_share_that_cannot_be_finished_is_not_just_missing(monkeypatch: Patch) -> None:
    shown(
        one_member_cannot_finish,
        lambda patch: patch.setattr(Damage, "unfinished", classmethod(lambda cls, host: cls(host))),
        "I1",
        monkeypatch,
    )
