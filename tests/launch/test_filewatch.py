"""Waking up when a file is written to."""

from __future__ import annotations

import select
import threading
import time
from pathlib import Path

import pytest

from jaxft.errors import StoreError
from jaxft.launch import sqlite
from jaxft.launch.filewatch import FileWatch, Writes
from jaxft.launch.sqlite import SqliteStore

LONG_S = 20.0


def waited_s(watch: FileWatch, timeout_s: float) -> float:
    began_s = time.monotonic()
    watch.wait(timeout_s)
    return time.monotonic() - began_s


def test_a_write_ends_the_wait_and_silence_does_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a")
    watch = FileWatch(path, poll_s=LONG_S)
    watch.clear()
    assert waited_s(watch, 0.05) >= 0.04
    path.write_bytes(b"b")
    assert waited_s(watch, LONG_S) < LONG_S / 2
    watch.clear()
    assert waited_s(watch, 0.05) >= 0.04


def test_a_file_that_is_missing_or_replaced_is_looked_at_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "file"
    watch = FileWatch(path, poll_s=0.05)
    watch.clear()
    assert waited_s(watch, LONG_S) < LONG_S / 2
    for content in (b"first", b"second"):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        watch.clear()
        watch.clear()
        assert waited_s(watch, 0.05) >= 0.04
        path.write_bytes(b"more")
        assert waited_s(watch, LONG_S) < LONG_S / 2


def test_writes_to_any_of_several_files_are_heard_of(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.touch()
    writes = Writes(paths)
    poller = select.poll()
    poller.register(writes.fileno(), select.POLLIN)
    for path in paths:
        assert not poller.poll(0)
        with path.open("ab") as file:
            file.write(b"line")
        assert poller.poll(LONG_S * 1000)
        writes.clear()
    writes.close()
    writes.close()


def test_writes_to_what_is_not_there_are_looked_for(tmp_path: Path) -> None:
    assert Writes([tmp_path / "missing"]).fileno() == -1


def test_a_write_that_is_heard_of_before_it_is_to_be_seen_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "POLL_S", LONG_S)
    mine, other = (SqliteStore(tmp_path / "store", job="j") for _ in range(2))
    mine.read()
    ended = threading.Event()

    def write() -> None:
        with other._transaction("IMMEDIATE"):
            other._write({"key": b"1"}, [])
            with (tmp_path / "store-wal").open("r+b") as log:
                first = log.read(1)
                log.seek(0)
                log.write(first)
            assert ended.wait(LONG_S)

    writer = threading.Thread(target=write)
    writer.start()
    assert not mine.changed(0.05)
    ended.set()
    began_s = time.monotonic()
    assert mine.changed(LONG_S)
    assert time.monotonic() - began_s < LONG_S / 2
    writer.join()
    mine.close()
    other.close()


def test_a_write_that_is_still_to_be_seen_beside_another_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write was heard of and read. A second one was heard of meanwhile, and is not to be seen
    yet; when it is, nobody hears of that."""
    monkeypatch.setattr(sqlite, "POLL_S", LONG_S)
    mine, other = (SqliteStore(tmp_path / "store", job="j") for _ in range(2))
    lease = mine.lease("hosts/a", b"", 60.0)
    mine.read()
    assert not mine.changed(0.0)
    other.commit({}, {"key": b"1"})
    assert mine.changed(LONG_S)
    mine.read()
    with other._transaction("IMMEDIATE"):
        other._write({}, ["hosts/a"])
        with (tmp_path / "store-wal").open("r+b") as log:
            first = log.read(1)
            log.seek(0)
            log.write(first)
        assert not mine.changed(0.0)
        with pytest.raises(StoreError):
            lease.renew()
    assert mine._seen.watch is not None
    mine._seen.watch.clear()
    assert not lease.renew()
    assert mine.changed(LONG_S)
    mine.close()
    other.close()


def test_a_change_in_the_store_is_noticed_without_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "POLL_S", LONG_S)
    mine, other = (SqliteStore(tmp_path / "store", job="j") for _ in range(2))
    for number in range(3):
        mine.read()
        assert not mine.changed(0.05)
        timer = threading.Timer(0.05, lambda n=number: other.commit({}, {"key": b"%d" % n}))
        timer.start()
        began_s = time.monotonic()
        assert mine.changed(LONG_S)
        assert time.monotonic() - began_s < LONG_S / 2
        timer.join()
    mine.close()
    other.close()


def test_waits_that_follow_each_other_look_for_nothing_and_miss_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "POLL_S", LONG_S)
    mine, other = (SqliteStore(tmp_path / "store", job="j") for _ in range(2))
    mine.read()
    assert not mine.changed(0.0)
    looks, look = [], mine._moved
    monkeypatch.setattr(mine, "_moved", lambda: looks.append(True) or look())
    for _ in range(3):
        assert not mine.changed(0.01)
    assert not looks
    other.commit({}, {"key": b"1"})
    for _ in range(2):
        assert mine.changed(LONG_S)
    mine.read()
    other.commit({}, {"key": b"2"})
    assert mine.changed(0.0)
    mine.read()
    mine.commit({}, {"key": b"3"})
    assert mine.changed(0.0)
    mine.close()
    other.close()
