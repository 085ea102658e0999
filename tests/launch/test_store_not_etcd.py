"""Where something else than etcd answers at its address, or could never be understood."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jaxft.config import StoreAccess
from jaxft.errors import ConfigError, StoreAway, StoreError
from jaxft.launch.store import Store
from jaxft.launch.stores import open_store, wait_for_store
from tests.launch.certificates import Authority

AS_ETCD = {
    "/v3/kv/range": (200, '{"header": {"revision": "1"}}'),
    "/v3/kv/txn": (200, '{"succeeded": true}'),
    "/v3/lease/grant": (200, '{"ID": "7", "TTL": "5"}'),
}
NONSENSE = [
    (200, "<html>maintenance</html>"),
    (200, "[]"),
    (200, "null"),
    (200, '{"error": {"message": "no"}}'),
    (502, "<html>bad gateway</html>"),
]


class Proxy(ThreadingHTTPServer):
    """Answers each path as it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        self.answers = dict(AS_ETCD)
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, text = self.server.answers[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def serving() -> Iterator[Proxy]:
    with Proxy() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def proxy(serving: Proxy) -> Proxy:
    serving.answers = dict(AS_ETCD)
    return serving


@pytest.fixture
def store(proxy: Proxy) -> Iterator[Store]:
    opened = open_store(f"etcd://{proxy.place}", job="j", access=StoreAccess())
    opened.read()
    yield opened
    opened.close()


@pytest.mark.parametrize("answer", NONSENSE)
def test_it_is_an_error_like_any_other(proxy: Proxy, store: Store, answer: tuple[int, str]) -> None:
    """Whoever follows the store goes on to do so, and tells a person where."""
    lease = store.lease("hosts/a", b"", 60.0)
    proxy.answers = dict.fromkeys((*AS_ETCD, "/v3/lease/keepalive"), answer)
    for ask in (store.read, lease.renew, lambda: store.lease("hosts/a", b"", 60.0)):
        with pytest.raises(StoreError, match=proxy.place):
            ask()
    with pytest.raises(StoreError, match=proxy.place):
        open_store(f"etcd://{proxy.place}", job="j", access=StoreAccess())
    if answer[0] != 200:
        with pytest.raises(StoreError, match="unknown whether it was written"):
            store.commit({}, {"a": b""})


@pytest.mark.parametrize("answer", [*NONSENSE, (401, '{"error": "token"}'), (200, "")])
def test_a_watch_that_fails_is_no_busy_loop(
    proxy: Proxy, store: Store, answer: tuple[int, str]
) -> None:
    """It is an error, or a reason to look that takes its time."""
    proxy.answers["/v3/watch"] = answer
    if answer in NONSENSE and answer != NONSENSE[3]:
        with pytest.raises(StoreError, match=proxy.place):  # after which the one who asks waits
            store.changed(5.0)
    else:
        began_s = time.monotonic()
        assert store.changed(5.0)
        assert time.monotonic() - began_s > 0.04


def test_files_that_hold_something_else_are_named_at_once(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (cert, key), (_, other) = authority.vouch("one"), authority.vouch("two")
    text = tmp_path / "text"
    text.write_text("no certificate")
    hidden = str(tmp_path / "hidden")
    command = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", hidden]
    subprocess.run(command, check=True, timeout=30)
    for access, why in [
        (StoreAccess(ca=str(text)), f"--store-ca {text}: expected certificates in PEM"),
        (StoreAccess(cert=cert, key=other), f"--store-key {other}: .*its own private key"),
        (StoreAccess(cert=str(text), key=key), f"--store-cert {text}"),
        (StoreAccess(cert=cert, key=hidden), "without a passphrase"),
    ]:
        with pytest.raises(ConfigError, match=why):
            open_store("etcds://192.0.2.1", job="j", access=access)


def test_tls_where_there_is_none_is_said(proxy: Proxy) -> None:
    with pytest.raises(StoreError, match="is it reached over TLS") as caught:
        open_store(f"etcds://{proxy.place}", job="j", access=StoreAccess())
    assert not isinstance(caught.value, StoreAway)


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "what answers there is not etcd"),
        (b"", "the connection was broken off"),
        (None, "Connection refused"),
    ],
)
def test_a_wrong_port_is_said_in_words(greeting: bytes | None, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting or b"")
                connection.recv(1)

        thread = threading.Thread(target=serve)
        if greeting is None:
            listener.close()
        else:
            thread.start()
        with pytest.raises(StoreError) as caught:
            open_store(f"etcd://{place}", job="j", access=StoreAccess())
        if greeting is not None:
            thread.join(10)
    assert f"no etcd endpoint answered (http://{place}: {said}): is etcd running" in str(
        caught.value
    )
    assert "urllib3" not in str(caught.value)
    # What is something else will not become etcd; all else may be on its way up.
    assert isinstance(caught.value, StoreAway) == (said != "what answers there is not etcd")


def test_a_store_that_starts_late_is_waited_for(store: Store) -> None:
    """As after a power cut, when hosts may be up before it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"etcd://127.0.0.1:{listener.getsockname()[1]}"
    waited: list[float] = []
    said: list[str] = []

    def reach() -> Store:
        return store if len(waited) == 2 else open_store(closed, job="j", access=StoreAccess())

    assert wait_for_store(reach, 60.0, said.append, waited.append) is store
    assert len(waited) == 2
    assert len(said) == 1
    assert "is etcd running" in said[0]
    assert "60 s" in said[0]
    with pytest.raises(StoreAway):
        wait_for_store(lambda: open_store(closed, job="j"), 0.0, said.append, waited.append)
    assert len(said) == 1
    with pytest.raises(ConfigError):
        wait_for_store(lambda: open_store("ftp://a", job="j"), 60.0, said.append, waited.append)
    assert len(waited) == 2


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    for scheme in ("etcd", "etcds", "https"):
        with pytest.raises(ConfigError) as caught:
            open_store(f"{scheme}://trainer:hidden@192.0.2.1", job="j")
        assert "hidden" not in str(caught.value)
        assert scheme == "https" or "JAXFT_STORE_PASSWORD" in str(caught.value)
