"""One conformance test for every peer transport, and what happens when a peer's process dies."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxft.errors import (
    ConfigError,
    PeerUnreachable,
    ProtocolError,
    ReadCancelled,
    WireError,
)
from jaxft.host.memory import Arena
from jaxft.host.trust import Trust
from jaxft.host.wire import (
    CANCEL_POLL_S,
    MESSAGE_BYTES_MAX,
    PIECE_BYTES_MAX,
    BulkServer,
    Endpoint,
    Network,
    Provider,
    ReadRequest,
    Refused,
    Shared,
)
from jaxft.host.wire_inprocess import InProcessNetwork
from jaxft.host.wire_zmq import ZmqNetwork
from tests.host.children import KEY, child, pattern

DEADLINE_S = 10.0
MIB = 1 << 20


@dataclass
class Transport:
    """A network, with a fresh address for each call of `hint`, and all that was made closed."""

    name: str
    network: Network
    directory: Path
    names: Iterator[int] = field(default_factory=itertools.count)
    made: list[Endpoint | BulkServer] = field(default_factory=list)

    def hint(self) -> str:
        if self.name in ("tcp", "encrypted"):
            return "tcp://127.0.0.1:*"
        if self.name == "ipc":
            return f"ipc://{self.directory}/{next(self.names)}"
        return "inprocess://*"

    def endpoint(self, hint: str = "") -> Endpoint:
        self.made.append(self.again(lambda: self.network.endpoint(hint or self.hint())))
        return self.made[-1]

    def serve(self, provider: Provider, hint: str = "") -> BulkServer:
        self.made.append(self.again(lambda: self.network.serve(hint or self.hint(), provider)))
        return self.made[-1]

    def again(self, make: Callable[[], Endpoint | BulkServer]) -> Endpoint | BulkServer:
        """A port that was just let go of may stay taken for a moment."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return make()
            except WireError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def absent(self) -> str:
        """An address where nobody listens."""
        endpoint = self.endpoint()
        endpoint.close()
        return endpoint.address

    def read(self, requests: list[ReadRequest], **options: object) -> dict:
        limits = {"peer_s": DEADLINE_S, "deadline_s": DEADLINE_S, **options}
        return dict(self.network.reader().read_many(requests, **limits))

    def close(self) -> None:
        for each in self.made:
            each.close()
        self.network.close()


def network_of(name: str) -> Network:
    if name == "inprocess":
        return InProcessNetwork()
    return ZmqNetwork(Trust(KEY) if name == "encrypted" else None)


@pytest.fixture(params=["ipc", "tcp", "encrypted", "inprocess"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    network = network_of(request.param)
    # pytest's own directory may be too deep for a Unix socket, and open to others.
    directory = Path(f"/tmp/jaxft-test-{os.getpid()}")
    made = Transport(request.param, network, directory)
    yield made
    made.close()
    if directory.exists():
        assert list(directory.iterdir()) == []
        directory.rmdir()


def eventually(found: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not found():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"


def provide(key: bytes, offset: int, nbytes: int) -> memoryview | Refused:
    if key != b"x":
        return Refused(f"{key!r} is not held here")
    return memoryview(pattern(offset, nbytes))


def open_fds() -> int:
    return psutil.Process().num_fds()


def used_bytes() -> int:
    """What is in memory, without what the C library only keeps for later: which blocks it keeps
    depends on what the process has freed before (mallopt(3), M_MMAP_THRESHOLD)."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


# Control messages


def test_messages_arrive_whole_and_apart(transport: Transport) -> None:
    sender, receiver = transport.endpoint(), transport.endpoint()
    sent = [b"", b"a", b"b" * 1000, b"c" * (5 * MIB)]
    for payload in sent:
        sender.send(receiver.address, payload)
    got: list[bytes] = []
    eventually(lambda: got.extend(receiver.receive(0.1)) or len(got) == 4, "four messages")
    assert sorted(got) == sent
    assert receiver.receive(0) == []
    assert sender.dropped == 0


def test_a_whisper_arrives_and_where_it_can_be_wakes_nobody(transport: Transport) -> None:
    sender, receiver = transport.endpoint(), transport.endpoint()
    sender.whisper(receiver.address, b"first")  # whoever has just begun to listen hears it too
    eventually(lambda: receiver.receive(0) == [b"first"], "the first")
    sender.whisper(receiver.address, b"quiet")
    if transport.name == "ipc":
        began = time.monotonic()
        assert receiver.wait([], 0.05) == []
        assert time.monotonic() - began >= 0.04
        assert receiver.receive(0) == [b"quiet"]
        sender.whisper(receiver.address, b"quiet")
    sender.send(receiver.address, b"aloud")
    got: list[bytes] = []
    eventually(lambda: got.extend(receiver.receive(0.1)) or len(got) == 2, "both")
    assert sorted(got) == [b"aloud", b"quiet"]


def test_whispers_that_find_no_room_are_said_aloud(transport: Transport) -> None:
    sender, receiver = transport.endpoint(), transport.endpoint()
    sent = [bytes([number]) for number in range(60)] + [b"x" * (1 << 20)]
    for payload in sent:
        sender.whisper(receiver.address, payload)
    got: list[bytes] = []
    eventually(lambda: got.extend(receiver.receive(0.1)) or len(got) == len(sent), "all")
    assert sorted(got) == sorted(sent)
    assert sender.dropped == 0


def test_whispers_to_nobody_are_kept_like_other_messages(transport: Transport) -> None:
    sender = transport.endpoint()
    address = transport.absent()
    for _ in range(3):
        sender.whisper(address, b"m")
    receiver = transport.endpoint(address)
    sender.whisper(address, b"now")
    eventually(lambda: b"now" in receiver.receive(0.1), "heard")


def test_receive_waits_no_longer_than_told(transport: Transport) -> None:
    endpoint = transport.endpoint()
    started = time.monotonic()
    assert endpoint.receive(0.05) == []
    assert 0.04 <= time.monotonic() - started < 1


def test_many_endpoints_all_to_all(transport: Transport) -> None:
    endpoints = [transport.endpoint() for _ in range(8)]
    for sender in endpoints:
        for receiver in endpoints:
            sender.send(receiver.address, sender.address.encode())
    everyone = {endpoint.address.encode() for endpoint in endpoints}
    for receiver in endpoints:
        got: set[bytes] = set()
        eventually(lambda r=receiver, g=got: g.update(r.receive(0.1)) or g == everyone, "all")


def test_sending_to_nobody_never_blocks_and_is_bounded(transport: Transport) -> None:
    sender = transport.endpoint()
    address = transport.absent()
    started = time.monotonic()
    for _ in range(2000):
        sender.send(address, b"m" * 1000)
    assert time.monotonic() - started < 2
    sender.forget(address)
    sender.forget(address)


def test_large_messages_to_nobody_take_bounded_memory(transport: Transport) -> None:
    sender = transport.endpoint()
    address = transport.absent()
    before = used_bytes()
    for number in range(50):
        sender.send(address, bytes([number]) * (4 * MIB))
    assert used_bytes() - before < 64 * MIB
    sender.forget(address)
    eventually(lambda: used_bytes() - before < 16 * MIB, "memory is back")


def test_a_full_queue_drops_and_counts(transport: Transport) -> None:
    sender, receiver = transport.endpoint(), transport.endpoint()
    sender.send(receiver.address, b"first")
    assert receiver.receive(DEADLINE_S) == [b"first"]
    started = time.monotonic()
    for _ in range(3000):
        sender.send(receiver.address, bytes(100_000))
    assert time.monotonic() - started < 5
    assert sender.dropped > 0
    got: list[bytes] = []
    eventually(lambda: not got.extend(receiver.receive(0.2)) and len(got) > 50, "what had room")
    assert len(got) + sender.dropped <= 3000

    def passes() -> bool:
        sender.send(receiver.address, b"last")
        return b"last" in receiver.receive(0.1)

    eventually(passes, "room again")


def test_a_receiver_that_comes_back_is_reached_again(transport: Transport) -> None:
    sender, receiver = transport.endpoint(), transport.endpoint()
    address = receiver.address

    def reached(endpoint: Endpoint, payload: bytes) -> bool:
        sender.send(address, payload)
        return payload in endpoint.receive(0.05)

    eventually(lambda: reached(receiver, b"first"), "the first one")
    receiver.close()
    for _ in range(10):
        sender.send(address, b"to nobody")
    second = transport.endpoint(address)
    assert second.address == address
    eventually(lambda: reached(second, b"second"), "the second one")
    sender.forget(address)
    eventually(lambda: reached(second, b"third"), "after forgetting")


def test_wait_is_the_one_place_to_wait(transport: Transport) -> None:
    endpoint, other = transport.endpoint(), transport.endpoint()
    reading, writing = os.pipe()
    idle = os.pipe()
    fds = (reading, idle[0])
    started = time.monotonic()
    assert endpoint.wait(fds, 0.05) == []
    assert time.monotonic() - started >= 0.04

    os.write(writing, b"x")
    assert endpoint.wait(fds, DEADLINE_S) == [reading]
    os.read(reading, 1)

    other.send(endpoint.address, b"m")
    assert endpoint.wait(fds, DEADLINE_S) == []
    assert endpoint.receive(0) == [b"m"]

    threading.Timer(0.05, endpoint.wake).start()
    started = time.monotonic()
    assert endpoint.wait(fds, DEADLINE_S) == []
    assert time.monotonic() - started < 5
    endpoint.wake()
    assert endpoint.wait(fds, DEADLINE_S) == []
    started = time.monotonic()
    assert endpoint.wait(fds, 0.05) == []
    assert time.monotonic() - started >= 0.04

    os.close(writing)
    assert endpoint.wait(fds, DEADLINE_S) == [reading]
    for fd in (reading, *idle):
        os.close(fd)
    endpoint.close()
    endpoint.wake()


def test_too_long_a_message_is_refused(transport: Transport) -> None:
    endpoint = transport.endpoint()
    with pytest.raises(ProtocolError, match="at most"):
        endpoint.send(endpoint.address, bytes(MESSAGE_BYTES_MAX + 1))


def test_an_address_in_use_is_an_error(transport: Transport) -> None:
    if transport.name == "ipc":
        return  # ZeroMQ takes a socket file over; the job's lock keeps a second process out
    endpoint = transport.endpoint()
    with pytest.raises(WireError, match="in use"):
        transport.network.endpoint(endpoint.address)


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        ("tcp://0.0.0.0:*", "authentication"),
        ("tcp://10.0.0.1:4000", "authentication"),
        ("tcp://localhost:4000", "authentication"),
        ("tcp://*:4000", "authentication"),
        ("tcp://127.0.0.1", "no port"),
        ("udp://127.0.0.1:1", "neither"),
        ("ipc://relative", "not absolute"),
        ("ipc:///tmp/open-to-all", "mode 700"),
        ("ipc:///" + "d" * 110, "bytes"),
        ("", "neither"),
    ],
)
def test_addresses_that_others_could_reach_are_refused(hint: str, why: str) -> None:
    network = ZmqNetwork()
    endpoint = network.endpoint("tcp://127.0.0.1:*")
    request = ReadRequest(hint, b"x", 0, 1, None)
    for refused in (
        lambda: network.endpoint(hint),
        lambda: network.serve(hint, provide),
        lambda: endpoint.send(hint, b""),
        lambda: list(network.reader().read_many([request], peer_s=1, deadline_s=1)),
    ):
        with pytest.raises(ConfigError, match=why):
            refused()
    endpoint.close()
    network.close()


# Bulk reads


def test_reads_from_several_servers_in_any_order(transport: Transport) -> None:
    servers = [transport.serve(provide) for _ in range(3)]
    requests = [
        ReadRequest(server.address, b"x", offset, nbytes, (place, offset))
        for offset, nbytes in ((0, 0), (5, 1), (100, 70_000), (1 << 33, 3 * MIB))
        for place, server in enumerate(servers)
    ]
    got = transport.read(requests, window_bytes=4 * MIB)
    assert set(got) == {request.tag for request in requests}
    for request in requests:
        data = got[request.tag]
        assert data.readonly
        assert bytes(data) == pattern(request.offset, request.nbytes)
        assert np.frombuffer(data, np.uint8).size == request.nbytes


def test_no_requests_are_no_answers(transport: Transport) -> None:
    assert transport.read([]) == {}


def test_a_refusal_is_the_answer_to_one_request(transport: Transport) -> None:
    def fickle(key: bytes, offset: int, nbytes: int) -> memoryview | Refused:
        if key == b"short":
            return memoryview(b"12")
        if key == b"known":
            raise WireError("slot is gone")
        if key == b"fault":
            raise RuntimeError("a mistake")
        return provide(key, offset, nbytes)

    server = transport.serve(fickle)
    keys = (b"x", b"y", b"short", b"known", b"fault")
    requests = [ReadRequest(server.address, key, 0, 10, key) for key in keys]
    requests.append(ReadRequest(server.address, b"x", -1, 10, b"negative"))
    got = transport.read(requests)
    assert bytes(got.pop(b"x")) == pattern(0, 10)
    assert got == {
        b"y": Refused("b'y' is not held here"),
        b"short": Refused(f"{server.address} gave 2 bytes for 10"),
        b"known": Refused("slot is gone"),
        b"fault": Refused("the server failed: RuntimeError('a mistake')"),
        b"negative": Refused("10 bytes at -1 cannot be asked for"),
    }
    assert bytes(transport.read([ReadRequest(server.address, b"x", 3, 4, 0)])[0]) == pattern(3, 4)


def test_what_was_read_does_not_change_with_the_server(transport: Transport) -> None:
    arena = Arena.create("slot", MIB)
    memory = arena.view(0, MIB)
    memory[:] = 1
    server = transport.serve(lambda _, offset, nbytes: memory[offset : offset + nbytes].data)
    got = transport.read([ReadRequest(server.address, b"", 0, MIB, 0)])[0]
    memory[:] = 2
    assert bytes(got) == b"\1" * MIB
    arena.close()


@pytest.fixture
def shared() -> Iterator[Arena]:
    arena = Arena.create("slot", 2 * MIB)
    arena.view(0, 2 * MIB)[:] = np.frombuffer(pattern(0, 2 * MIB), np.uint8)
    yield arena
    arena.close()


def share(arena: Arena) -> Provider:
    """All of an arena, as its first bytes are what one finds at offset 0."""

    def give(key: bytes, offset: int, nbytes: int) -> Shared:
        return Shared(arena.view(offset, nbytes).data, arena.fd, offset)

    return give


def test_shared_memory_is_mapped_on_one_machine_and_else_sent(
    transport: Transport, shared: Arena
) -> None:
    server = transport.serve(share(shared))
    requests = [ReadRequest(server.address, b"", n * 5000, 5000, n) for n in range(200)]
    got = transport.read(requests, window_bytes=50_000)
    assert all(bytes(got[n]) == pattern(n * 5000, 5000) for n in range(200))
    assert all(got[n].readonly for n in range(200))
    server.close()
    shared.view(0, MIB)[:] = 7
    mapped = bytes(got[0]) == b"\7" * 5000
    assert mapped == (transport.name == "ipc")


def test_what_lies_in_memory_that_is_mapped_is_not_asked_for_again(
    transport: Transport, shared: Arena
) -> None:
    asked: list[tuple[bytes, int]] = []

    def give(key: bytes, offset: int, nbytes: int) -> Shared | Refused:
        asked.append((key, offset))
        if key == b"gone" or offset + nbytes > 2 * MIB:
            return Refused("not here")
        return Shared(shared.view(offset, nbytes).data, shared.fd, offset)

    server = transport.serve(give)
    requests = [
        ReadRequest(server.address, b"here", n * 5000, 5000, n) for n in range(100, 200)
    ] + [
        ReadRequest(server.address, b"here", 100, 400, 0),
        ReadRequest(server.address, b"gone", 0, 5000, 1),
        ReadRequest(server.address, b"here", 2 * MIB - 10, 11, 2),
    ]
    got = transport.read(requests, window_bytes=10_000)
    assert all(bytes(got[n]) == pattern(n * 5000, 5000) for n in range(100, 200))
    assert bytes(got[0]) == pattern(100, 400)
    assert got[1] == got[2] == Refused("not here")
    few = {(b"here", 500_000), (b"here", 505_000), (b"gone", 0), (b"here", 2 * MIB - 10)}
    if transport.name == "ipc":
        assert set(asked) == few
    else:
        assert len(asked) == len(requests)


def test_shared_memory_that_has_grown_is_mapped_again(transport: Transport, shared: Arena) -> None:
    server = transport.serve(share(shared))

    def requests() -> Iterator[ReadRequest[int]]:
        yield ReadRequest(server.address, b"", 0, MIB, 0)
        shared.ensure(8 * MIB)
        shared.view(7 * MIB, MIB)[:] = 9
        yield ReadRequest(server.address, b"", 7 * MIB, MIB, 1)

    limits = {"peer_s": DEADLINE_S, "deadline_s": DEADLINE_S, "window_bytes": 1}
    got = dict(transport.network.reader().read_many(requests(), **limits))
    assert bytes(got[0]) == pattern(0, MIB)
    assert bytes(got[1]) == b"\x09" * MIB


def test_mapping_leaves_nothing_open(transport: Transport, shared: Arena) -> None:
    server = transport.serve(share(shared))
    request = ReadRequest(server.address, b"", 0, MIB, 0)
    kept = transport.read([request])[0]
    before = settled()
    for _ in range(5):
        transport.read([request])
    eventually(lambda: open_fds() <= before, "descriptors are back")
    assert bytes(kept) == pattern(0, MIB)


def test_memory_that_is_none_is_a_protocol_error(shared: Arena) -> None:
    """A peer that says its bytes lie beyond the end of its file: touching them would kill us."""
    directory = Path(f"/tmp/jaxft-test-{os.getpid()}")
    network = ZmqNetwork()
    past = shared.size_bytes - 10

    def lie(key: bytes, offset: int, nbytes: int) -> Shared:
        return Shared(shared.view(0, nbytes).data, shared.fd, past)

    with contextlib.closing(network.serve(f"ipc://{directory}/0", lie)) as server:
        request = ReadRequest(server.address, b"", 0, 11, 0)
        with pytest.raises(ProtocolError, match="passed on memory that is none"):
            list(network.reader().read_many([request], peer_s=5, deadline_s=5))
    assert shared.size_bytes == past + 10
    network.close()
    directory.rmdir()


def test_requests_are_taken_as_room_is_made(transport: Transport) -> None:
    server = transport.serve(provide)
    taken = 0

    def requests() -> Iterator[ReadRequest[int]]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield ReadRequest(server.address, b"x", number, MIB, number)

    limits = {"peer_s": DEADLINE_S, "deadline_s": DEADLINE_S, "window_bytes": 4 * MIB}
    for count, _ in enumerate(transport.network.reader().read_many(requests(), **limits)):
        # Four under way, one in our hands, one that waits for room.
        assert taken <= count + 6
    assert taken == 40
    big = [ReadRequest(server.address, b"x", 0, 8 * MIB, n) for n in range(3)]
    assert len(transport.read(big, window_bytes=MIB)) == 3


def test_a_piece_beyond_the_limit_is_refused(transport: Transport) -> None:
    server = transport.serve(provide)
    for nbytes in (PIECE_BYTES_MAX + 1, -1):
        with pytest.raises(ProtocolError, match="at once"):
            transport.read([ReadRequest(server.address, b"x", 0, nbytes, 0)])


def test_a_server_that_is_not_there_is_named_in_time(transport: Transport) -> None:
    here, gone = transport.serve(provide), transport.absent()
    requests = [ReadRequest(address, b"x", 0, 100, address) for address in (here.address, gone)]
    started, cpu = time.monotonic(), time.process_time()
    with pytest.raises(PeerUnreachable, match=gone):
        transport.read(requests, peer_s=0.4)
    assert 0.35 < time.monotonic() - started < 3
    assert time.process_time() - cpu < 0.3
    with pytest.raises(PeerUnreachable, match=gone):
        transport.read(requests, deadline_s=0.2)


def test_a_server_that_starts_late_or_again_is_asked_again(transport: Transport) -> None:
    server = transport.serve(provide)
    requests = (ReadRequest(server.address, b"x", n, 10, n) for n in range(2))
    limits = {"peer_s": DEADLINE_S, "deadline_s": DEADLINE_S, "window_bytes": 10}
    reading = transport.network.reader().read_many(requests, **limits)
    assert bytes(next(reading)[1]) == pattern(0, 10)
    server.close()
    later = threading.Timer(0.3, lambda: transport.serve(provide, server.address))
    later.start()
    assert [(tag, bytes(data)) for tag, data in reading] == [(1, pattern(1, 10))]
    later.join()


def test_a_cancelled_read_ends_at_once(transport: Transport) -> None:
    gone = transport.absent()
    cancel = threading.Event()
    ended: list[object] = []

    def work() -> None:
        try:
            transport.read([ReadRequest(gone, b"x", 0, 1, 0)], cancel=cancel)
        except ReadCancelled as error:
            ended.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    cancel.set()
    started = time.monotonic()
    worker.join(DEADLINE_S)
    assert time.monotonic() - started < 10 * CANCEL_POLL_S
    assert len(ended) == 1


def test_a_reader_that_is_busy_elsewhere_blames_nobody(transport: Transport) -> None:
    server = transport.serve(provide)
    requests = [ReadRequest(server.address, b"x", n, MIB, n) for n in range(4)]
    limits = {"peer_s": 0.5, "deadline_s": DEADLINE_S, "window_bytes": 2 * MIB}
    count = 0
    for _ in transport.network.reader().read_many(requests, **limits):
        count += 1
        time.sleep(0.6)
    assert count == 4


def test_a_server_is_not_silent_while_much_is_found_at_another(
    transport: Transport, shared: Arena
) -> None:
    """One server has said where its bytes lie, and they are taken without asking. What the other
    has answered meanwhile is heard, however much of that there is."""
    answered = threading.Event()

    def later(key: bytes, offset: int, nbytes: int) -> Shared:
        answered.wait(0.05)
        return Shared(shared.view(offset, nbytes).data, shared.fd, offset)

    first, other = transport.serve(share(shared)), transport.serve(later)

    def requests() -> Iterator[ReadRequest[int]]:
        yield ReadRequest(first.address, b"x", 0, 5000, 0)
        yield ReadRequest(other.address, b"y", 0, 5000, 1)
        for number in range(2, 40):
            yield ReadRequest(first.address, b"x", number * 5000, 5000, number)

    limits = {"peer_s": 0.3, "deadline_s": DEADLINE_S, "window_bytes": 20_000}
    order = []
    for tag, _ in transport.network.reader().read_many(requests(), **limits):
        order.append(tag)
        time.sleep(0.02)
    assert sorted(order) == list(range(40))
    assert order.index(1) < 30


def test_several_readers_at_once(transport: Transport) -> None:
    server = transport.serve(provide)
    counts: list[int] = []

    def work() -> None:
        requests = [ReadRequest(server.address, b"x", n, 10_000, n) for n in range(300)]
        got = transport.read(requests, window_bytes=100_000)
        counts.append(sum(bytes(data) == pattern(n, 10_000) for n, data in got.items()))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE_S)
    assert counts == [300] * 4


def test_nothing_is_left_open(transport: Transport) -> None:
    def use() -> None:
        server, sender = transport.serve(provide), transport.endpoint()
        peers = [transport.endpoint() for _ in range(3)]
        for peer in peers:
            sender.send(peer.address, b"m")
            assert peer.receive(DEADLINE_S) == [b"m"]
        transport.read([ReadRequest(server.address, b"x", n, MIB, n) for n in range(3)])
        half = transport.network.reader().read_many(
            [ReadRequest(server.address, b"x", n, MIB, n) for n in range(9)],
            peer_s=DEADLINE_S,
            deadline_s=DEADLINE_S,
            window_bytes=2 * MIB,
        )
        next(half)
        half.close()
        for each in (server, sender, *peers):
            each.close()

    use()
    eventually(lambda: settled() >= 0, "sockets are closed")
    before, threads = settled(), threading.active_count()
    for _ in range(8):
        use()
    eventually(lambda: open_fds() <= before, "descriptors are back")
    assert threading.active_count() <= threads


def settled() -> int:
    """Open descriptors once ZeroMQ's reaper is through with what was closed."""
    last = -1
    while last != (now := open_fds()):
        last = now
        time.sleep(0.05)
    return now


def test_what_is_received_into_is_used_again_and_never_under_a_view() -> None:
    network = ZmqNetwork()
    server = network.serve("tcp://127.0.0.1:*", provide)
    requests = [ReadRequest(server.address, b"x", n, MIB, n) for n in range(60)]
    places: set[int] = set()
    kept: dict[int, memoryview] = {}
    reading = network.reader().read_many(
        requests, peer_s=DEADLINE_S, deadline_s=DEADLINE_S, window_bytes=4 * MIB
    )
    for number, data in reading:
        assert isinstance(data, memoryview)
        if number % 20 == 0:
            kept[number] = data
        else:
            places.add(np.frombuffer(data, np.uint8).ctypes.data)
    # One in our hands, one that arrives, and those that were kept.
    assert len(places) <= 3 + len(kept)
    assert all(bytes(data) == pattern(number, MIB) for number, data in kept.items())
    server.close()
    network.close()


# Peers that are other processes


@pytest.fixture(params=["ipc", "tcp", "encrypted"])
def remote(request: pytest.FixtureRequest) -> Iterator[Transport]:
    directory = Path(f"/tmp/jaxft-test-{os.getpid()}")
    made = Transport(request.param, network_of(request.param), directory)
    yield made
    made.close()
    if directory.exists():
        for left in directory.iterdir():  # by the children that were killed
            left.unlink()
        directory.rmdir()


def test_a_killed_peer_is_reached_again_when_restarted(remote: Transport) -> None:
    me = remote.endpoint()

    def answered(address: str, payload: bytes) -> bool:
        me.send(address, me.address.encode() + b" " + payload)
        return payload in me.receive(0.1)

    with child("echo", remote.hint(), remote.name) as first:
        address = first.line()
        eventually(lambda: answered(address, b"one"), "an answer")
        first.kill()
        assert not answered(address, b"two")
    with child("echo", address, remote.name) as second:
        assert second.line() == address
        eventually(lambda: answered(address, b"three"), "an answer after the restart")


def test_a_stopped_peer_does_not_block_a_sender(remote: Transport) -> None:
    me = remote.endpoint()
    with child("echo", remote.hint(), remote.name) as peer:
        address = peer.line()
        me.send(address, me.address.encode() + b" hello")
        assert me.receive(DEADLINE_S) == [b"hello"]
        peer.stop()
        started = time.monotonic()
        for _ in range(300):
            me.send(address, bytes(MIB))
        assert time.monotonic() - started < 3
        assert me.dropped > 100


def test_a_server_killed_and_restarted_during_a_read(remote: Transport) -> None:
    size = 16 * MIB
    with child("serve_bulk", remote.hint(), size, remote.name) as first:
        address = first.line()
        requests = [ReadRequest(address, b"x", n * MIB // 4, MIB // 4, n) for n in range(64)]
        reading = remote.network.reader().read_many(
            requests, peer_s=DEADLINE_S, deadline_s=2 * DEADLINE_S, window_bytes=MIB
        )
        got = dict(itertools.islice(reading, 10))
        first.kill()
        with child("serve_bulk", address, size, remote.name) as second:
            got.update(reading)
            second.end()
    assert sorted(got) == list(range(64))
    whole = b"".join(bytes(got[n]) for n in range(64))
    assert whole == pattern(0, size)


def test_a_server_killed_while_another_is_read_is_asked_again(remote: Transport) -> None:
    """It had something to say, and was found gone when it was asked for more."""
    size, count = 4 * MIB, 400
    with (
        child("serve_bulk", remote.hint(), size, remote.name) as stays,
        child("serve_bulk", remote.hint(), size, remote.name) as goes,
    ):
        addresses = [stays.line(), goes.line()]
        requests = [
            ReadRequest(addresses[n % 2], b"x", n % 16 * MIB // 4, MIB // 4, n)
            for n in range(count)
        ]
        reading = remote.network.reader().read_many(
            requests, peer_s=DEADLINE_S, deadline_s=3 * DEADLINE_S, window_bytes=8 * MIB
        )
        got = {tag: len(data) for tag, data in itertools.islice(reading, 41)}
        goes.kill()
        with child("serve_bulk", addresses[1], size, remote.name) as again:
            got.update((tag, len(data)) for tag, data in reading)
            again.end()
        stays.end()
    assert got == dict.fromkeys(range(count), MIB // 4)


def test_a_server_killed_during_a_read_is_named_in_time(remote: Transport) -> None:
    with child("serve_bulk", remote.hint(), 4 * MIB, remote.name) as server:
        address = server.line()
        endless = (ReadRequest(address, b"x", 0, MIB, n) for n in itertools.count())
        reading = remote.network.reader().read_many(
            endless, peer_s=0.4, deadline_s=DEADLINE_S, window_bytes=8 * MIB
        )
        next(reading)
        server.kill()
        started, cpu = time.monotonic(), time.process_time()
        with pytest.raises(PeerUnreachable, match=address):
            list(reading)
    assert time.monotonic() - started < 3
    assert time.process_time() - cpu < 0.3


def test_a_server_that_hangs_is_named_and_the_others_go_on(remote: Transport) -> None:
    with child("serve_bulk", remote.hint(), MIB, remote.name) as stuck:
        here = remote.serve(provide)
        requests = [ReadRequest(stuck.line(), b"stuck", 0, 1, "stuck")]
        requests += [ReadRequest(here.address, b"x", n, 1000, n) for n in range(100)]
        got = []
        with pytest.raises(PeerUnreachable, match="owes 1 reads"):
            got.extend(
                tag
                for tag, _ in remote.network.reader().read_many(
                    requests, peer_s=0.5, deadline_s=DEADLINE_S
                )
            )


def test_a_peer_killed_in_the_middle_of_a_piece_case_26() -> None:
    network = ZmqNetwork()
    with child("half_a_piece", 0) as peer:
        address = f"tcp://127.0.0.1:{peer.line()}"
        reading = network.reader().read_many(
            [ReadRequest(address, b"x", 0, MIB, 0)], peer_s=1.0, deadline_s=DEADLINE_S
        )
        errors: list[BaseException] = []

        def work() -> None:
            try:
                next(reading)
            except PeerUnreachable as error:
                errors.append(error)

        started, cpu = time.monotonic(), time.process_time()
        worker = threading.Thread(target=work)
        worker.start()
        assert peer.line() == "half"
        peer.kill()
        worker.join(DEADLINE_S)
        assert time.monotonic() - started < 4
        assert time.process_time() - cpu < 0.4
        assert len(errors) == 1
        assert address in str(errors[0])
    network.close()


def test_garbage_on_the_port_is_survived() -> None:
    """Whoever connects and is no peer gets nothing, and does not keep others from being heard."""
    network = ZmqNetwork()
    server = network.serve("tcp://127.0.0.1:*", provide)
    endpoint = network.endpoint("tcp://127.0.0.1:*")
    for address in (server.address, endpoint.address):
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)) * 10)
    endpoint.send(endpoint.address, b"still here")
    eventually(lambda: b"still here" in endpoint.receive(0.1), "the message among the garbage")
    request = ReadRequest(server.address, b"x", 0, 5, 0)
    got = dict(network.reader().read_many([request], peer_s=5, deadline_s=5))
    assert bytes(got[0]) == pattern(0, 5)
    server.close()
    endpoint.close()
    network.close()
