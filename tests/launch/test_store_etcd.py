"""What is particular to the store in etcd. Collected only where etcd is installed."""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
import requests

import jaxft.launch.etcd
from jaxft.errors import StoreError
from jaxft.launch.store import Store
from jaxft.launch.stores import jobs_of, open_store, read_entries
from tests.launch.store_site import WAIT_S, Site, takes_at_most, values


def address(server: socket.socket) -> str:
    host, port = server.getsockname()
    return f"{host}:{port}"


@pytest.fixture
def opened(etcd_url: str) -> Iterator[Callable[..., Store]]:
    """Opens a store of etcd behind other endpoints, if any; always the same job."""
    sites: list[Site] = []
    job = uuid.uuid4().hex

    def open_behind(*endpoints: str) -> Store:
        url = etcd_url.replace("//", "//" + "".join(f"{each}," for each in endpoints))
        sites.append(Site(url, ttl_s=1.0))
        return sites[-1].open(job)

    yield open_behind
    for site in sites:
        site.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An endpoint that takes connections and never answers."""
    monkeypatch.setattr(jaxft.launch.etcd, "REQUEST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield address(server)


@pytest.fixture
def refusing() -> str:
    """An endpoint where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return address(server)


def test_says_when_nobody_answers(refusing: str, silent: str) -> None:
    takes_at_most(
        3.0,
        lambda: open_store(f"etcd://{refusing},{silent}", job="job"),
        f"(?s)no etcd endpoint answered.*{refusing}.*{silent}",
    )


def test_tries_its_endpoints_in_turn(
    opened: Callable[..., Store], refusing: str, silent: str
) -> None:
    store = opened(refusing, silent)
    began_s = time.monotonic()  # from here on it knows which one answers
    store.commit({}, {"a": b""})
    lease = store.lease("hosts/a", b"", 60.0)
    assert lease.renew()
    assert set(store.read()) == {"a", "hosts/a"}
    assert not store.changed(0.1)
    lease.release()
    assert time.monotonic() - began_s < 2.0


def break_off(server: socket.socket, requests: int) -> None:
    """Answers one read as etcd does, then hangs up on every request once it has come in."""
    answer = json.dumps({"header": {"revision": "1"}}).encode()
    for number in range(requests):
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            if number == 0:
                head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % len(answer) + answer)


def test_never_sends_a_write_twice(opened: Callable[..., Store]) -> None:
    """The first endpoint may have written before it broke off: who asks the second is deceived."""
    with socket.create_server(("127.0.0.1", 0)) as breaking:
        breaking.settimeout(WAIT_S)
        thread = threading.Thread(target=break_off, args=(breaking, 2))
        thread.start()
        store = opened(address(breaking))
        with pytest.raises(StoreError, match="unknown whether it was written"):
            store.commit({"a": None}, {"a": b"1"})
        thread.join(timeout=WAIT_S)
    # What never left may go to the next: nobody listens at the first any more.
    assert store.commit({"a": None}, {"a": b"2"})
    assert values(store) == {"a": b"2"}


def test_passes_on_why_it_refused(opened: Callable[..., Store]) -> None:
    store = opened()
    with pytest.raises(StoreError, match=r"refused: .*too many operations"):
        store.commit({}, {str(number): b"" for number in range(200)})
    assert store.read() == {}


def test_compaction_is_a_reason_to_look(opened: Callable[..., Store], etcd_url: str) -> None:
    store = opened()
    for number in range(3):
        store.commit({}, {"a": b"%d" % number})
        if number == 0:
            store.read()
    revision = opened().read()["a"].revision
    with requests.Session() as session:
        session.trust_env = False
        base = etcd_url.replace("etcd", "http")
        session.post(f"{base}/v3/kv/compaction", json={"revision": revision}, timeout=5)
    assert store.changed(WAIT_S)


def test_who_only_looks_sees_all_jobs_and_their_keys(etcd_url: str) -> None:
    job = f"a b/{uuid.uuid4().hex}"
    store = open_store(etcd_url, job=job)
    store.commit({}, {"x": b"1"})
    assert job in jobs_of(etcd_url)
    assert read_entries(etcd_url, job) == store.read()
    store.close()
