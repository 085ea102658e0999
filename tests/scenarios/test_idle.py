"""A world in which nothing is under way says little, and hears at once what it needs to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxft.group import events as e
from jaxft.group import host, keeper
from jaxft.group.messages import Directive, Status
from tests.scenarios.stage import Stage

Patch = pytest.MonkeyPatch
LONG_S = 20.0


def idle(hosts: int = 4) -> Stage:
    """Its next snapshot is far away."""
    stage = Stage(hosts=hosts, code="2+1", every_steps=10**6)
    stage.commits(1)
    stage.run(2.0)
    return stage


def messages(stage: Stage, run_s: float) -> int:
    before = stage.sim.messages
    stage.run(run_s)
    return stage.sim.messages - before


def core(stage: Stage, name: str) -> Any:
    smp = stage.host(name).smp
    assert smp is not None
    return smp.core


@pytest.mark.parametrize("hosts", [3, 6])
def test_signs_of_life_are_all_that_is_said(hosts: int) -> None:
    """A directive to each host, and its answer, twice within a silence."""
    stage = idle(hosts)
    timing = stage.sim.setup.timing
    said = messages(stage, LONG_S)
    assert said / (hosts - 1) <= 1.1 * 2 * LONG_S / timing.heartbeat_s
    assert said / (hosts - 1) >= 2 * LONG_S / (0.5 * timing.silence_s)


def test_time_passes_seldom_and_the_hosts_need_none_of_their_own(monkeypatch: Patch) -> None:
    stage = idle()
    heartbeat_s = stage.sim.setup.timing.heartbeat_s
    ticks: list[str] = []
    real = host.HostCore.handle

    def counting(self: host.HostCore, event: Any, now_s: float) -> Any:
        if type(event).__name__ == "Ticked":
            ticks.append(self.host)
        return real(self, event, now_s)

    monkeypatch.setattr(host.HostCore, "handle", counting)
    stage.run(LONG_S)
    assert set(ticks) == {"a"}
    assert len(ticks) <= 1.1 * LONG_S / heartbeat_s


def test_a_holder_that_hears_no_root_does_not_let_time_pass_all_the_time() -> None:
    stage = idle()
    b = core(stage, "b")
    b.keeper.generation = msgspec.structs.replace(
        b.keeper.generation,
        hosts=tuple(one for one in b.keeper.generation.hosts if one.host != "b"),
        holders=tuple(one for one in b.keeper.generation.hosts if one.host == "b"),
    )
    now_s = stage.sim.now + 100.0
    b.handle(e.Ticked(), now_s)
    assert b.keeper.is_calm
    assert b.due_s(now_s) > now_s


def test_a_host_that_was_cut_off_is_told_at_once_when_it_is_back() -> None:
    stage = idle()
    for other in "acd":
        stage.cut("b", other)
    stage.run(3 * stage.sim.setup.timing.silence_s)
    assert core(stage, "b").keeper._held
    assert core(stage, "a").root.is_calm(stage.sim.now)
    stage.sim.blocked.clear()
    stage.run(keeper.RESEND_S + 0.1)
    assert not core(stage, "b").keeper._held


def test_an_answer_that_is_found_late_counts_from_when_the_root_spoke() -> None:
    """An SMP leaves answers that say nothing new until it speaks again: a host is not silent for
    any longer than it says nothing."""
    stage = idle()
    a = core(stage, "a").root
    lost = stage.hold(Status, of="b")
    heard_s, spoke_s = a.heard_s["b"], a.sent_s
    stage.until(lambda: a.sent_s > spoke_s and lost.kept, "b has answered")
    spoke_s = a.sent_s
    now_s = stage.sim.now + a.timing.heartbeat_s
    status = lost.kept[-1][0].body
    a.heard("b", status, now_s)
    assert heard_s < a.heard_s["b"] == spoke_s < now_s
    a.heard("b", msgspec.structs.replace(status, version=status.version + 1, settled=False), now_s)
    assert a.heard_s["b"] == now_s


def test_a_decision_that_one_has_not_heard_is_said_again_soon() -> None:
    stage = idle()
    lost = stage.hold(Directive, to="b")
    a = core(stage, "a")
    a.root._direct(stage.sim.now, interval=7)  # which is told to nobody
    stage.run(keeper.RESEND_S + 0.3)
    assert core(stage, "c").keeper.directive.interval == 7
    assert not a.root.is_calm(stage.sim.now)
    lost.drop()
    stage.run(keeper.RESEND_S + 0.1)
    assert core(stage, "b").keeper.directive.interval == 7
    stage.run(1.0)
    assert a.root.is_calm(stage.sim.now)


def test_a_status_that_is_lost_is_said_again_soon() -> None:
    """The snapshot that is under way is not calm, so the root asks, and is answered."""
    stage = Stage(every_steps=3)
    stage.commits(1)
    lost = stage.hold(Status, of="b")
    stage.until(stage.slot("b", 1, "coded"), "b codes")
    stage.run(0.05)
    lost.drop()
    began_s = stage.sim.now
    stage.until(stage.knows("b", 1), "b learns the outcome")
    assert stage.sim.now - began_s < 2 * keeper.RESEND_S
