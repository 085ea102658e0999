"""Who is let in, with which key, and what others see of it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

import jaxft.host.stream_server
import jaxft.host.wire_zmq
from jaxft.errors import ConfigError, PeerUnreachable, ReadCancelled
from jaxft.host.job_key import JobKey
from jaxft.host.trust import MessageSeal, Trust, check_address
from jaxft.host.wire import BulkServer, Endpoint, ReadRequest, Refused
from jaxft.host.wire_zmq import ZmqNetwork
from tests.host.children import ROOT

KEY, OTHER = JobKey(bytes(range(32))), JobKey(bytes(32))
SECRET = b"the bytes of a snapshot " * 100
WAIT_S = 10.0


def provide(key: bytes, offset: int, nbytes: int) -> memoryview | Refused:
    return memoryview(SECRET)[offset : offset + nbytes]


class Host:
    """A host of the job, at loopback: there TCP is the same as between machines."""

    def __init__(self, trust: Trust | None) -> None:
        self.network = ZmqNetwork(trust)
        self.endpoint: Endpoint = self.network.endpoint("tcp://127.0.0.1:*")
        self.server: BulkServer = self.network.serve("tcp://127.0.0.1:*", provide)

    def read(self, other: Host, peer_s: float = WAIT_S) -> bytes:
        request = ReadRequest(other.server.address, b"", 0, len(SECRET), 0)
        limits = {"peer_s": peer_s, "deadline_s": WAIT_S}
        ((_, data),) = self.network.reader().read_many([request], **limits)
        assert isinstance(data, memoryview)
        return bytes(data)

    def hears(self, payload: bytes) -> bool:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            if payload in self.endpoint.receive(0.1):
                return True
        return False

    def close(self) -> None:
        self.endpoint.close()
        self.server.close()
        self.network.close()


@pytest.fixture
def hosts() -> Iterator[Callable[[Trust | None], Host]]:
    made: list[Host] = []

    def make(trust: Trust | None) -> Host:
        made.append(Host(trust))
        return made[-1]

    yield make
    for host in made:
        host.close()


STRANGERS = [None, Trust(OTHER), Trust(OTHER, clear=True), Trust(KEY), Trust(KEY, clear=True)]


@pytest.mark.parametrize("trust", [Trust(KEY), Trust(KEY, clear=True)], ids=["encrypted", "proven"])
def test_only_hosts_with_the_same_key_and_way_are_heard_and_answered(
    hosts: Callable[[Trust | None], Host], trust: Trust
) -> None:
    one, two = hosts(trust), hosts(trust)
    strangers = [hosts(other) for other in STRANGERS if other != trust]
    for stranger in strangers:
        stranger.endpoint.send(one.endpoint.address, b"from a stranger")
        with pytest.raises(PeerUnreachable, match="owes 1 reads"):
            stranger.read(one, peer_s=0.15)
        with pytest.raises(PeerUnreachable, match="owes 1 reads"):
            one.read(stranger, peer_s=0.15)
        one.endpoint.send(stranger.endpoint.address, b"for a friend")
    assert two.read(one) == SECRET
    two.endpoint.send(one.endpoint.address, b"from a friend")
    heard: list[bytes] = []
    while b"from a friend" not in heard:
        heard += one.endpoint.receive(WAIT_S)
    assert heard == [b"from a friend"]
    for stranger in strangers:
        # Who asks for no proof hears what came in clear, with its proof before it.
        assert b"for a friend" not in stranger.endpoint.receive(0.1)


def test_the_listeners_public_key_lets_nobody_in(hosts: Callable[[Trust | None], Host]) -> None:
    """One that knows it, and shows another key than the job's, is refused by the doorkeeper."""
    trust = Trust(KEY)
    host = hosts(trust)
    public, secret = zmq.curve_keypair()
    known = zmq.curve_public(z85.encode(KEY.derive("control server")))
    sender = zmq.curve_public(z85.encode(KEY.derive("control client")))
    with zmq.Context() as context:
        for shown, own in ((public, secret), (known, z85.encode(KEY.derive("control server")))):
            assert shown != sender
            with context.socket(zmq.PUSH) as knocking:
                knocking.setsockopt(zmq.LINGER, 0)
                knocking.setsockopt(zmq.CURVE_PUBLICKEY, shown)
                knocking.setsockopt(zmq.CURVE_SECRETKEY, own)
                knocking.setsockopt(zmq.CURVE_SERVERKEY, known)
                monitor = knocking.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
                knocking.connect(host.endpoint.address)
                knocking.send(b"from a stranger")
                assert monitor.poll(1000 * WAIT_S)
                knocking.disable_monitor()
                monitor.close()
    assert host.endpoint.receive(0.1) == []
    hosts(trust).endpoint.send(host.endpoint.address, b"from a friend")
    assert host.hears(b"from a friend")


def test_nothing_can_be_read_on_the_way_but_where_the_network_is_trusted(
    hosts: Callable[[Trust | None], Host],
) -> None:
    """A reader's bytes, seen by somebody between it and the server."""
    seen = {}
    for trust in (Trust(KEY), Trust(KEY, clear=True)):
        host = hosts(trust)
        with Between(host.server.address) as between:
            request = ReadRequest(between.address, b"", 0, len(SECRET), 0)
            limits = {"peer_s": WAIT_S, "deadline_s": WAIT_S}
            ((_, data),) = host.network.reader().read_many([request], **limits)
            assert bytes(data) == SECRET
        seen[trust.clear] = between.seen
    assert SECRET not in seen[False]
    assert SECRET in seen[True]
    for secret in (KEY.text.encode(), bytes.fromhex(KEY.text), KEY.derive("stream proof")):
        assert secret not in seen[True]


class Between:
    """Passes on what goes from a server to one client, and back, and keeps a copy."""

    def __init__(self, address: str) -> None:
        self._to = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = b""
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Between:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        one, _ = self._listener.accept()
        other = socket.create_connection(self._to, WAIT_S)
        self._start(self._pass_on, one, other)
        self._start(self._pass_on, other, one)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_a_message_for_one_host_is_none_for_another(hosts: Callable[[Trust | None], Host]) -> None:
    """And one that is changed on its way is none at all."""
    trust = Trust(KEY, clear=True)
    one, two = hosts(trust), hosts(trust)
    seal = MessageSeal(trust)
    sealed = seal.close(two.endpoint.address, b"for two")
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(one.endpoint.address)
        for message in (sealed, b"", b"short", bytes(40)):
            raw.send(message)
        changed = bytearray(seal.close(one.endpoint.address, b"for one"))
        changed[-1] ^= 1
        raw.send(bytes(changed))
        raw.send(seal.close(one.endpoint.address, b"for one"))
        heard: list[bytes] = []
        while b"for one" not in heard:
            heard += one.endpoint.receive(WAIT_S)
    assert heard == [b"for one"]


@pytest.mark.parametrize(
    ("limit", "value", "taken"), [("_RECEIVE_QUEUE", 4, 4), ("_RECEIVE_BYTES", 2500, 3)]
)
def test_messages_without_a_proof_do_not_hold_up_who_receives(
    hosts: Callable[[Trust | None], Host],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
    taken: int,
) -> None:
    """Who sends them sends more of them while they are looked at."""
    monkeypatch.setattr(jaxft.host.wire_zmq, limit, value)
    one = hosts(Trust(KEY, clear=True))
    looked_at = 0
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(one.endpoint.address)

        def open_slowly(seal: MessageSeal, address: str, sealed: bytes) -> None:
            nonlocal looked_at
            looked_at += 1
            if looked_at < 20:
                raw.send(bytes(1000))
                assert one.endpoint._inbox.poll(1000 * WAIT_S)  # type: ignore[attr-defined]

        monkeypatch.setattr(MessageSeal, "open", open_slowly)
        raw.send(bytes(1000))
        assert one.endpoint.receive(WAIT_S) == []
    assert looked_at == taken


@pytest.mark.parametrize("trust", [Trust(KEY), Trust(KEY, clear=True)], ids=["encrypted", "proven"])
def test_whoever_says_nothing_or_nonsense_holds_up_nobody(
    hosts: Callable[[Trust | None], Host], trust: Trust
) -> None:
    one, two = hosts(trust), hosts(trust)
    place = ("127.0.0.1", int(one.server.address.rpartition(":")[2]))
    with socket.create_connection(place), socket.create_connection(place) as noisy:
        noisy.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(200))
        noisy.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            while noisy.recv(1000):  # an alert at most, and the end
                pass
        assert two.read(one) == SECRET


@pytest.mark.parametrize("trust", [Trust(KEY), Trust(KEY, clear=True)], ids=["encrypted", "proven"])
def test_those_who_say_nothing_keep_nobody_out(
    hosts: Callable[[Trust | None], Host], trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by their number nor for long; and a person is told once."""
    monkeypatch.setattr(jaxft.host.stream_server, "_CONNECTIONS_MAX", 6)
    monkeypatch.setattr(jaxft.host.stream_server, "_PROVING_MAX", 3)
    monkeypatch.setattr(jaxft.host.wire_zmq, "_PROOF_MS", 200)
    told: list[str] = []
    monkeypatch.setattr(
        jaxft.host.stream_server._log, "warning", lambda text, *rest: told.append(text % rest)
    )
    one, two = hosts(trust), hosts(trust)
    with contextlib.ExitStack() as stack:
        places = [address.rpartition(":")[2] for address in (one.server.address,) * 10]
        places.append(one.endpoint.address.rpartition(":")[2])
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), WAIT_S))
            for port in places
        ]
        assert two.read(one) == SECRET
        for connection in (silent[0], silent[-1]):
            connection.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1000):  # ZeroMQ's greeting
                    pass
    assert len(told) == 1
    assert "127.0.0.1 port" in told[0]
    assert "did not prove this job's key" in told[0]


def test_a_snapshot_process_has_room_for_many_who_say_nothing() -> None:
    """An agent is started by shells and service managers with a limit of 1024 descriptors."""
    code = (
        "import resource as r; from jaxft.host.descriptors import allow_all; "
        "most = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, most)); "
        "allow_all(); assert r.getrlimit(r.RLIMIT_NOFILE) == (most, most)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=WAIT_S)


def test_a_server_goes_on_when_there_are_threads_again(
    hosts: Callable[[Trust | None], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = hosts(Trust(KEY)), hosts(Trust(KEY))
    start, failed = threading.Thread.start, threading.Event()

    def fail(thread: threading.Thread) -> None:
        if thread.name == "jaxft-bulk-peer" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert two.read(one) == SECRET
    assert failed.is_set()


@pytest.mark.parametrize("trust", [Trust(KEY), Trust(KEY, clear=True)], ids=["encrypted", "proven"])
def test_a_server_that_never_proves_itself_is_named_and_cancels_in_time(
    hosts: Callable[[Trust | None], Host], trust: Trust
) -> None:
    host = hosts(trust)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        request = ReadRequest(address, b"", 0, 1, 0)
        began_s = time.monotonic()
        with pytest.raises(PeerUnreachable, match=address):
            list(host.network.reader().read_many([request], peer_s=0.3, deadline_s=WAIT_S))
        cancel = threading.Event()
        threading.Timer(0.1, cancel.set).start()
        limits = {"peer_s": WAIT_S, "deadline_s": WAIT_S, "cancel": cancel}
        with pytest.raises(ReadCancelled):
            list(host.network.reader().read_many([request], **limits))
        assert time.monotonic() - began_s < 2.0


def test_why_another_key_is_refused_is_said(hosts: Callable[[Trust | None], Host]) -> None:
    for one, other in ((Trust(KEY), Trust(OTHER)), (Trust(KEY, True), Trust(OTHER, True))):
        with pytest.raises(PeerUnreachable, match=r"cut off \(.*does not take this job key\)"):
            hosts(other).read(hosts(one), peer_s=0.3)


# ------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("address", "without", "with_key"),
    [
        ("tcp://127.0.0.1:1", "", ""),
        ("tcp://[::1]:*", "", ""),
        ("tcp://10.0.0.1:1", "--job-key-file", ""),
        ("tcp://[fd00::1]:*", "--job-key-file", ""),
        ("tcp://0.0.0.0:1", "--job-key-file", "--address or --interface"),
        ("tcp://[::]:1", "--job-key-file", "--address or --interface"),
        ("tcp://*:1", "--job-key-file", "--address or --interface"),
        ("tcp://node7:1", "--job-key-file", "--address or --interface"),
        ("tcp://224.0.0.1:1", "--job-key-file", "--address or --interface"),
    ],
)
def test_what_others_can_reach_needs_the_key(address: str, without: str, with_key: str) -> None:
    for trust, why in ((None, without), (Trust(KEY), with_key), (Trust(KEY, clear=True), with_key)):
        if why:
            with pytest.raises(ConfigError, match=why):
                check_address(address, trust)
        else:
            check_address(address, trust)


def test_an_ipv6_address_can_be_talked_to(hosts: Callable[[Trust | None], Host]) -> None:
    network = ZmqNetwork(Trust(KEY))
    with contextlib.ExitStack() as stack:
        stack.callback(network.close)
        endpoint = network.endpoint("tcp://[::1]:*")
        stack.callback(endpoint.close)
        server = stack.enter_context(contextlib.closing(network.serve("tcp://[::1]:*", provide)))
        endpoint.send(endpoint.address, b"here")
        assert endpoint.receive(WAIT_S) == [b"here"]
        request = ReadRequest(server.address, b"", 0, 3, 0)
        limits = {"peer_s": WAIT_S, "deadline_s": WAIT_S}
        assert dict(network.reader().read_many([request], **limits)) == {0: SECRET[:3]}


# ------------------------------------------------------------------------------ keys


def test_a_key_is_derived_from_as_rfc_5869_says() -> None:
    hkdf = HKDF(SHA256(), 32, salt=None, info=b"jaxft 1 message")
    expected = hkdf.derive(bytes(range(32)))
    assert KEY.derive("message") == expected
    assert KEY.derive("message") != KEY.derive("stream proof")


def test_a_key_shows_itself_nowhere() -> None:
    shown = f"{KEY} {KEY!r} {Trust(KEY)} {Trust(KEY).name}"
    assert KEY.text not in shown
    assert KEY.name in shown
    assert JobKey.parse(KEY.text + "\n", "").text == KEY.text
    assert JobKey.make().text != JobKey.make().text


@pytest.mark.parametrize("text", ["", "secret", "ab" * 31, "zz" * 32])
def test_what_is_no_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"here has no job key: .*openssl rand") as caught:
        JobKey.parse(text, "here")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    ("user", "owner", "mode", "fits"),
    [
        (7, 7, 0o600, True),
        (7, 7, 0o400, True),
        (7, 7, 0o640, False),
        (7, 0, 0o600, True),
        (7, 0, 0o440, True),  # a Secret of Kubernetes in a pod with an fsGroup
        (7, 0, 0o640, True),
        (7, 0, 0o460, False),
        (7, 0, 0o444, False),
        (0, 0, 0o600, True),
        (0, 0, 0o440, False),
        (0, 7, 0o600, False),
        (7, 8, 0o600, False),
    ],
)
def test_a_file_that_others_can_read_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, owner: int, mode: int, fits: bool
) -> None:
    path = tmp_path / "key"
    path.write_text(KEY.text + "\r\n")
    real = path.stat()
    found = os.stat_result((stat.S_IFREG | mode, *real[1:4], owner, *real[5:]))
    monkeypatch.setattr(os, "fstat", lambda fd: found)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if fits:
        assert JobKey.read(path, "--job-key-file").text == KEY.text
    else:
        why = rf"--job-key-file .*key: .*user {owner} .*mode {mode:o}.*user {user}.*chmod 600"
        with pytest.raises(ConfigError, match=why):
            JobKey.read(path, "--job-key-file")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)  # whose other end nobody opens
    for path, why in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (pipe, "this is no regular file"),
    ):
        with pytest.raises(ConfigError, match=f"--job-key-file {path}: {why}"):
            JobKey.read(path, "--job-key-file")
