"""The reference method of protecting hosts: processes that pull fragments from each other and code.

Each host is a process with its bytes in shared memory that has its pages. A thread of each serves
any range of them over TCP, without a copy. The holder of a parity fragment asks the data hosts of
its stripe for pieces of two MiB, three rounds of them in flight, and runs ISA-L over what arrived,
straight into its place. Nothing is checksummed, nothing is decided, nothing was copied before: it
is the least that coding over sockets can cost with these tools.
"""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import zmq

from bench.baseline_isal import Isal
from bench.measure import Bytes, noise
from jaxft.group.codec import encode_rows

PIECE_BYTES = 2 << 20
IN_FLIGHT = 3
WAIT_S = 60.0
LOOPBACK = "tcp://127.0.0.1"


class Coded(NamedTuple):
    """What a round took: by the clock, and in CPU seconds of all processes."""

    wall_s: float
    cpu_s: float


class CodingHosts:
    """As many processes as the code has hosts. Use it in a `with` statement.

    Args:
        k, m: the code.
        nbytes: of each host's own data.
    """

    def __init__(self, k: int, m: int, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for place in range(k + m):
            pipe, other = context.Pipe()
            process = context.Process(
                target=_run_host, args=(other, place, k, m, nbytes), daemon=True
            )
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        addresses = [_answer(pipe) for pipe in self._pipes]
        self._ask_all("meet", addresses)

    def protect(self) -> Coded:
        """Every host computes all its parity fragments, all at once."""
        return self._round(self._pipes, "protect")

    def rebuild(self) -> Coded:
        """One host computes as many bytes as it holds, from k others each."""
        return self._round(self._pipes[:1], "rebuild")

    def _round(self, pipes: Sequence[Connection], what: str) -> Coded:
        before = sum(self._ask_all("cpu"))
        for pipe in pipes:
            pipe.send((what, ()))
        spans = [_answer(pipe) for pipe in pipes]
        cpu_s = sum(self._ask_all("cpu")) - before
        return Coded(max(end for _, end in spans) - min(begin for begin, _ in spans), cpu_s)

    def _ask_all(self, what: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((what, args))
        return [_answer(pipe) for pipe in self._pipes]

    def __enter__(self) -> CodingHosts:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(WAIT_S)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"a process of the reference method did not answer in {WAIT_S:g} s")
    return pipe.recv()


class _Host:
    """One host's process."""

    def __init__(self, place: int, k: int, m: int, nbytes: int) -> None:
        self.place, self.k, self.m = place, k, m
        self.fragment = nbytes // k // 64 * 64
        self.data = _shared(nbytes)
        self.data[:] = noise(nbytes, place)
        self.output = _shared(max(m, k) * self.fragment)
        self.isal = Isal()
        self.context = zmq.Context()
        self.peers: dict[int, zmq.Socket[bytes]] = {}
        self.server = self.context.socket(zmq.ROUTER)
        self.address = f"{LOOPBACK}:{self.server.bind_to_random_port(LOOPBACK)}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        memory = self.data.data
        while True:
            who, start, length = self.server.recv_multipart()
            piece = memory[int(start) : int(start) + int(length)]
            self.server.send_multipart([who, piece], copy=False)

    def meet(self, addresses: list[str]) -> None:
        for place, address in enumerate(addresses):
            if place != self.place:
                self.peers[place] = self.context.socket(zmq.DEALER)
                self.peers[place].setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
                self.peers[place].connect(address)

    def cpu(self) -> float:
        return time.process_time()

    def protect(self) -> tuple[float, float]:
        """Parity j of the stripe that lies j places before this host, for every j."""
        began_s = time.monotonic()
        hosts = self.k + self.m
        for j in range(self.m):
            stripe = (self.place - j) % hosts
            holders = [(stripe + self.m + i) % hosts for i in range(self.k)]
            starts = [self._slot_of(stripe, holder) * self.fragment for holder in holders]
            self._code(encode_rows(self.k, self.m)[j : j + 1], holders, starts, j)
        return began_s, time.monotonic()

    def rebuild(self) -> tuple[float, float]:
        """k fragments, each from a fragment of k others: which ones makes no difference."""
        began_s = time.monotonic()
        holders = sorted(self.peers)[: self.k]
        for number in range(self.k):
            starts = [number * self.fragment] * self.k
            self._code(encode_rows(self.k, self.m)[:1], holders, starts, number)
        return began_s, time.monotonic()

    def _slot_of(self, stripe: int, holder: int) -> int:
        """Which of its own fragments, in order of stripes, a data host has of a stripe."""
        hosts = self.k + self.m
        mine = [s for s in range(hosts) if (holder - s) % hosts >= self.m]
        return mine.index(stripe)

    def _code(self, row: Bytes, holders: list[int], starts: list[int], place: int) -> None:
        """Pulls the fragments that begin at `starts` of `holders` and codes them into a place."""
        offsets = range(0, self.fragment, PIECE_BYTES)
        ask = functools.partial(self._ask, holders, starts)
        for offset in offsets[:IN_FLIGHT]:
            ask(offset)
        for number, offset in enumerate(offsets):
            frames = [self.peers[holder].recv(copy=False) for holder in holders]
            if number + IN_FLIGHT < len(offsets):
                ask(offsets[number + IN_FLIGHT])
            pieces = [np.frombuffer(frame.buffer, np.uint8) for frame in frames]
            at = place * self.fragment + offset
            self.isal.prepare(row, pieces, [self.output[at : at + pieces[0].size]])()

    def _ask(self, holders: list[int], starts: list[int], offset: int) -> None:
        length = min(PIECE_BYTES, self.fragment - offset)
        for holder, start in zip(holders, starts, strict=True):
            self.peers[holder].send_multipart([b"%d" % (start + offset), b"%d" % length])


def _shared(nbytes: int) -> Bytes:
    """Shared memory, as snapshots lie in, that has its pages."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, nbytes)
    memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    os.close(fd)
    memory[:] = 1
    return memory


def _run_host(pipe: Connection, place: int, k: int, m: int, nbytes: int) -> None:
    host = _Host(place, k, m, nbytes)
    pipe.send(host.address)
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(host, what)(*args))
