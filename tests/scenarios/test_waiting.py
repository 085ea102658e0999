"""Whom the root waits for, and for how long; and what all ranks have to agree on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxft.group import events as e
from jaxft.group import root
from jaxft.group.commit import Decision, decide
from jaxft.group.keeper import Keeper
from jaxft.group.messages import Directive, Ledger, ManifestNotice, Outcome, Plan, Status
from jaxft.group.root import Root
from jaxft.group.timing import Timing
from jaxft.schedule import Schedule
from tests.scenarios.stage import Held, Stage, shown
from tests.sim.oracle import Oracle

Patch = pytest.MonkeyPatch


def _says_nothing(stage: Stage, name: str, generation: int) -> Held:
    """The SMP of this host is not heard by the root in this generation."""
    return Held(
        stage.sim,
        lambda envelope, address: (
            envelope.sender == name
            and envelope.generation == generation
            and isinstance(envelope.body, Status)
        ),
    )


# ------------------------------------------------------------------ memory that may come back


def hosts_with_newer_memory_come_back() -> None:
    """c and d stand still: what a and b have is too little for what they know to be committed."""
    stage = Stage(hosts=4, code="3+1")
    stage.commits(2)
    told = stage.sim.checker.told
    stage.host("d").pause()
    stage.pause("c")
    stage.until(lambda: stage.number == 2)
    stage.run(0.3)
    stage.wake("c")
    stage.wake("d")
    stage.until(stage.settled(3), "generation 3 settles")
    stage.keep(stage.base() == told, "lost", f"{stage.base()} is restored instead of {told}")
    stage.peace()


def test_newer_committed_memory_is_waited_for(monkeypatch: Patch) -> None:
    real = Root.__init__

    def hasty(self: Root, generation: Any, ledger: Any, now_s: float, timing: Timing) -> None:
        real(self, generation, ledger, now_s, msgspec.structs.replace(timing, rejoin_s=0.0))

    shown(
        hosts_with_newer_memory_come_back,
        lambda patch: patch.setattr(Root, "__init__", hasty),
        "lost",
        monkeypatch,
    )


# ------------------------------------------------------------------ silence


def a_host_is_silent_while_recovering() -> None:
    """The SMP of c says nothing in generation 2. Once that is over, it is as good as ever."""
    stage = Stage()
    stage.commits(1)
    _says_nothing(stage, "c", 2)
    stage.fault()
    stage.until(lambda: stage.number == 2)
    stage.until(lambda: stage.number == 3, "that generation 2 is given up")
    stage.peace()


def _patient(patch: Patch) -> None:
    patch.setattr(Root, "_silent", lambda self, members, now_s: {})


def test_a_host_that_is_silent_while_recovering_is_a_fault(monkeypatch: Patch) -> None:
    shown(a_host_is_silent_while_recovering, _patient, "progress", monkeypatch)


def _restored(stage: Stage, number: int) -> int:
    """How many ranks of this generation have said that they have restored."""
    ranks = [rank for rank in stage.sim.ranks() if rank.generation.number == number]
    return len([rank for rank in ranks if rank.verified is not None])


def a_holder_is_lost_while_it_codes() -> None:
    """Generation 3 goes on from a snapshot whose coding c has to finish, a host outside of it. All
    ranks have restored when c is lost."""
    stage = Stage(spares=1)
    stage.commits(1)
    late = stage.hold(ManifestNotice, to="c")
    stage.until(lambda: all(stage.slot(name, 1, "coded")() for name in "ab"))
    stage.pause("c")
    stage.until(lambda: stage.number == 2)
    stage.wake("c")
    stage.fault()
    stage.until(lambda: stage.number == 3)
    assert stage.members() == "abd"
    stage.stick("c")
    stage.until(lambda: _restored(stage, 3) > 0)
    late.drop()
    stage.until(lambda: _restored(stage, 3) == 3, "that all have restored")
    stage.run(0.3)
    stage.lose("c")
    stage.until(stage.settled(4), "generation 4 settles")
    assert isinstance(stage.sim.oracle, Oracle)
    stage.keep(stage.sim.oracle.reports[3] == ("c", "unreachable"), "words", "c is not silent")
    stage.peace()


def test_a_holder_that_is_silent_while_it_is_needed_is_a_fault(monkeypatch: Patch) -> None:
    shown(a_holder_is_lost_while_it_codes, _patient, "progress", monkeypatch)


def a_holder_never_answers() -> None:
    """c is a holder of generation 2, and its SMP has just died with its host."""
    stage = Stage(hosts=3, spares=1)
    stage.commits(1)
    stage.pause("c")
    stage.until(lambda: stage.number == 2)
    stage.wake("c")
    stage.run(0.2)
    stage.fault()
    stage.until(lambda: stage.number == 3)
    stage.lose("c")
    stage.until(stage.settled(3), "generation 3 settles")
    stage.peace()


def test_a_holder_that_stays_silent_is_left_out(monkeypatch: Patch) -> None:
    shown(a_holder_never_answers, _patient, "progress", monkeypatch)


def a_host_is_silent_while_a_snapshot_is_made() -> None:
    """c hears the root and is not heard; the others have begun snapshot 1."""
    stage = Stage()
    stage.commits(1)
    stage.until(lambda: all(stage.knows(name, 0)() for name in "abc"))
    stage.run(0.05)
    quiet = _says_nothing(stage, "c", 1)
    stage.until(stage.knows("c", 1), "that snapshot 1 is decided")
    quiet.drop()
    outcome = stage.sim.checker.outcomes[1, 1]
    stage.keep(not outcome.ok, "I2", "a silent host has taken part")
    stage.peace()
    stage.keep(stage.number == 1, "steady", "training has not gone on")


def test_a_host_that_is_silent_aborts_the_snapshot(monkeypatch: Patch) -> None:
    def patient(seq: int, reports: Any, silent: Any) -> Decision:
        return decide(seq, reports, {})

    shown(
        a_host_is_silent_while_a_snapshot_is_made,
        lambda patch: patch.setattr(root, "decide", patient),
        "progress",
        monkeypatch,
    )


def the_root_stands_still() -> None:
    """While all wait for the rank of c, the host of the root stands still for a while itself."""
    stage = Stage()
    stage.commits(1)
    stage.fault()
    stage.until(lambda: stage.number == 2 and stage.rank("c").generation.number == 2)
    stage.rank("c").stop()
    stage.run(0.3)
    stage.host("a").pause()
    stage.run(2.0)
    stage.wake("a")
    stage.run(0.5)
    stage.rank("c").wake()
    stage.until(lambda: stage.number > 2 or stage.settled(2)())
    stage.keep(stage.number == 2, "steady", "the root has blamed others for its own pause")
    stage.peace()


def test_a_root_that_stood_still_blames_nobody(monkeypatch: Patch) -> None:
    def unaware(self: Root, now_s: float) -> None:
        self._awake_s = now_s

    shown(
        the_root_stands_still,
        lambda patch: patch.setattr(Root, "_wake", unaware),
        "steady",
        monkeypatch,
    )


# ------------------------------------------------------------------ all ranks of a host


def one_rank_of_a_host_asks_late() -> None:
    stage = Stage(ranks=2)
    stage.commits(1)
    stage.until(stage.knows("b", 0))
    stage.rank("b", 1).stop()
    stage.run(0.8)
    stage.rank("b", 1).wake()
    stage.peace()


def test_a_slot_is_granted_once_all_ranks_have_asked(monkeypatch: Patch) -> None:
    real = Keeper._grant

    def hasty(self: Keeper) -> list[e.Effect]:
        with monkeypatch.context() as patch:
            patch.setattr(Keeper, "_rank_numbers", lambda self: sorted(self._asks))
            return real(self)

    shown(
        one_rank_of_a_host_asks_late,
        lambda patch: patch.setattr(Keeper, "_grant", hasty),
        "progress",
        monkeypatch,
    )


def a_rank_asks_before_all_have_restored() -> None:
    """The rank of b wants a slot in generation 2 while that of c restores."""
    stage = Stage()
    stage.commits(1)
    stage.fault()
    stage.until(lambda: stage.number == 2 and stage.rank("c").generation.number == 2)
    stage.rank("c").stop()
    stage.until(lambda: _restored(stage, 2) == 2)
    smp, rank = stage.host("b").smp, stage.rank("b")
    assert smp is not None
    smp.deliver(e.SlotWanted(rank.number, 0, 0, "plan", 64))
    stage.run(0.3)
    stage.rank("c").wake()
    stage.peace()


def test_a_slot_is_granted_once_the_lineage_is_written(monkeypatch: Patch) -> None:
    """What the generation goes on from stands in the ledger before it gives anything away."""

    def hasty(patch: Patch, name: str) -> None:
        real = getattr(Keeper, name)

        def settled_already(self: Keeper, *args: Any) -> list[e.Effect]:
            with monkeypatch.context() as short:
                short.setattr(Ledger, "settled", True)
                effects: list[e.Effect] = real(self, *args)
                return effects

        patch.setattr(Keeper, name, settled_already)

    def without(patch: Patch) -> None:
        hasty(patch, "_slot_wanted")
        hasty(patch, "_grant")

    shown(a_rank_asks_before_all_have_restored, without, "I3", monkeypatch)


# ------------------------------------------------------------------ one restore for all


def _skips(stage: Stage, *numbers: int) -> None:
    """These ranks do not call `restore` in generation 2."""
    stage.sim.skipping = {(2, number) for number in numbers}


def some_ranks_skip_the_restore() -> None:
    """The rank of b saves before it restores."""
    stage = Stage()
    stage.commits(1)
    _skips(stage, 1)
    stage.fault()
    stage.until(stage.settled(3), "generation 3 settles")
    assert 2 not in stage.sim.checker.bases
    stage.peace()


def test_ranks_that_do_not_all_restore_are_a_fault(monkeypatch: Patch) -> None:
    real = Root._judge

    def careless(self: Root, plan: Plan, now_s: float) -> list[e.Effect]:
        for name, status in self.statuses.items():
            if status.restored:
                self.statuses[name] = msgspec.structs.replace(status, restored="verified")
        return real(self, plan, now_s)

    shown(
        some_ranks_skip_the_restore,
        lambda patch: patch.setattr(Root, "_judge", careless),
        "I2",
        monkeypatch,
    )


def on_every_host_one_rank_skips_the_restore() -> None:
    stage = Stage(ranks=2)
    stage.commits(1)
    _skips(stage, 1, 3, 5)
    stage.fault()
    stage.until(stage.settled(3), "generation 3 settles")
    assert 2 not in stage.sim.checker.bases
    stage.peace()


def test_ranks_of_one_host_that_do_not_all_restore_are_a_fault(monkeypatch: Patch) -> None:
    real = Keeper.status

    def blurred(self: Keeper) -> Status:
        status = real(self)
        if status.restored == "mixed":
            status = msgspec.structs.replace(status, restored="skipped")
        return status

    shown(
        on_every_host_one_rank_skips_the_restore,
        lambda patch: patch.setattr(Keeper, "status", blurred),
        "I1",
        monkeypatch,
    )


# ------------------------------------------------------------------ when the next one is due


def steps_become_slower() -> None:
    """The root makes the interval shorter; b hears of that late, while it trains on."""
    stage = Stage(every_s=0.4)
    stage.commits(2)
    stage.sim.measured_s = 0.4
    stage.until(stage.writing("b", 2))
    late = stage.hold(Directive, to="b")
    stage.until(stage.knows("c", 2))
    stage.run(0.5)
    late.release()
    stage.peace()
    aborted = [detail for kind, detail in stage.sim.checker.announced if kind == "aborted"]
    stage.keep(not aborted, "steady", f"ranks did not agree when the next was due: {aborted}")


def test_the_interval_was_known_to_all_before_it_is_needed(monkeypatch: Patch) -> None:
    real = Schedule.__dict__["due_step"]

    def hasty(self: Schedule) -> int | None:
        """By the newest outcome, which not everybody may know."""
        known: dict[int, Outcome] = self.outcomes
        newest = known.get(self.seq - 1)
        if newest is None:
            due_step: int | None = real.fget(self)
            return due_step
        return newest.step + newest.interval

    shown(
        steps_become_slower,
        lambda patch: patch.setattr(Schedule, "due_step", property(hasty)),
        "steady",
        monkeypatch,
    )
