from __future__ import annotations

from typing import Any

import pytest

from jaxft.group.absence import mind_absence

TIMES: dict[str, Any] = {"grace_s": 60.0, "patience_s": 300.0}


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
