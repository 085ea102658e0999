"""A checkpoint gets its name only while its generation is the store's newest, and goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from jaxft.checkpoint import RECORD, Record
from jaxft.errors import SnapshotLost, StoreError
from jaxft.group.manifest import SnapshotId
from jaxft.group.placement import form_groups
from jaxft.group.records import END, FAULT, GENERATION, HOST, Fault, HostRecord, JobEnd
from jaxft.group.world import Code, Generation, Member, encode
from jaxft.launch.ended_run import clear_ended_run
from jaxft.launch.floor import (
    known_generation,
    remember,
    remember_generation,
    stored_generation,
)
from jaxft.launch.standing import check_current
from jaxft.launch.stores import open_store


def generation(number: int) -> Generation:
    member = Member("a", "agent", "arena", "ipc:///a,ipc:///b")
    groups = form_groups(1, Code())
    return Generation(
        job="j", number=number, nonce=f"n{number}", hosts=(member,), groups=groups, code=Code()
    )


def test_a_generation_that_was_replaced_or_has_ended_commits_nothing(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    store = open_store(url, job="j")
    try:
        with pytest.raises(SnapshotLost, match="the store has none"):
            check_current(url, "j", 1, "n1")
        store.commit({}, {GENERATION: encode(generation(1))})
        check_current(url, "j", 1, "n1")
        check_current("", "j", 7, "no store")
        with pytest.raises(SnapshotLost, match="the store has generation 1"):
            check_current(url, "j", 1, "another")
        fault = Fault(generation=1, host="a", kind="host_lost", detail="a is lost")
        store.commit({}, {f"{FAULT}1": encode(fault)})
        with pytest.raises(SnapshotLost, match="generation 1 has ended: a is lost"):
            check_current(url, "j", 1, "n1")
        store.commit({}, {GENERATION: encode(generation(2))})
        with pytest.raises(SnapshotLost, match="the store has generation 2"):
            check_current(url, "j", 1, "n1")
    finally:
        store.close()
    with pytest.raises(StoreError):
        check_current("sqlite:///no/such/store.db", "j", 2, "n2")


def test_where_checkpoints_are_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path))
    assert stored_generation("j") == 0
    remember("j", "")
    assert list(tmp_path.iterdir()) == []
    for step, generation_number, job in ((10, 5, "j"), (11, 9, "k")):
        checkpoint = tmp_path / "ckpt" / str(step)
        checkpoint.mkdir(parents=True)
        record = Record(id=SnapshotId(generation_number, 0, "n"), step=step, job=job)
        (checkpoint / RECORD).write_bytes(msgspec.json.encode(record))
    remember("j", str(tmp_path / "ckpt"))
    assert stored_generation("j") == 5
    assert stored_generation("k") == 0


def test_numbers_of_generations_go_on_where_the_store_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path))
    assert known_generation("j") == 0
    for number in (7, 5):
        remember_generation("j", number)
        assert known_generation("j") == 7
    assert known_generation("k") == 0
    [note] = tmp_path.iterdir()
    note.write_text("torn")
    assert known_generation("j") == 0
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "away"))
    remember_generation("j", 1)  # the next run counts from where the store is
    assert known_generation("j") == 0


def test_a_run_that_follows_one_that_was_told_to_end_waits_for_its_hosts_to_go(
    tmp_path: Path,
) -> None:
    """Else it would end with them."""
    store = open_store(f"sqlite://{tmp_path}/store.db", job="j")
    record = HostRecord(
        host="a", agent="1", arena="m", address="ipc:///a", coordinator="", lease_s=9.0
    )
    for kind, gone in (("told", True), ("script", False)):
        lease = store.lease(f"{HOST}a", encode(record), 30.0)
        store.commit({}, {END: encode(JobEnd(kind=kind, reason="over"))})
        timer = threading.Timer(0.3, lease.release)
        timer.start()
        clear_ended_run(store)
        assert (END not in store.read()) == gone
        timer.join()
    store.close()
