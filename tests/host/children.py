"""Processes that the tests of this room start, talk to by lines, stop and kill.

    python -m tests.host.children ROLE ARGUMENT...

A child says one line when it is ready, and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxft.host import local
from jaxft.host.job_key import JobKey
from jaxft.host.ledger import Ledger
from jaxft.host.memory import Arena
from jaxft.host.trust import Trust
from jaxft.host.wire import Refused
from jaxft.host.wire_zmq import ZmqNetwork

ROOT = Path(__file__).parents[2]


class Child:
    def __init__(self, role: str, *arguments: object, fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.host.children", role, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the child ended with {self.process.wait(10)}"
        return line

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def child(role: str, *arguments: object, fds: tuple[int, ...] = ()) -> Iterator[Child]:
    started = Child(role, *arguments, fds=fds)
    try:
        yield started
    finally:
        started.end()


def say(line: object) -> None:
    print(line, flush=True)


def pattern(offset: int, nbytes: int) -> bytes:
    """What every served memory holds: each byte tells where it lies."""
    places = np.arange(offset, offset + nbytes, dtype=np.uint64)
    return (places * 2654435761 >> 7).astype(np.uint8).tobytes()


KEY = JobKey(bytes(range(32)))


def network(kind: str) -> ZmqNetwork:
    return ZmqNetwork(Trust(KEY) if kind == "encrypted" else None)


def serve_bulk(hint: str, size_bytes: str, kind: str) -> None:
    """Serves `pattern` as key b"x"; key b"stuck" never answers."""
    memory = memoryview(pattern(0, int(size_bytes)))

    def provide(key: bytes, offset: int, nbytes: int) -> memoryview | Refused:
        if key == b"stuck":
            threading.Event().wait(60)
        return memory[offset : offset + nbytes] if key == b"x" else Refused("no such key")

    server = network(kind).serve(hint, provide)
    say(server.address)
    sys.stdin.read()


def echo(hint: str, kind: str) -> None:
    """Sends "ADDRESS payload" back to ADDRESS."""
    endpoint = network(kind).endpoint(hint)
    say(endpoint.address)
    while True:
        for message in endpoint.receive(0.5):
            address, _, payload = message.partition(b" ")
            endpoint.send(address.decode(), payload)


def half_a_piece(port: str) -> None:
    """A bulk server that dies within an answer: it sends half of the bytes that it promised."""
    listener = socket.create_server(("127.0.0.1", int(port)))
    say(listener.getsockname()[1])
    connected, _ = listener.accept()
    assert connected.recv(1 << 16).startswith(b"JXR1")
    connected.sendall(b"JXA1" + bytes(4) + (1 << 20).to_bytes(8, "little") + bytes(1 << 19))
    say("half")
    sys.stdin.read()


def write_ledger(fd: str) -> None:
    """Writes records 1, 2, 3, ... as fast as it can, and says each number once it is written."""
    ledger = Ledger(Arena.adopt(int(fd)))
    for number in itertools.count(1):
        ledger.write(number.to_bytes(8, "little") * (20_000 + number % 7))
        say(number)


def local_echo(path: str) -> None:
    """Says its pid, connects, and sends every message back with its descriptors."""
    channel = local.connect(Path(path), 10)
    say("connected")
    while True:
        message = channel.receive(0.5)
        if message is not None:
            channel.send(*message)


def local_half(path: str) -> None:
    """Connects and sends half of a message of 1 MiB of b"h"; the rest when told to."""
    channel = local.connect(Path(path), 10)
    frame = b"JXF\0" + (1 << 20).to_bytes(4, "little") + b"h" * (1 << 20)
    raw = socket.socket(fileno=channel.fileno())
    raw.setblocking(True)
    raw.sendall(frame[:100_000])
    say("half")
    sys.stdin.readline()
    raw.sendall(frame[100_000:])
    say("whole")
    sys.stdin.read()


def local_idle(path: str) -> None:
    """Connects and never receives."""
    channel = local.connect(Path(path), 10)
    say("connected")
    sys.stdin.read()
    channel.close()


def local_listen(path: str) -> None:
    """Listens and accepts nobody."""
    listener = local.LocalListener(Path(path))
    say("listening")
    sys.stdin.read()
    listener.close()


def map_arena(path: str) -> None:
    """Takes an arena, writes b"child" at its start, and after growth at its new end."""
    channel = local.connect(Path(path), 10)
    message = channel.receive(10)
    assert message is not None
    arena = Arena.adopt(message.fds[0])
    early = arena.view(0, 5)
    early[:] = np.frombuffer(b"child", np.uint8)
    channel.send(b"written")
    message = channel.receive(10)
    assert message is not None
    size_bytes = int(message.payload)
    arena.ensure(size_bytes)
    arena.view(size_bytes - 5, 5)[:] = early
    channel.send(b"grown")
    sys.stdin.read()


if __name__ == "__main__":
    {
        role.__name__: role
        for role in (
            serve_bulk,
            echo,
            half_a_piece,
            write_ledger,
            local_echo,
            local_half,
            local_idle,
            local_listen,
            map_arena,
        )
    }[sys.argv[1]](*sys.argv[2:])
