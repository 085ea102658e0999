"""The event log: lines that a reader can follow while they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxft.errors import ConfigError
from jaxft.status.events import EventLog, EventReader


def test_a_reader_sees_each_event_once_and_in_order(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    one = EventLog(tmp_path, host="host0", role="rank")
    two = EventLog(tmp_path, host="host1", role="agent")
    one.emit("first", step=1)
    two.emit("second", pid=7)
    one.emit("third")
    told = reader.poll()
    assert [event["event"] for event in told] == ["first", "second", "third"]
    assert told[1]["pid"] == 7
    assert reader.poll() == []
    two.emit("fourth")
    assert [event["event"] for event in reader.poll()] == ["fourth"]
    one.close()
    two.close()


def test_what_is_not_whole_is_left_for_later_and_what_is_broken_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "host0-rank-1.jsonl"
    path.write_bytes(b'{"t": 1, "event": "a"}\nbroken\n{"t": 2, "ev')
    reader = EventReader(tmp_path)
    assert [event["event"] for event in reader.poll()] == ["a"]
    with path.open("ab") as file:
        file.write(b'ent": "b"}\n')
    assert [event["event"] for event in reader.poll()] == ["b"]


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    log = EventLog(None, host="host0", role="rank")
    log.emit("lost")
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    log = EventLog(tmp_path, host="host0", role="rank")
    assert log._fd is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    os.close(full)
    log.emit("lost")
    log.close()


def test_a_directory_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match="JAXFT_EVENTS=/proc/no cannot be used"):
        EventLog(Path("/proc/no"), host="host0", role="rank")
