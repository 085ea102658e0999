"""The local channel: frames, descriptors, deadlines, and processes that stop or die."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jaxft.errors import (
    ChannelClosed,
    ConfigError,
    JobInUse,
    PeerUnreachable,
    ProtocolError,
    WireError,
)
from jaxft.host import local
from jaxft.host.local import LocalChannel, LocalListener, connect
from jaxft.host.memory import Arena
from tests.host.children import Child, child

DEADLINE_S = 10.0
MIB = 1 << 20


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path short enough, in a directory that is not there yet."""
    directory = Path(f"/tmp/jaxft-test-{os.getpid()}-local")
    yield directory / "smp"
    if directory.exists():
        for left in directory.iterdir():
            left.unlink()
        directory.rmdir()


@pytest.fixture
def listener(path: Path) -> Iterator[LocalListener]:
    made = LocalListener(path)
    yield made
    made.close()


@pytest.fixture
def ends(listener: LocalListener, path: Path) -> Iterator[tuple[LocalChannel, LocalChannel]]:
    client = connect(path, DEADLINE_S)
    server = accept(listener)
    yield client, server
    client.close()
    server.close()


def accept(listener: LocalListener) -> LocalChannel:
    channel = listener.accept(DEADLINE_S)
    assert channel is not None
    return channel


def take(channel: LocalChannel) -> local.Received:
    message = channel.receive(DEADLINE_S)
    assert message is not None
    return message


def readable(channel: LocalChannel, timeout_s: float = DEADLINE_S) -> bool:
    return bool(select.select([channel], [], [], timeout_s)[0])


def open_fds() -> int:
    return psutil.Process().num_fds()


# Messages


def test_messages_keep_their_bounds_and_order(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, server = ends
    sent = [b"", b"a", b"b" * 1000, b"", b"c" * (3 * MIB), b"d"]
    sender = threading.Thread(target=lambda: [client.send(payload) for payload in sent])
    sender.start()
    assert [take(server).payload for _ in sent] == sent
    sender.join()
    server.send(b"back")
    assert take(client) == (b"back", ())


def test_receive_waits_no_longer_than_told(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, _ = ends
    started = time.monotonic()
    assert client.receive(0.05) is None
    assert client.receive(0) is None
    assert 0.04 <= time.monotonic() - started < 1
    assert not client.ended


def test_drain_takes_what_is_there(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, server = ends
    assert server.drain() == []
    for number in range(100):
        client.send(b"%d" % number)
    got = [*server.drain(), *server.drain(), *server.drain()]
    assert [message.payload for message in got] == [b"%d" % number for number in range(100)]


def test_each_end_knows_who_the_other_is(listener: LocalListener, path: Path) -> None:
    with child("local_idle", path) as client:
        assert client.line() == "connected"
        channel = accept(listener)
        assert channel.peer_pid == client.pid
        assert channel.peer_uid == os.geteuid()
        channel.close()


def test_too_much_is_refused_before_it_is_sent(
    ends: tuple[LocalChannel, LocalChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = ends
    monkeypatch.setattr(local, "FRAME_BYTES_MAX", MIB)
    with pytest.raises(ProtocolError, match=r"1048577 bytes .* at most 1048576"):
        client.send(bytes(MIB + 1))
    with pytest.raises(ProtocolError, match="17 descriptors"):
        client.send(b"", [0] * 17)
    client.send(b"fine")
    assert take(server).payload == b"fine"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"GET / HT", "no message"),
        (b"JXF\0\xff\xff\xff\xff", "length 4294967295"),
        (b"JXF\1\0\0\0\0", "0 of 1 descriptors"),
    ],
)
def test_what_is_no_message_closes_the_channel(
    listener: LocalListener, path: Path, raw: bytes, why: str
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        server = accept(listener)
        stranger.sendall(raw)
        with pytest.raises(ProtocolError, match=why):
            server.receive(DEADLINE_S)
        assert server.ended
        assert server.fileno() == -1
        assert stranger.recv(1) == b""


# Descriptors


def test_descriptors_come_with_their_own_message(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, server = ends
    pipes = [os.pipe() for _ in range(3)]
    before = open_fds()
    for number, (reading, _) in enumerate(pipes):
        client.send(b"none")
        client.send(b"%d" % number * (number * 60_000), [reading])
        client.send(b"two", [reading, reading])
    got = [take(server) for _ in range(9)]
    assert [len(message.fds) for message in got] == [0, 1, 2] * 3
    for number, (_, writing) in enumerate(pipes):
        fd = got[3 * number + 1].fds[0]
        assert not os.get_inheritable(fd)
        os.write(writing, b"%d" % number)
        assert os.read(fd, 10) == b"%d" % number
    for message in got:
        for fd in message.fds:
            os.close(fd)
    assert open_fds() == before
    for pipe in pipes:
        os.close(pipe[0])
        os.close(pipe[1])


def test_the_most_descriptors_arrive(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, server = ends
    client.send(b"all", [client.fileno()] * local.FDS_MAX)
    message = take(server)
    assert len(message.fds) == local.FDS_MAX
    for fd in message.fds:
        os.close(fd)


def test_descriptors_of_half_a_message_are_closed(listener: LocalListener, path: Path) -> None:
    before = open_fds()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        server = accept(listener)
        socket.send_fds(stranger, [b"JXF\1\x10\0\0\0half"], [0])
        assert server.receive(0.05) is None
    with pytest.raises(ChannelClosed):
        server.receive(DEADLINE_S)
    server.close()
    assert open_fds() == before


def test_an_arena_is_mapped_by_both_sides_and_grows(listener: LocalListener, path: Path) -> None:
    arena = Arena.create("slot", 4096)
    mine = arena.view(0, 5)
    with child("map_arena", path) as other:
        channel = accept(listener)
        channel.send(b"here", [arena.fd])
        assert take(channel).payload == b"written"
        assert mine.tobytes() == b"child"
        arena.ensure(3 * MIB)
        channel.send(b"%d" % arena.size_bytes)
        assert take(channel).payload == b"grown"
        assert arena.view(3 * MIB - 5, 5).tobytes() == b"child"
        other.kill()
        assert arena.view(3 * MIB - 5, 5).tobytes() == b"child"
        with pytest.raises(ChannelClosed):
            channel.receive(DEADLINE_S)
        channel.close()
    arena.close()


# Ends


def test_the_end_comes_after_the_last_message(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, server = ends
    client.send(b"last words")
    client.close()
    with pytest.raises(ChannelClosed):
        server.send(b"too late")
    assert readable(server)
    assert [message.payload for message in server.drain()] == [b"last words"]
    assert server.ended
    with pytest.raises(ChannelClosed):
        server.receive(DEADLINE_S)
    server.close()
    server.close()
    with pytest.raises(ChannelClosed):
        server.send(b"")
    with pytest.raises(ChannelClosed):
        server.receive(DEADLINE_S)


def test_a_killed_client_is_an_end_at_once(listener: LocalListener, path: Path) -> None:
    with child("local_echo", path) as client:
        channel = accept(listener)
        channel.send(b"hello", [channel.fileno()])
        reply = take(channel)
        assert reply.payload == b"hello"
        os.close(reply.fds[0])
        client.process.kill()
        started = time.monotonic()
        # The child's copy of our descriptor is gone with it.
        with pytest.raises(ChannelClosed):
            take(channel)
        assert time.monotonic() - started < 2
        channel.close()


def test_closing_ends_a_receive_in_another_thread(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, _ = ends
    ended = threading.Event()

    def work() -> None:
        try:
            client.receive(60)
        except ChannelClosed:
            ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.05)
    client.close()
    worker.join(DEADLINE_S)
    assert ended.is_set()


# Clients that stop


def test_a_client_stopped_in_the_middle_of_a_frame_blocks_nobody(
    listener: LocalListener, path: Path
) -> None:
    with child("local_half", path) as stopped, child("local_echo", path) as lively:
        channels = {channel.peer_pid: channel for channel in (accept(listener), accept(listener))}
        half, whole = channels[stopped.pid], channels[lively.pid]
        assert stopped.line() == "half"
        stopped.stop()
        started = time.monotonic()
        assert readable(half)
        assert half.drain() == []
        assert not half.ended
        assert not readable(half, 0)
        for number in range(20):
            whole.send(b"%d" % number)
            assert take(whole).payload == b"%d" % number
            assert half.drain() == []
        assert time.monotonic() - started < 3
        stopped.go_on()
        stopped.say("go on")
        assert take(half).payload == b"h" * MIB
        half.close()
        whole.close()


def test_a_stopped_receiver_is_an_error_after_the_deadline(
    listener: LocalListener, path: Path
) -> None:
    with child("local_idle", path) as client:
        channel = accept(listener)
        assert client.line() == "connected"
        client.stop()
        channel.send(b"fits into the socket's buffer")
        started, cpu = time.monotonic(), time.process_time()
        with pytest.raises(WireError, match=f"process {client.pid} did not take a message"):
            channel.send(bytes(8 * MIB), timeout_s=0.4)
        assert 0.35 < time.monotonic() - started < 2
        assert time.process_time() - cpu < 0.2
        assert channel.ended
        with pytest.raises(ChannelClosed):
            channel.send(b"more")


def test_a_sender_that_waits_for_another_has_a_deadline_too(
    ends: tuple[LocalChannel, LocalChannel],
) -> None:
    client, server = ends
    errors: list[WireError] = []

    def work() -> None:
        try:
            client.send(bytes(8 * MIB), timeout_s=1.0)
        except WireError as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert readable(server)
    with pytest.raises(WireError, match="earlier messages"):
        client.send(b"me too", timeout_s=0.1)
    worker.join(DEADLINE_S)
    assert len(errors) == 1


def test_threads_may_send_at_once(ends: tuple[LocalChannel, LocalChannel]) -> None:
    client, server = ends
    workers = [
        threading.Thread(target=lambda b=bytes([n]): [client.send(b * 50_000) for _ in range(20)])
        for n in range(4)
    ]
    for worker in workers:
        worker.start()
    got = [take(server).payload for _ in range(80)]
    for worker in workers:
        worker.join()
    assert all(len(set(payload)) == 1 and len(payload) == 50_000 for payload in got)


# Listening and connecting


def test_the_socket_is_for_this_user_alone(listener: LocalListener, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    listener.close()
    listener.close()
    assert not path.exists()


def test_an_open_directory_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"mode 755: it must belong to user .* mode 700"):
        LocalListener(path)
    with pytest.raises(ConfigError, match="mode 755"):
        connect(path, 0)


def test_a_path_too_long_is_refused() -> None:
    path = Path("/tmp") / ("d" * 100) / "socket"
    with pytest.raises(ConfigError, match="112 bytes and Unix sockets take 107"):
        LocalListener(path)
    with pytest.raises(ConfigError, match="112 bytes"):
        connect(path, 0)
    assert not path.parent.exists()


def test_what_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(ConfigError, match="cannot listen"):
        LocalListener(path)
    assert path.read_text() == "precious"


def test_another_user_is_turned_away(
    listener: LocalListener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(path, DEADLINE_S)
    monkeypatch.setattr(local, "_credentials", lambda _: (1, os.geteuid() + 1, 1))
    assert listener.accept(DEADLINE_S) is None
    with pytest.raises(PeerUnreachable, match="another user"):
        connect(path, 0.05)
    monkeypatch.undo()
    with pytest.raises(ChannelClosed):
        client.receive(DEADLINE_S)
    client.close()


def test_a_live_listener_is_a_job_in_use(path: Path) -> None:
    with child("local_listen", path) as other:
        assert other.line() == "listening"
        with pytest.raises(JobInUse, match="another process listens"):
            LocalListener(path)
        other.stop()
        for _ in range(3):
            with pytest.raises(JobInUse):
                LocalListener(path)
        other.kill()
        assert path.exists()
        replaced = LocalListener(path)
        client = connect(path, DEADLINE_S)
        accept(replaced).close()
        client.close()
        replaced.close()
    assert not path.exists()


def test_closing_leaves_a_successor_alone(path: Path) -> None:
    first = LocalListener(path)
    path.unlink()
    second = LocalListener(path)
    first.close()
    client = connect(path, DEADLINE_S)
    accept(second).close()
    client.close()
    second.close()


def test_connecting_waits_for_the_listener(path: Path) -> None:
    channels: list[LocalChannel] = []
    waiting = threading.Thread(target=lambda: channels.append(connect(path, DEADLINE_S)))
    waiting.start()
    time.sleep(0.05)
    listener = LocalListener(path)
    accept(listener).close()
    waiting.join(DEADLINE_S)
    channels[0].close()
    listener.close()


def test_connecting_to_nobody_ends_in_time(path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(PeerUnreachable, match=f"nobody answered at {path}"):
        connect(path, 0.1)
    assert time.monotonic() - started < 2


def test_accept_without_anybody_is_none(listener: LocalListener) -> None:
    assert listener.accept() is None
    assert listener.accept(0.02) is None


# Many


def test_200_connections_leave_nothing(listener: LocalListener, path: Path) -> None:
    def once(payload: bytes) -> None:
        client = connect(path, DEADLINE_S)
        server = accept(listener)
        client.send(payload, [client.fileno()])
        message = take(server)
        assert message.payload == payload
        os.close(message.fds[0])
        server.send(b"unread")
        client.close()
        server.close()

    once(b"")
    fds, rss = open_fds(), psutil.Process().memory_info().rss
    for _ in range(200):
        once(bytes(100_000))
    assert open_fds() == fds
    assert psutil.Process().memory_info().rss - rss < 16 * MIB


def test_resident_memory_is_flat_over_many_large_messages(
    ends: tuple[LocalChannel, LocalChannel],
) -> None:
    client, server = ends
    payload = bytes(4 * MIB)
    sender = threading.Thread(target=lambda: [client.send(payload) for _ in range(60)])
    sender.start()
    rss = 0
    for number in range(60):
        assert len(take(server).payload) == 4 * MIB
        if number == 10:
            rss = psutil.Process().memory_info().rss
    sender.join()
    assert psutil.Process().memory_info().rss - rss < 24 * MIB


def test_killed_clients_leave_nothing(listener: LocalListener, path: Path) -> None:
    before = open_fds()
    clients = [Child("local_half", path) for _ in range(3)]
    channels = [accept(listener) for _ in clients]
    for client in clients:
        assert client.line() == "half"
        client.end()
    for channel in channels:
        assert readable(channel)
        assert channel.drain() == []
        assert channel.ended
        channel.close()
    assert open_fds() == before
