"""A host's record in the store: kept, brought up to date, lost, taken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import jaxft.group.records
from jaxft.errors import JobInUse, StoreError
from jaxft.group.manifest import SnapshotId
from jaxft.group.records import (
    END,
    FAULT,
    HOST,
    NUMBER,
    PROGRESS,
    Fault,
    HostRecord,
    JobEnd,
    Progress,
    read_view,
)
from jaxft.group.world import Member, encode
from jaxft.host.local import LocalListener
from jaxft.launch.agent import clear_ended_run
from jaxft.launch.probe import answering
from jaxft.launch.registration import (
    Registration,
    StoreWatcher,
    boot_s,
    machine_id,
    wait_for_name,
)
from jaxft.launch.store import Store
from jaxft.launch.stores import open_store

KEY = f"{HOST}a"
RECORD = HostRecord(host="a", agent="1", arena="m", address="ipc:///a", coordinator="127.0.0.1:1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(str(tmp_path / "store.db"), job="j")
    yield opened
    opened.close()


class Kept:
    """A record as an agent keeps it, and what its thread has said."""

    def __init__(self, store: Store, lease_s: float, look_s: float = 60.0) -> None:
        self.woken: list[bool] = []
        self.looks: list[float] = []
        self.long = False
        self.registration = Registration(store, lease_s)
        self.watcher = StoreWatcher(
            store,
            self.registration,
            look=self.look,
            look_s=look_s,
            wake=lambda: self.woken.append(True),
        )

    def look(self) -> bool:
        self.looks.append(time.monotonic())
        return self.long


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def registered(store: Store) -> HostRecord | None:
    entry = store.read(KEY).get(KEY)
    return None if entry is None else msgspec.msgpack.decode(entry.value, type=HostRecord)


def test_a_record_is_kept_changed_and_released(store: Store) -> None:
    kept = Kept(store, 0.5)
    registration = kept.registration
    registration.put(RECORD)
    assert registered(store) == RECORD
    deadline_s = time.monotonic() + 1.2
    while time.monotonic() < deadline_s:
        assert registered(store) == RECORD
        time.sleep(0.02)
    assert registration.silent_s() < 0.5
    later = msgspec.structs.replace(RECORD, left=4)
    registration.put(later)
    assert registered(store) == later
    kept.watcher.close()
    assert registered(store) is None
    registration.put(RECORD)
    assert registered(store) is None


def test_a_record_that_was_lost_is_written_again(store: Store) -> None:
    kept = Kept(store, 0.3)
    kept.registration.put(RECORD)
    store.commit({}, {}, [KEY])
    until(lambda: registered(store) == RECORD)
    kept.watcher.close()


def test_a_name_that_another_agent_took_is_not_fought_for(store: Store, tmp_path: Path) -> None:
    kept = Kept(store, 0.3)
    registration = kept.registration
    registration.put(RECORD)
    other = open_store(str(tmp_path / "store.db"), job="j")
    theirs = msgspec.structs.replace(RECORD, agent="2")
    lease = other.lease(KEY, encode(theirs), 60.0)
    until(lambda: bool(registration.taken_by))
    with pytest.raises(JobInUse, match=r"another agent \(2\) has registered as this host"):
        registration.silent_s()
    kept.watcher.close()
    assert registered(store) == theirs
    lease.release()
    other.close()


def test_a_watcher_sees_what_others_write(store: Store, tmp_path: Path) -> None:
    kept = Kept(store, 5.0, look_s=0.5)
    watcher = kept.watcher
    until(lambda: watcher.view() is not None)
    other = open_store(str(tmp_path / "store.db"), job="j")
    other.commit({}, {KEY: encode(RECORD)})
    until(lambda: (view := watcher.view()) is not None and "a" in view.hosts)
    other.close()
    (tmp_path / "store.db").rename(tmp_path / "away.db")
    until(lambda: watcher.error is not None)
    assert watcher.view() is None
    (tmp_path / "away.db").rename(tmp_path / "store.db")
    until(lambda: watcher.view() is not None)
    watcher.close()
    assert kept.woken


def test_a_thread_that_waits_for_the_store_ends_at_once(store: Store) -> None:
    kept = Kept(store, 60.0)
    kept.registration.put(RECORD)
    until(lambda: (view := kept.watcher.view()) is not None and "a" in view.hosts)
    began_s = time.monotonic()
    kept.watcher.close()
    assert time.monotonic() - began_s < 5.0
    assert registered(store) is None


def test_renewals_looks_and_all_else_need_one_wake_up(store: Store) -> None:
    kept = Kept(store, 0.9, look_s=0.45)
    kept.registration.put(RECORD)
    until(lambda: kept.watcher.view() is not None)
    time.sleep(0.3)
    began_s, looks, woken = time.monotonic(), len(kept.looks), len(kept.woken)
    time.sleep(1.5)
    passed_s = time.monotonic() - began_s
    # A renewal comes three times a lease, and each wake-up looks.
    assert len(kept.looks) - looks <= passed_s / 0.3 + 1
    assert len(kept.woken) == woken
    assert kept.registration.silent_s() < 0.9
    kept.watcher.close()


def test_looks_go_on_where_the_lease_is_long_and_wake_the_agent(store: Store) -> None:
    kept = Kept(store, 600.0, look_s=0.05)
    kept.registration.put(RECORD)
    until(lambda: len(kept.looks) > 5)
    until(lambda: kept.watcher.view() is not None)
    woken, kept.long = len(kept.woken), True
    until(lambda: len(kept.woken) > woken + 2)
    kept.watcher.close()


class Lost:
    """A store that takes a lease, and then loses each renewal but every third."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.read = store.read
        self.tries = 0
        self.all = False
        self.taken_s: list[float] = []

    def lease(self, key: str, value: bytes, ttl_s: float) -> Lost:
        self.real = self.store.lease(key, value, ttl_s)
        return self

    def renew(self) -> bool:
        self.tries += 1
        if self.all or self.tries % 3:
            raise StoreError("lost")
        self.taken_s.append(time.monotonic())
        return self.real.renew()

    def release(self) -> None:
        self.real.release()


def test_a_renewal_that_was_lost_is_tried_again_before_the_next_is_due(store: Store) -> None:
    lost = Lost(store)
    registration = Registration(lost, 1.2)  # type: ignore[arg-type]
    began_s = time.monotonic()
    registration.put(RECORD)
    assert registration.due_s - began_s >= 0.4
    began_s = time.monotonic()
    for _ in range(2):
        assert not registration.renew()
        assert registration.due_s - time.monotonic() <= 0.1
    assert registration.renew()
    assert registration.due_s - began_s <= 0.4 + time.monotonic() - began_s
    assert registration.silent_s() < 1.2


def test_for_how_long_the_store_is_back_after_leases_may_have_lapsed(store: Store) -> None:
    lost = Lost(store)
    registration = Registration(lost, 0.3)  # type: ignore[arg-type]
    registration.put(RECORD)
    assert registration.back_s() == math.inf
    lost.all = True
    until(lambda: not registration.renew() and registration.back_s() == 0.0)
    lost.all, lost.tries = False, 2
    before_s = boot_s()
    assert registration.renew()
    assert 0 < registration.back_s() <= boot_s() - before_s


def test_a_store_that_takes_no_renewal_for_a_lease_is_away(store: Store) -> None:
    """Its reads need not fail: on a network that swallows all, whoever waits for changes only hears
    of none."""
    lost = Lost(store)
    registration = Registration(lost, 0.3)  # type: ignore[arg-type]
    watcher = StoreWatcher(store, registration, look=lambda: False, look_s=60.0, wake=lambda: None)
    registration.put(RECORD)
    assert watcher.error is None
    lost.all = True
    until(lambda: watcher.error is not None)
    assert str(watcher.error) == "lost"
    assert watcher.view() is not None
    lost.all = False
    until(lambda: watcher.error is None)
    watcher.close()


def test_what_an_ended_run_left_is_cleared_and_numbers_go_on(store: Store) -> None:
    fault = Fault(generation=6, host="a", kind="rank_exited", detail="")
    end = JobEnd(kind="script", reason="no")
    store.commit({}, {END: encode(end), f"{FAULT}6": encode(fault)})
    store.commit({}, {KEY: encode(RECORD)})
    clear_ended_run(store)
    assert END in store.read()  # somebody of it is still there
    store.commit({}, {}, [KEY])
    clear_ended_run(store)
    assert set(store.read()) == {NUMBER}
    assert read_view(store.read()).next_number == 7


@pytest.mark.parametrize("kind", ["script", "world", "finished"])
def test_what_a_failed_run_had_protected_stays_on_record(store: Store, kind: str) -> None:
    end = JobEnd(kind=kind, reason="")
    newest = Progress(step=30, snapshot=SnapshotId(6, 3, "n"))
    older = Progress(step=20, snapshot=SnapshotId(5, 2, "n"))
    put = {END: end, f"{PROGRESS}5": older, f"{PROGRESS}6": newest, NUMBER: 6}
    store.commit({}, {key: encode(value) for key, value in put.items()})
    clear_ended_run(store)
    view = read_view(store.read())
    assert view.progress == ({} if kind == "finished" else {6: newest})
    assert (view.end, view.next_number) == (None, 7)


def test_a_probe_tells_a_listening_smp_from_a_dead_one(tmp_path: Path) -> None:
    listener = LocalListener(tmp_path / "private" / "c")
    there = Member("there", "", "", f"ipc://{listener.path},ipc:///b")
    gone = Member("gone", "", "", f"ipc://{tmp_path}/none,ipc:///b")
    closed = Member("closed", "", "", "tcp://127.0.0.1:1,tcp://127.0.0.1:2")
    assert answering([there, gone, closed]) == {"there": True, "gone": False, "closed": False}
    listener.close()


def test_a_fault_in_the_thread_that_keeps_the_lease_does_not_end_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[str] = []

    def look() -> bool:
        looks.append("looked")
        if len(looks) == 1:
            raise ValueError("odd")
        return False

    registration = Registration(store, 0.3)
    watcher = StoreWatcher(store, registration, look=look, look_s=60.0, wake=lambda: None)
    registration.put(RECORD)
    until(lambda: len(looks) > 3)  # once for each renewal
    assert "ValueError: odd" in caplog.text
    assert watcher.error is None
    assert watcher.view() is not None
    watcher.close()


def test_a_name_that_an_agent_on_another_machine_has_is_waited_for_and_not_taken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxft.group.records, "LAPSE_S", 0.0)
    said: list[str] = []
    checks: list[None] = []

    def wait(machine: str) -> None:
        wait_for_name(store, "a", machine, said.append, lambda: checks.append(None))

    def there(lease_s: float) -> bytes:
        return encode(msgspec.structs.replace(RECORD, machine="m1", lease_s=lease_s))

    wait("m2")  # nobody has it
    lease = store.lease(KEY, encode(RECORD), 60.0)
    wait("m2")  # nobody says which machine has it
    lease.update(there(0.15))
    wait("")
    wait("m1")  # its agent was killed here, and is started again
    assert not said
    with pytest.raises(JobInUse, match=r"host a of this job lives on another machine.*--host"):
        wait("m2")
    assert said == ["host a is registered from another machine: waits 0.3 s for it to go"]
    lease.release()
    store.lease(KEY, there(5.0), 0.3)  # and is never renewed
    checks.clear()
    began_s = time.monotonic()
    wait("m2")
    assert 0.2 < time.monotonic() - began_s < 5.0
    assert checks
    assert registered(store) is None


def test_this_machine_is_told_from_others_and_a_container_from_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(name: str) -> str:
        monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / name))
        (tmp_path / name).mkdir(exist_ok=True)
        return machine_id()

    boot, _, _ = seen("a").partition("/")
    assert len(boot) == 36
    assert seen("a") == seen("a") != seen("b")
