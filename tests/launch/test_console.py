"""What a person sees: colours where they are wanted, and the end of a job that has failed."""

from __future__ import annotations

import io
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from jaxft.group.records import Fault, JobEnd
from jaxft.launch.console import Console, colour
from jaxft.launch.summary import FAILURES_SHOWN, summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prefixes_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour(Terminal(), 1, "[a 1]") == "\x1b[33m[a 1]\x1b[0m"
    assert colour(Terminal(), 1, "[a 1]") != colour(Terminal(), 2, "[a 1]")
    assert colour(io.StringIO(), 1, "[a 1]") == "[a 1]"
    monkeypatch.setenv("NO_COLOR", "1")
    assert colour(Terminal(), 1, "[a 1]") == "[a 1]"


def test_an_agents_words_have_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    Console("a", quiet=True).say("it goes on")
    time, words = capsys.readouterr().err.split(" jaxft ")
    assert datetime.now() - datetime.fromisoformat(time) < timedelta(minutes=1)
    assert words == "[a] it goes on\n"


def failures(count: int) -> tuple[Fault, ...]:
    return tuple(
        Fault(generation=number, host="a", kind="rank_exited", detail=f"failure {number}")
        for number in range(1, count + 1)
    )


def test_the_end_says_why_and_what_came_first() -> None:
    end = JobEnd(
        kind="script",
        reason="rank 1 on a failed; 3 times in a row",
        generation=3,
        host="a",
        rank=1,
        tail="reading\nValueError: no such data",
        failures=failures(3),
    )
    assert list(summary(end, Path("/logs"))) == [
        "jaxft: error: rank 1 on a failed; 3 times in a row",
        "  what happened, the first of 3 on top:",
        "    generation 1: failure 1",
        "    generation 2: failure 2",
        "    generation 3: failure 3",
        "  the last lines of rank 1 on a, generation 3:",
        "  | reading",
        "  | ValueError: no such data",
        "  logs: /logs",
    ]


def test_of_many_failures_the_first_and_the_last_are_shown() -> None:
    said = list(summary(JobEnd(kind="world", reason="r", failures=failures(15)), Path("/logs")))
    shown = [line.split()[-1] for line in said if "failure " in line]
    assert shown == ["1", *map(str, range(16 - FAILURES_SHOWN + 1, 16))]
    assert "    ... 5 more ..." in said
    few = list(summary(JobEnd(kind="world", reason="r", failures=failures(1)), Path("/logs")))
    assert few == ["jaxft: error: r", "  logs: /logs"]
