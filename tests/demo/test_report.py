"""What is read out of two runs' events: equal or not, and what each failure cost."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from jaxft.demo.plan import plan_demo
from jaxft.demo.report import Report, summarise, table, verdict
from tests.demo.recorded import KILL_T, Script, disturbed, run_log, strike, undisturbed


def _options(**given: Any) -> Any:
    asked: dict[str, Any] = {"hosts": 2, "code": "1+1", "steps": 6, "every": 2, "seed": 0}
    asked |= {"elastic": False, "fallback": False, "fail": ["rank@4"]}
    return plan_demo(**(asked | given))


def _report(script: Script, *strikes: Any, **given: Any) -> Report:
    return summarise(_options(**given), run_log(undisturbed()), run_log(script, *strikes))


def test_a_recovered_rank_is_told_with_its_costs() -> None:
    report = _report(disturbed(), strike())
    assert report.passed
    assert report.bitwise_equal
    (failure,) = report.failures
    assert (failure.kind, failure.host, failure.at_step) == ("rank", "host1", 4)
    assert (failure.restored_step, failure.lost_steps, failure.source) == (3, 1, "own")
    assert failure.detect_s == pytest.approx(0.25)
    assert failure.restore_s == pytest.approx(0.2)
    assert failure.resume_s == pytest.approx(3.25)
    assert report.snapshots == {"taken": 3, "protected": 3, "skipped": 0}
    assert report.orbax_restores == 0


def test_the_json_has_what_it_promises() -> None:
    report = _report(disturbed("orbax"), strike())
    told = json.loads(json.dumps(report.to_json()))
    assert {"hosts", "code", "steps", "bitwise_equal", "failures", "snapshots"} <= set(told)
    assert told["orbax_restores"] == 1
    assert set(told["snapshots"]) == {"taken", "protected", "skipped"}
    assert set(told["failures"][0]) == {
        "kind",
        "host",
        "at_step",
        "restored_step",
        "lost_steps",
        "source",
        "detect_s",
        "restore_s",
        "resume_s",
    }


def test_what_save_took_of_training_is_told() -> None:
    report = _report(disturbed(), strike())
    assert report.stall_ms == {"median": 2.0, "most": 30.1}
    assert "save took 2.0 ms of training (median)" in verdict(report)


def test_an_smp_that_comes_back_loses_nothing() -> None:
    script = undisturbed()
    script.t = KILL_T + 0.5
    script.say("smp_died", "host1", pid=66)
    script.t = KILL_T + 1.0
    script.say("smp_restarted", "host1", pid=77)
    script.t = KILL_T + 2.0
    script.snapshot(3, 6)
    report = _report(script, strike("smp"), fail=["smp@4"])
    (failure,) = report.failures
    assert (failure.restored_step, failure.lost_steps, failure.source) == (4, 0, "own")
    assert (failure.detect_s, failure.resume_s) == (0.5, 2.0)
    assert report.passed


def test_one_bit_of_one_loss_of_a_step_that_was_run_again_is_seen() -> None:
    script = disturbed()
    again = [e for e in script.events if e["event"] == "step" and e["step"] == 4][-1]
    again["bits"] = (again["loss"] + 1e-15).hex()
    report = _report(script, strike())
    assert not report.bitwise_equal
    assert not report.passed
    assert "step 4 on host1" in report.differences[0]


def test_other_bytes_at_the_end_are_seen() -> None:
    script = disturbed()
    script.events[-1]["digest"] = {"['w'][1:2]": "b" * 32}
    report = _report(script, strike())
    assert not report.passed
    assert "last states differ" in report.differences[0]


def test_a_state_that_is_not_told_whole_is_not_equal() -> None:
    script = disturbed()
    del script.events[-1]
    assert not _report(script, strike()).passed


def test_replicas_that_differ_are_not_equal() -> None:
    script = disturbed()
    script.events[-1]["digest"] = {"['w'][0:1]": "b" * 32}
    assert "replicas of" in _report(script, strike()).differences[0]


def test_a_run_that_failed_or_stopped_early_does_not_pass() -> None:
    short = undisturbed()
    short.events = [e for e in short.events if e.get("step") != 6]
    report = summarise(_options(fail=["none"]), run_log(undisturbed()), run_log(short, status=3))
    assert not report.passed
    assert "status 3" in report.differences[0]
    assert "never did step 6" in report.differences[1]


def test_a_failure_that_was_not_recovered_does_not_pass() -> None:
    report = _report(undisturbed(), strike())
    assert report.failures[0].resume_s is None
    assert not report.passed
    assert "rank (host1) was not recovered" in verdict(report)


def _shrunk(saved: str, restored: str, loss: float) -> Script:
    """Goes on from step 3 in a generation of one host, with these digests."""
    script = disturbed()
    common = {"host": "host0", "role": "rank", "pid": 1, "event": "digest", "step": 3}
    parts: list[dict[str, Any]] = [
        {"t": KILL_T - 1, "generation": 1, "when": "saved", "of": None, "digest": {"w": saved}},
        {"t": KILL_T + 3, "generation": 2, "when": "restored", "of": 1, "digest": {"w": restored}},
    ]
    script.events += [common | part for part in parts]
    for event in script.events:
        if event["event"] == "step" and event["t"] > KILL_T:
            event |= {"loss": event["loss"] * (1 + loss), "bits": "other"}
    return script


def test_a_smaller_world_is_judged_by_what_it_restored() -> None:
    same, other = "1" * 32, "2" * 32
    good = _report(_shrunk(same, same, 1e-4), strike("host"), elastic=True, fail=["host@4"])
    assert good.passed
    assert good.bitwise_equal
    assert good.loss_difference_max == pytest.approx(1e-4)
    changed = _report(_shrunk(same, other, 1e-4), strike("host"), elastic=True, fail=["host@4"])
    assert not changed.bitwise_equal
    assert not changed.passed
    far = _report(_shrunk(same, same, 0.1), strike("host"), elastic=True, fail=["host@4"])
    assert far.bitwise_equal
    assert not far.passed


def test_what_nobody_saved_cannot_be_restored() -> None:
    script = _shrunk("1" * 32, "1" * 32, 0.0)
    script.events = [e for e in script.events if e.get("when") != "saved"]
    report = _report(script, strike("host"), elastic=True, fail=["host@4"])
    assert "nobody said was saved" in report.differences[0]


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    report = _report(disturbed("rebuilt"), strike("hosts", hosts=("host0", "host1")))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(report))
    text = console.export_text()
    assert " parity " in text
    assert "step 3" in text
    assert "3.25 s" in text
    assert max(map(len, text.splitlines())) <= 80
