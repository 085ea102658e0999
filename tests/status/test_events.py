"""The event log: lines that a reader can follow while they are written."""

from __future__ import annotations

from pathlib import Path

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
