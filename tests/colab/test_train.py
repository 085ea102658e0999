"""The notebook that loses its kernel twice, and its memory once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.colab import notebooks

Event = dict[str, Any]


def lives_of(log: Path) -> list[list[Event]]:
    """The log's events, a list for each start of the training."""
    lives: list[list[Event]] = []
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            lives.append([])
        lives[-1].append(event)
    return lives


def all_of(kind: str, events: list[Event], name: str) -> dict[int, Any]:
    return {event["step"]: event.get(name) for event in events if event["event"] == kind}


def test_a_kernel_that_dies_goes_on_from_memory_and_without_memory_from_storage(
    folder: Path,
) -> None:
    notebook = notebooks.read(notebooks.ROOT / "colab" / "train.ipynb")
    assert notebooks.execute(notebook, folder) == ["crash", "memory"]
    assert notebooks.complaints(notebook) == []

    first, second, third = lives_of(folder / "log.jsonl")
    before = first + second
    saved = all_of("snapshot", before, "digest")
    assert [life[0]["source"] for life in (first, second, third)] == ["nothing", "own", "orbax"]
    # From memory: the newest snapshot, bit for bit, and three steps are lost.
    assert second[0]["step"] == max(all_of("snapshot", first, "digest")) == 101
    assert second[0]["digest"] == saved[101]
    assert "restored step 101 in" in notebooks.printed(notebook, "memory")
    # From storage: the newest checkpoint, bit for bit. (Memory usually had a newer snapshot.)
    newest = max(all_of("stored", before, "step"))
    assert third[0]["step"] == newest <= max(saved)
    assert third[0]["digest"] == saved[newest]
    assert "source: orbax" in notebooks.printed(notebook, "storage")
    # What was done again was the same.
    losses: dict[int, float] = {}
    for life in (first, second, third):
        for step, loss in all_of("step", life, "loss").items():
            assert losses.setdefault(step, loss) == loss
    assert list(losses) == list(range(1, len(losses) + 1))
    assert f"{len(losses)} equal losses, and equal bits" in notebooks.printed(notebook, "compare")
    assert losses[len(losses)] < losses[1] / 2

    assert notebooks.pictures(notebook) == ["plot"]
    assert (folder / "losses.png").stat().st_size > 10_000
    notebooks.wait_until_gone(folder)
