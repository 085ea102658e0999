"""The SMP as a process of its host: its agent, its end, what it keeps, and what it refuses."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import msgspec
import psutil
import pytest
import zmq

from jaxft.errors import PeerUnreachable, ProtocolError
from jaxft.group.manifest import Part
from jaxft.group.messages import Directive, Envelope, RankOptions
from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from jaxft.host.wire import ReadRequest, Refused
from jaxft.host.wire_zmq import ZmqNetwork
from tests.host.ranks import WAIT_S
from tests.host.world import World, segments, until

PAIR = Code(data=1, parity=1)
LONE = Code(data=1, parity=0)


def test_the_snapshot_process_as_the_agent_starts_it(make_hosts):
    """By its command line: new memory, memory of a dead one, and an end when it is told."""
    hosts = make_hosts(2, command=True)
    world = World(hosts, 1, PAIR)
    world.restore()
    datas = segments(2)
    assert world.save(0, 1, datas).ok
    hosts[0].kill()
    hosts[0].start()
    assert World(hosts, 2, PAIR).restore(datas).source == "own"
    for host in hosts:
        host.say(p.Stop())
        host.reaped()
        assert [path.name for path in host.directory.iterdir()] == ["smp.log"]


def test_a_signal_to_all_processes_of_a_host_leaves_it_to_the_agent(make_hosts):
    hosts = make_hosts(2, command=True)
    for host in hosts:
        for number in (signal.SIGTERM, signal.SIGINT):
            host.signal(number)
    world = World(hosts, 1, PAIR)
    world.restore()
    assert world.save(0, 1, segments(2)).ok
    for host in hosts:
        host.say(p.Stop())
        host.reaped()


def test_ranks_end_with_their_agent_and_a_new_one_adopts_the_memory(make_hosts):
    hosts = make_hosts(2)
    world = World(hosts, 1, PAIR)
    world.restore()
    datas = segments(2)
    assert world.save(0, 1, datas).ok
    arena = hosts[0].welcome.arena
    hosts[0].leave()
    until(lambda: not world.ranks[0].alive, "the rank is dead")
    assert world.ranks[1].alive
    hosts[0].join()
    assert hosts[0].welcome.arena == arena
    assert hosts[0].welcome.newest.seq == 0
    assert World(hosts, 2, PAIR).restore(datas).source == "own"


def test_a_rank_that_no_agent_started_goes_on_until_another_has_its_place(make_hosts):
    (host,) = make_hosts(1)
    world = World([host], 1, LONE, attached=True)
    world.restore()
    datas = segments(1)
    assert world.save(0, 1, datas).ok
    host.leave()
    assert world.save(1, 2, datas).ok
    host.join()
    assert host.welcome.writers == (world.ranks[0].pid,)
    world.enter(host)
    newer = segments(1, 3)
    assert world.save(2, 3, newer).ok
    host.leave()
    host.join()
    assert World([host], 2, LONE, kill=False, attached=True).restore(newer).source == "own"
    assert not world.ranks[0].alive


def test_without_an_agent_it_ends_after_a_while(make_hosts):
    hosts = make_hosts(1, "--orphan-s", "0.3")
    began_s = time.monotonic()
    hosts[0].leave()
    hosts[0].reaped()
    assert time.monotonic() - began_s >= 0.3
    assert "no agent for" in hosts[0].log()


def test_without_an_agent_and_its_socket_it_ends_soon(make_hosts):
    """Nobody can find it any more: its memory would be held for `orphan_s` in vain."""
    hosts = make_hosts(2)
    kept, lost = hosts
    (lost.directory / "smp.sock").unlink()
    lost.process.join(0.5)
    assert lost.process.is_alive()  # it has an agent
    for host in hosts:
        host.leave()
    began_s = time.monotonic()
    lost.reaped()
    assert time.monotonic() - began_s < 2
    assert kept.process.is_alive()
    assert "this SMP ends" in lost.log()


def test_a_stop_ends_it_within_five_seconds_whatever_hangs_case_42(make_hosts, tmp_path):
    hosts = make_hosts(2, command=True, faults=f"smp.coding:host=h1=wait:{tmp_path / 'never'}")
    world = World(hosts, 1, PAIR)
    world.restore()
    datas = segments(2)
    world.begin(0, 1, datas)
    world.put()
    world.all("staged", 0)
    began_s = time.monotonic()
    hosts[1].say(p.Stop())
    hosts[1].process.join(WAIT_S)
    assert time.monotonic() - began_s < 5
    assert not hosts[1].process.is_alive()


def test_two_hundred_snapshots_leave_nothing_behind_case_5(make_hosts):
    hosts = make_hosts(2)
    world = World(hosts, 1, PAIR)
    world.restore()
    datas = segments(2, chunks=1)
    processes = [psutil.Process(host.process.pid) for host in hosts]
    processes += [psutil.Process(rank.pid) for rank in world.ranks]
    save_many(world, 0, 20, datas)
    before = [Use(process) for process in processes]
    save_many(world, 20, 200, datas)
    for process, was in zip(processes, before, strict=True):
        until(lambda process=process, was=was: Use(process).flat(was), f"{process} is flat", 5.0)


def test_generations_and_lost_peers_leave_nothing_behind_case_5(make_hosts):
    """Not their sockets, not the segments that were rebuilt, not the ranks that ended."""
    hosts = make_hosts(2)
    world = World(hosts, 1, PAIR)
    world.restore()
    process = psutil.Process(hosts[0].process.pid)
    used = []
    for number in range(2, 18, 2):
        datas = segments(2, number)
        assert world.save(0, number, datas).ok
        hosts[1].lose()
        assert World(hosts[:1], number, PAIR).restore(datas).source == "rebuilt"
        hosts[1] = make_hosts(1, first=10 + number)[0]
        world = World(hosts, number + 1, PAIR)
        assert world.restore(datas).source == "rebuilt"
        used.append(Use(process))
    until(lambda: Use(process).flat(used[3]), "the SMP is flat", 5.0)


def save_many(world: World, first: int, count: int, datas: list[bytes]) -> None:
    for rank, data in zip(world.ranks, datas, strict=True):
        rank.ask("save_many", first, count, data)
    for rank in world.ranks:
        rank.answer()


class Use:
    """What a process uses."""

    def __init__(self, process: psutil.Process) -> None:
        self.memory_bytes = process.memory_info().rss
        self.fds = process.num_fds()
        self.threads = process.num_threads()

    def flat(self, was: Use) -> bool:
        return (
            self.memory_bytes < was.memory_bytes + (2 << 20)
            and self.fds <= was.fds
            and self.threads <= was.threads
        )


# ------------------------------------------------------------------------------ bad input


@pytest.fixture
def world(make_hosts) -> World:
    hosts = make_hosts(2)
    world = World(hosts, 4, PAIR)
    world.restore()
    return world


def test_what_is_no_message_on_its_socket_is_refused(world):
    host = world.hosts[0]
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"JXF\x00" + (0xFFFFFFFF).to_bytes(4, "little"),
        b"JXF\x03" + (5).to_bytes(4, "little") + b"hello",
        b"JXF\x00" + (5).to_bytes(4, "little") + b"hello",
        frame(msgspec.msgpack.encode({"type": "hello"})),
        frame(p.encode(p.Stop())),
        frame(p.encode(p.Reserve(nbytes=1 << 60))),
    ):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(WAIT_S)
            raw.connect(str(host.directory / "smp.sock"))
            raw.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(4096):
                    pass
    still_good(world)


def frame(payload: bytes) -> bytes:
    return b"JXF\x00" + len(payload).to_bytes(4, "little") + payload


def test_a_rank_says_what_cannot_be_and_is_sent_away(world):
    said = [
        p.Enter(generation=world.generation),
        p.Stop(),
        p.Staged(seq=0, part=Part(0, 0, 1000, (), bytes(8)), leaves=b"\xc1 is no table"),
    ]
    for number, message in enumerate(said):
        world.ranks[0].kill()
        client = SmpClient(world.hosts[0].directory / "smp.sock", hello(world))
        client.say(p.WantSlot(seq=0, step=0, plan="plan", nbytes=1000))
        client.say(message)
        until(lambda client=client: client.failure, f"message {number} is refused")
        client.close()
    assert world.hosts[0].inspect()["generation"] == 4


def hello(world: World, **changes: object) -> p.Hello:
    named = {"generation": world.generation.number, "nonce": world.generation.nonce, "rank": 0}
    return greeting("rank", **{**named, **changes}, options=RankOptions(every_steps=1))


def test_a_rank_of_another_generation_is_not_let_in(world):
    path = world.hosts[0].directory / "smp.sock"
    for other in ({"generation": 3}, {"nonce": "another"}):
        with pytest.raises(ProtocolError, match="belongs to generation"):
            SmpClient(path, hello(world, **other))
    with pytest.raises(PeerUnreachable, match="did not let rank 0 of generation 5 in"):
        SmpClient(path, hello(world, generation=5), connect_s=0.2)
    still_good(world)


def test_what_is_no_message_on_the_peers_sockets_changes_nothing(world):
    control, _, bulk = world.hosts[0].welcome.address.partition(",")
    envelope = Envelope(
        job="test",
        generation=4,
        nonce=world.generation.nonce,
        sender="h0",
        arena=world.hosts[0].welcome.arena,
        body=Directive(version=1 << 60, settled=True),
    )
    changed = [
        {"job": "other"},
        {"generation": 3},
        {"nonce": "other"},
        {"arena": "other"},
        {"sender": "h7"},
    ]
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(control)
        push.send(b"garbage")
        push.send_multipart([b"two", b"frames"])
        for changes in changed:
            push.send(msgspec.msgpack.encode(msgspec.structs.replace(envelope, **changes)))
    for garbage in (b"garbage" * 1000, b"JXR1" + b"\xff" * 4, b"JXR1\x05\0\0\0hello"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(WAIT_S)
            raw.connect(bulk.removeprefix("ipc://"))
            with contextlib.suppress(ConnectionError):
                raw.sendall(garbage)
                assert raw.recv(100) == b""
    request = ReadRequest(bulk, b"no such key", 0, 10, None)
    network = ZmqNetwork()
    answers = list(network.reader().read_many([request], peer_s=WAIT_S, deadline_s=WAIT_S))
    network.close()
    assert answers == [(None, Refused("not here"))]
    still_good(world)


def still_good(world: World) -> None:
    assert world.save(0, 0, segments(2)).ok
    assert all(host.process.is_alive() for host in world.hosts)
