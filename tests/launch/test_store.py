"""The store's contract: one suite for all back ends; URLs; and the pure observer of leases."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.errors import ConfigError
from jaxft.launch.store import Entry, LeaseObserver, Pulse, Store
from jaxft.launch.stores import open_store
from tests.launch.store_site import WAIT_S, Site, values, wait_for

BACK_ENDS = ["sqlite", "etcd"] if shutil.which("etcd") else ["sqlite"]
spawn = multiprocessing.get_context("spawn")


def test_etcd_is_here_when_required() -> None:
    """Without etcd its tests are not collected: in CI that must not go unnoticed."""
    if os.environ.get("CI"):
        assert shutil.which("etcd"), "etcd is not installed: apt-get install etcd-server"


@pytest.fixture(params=BACK_ENDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "sqlite":
        site = Site(f"sqlite://{tmp_path}/store.db", ttl_s=0.4)
    else:
        site = Site(request.getfixturevalue("etcd_url"), ttl_s=1.0)
    yield site
    site.close()


# Reading and committing


def test_reads_what_was_committed(site: Site) -> None:
    store = site.open()
    assert store.read() == {}
    everything = bytes(range(256))
    assert store.commit({}, {"generation": b"", "hosts/a": everything})
    assert values(site.open()) == {"generation": b"", "hosts/a": everything}
    assert not any(entry.leased for entry in store.read().values())


def test_a_write_changes_the_revision_of_its_keys_only(site: Site) -> None:
    store = site.open()
    store.commit({}, {"a": b"1", "b": b"1"})
    before = store.read()
    store.commit({}, {"a": b"1"})
    after = store.read()
    assert after["a"].revision > before["a"].revision
    assert after["b"] == before["b"]


def test_all_or_nothing(site: Site) -> None:
    store = site.open()
    assert store.commit({"generation": None}, {"generation": b"1", "doomed": b""})
    revision = store.read()["generation"].revision
    before = store.read()
    for wrong in (
        {"generation": None},
        {"generation": revision + 1},
        {"generation": revision, "nobody": revision},
        {"generation": revision, "doomed": None},
    ):
        assert not store.commit(wrong, {"generation": b"2", "more": b""}, ["doomed"])
        assert store.read() == before
    assert store.commit(
        {"generation": revision, "nobody": None}, {"generation": b"2", "more": b""}, ["doomed"]
    )
    assert values(store) == {"generation": b"2", "more": b""}


def test_a_commit_may_only_ask(site: Site) -> None:
    store = site.open()
    assert store.commit({"a": None}, {})
    store.commit({}, {"a": b"1"})
    assert not store.commit({"a": None}, {})
    assert values(store) == {"a": b"1"}


def test_a_key_that_was_deleted_and_came_back_is_another(site: Site) -> None:
    store = site.open()
    store.commit({}, {"a": b"1"})
    old = store.read()["a"].revision
    assert store.commit({"a": old}, {}, ["a", "never there"])
    assert store.read() == {}
    store.commit({"a": None}, {"a": b"1"})
    assert not store.commit({"a": old}, {"a": b"2"})


@pytest.mark.parametrize("prefix", ["hosts/1", "hosts/", "Hosts/", "_", "%", "é", "x/ü", ""])
def test_prefixes_are_literal(site: Site, prefix: str) -> None:
    keys = ["hosts/1", "hosts/10", "hosts/2", "HOSTS/1", "_", "a b", "%", "é1", "x/ü", "x/ý"]
    store = site.open()
    store.commit({}, {key: key.encode() for key in keys})
    assert values(store, prefix) == {key: key.encode() for key in keys if key.startswith(prefix)}


def test_jobs_do_not_meet(site: Site) -> None:
    jobs = [site.job + suffix for suffix in ("", "/", "/b", "%2Fb", "_", " é")]
    stores = [site.open(job) for job in jobs]
    for number, store in enumerate(stores):
        assert store.commit({"b": None, "key": None}, {"key": b"%d" % number})
        store.lease("lease", b"", 60.0)
    stores[0].commit({}, {}, ["lease"])
    for number, store in enumerate(stores):
        lease = {} if number == 0 else {"lease": b""}
        assert values(store) == {"key": b"%d" % number, **lease}


# Several processes


def increment(url: str, job: str, times: int) -> None:
    """Adds one to both of two keys, `times` times."""
    store = open_store(url, job=job)
    done = 0
    while done < times:
        found = store.read()
        count = int(found["left"].value) if "left" in found else 0
        expect = {key: found[key].revision if key in found else None for key in ("left", "right")}
        text = b"%d" % (count + 1)
        done += store.commit(expect, {"left": text, "right": text})
    store.close()


def test_no_update_is_lost_between_processes(site: Site) -> None:
    """All four open a store that was not there before."""
    workers = [
        spawn.Process(target=increment, args=(site.url, site.job, 25), daemon=True)
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert values(site.open()) == {"left": b"100", "right": b"100"}


def differs(store: Store, before: dict[str, bytes]) -> bool:
    return values(store) != before


def test_a_writer_killed_at_any_moment_leaves_the_store_whole(site: Site) -> None:
    store = site.open()
    for kill in range(3):
        writer = spawn.Process(target=increment, args=(site.url, site.job, 10**6), daemon=True)
        before = values(store)
        writer.start()
        wait_for(functools.partial(differs, store, before), "the writer writes")
        time.sleep(0.003 * kill)  # another moment of its cycle each time; any will do
        writer.kill()
        writer.join(timeout=10)
        found = values(store)
        assert found["left"] == found["right"]
    count = int(values(store)["left"])
    increment(site.url, site.job, 1)
    assert int(values(store)["left"]) == count + 1


def write_after_a_line(url: str, job: str, start: socket.socket) -> None:
    store = open_store(url, job=job)
    start.sendall(b"open")
    start.recv(1)
    store.commit({}, {"a": b"2"})
    start.sendall(b"%f" % time.monotonic())
    store.close()


def test_a_change_by_another_process_is_noticed_at_once(site: Site) -> None:
    store = site.open()
    store.commit({}, {"a": b"1"})
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(WAIT_S)
        writer = spawn.Process(target=write_after_a_line, args=(site.url, site.job, there))
        writer.start()
        assert here.recv(4) == b"open"
        with ThreadPoolExecutor(1) as pool:
            pool.submit(store.read).result()
            assert not pool.submit(store.changed, 0.1).result()
            waiting = pool.submit(lambda: (store.changed(WAIT_S), time.monotonic()))
            here.sendall(b"!")
            changed, noticed_s = waiting.result()
        written_s = float(here.recv(100))
        writer.join(timeout=10)
    assert changed
    assert noticed_s - written_s < 1.0
    assert values(store) == {"a": b"2"}


# Waiting


def test_changed_is_true_before_the_first_read_and_until_the_next(site: Site) -> None:
    store, other = site.open(), site.open()
    assert store.changed(0.0)
    store.read()
    assert not store.changed(0.0)
    other.commit({}, {"a": b""})
    assert store.changed(WAIT_S)
    assert store.changed(WAIT_S)
    store.read()
    other.commit({}, {}, ["a"])
    assert store.changed(WAIT_S)


def test_changed_counts_own_writes(site: Site) -> None:
    store = site.open()
    store.read()
    store.commit({}, {"a": b""})
    assert store.changed(WAIT_S)
    store.read()
    store.lease("hosts/a", b"", 60.0)
    assert store.changed(WAIT_S)


def test_what_one_thread_has_read_another_has_not(site: Site) -> None:
    store = site.open()
    store.read()
    assert not store.changed(0.1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.changed, 0.1).result()
        store.commit({}, {"a": b""})
        assert set(pool.submit(store.read).result()) == {"a"}
        assert not pool.submit(store.changed, 0.1).result()
        assert store.changed(0.1)


def test_changed_waits_no_longer_than_told(site: Site) -> None:
    store = site.open()
    store.read()
    for timeout_s in (0.0, 0.2):
        began_s = time.monotonic()
        assert not store.changed(timeout_s)
        assert timeout_s <= time.monotonic() - began_s < timeout_s + 1.0


def test_a_renewal_wakes_nobody(site: Site) -> None:
    owner, store = site.open(), site.open()
    lease = owner.lease("hosts/a", b"", 60.0)
    store.read()
    for _ in range(3):
        assert lease.renew()
    assert not store.changed(0.2)


# Leases


def test_a_lease_lives_while_renewed_and_vanishes_for_all_when_not(site: Site) -> None:
    owner, first, second = site.open(), site.open(), site.open()
    first.commit({}, {"ordinary": b""})
    lease = owner.lease("hosts/a", b"me", site.ttl_s)
    entry = first.read()["hosts/a"]
    assert entry.value == b"me"
    assert entry.leased
    until_s = time.monotonic() + 1.5 * site.ttl_s
    while time.monotonic() < until_s:
        assert lease.renew()
        # Neither the value nor the revision: only the fact that it is there.
        assert first.read()["hosts/a"] == second.read()["hosts/a"] == entry
        time.sleep(site.ttl_s / 8)

    silent_s = time.monotonic()
    wait_for(lambda: "hosts/a" not in first.read(), "the lease vanishes")
    assert time.monotonic() - silent_s > site.ttl_s / 2
    assert set(second.read()) == {"ordinary"}
    assert second.commit({"hosts/a": None}, {})

    for _ in range(2):
        assert not lease.renew()
        assert not lease.update(b"late")
    lease.release()
    assert set(owner.read()) == {"ordinary"}


def test_a_loop_over_changed_sees_a_dead_lease(site: Site) -> None:
    """Also where nobody writes any more: this is how agents find dead hosts."""
    store = site.open()
    site.open().lease("hosts/a", b"", site.ttl_s)
    deadline_s = time.monotonic() + WAIT_S
    reads = 0
    while "hosts/a" in store.read():
        assert store.changed(deadline_s - time.monotonic())
        reads += 1
    assert reads < 50  # it slept in between


def test_updating_a_lease_changes_value_and_revision(site: Site) -> None:
    store = site.open()
    lease = store.lease("hosts/a", b"1", 60.0)
    before = store.read()["hosts/a"]
    assert lease.renew()
    assert store.read()["hosts/a"] == before
    assert lease.update(b"2")
    after = site.open().read()["hosts/a"]
    assert after == Entry(b"2", after.revision, True)
    assert after.revision > before.revision
    assert lease.renew()


def test_releasing_a_lease_deletes_its_key_at_once(site: Site) -> None:
    store = site.open()
    lease = store.lease("hosts/a", b"", 60.0)
    lease.release()
    assert store.read() == {}
    assert not lease.renew()
    lease.release()


def test_a_commit_may_depend_on_leases(site: Site) -> None:
    store = site.open()
    leases = [store.lease(f"hosts/{name}", b"", 60.0) for name in "ab"]
    members: dict[str, int | None] = {
        key: entry.revision for key, entry in store.read("hosts/").items()
    }
    assert leases[0].renew()  # does not stand in the way
    assert store.commit({**members, "generation": None}, {"generation": b"1"})
    leases[1].release()
    assert not store.commit(members, {"generation": b"2"})
    assert values(store, "generation") == {"generation": b"1"}


def test_a_lease_whose_key_was_deleted_is_told(site: Site) -> None:
    store = site.open()
    lease = store.lease("hosts/a", b"", 60.0)
    assert store.commit({}, {}, ["hosts/a"])
    assert not lease.update(b"")
    assert not lease.renew()
    assert store.read() == {}


def test_a_lease_whose_key_was_overwritten_is_told_and_the_new_value_stays(site: Site) -> None:
    store = site.open()
    lease = store.lease("hosts/a", b"", 60.0)
    assert store.commit({}, {"hosts/a": b"ordinary"})
    assert not lease.renew()
    assert not lease.update(b"mine")
    lease.release()
    entry = store.read()["hosts/a"]
    assert (entry.value, entry.leased) == (b"ordinary", False)


def test_a_lease_takes_its_key_over(site: Site) -> None:
    store = site.open()
    old = store.lease("hosts/a", b"old", 60.0)
    new = site.open().lease("hosts/a", b"new", 60.0)
    assert not old.renew()
    old.release()
    assert new.renew()
    assert values(store) == {"hosts/a": b"new"}


def test_a_lease_is_renewed_from_a_second_thread_while_the_first_waits(site: Site) -> None:
    store = site.open()
    lease = store.lease("hosts/a", b"", 60.0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(store.read).result()
        waiting = pool.submit(store.changed, 1.0)
        began_s = time.monotonic()
        for _ in range(5):
            assert lease.renew()
        assert time.monotonic() - began_s < 0.9
        assert not waiting.done()
        assert not waiting.result(timeout=WAIT_S)


# URLs


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("postgres://host/db", "unknown kind postgres"),
        ("sqlite://relative.db", "sqlite:///absolute"),
        ("", "empty"),
        ("etcd://", "not host:port"),
        ("etcd://a:2379,", "not host:port"),
        ("etcd://a:port", "not host:port"),
        ("etcd://me:secret@a:2379", "JAXFT_STORE_USER"),
        ("etcd://a:2379/path", "not host:port"),
    ],
)
def test_urls_that_cannot_work(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        open_store(url, job="job")


def test_a_job_has_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name is empty"):
        open_store(f"{tmp_path}/store.db", job="")
    assert list(tmp_path.iterdir()) == []


def test_etcd_without_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    monkeypatch.delitem(sys.modules, "jaxft.launch.etcd", raising=False)
    with pytest.raises(ConfigError, match=r"etcd3gw is not installed: pip install 'jaxft\[etcd\]'"):
        open_store("etcd://127.0.0.1:2379", job="job")


# The observer of counted leases


def pulse(counter: int, owner: str = "me", ttl_s: float = 10.0) -> Pulse:
    return Pulse(owner, counter, ttl_s)


def test_observer_expires_what_stands_still() -> None:
    observer = LeaseObserver()
    for now_s in range(100, 131):
        ticking = pulse(now_s // 3)
        dead = observer.observe(now_s, {"a": ticking, "b": pulse(7), "c": pulse(0, ttl_s=20.0)})
        expected = {"b"} if now_s > 110 else set()
        assert dead == expected | ({"c"} if now_s > 120 else set()), now_s


def test_observer_gives_what_it_has_just_met_its_full_time() -> None:
    observer = LeaseObserver()
    assert observer.observe(1e6, {"a": pulse(5)}) == set()
    assert observer.observe(1e6 + 4, {"a": pulse(5), "b": pulse(5)}) == set()
    assert observer.observe(1e6 + 8, {"a": pulse(5), "b": pulse(5)}) == set()
    assert observer.observe(1e6 + 12, {"a": pulse(5), "b": pulse(5)}) == {"a"}


@pytest.mark.parametrize(("gap_s", "dead"), [(4.9, {"a"}), (5.1, set()), (1000.0, set())])
def test_observer_a_late_tick_of_its_own_restarts_the_count(gap_s: float, dead: set[str]) -> None:
    observer = LeaseObserver()
    for now_s in (0, 4, 8):
        assert observer.observe(now_s, {"a": pulse(1)}) == set()
    assert observer.observe(8 + gap_s, {"a": pulse(1)}) == dead
    # Then it has its full time again, and no more.
    assert observer.observe(12 + gap_s, {"a": pulse(1)}) == dead
    assert observer.observe(16 + gap_s, {"a": pulse(1)}) == dead
    assert observer.observe(20 + gap_s, {"a": pulse(1)}) == {"a"}


def test_observer_who_looks_when_told_to_is_never_late_and_finds_the_dead_in_time() -> None:
    observer = LeaseObserver()
    assert observer.look_s == math.inf
    now_s, looks, dead = 100.0, 0, frozenset()
    while not dead:
        leases = {"dead": pulse(7), "living": pulse(looks), "long": pulse(0, ttl_s=50.0)}
        dead = observer.observe(now_s, leases)
        found_s, now_s = now_s, observer.look_s
        looks += 1
    assert dead == {"dead"}
    assert found_s == pytest.approx(110.0)
    assert looks <= 5


def test_observer_another_owner_of_the_key_is_another_lease() -> None:
    observer = LeaseObserver()
    for now_s in (0, 4, 8):
        observer.observe(now_s, {"a": pulse(0)})
    assert observer.observe(11, {"a": pulse(0, owner="new")}) == set()
    assert observer.observe(15, {}) == set()
    assert observer.observe(19, {"a": pulse(0, owner="new")}) == set()


@given(st.lists(st.sampled_from([0.5, 1.0, 4.0, 4.9, 60.0, 1e5]), max_size=60))
def test_observer_a_paused_machine_expires_nobody(pauses: list[float]) -> None:
    """The machine runs for 4 s, stands still, and so on; after it the observer looks first."""
    observer, now_s, counter, renewed_s = LeaseObserver(), 0.0, 0, 0.0
    for pause_s in pauses:
        for _ in range(8):
            now_s += 0.5
            assert observer.observe(now_s, {"a": pulse(counter)}) == set()
            if now_s - renewed_s >= 10.0 / 3:
                counter, renewed_s = counter + 1, now_s
        now_s += pause_s
        assert observer.observe(now_s, {"a": pulse(counter)}) == set()
