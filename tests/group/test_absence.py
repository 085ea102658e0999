from __future__ import annotations

from typing import Any

import pytest

from jaxft.group.absence import mind_absence

TIMES: dict[str, Any] = {"grace_s": 60.0, "patience_s": 300.0, "peer_s": 5.0, "unheard_s": {}}


@pytest.mark.parametrize(
    ("silent_s", "error", "running", "action"),
    [
        (1.0, "", True, "go on"),
        (60.0, "no answer", True, "go on"),
        (61.0, "no answer", True, "kill"),
        (61.0, "", True, "kill"),
        (361.0, "no answer", True, "kill"),
        (360.0, "no answer", False, "go on"),
        (361.0, "no answer", False, "give up"),
        (361.0, "", False, "go on"),
    ],
)
def test_what_is_done_without_the_store(
    silent_s: float, error: str, running: bool, action: str
) -> None:
    absence = mind_absence(silent_s, error, running=running, **TIMES)
    assert absence.action == action
    assert error in absence.reason


def test_the_reason_says_how_long_and_what_next() -> None:
    absence = mind_absence(61.0, "database is locked", running=True, **TIMES)
    assert absence.reason == (
        "the store has not answered for 61 s: the ranks are killed (database is locked); it is "
        "waited for, 300 s at most"
    )
    assert mind_absence(1.0, "", running=True, **TIMES).reason == ""


@pytest.mark.parametrize(
    ("error", "unheard_s", "action"),
    [
        ("no answer", {"host1": 5.1}, "kill"),
        ("no answer", {"host1": 5.0}, "go on"),
        ("", {"host1": 50.0}, "go on"),
    ],
)
def test_without_the_store_every_member_has_to_answer(
    error: str, unheard_s: dict[str, float], action: str
) -> None:
    times = {**TIMES, "unheard_s": unheard_s}
    absence = mind_absence(20.0, error, running=True, **times)
    assert absence.action == action
    assert ("host1" in absence.reason) is (action == "kill")
