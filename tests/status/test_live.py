"""The live view, drawn from recorded events."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jaxft.status.live import Display, RunView
from tests.demo.recorded import KILL_T, Script, disturbed

_STRUCK = {
    "t": KILL_T,
    "host": "host1",
    "role": "demo",
    "event": "struck",
    "what": "the rank",
    "target": "host1",
    "step": 4,
}


def _draw(script: Script, until: int | None = None) -> str:
    view = RunView("disturbed", 6)
    for event in script.events[:until]:
        view.update(event)
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _row(drawn: str, host: str) -> list[str]:
    return next(line.split() for line in drawn.splitlines() if line.startswith(host))


def _with_strike() -> Script:
    script = disturbed()
    place = next(i for i, event in enumerate(script.events) if event["event"] == "fault")
    script.events.insert(place, _STRUCK)
    return script


def test_nothing_has_happened_yet() -> None:
    assert "step 0/6" in _draw(Script())


def test_each_host_has_a_row_with_state_rank_step_and_snapshot() -> None:
    script = _with_strike()
    before = script.events.index(_STRUCK)
    assert _row(_draw(script, before), "host1") == ["host1", "training", "111", "4", "3", "-"]
    assert _row(_draw(script), "host1") == ["host1", "done", "211", "6", "3", "-"]


def test_failures_and_recoveries_are_counted_and_told() -> None:
    drawn = _draw(_with_strike())
    assert "failures 1, recovered 1" in drawn
    assert "SIGKILL to the rank of host1 after step 4" in drawn
    assert "restoring step 3 from own memory" in drawn


def test_a_lost_host_is_shown_as_lost_until_it_is_back() -> None:
    script = Script()
    script.form(1)
    script.step(1)
    script.say("host_lost", "host1")
    assert _row(_draw(script), "host1") == ["host1", "lost", "-", "-", "-", "-"]
    script.form(2)
    assert _row(_draw(script), "host1")[1] == "loading"


def test_the_same_news_from_every_host_is_told_once() -> None:
    assert _draw(_with_strike()).count("restored step 3") == 1


@pytest.mark.parametrize("hosts", [1, 12])
def test_it_fits_80_columns(hosts: int) -> None:
    script = Script()
    names = tuple(f"host{number}" for number in range(hosts))
    script.say("generation_formed", number=1, hosts=list(names), reason="a long reason " * 20)
    drawn = _draw(script)
    assert max(map(len, drawn.splitlines())) <= 80
    assert [line.split()[0] for line in drawn.splitlines() if line.startswith("host")][1:] == [
        *names
    ]


def test_without_a_terminal_each_thing_is_a_line() -> None:
    out = io.StringIO()
    with Display(Console(width=80, file=out)) as display:
        display.show(RunView("disturbed", 6))
        for event in _with_strike().events:
            display.update(event)
    lines = out.getvalue().splitlines()
    assert lines[0] == "disturbed"
    assert any("step 5: loss 4.5000" in line for line in lines)
    assert sum("restored step 3" in line for line in lines) == 1
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_runs_follow_each_other() -> None:
    out = io.StringIO()
    console = Console(width=80, file=out, force_terminal=True)
    with Display(console) as display:
        display.show(RunView("reference", 6))
        for event in disturbed().events:
            display.update(event)
        display.show(RunView("disturbed", 6))
    assert "reference" in out.getvalue()
    assert "disturbed" in out.getvalue()
