"""Saving: slots, coding, and one outcome for each snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from jaxft.group import events as e
from jaxft.group import host, root
from jaxft.group.commit import Decision, decide
from jaxft.group.host import HostCore
from jaxft.group.keeper import Keeper
from jaxft.group.messages import Directive, ManifestAck, Outcome, Report, Status
from jaxft.group.root import Root
from tests.scenarios.stage import Stage, shown

Patch = pytest.MonkeyPatch


# ------------------------------------------------------------------ slots


def an_abort_after_a_commit() -> None:
    """Both slots are in use, and the older snapshot is the committed one."""
    stage = Stage()
    stage.commits(2)
    stage.until(stage.writing("b", 2))
    stage.fail_staging("b")
    stage.until(stage.knows("c", 2))
    stage.peace()


def test_the_newest_committed_snapshot_is_pinned(monkeypatch: Patch) -> None:
    def without(patch: Patch) -> None:
        patch.setattr(Keeper, "pinned", property(lambda self: set()))

    shown(an_abort_after_a_commit, without, "I3", monkeypatch)


def a_slot_that_is_used_again() -> None:
    """Each slot is granted for the second time."""
    stage = Stage()
    stage.commits(3)
    stage.peace()


def test_the_ledger_says_that_a_slot_means_nothing_before_it_is_granted(monkeypatch: Patch) -> None:
    real = Keeper._grant

    def hasty(self: Keeper) -> list[e.Effect]:
        return real(self)[::-1]

    shown(
        a_slot_that_is_used_again,
        lambda patch: patch.setattr(Keeper, "_grant", hasty),
        "I3",
        monkeypatch,
    )


def a_coder_that_wakes_up_late() -> None:
    """Host c cannot code snapshot 2, which ends it; the coder of b stands still in the middle."""
    stage = Stage()
    stage.commits(2)
    stage.stick("c")
    stage.until(stage.coding("b"))
    stage.stick("b")
    stage.host("a").damage(stage.slot_number("a", 2), 0, "data")
    stage.unstick("c")
    stage.until(stage.knows("b", 2))
    stage.run(1.0)
    stage.unstick("b")
    stage.peace()


def test_a_slot_in_which_coding_runs_is_not_granted(monkeypatch: Patch) -> None:
    real = Keeper._free_slot

    def careless(self: Keeper) -> int | None:
        coding, self._coding = self._coding, None
        number = real(self)
        self._coding = coding
        return number

    shown(
        a_coder_that_wakes_up_late,
        lambda patch: patch.setattr(Keeper, "_free_slot", careless),
        "I3",
        monkeypatch,
    )


def a_damaged_manifest_while_coding() -> None:
    """The coder of b stands still in the middle of a piece when b finds that the manifest in its
    slot is damaged, and the snapshot is aborted."""
    stage = Stage()
    stage.commits(2)
    stage.hold(ManifestAck, to="b")
    stage.until(stage.coding("b"))
    stage.stick("b")
    stage.host("b").damage(stage.slot_number("b", 2), 0, "manifest")
    stage.until(stage.knows("b", 2))
    stage.run(1.0)
    stage.unstick("b")
    stage.peace()


def test_a_failed_slot_says_nothing_about_its_coding(monkeypatch: Patch) -> None:
    real = Keeper._react

    def careless(self: Keeper, event: e.Event, now_s: float) -> list[e.Effect]:
        if isinstance(event, e.GrantFailed):
            self._coding = None
        return real(self, event, now_s)

    shown(
        a_damaged_manifest_while_coding,
        lambda patch: patch.setattr(Keeper, "_react", careless),
        "I3",
        monkeypatch,
    )


# ------------------------------------------------------------------ what committed needs


def one_host_is_late() -> None:
    """The coding of c takes a while."""
    stage = Stage()
    stage.commits(1)
    stage.stick("c")
    stage.until(stage.slot("b", 1, "coded"))
    stage.run(0.5)
    stage.unstick("c")
    stage.peace()


def test_committed_needs_parity_from_every_host(monkeypatch: Patch) -> None:
    def careless(
        seq: int, reports: Mapping[str, Report | None], silent: Mapping[str, float]
    ) -> Decision:
        coded = {
            name: msgspec.structs.replace(report, coded=True) if report is not None else None
            for name, report in reports.items()
        }
        return decide(seq, coded, silent)

    shown(
        one_host_is_late, lambda patch: patch.setattr(root, "decide", careless), "I1", monkeypatch
    )


def one_rank_is_late() -> None:
    stage = Stage(hosts=6, code="2+1")
    stage.commits(1)
    stage.until(stage.writing("c", 1))
    stage.rank("c").stop()
    stage.until(stage.slot("b", 1, "coded"))
    stage.run(0.5)
    stage.peace()


def test_committed_needs_every_host(monkeypatch: Patch) -> None:
    def careless(
        seq: int, reports: Mapping[str, Report | None], silent: Mapping[str, float]
    ) -> Decision:
        return decide(seq, {n: r for n, r in reports.items() if r is not None and r.coded}, silent)

    shown(
        one_rank_is_late, lambda patch: patch.setattr(root, "decide", careless), "I1", monkeypatch
    )


def a_rank_with_another_tree() -> None:
    stage = Stage()
    stage.sim.checker.odd = True
    stage.commits(1)
    stage.sim.digests["b"] = "another plan"
    stage.until(stage.knows("b", 1))
    stage.sim.digests.clear()
    stage.peace()


def test_committed_needs_one_plan_digest(monkeypatch: Patch) -> None:
    def careless(
        seq: int, reports: Mapping[str, Report | None], silent: Mapping[str, float]
    ) -> Decision:
        same = {
            name: msgspec.structs.replace(report, plan="") if report is not None else None
            for name, report in reports.items()
        }
        return decide(seq, same, silent)

    shown(
        a_rank_with_another_tree,
        lambda patch: patch.setattr(root, "decide", careless),
        "I2",
        monkeypatch,
    )


# ------------------------------------------------------------------ one outcome


def the_root_dies_after_deciding() -> None:
    """Its SMP dies between the decision and the message to c."""
    stage = Stage()
    stage.commits(1)

    def telling_c(effect: e.Effect) -> bool:
        return (
            isinstance(effect, e.Send)
            and isinstance(effect.body, Directive)
            and effect.body.outcome is not None
            and effect.body.outcome.seq == 1
            and effect.address == "smp-c"
        )

    stage.die_before("a", telling_c)
    stage.until(lambda: stage.host("a").smp is None)
    stage.peace()


def _own_words_last(self: HostCore, effects: list[e.Effect], now_s: float) -> list[e.Effect]:
    """What a host says to itself is heard after the others were told."""
    done: list[e.Effect] = []
    queue = list(effects)
    while queue:
        effect = queue.pop(0)
        if isinstance(effect, e.Decide):
            continue
        if not (isinstance(effect, e.Send) and effect.address == self.address):
            done.append(effect)
        elif isinstance(effect.body, Status):
            queue += [] if self.root is None else self.root.heard(self.host, effect.body, now_s)
        else:
            queue += self.keeper.handle(e.Heard(self.host, effect.body), now_s)
    return done


def test_an_outcome_is_written_before_it_is_sent(monkeypatch: Patch) -> None:
    shown(
        the_root_dies_after_deciding,
        lambda patch: patch.setattr(host.HostCore, "_deliver_own", _own_words_last),
        "I2",
        monkeypatch,
    )


def the_root_is_started_again_while_a_snapshot_is_written() -> None:
    """The new root tells the last outcome once more, with a higher version."""
    stage = Stage()
    stage.commits(2)
    stage.until(stage.writing("b", 2))
    stage.rank("b").stop()
    stage.host("a").kill_smp()
    stage.run(1.0)
    stage.peace()


def test_an_outcome_is_learned_once(monkeypatch: Patch) -> None:
    def again(self: Keeper, outcome: Outcome) -> list[e.Effect]:
        known, self.ledger = self.ledger, msgspec.structs.replace(self.ledger, outcome=None)
        effects = learn(self, outcome)
        return effects if known.outcome != outcome else [e.TellOutcome(outcome)]

    learn = Keeper.learn

    def without(patch: Patch) -> None:
        patch.setattr(Keeper, "learn", again)
        # The second of the two checks: a directive whose outcome is known is handed on as well.
        real = Keeper._directed

        def directed(self: Keeper, directive: Directive) -> list[e.Effect]:
            effects = real(self, directive)
            if directive.outcome is not None and directive.outcome == self.ledger.outcome:
                effects += self.learn(directive.outcome)
            return effects

        patch.setattr(Keeper, "_directed", directed)

    shown(the_root_is_started_again_while_a_snapshot_is_written, without, "progress", monkeypatch)


def a_host_misses_an_outcome() -> None:
    """Directives to b are late; meanwhile c fails in the next snapshot."""
    stage = Stage()
    stage.commits(1)
    late = stage.hold(Directive, to="b")
    stage.until(stage.knows("c", 1))
    stage.until(stage.writing("c", 2))
    stage.fail_staging("c")
    stage.run(0.8)
    late.drop()
    stage.peace()


def test_nothing_is_decided_before_all_know_the_last_outcome(monkeypatch: Patch) -> None:
    real = Root._commit

    def hasty(self: Root, now_s: float) -> list[e.Effect]:
        last = self.directive.outcome
        seq = -1 if last is None else last.seq
        for name, status in self.statuses.items():
            if status.outcome_seq < seq:
                self.statuses[name] = msgspec.structs.replace(status, outcome_seq=seq)
        return real(self, now_s)

    shown(
        a_host_misses_an_outcome,
        lambda patch: patch.setattr(Root, "_commit", hasty),
        "I2",
        monkeypatch,
    )


# ------------------------------------------------------------------ an SMP that is started again


def the_smp_dies_with_its_segment_sealed() -> None:
    stage = Stage()
    stage.commits(2)
    stage.stick("c")
    stage.until(stage.slot("b", 2, "staged"))
    stage.host("b").kill_smp()
    stage.run(1.0)
    stage.unstick("c")
    stage.peace()


def test_a_whole_segment_is_not_granted_again(monkeypatch: Patch) -> None:
    shown(
        the_smp_dies_with_its_segment_sealed,
        lambda patch: patch.setattr(Keeper, "_has_segment", lambda self, number: False),
        "I3",
        monkeypatch,
    )


def test_the_plan_digest_outlives_the_smp(monkeypatch: Patch) -> None:
    real = Keeper._report

    def forgetful(self: Keeper) -> Report | None:
        report = real(self)
        if report is None or self._asks:
            return report
        return msgspec.structs.replace(report, plan="")

    shown(
        the_smp_dies_with_its_segment_sealed,
        lambda patch: patch.setattr(Keeper, "_report", forgetful),
        "I2",
        monkeypatch,
    )


def two_outcomes_while_a_rank_is_not_connected() -> None:
    """All wait for outcome 1. The SMP of b dies before it tells its rank, and when it is there
    again, hears outcome 2 before the rank has come back."""
    stage = Stage(every_steps=1)
    stage.commits(1)
    stage.stick("c")
    stage.run(1.0)
    stage.die_before("b", lambda effect: isinstance(effect, e.TellOutcome))
    stage.unstick("c")
    stage.until(lambda: stage.host("b").smp is None)
    stage.rank("b").stop()
    stage.until(stage.writing("c", 2))
    stage.fail_staging("c")
    stage.until(stage.knows("b", 2))
    stage.rank("b").wake()
    stage.peace()


def test_a_rank_is_told_the_last_two_outcomes(monkeypatch: Patch) -> None:
    real = Keeper._rank_joined

    def forgetful(self: Keeper, rank: int, options: Any) -> list[e.Effect]:
        self.ledger = msgspec.structs.replace(self.ledger, before=None)
        return real(self, rank, options)

    shown(
        two_outcomes_while_a_rank_is_not_connected,
        lambda patch: patch.setattr(Keeper, "_rank_joined", forgetful),
        "I2",
        monkeypatch,
    )
