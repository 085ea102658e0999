"""A small world for tests: real SMP processes, an agent's part and ranks' parts in this process."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxft.group.manifest import CHUNK
from jaxft.group.messages import Outcome, Plan, RankOptions, StorageEntry
from jaxft.group.placement import form_groups
from jaxft.group.world import Code, Generation, Member
from jaxft.host import protocol as p
from jaxft.host.client import greeting
from jaxft.host.local import LocalChannel, connect
from tests.host.ranks import Rank

WAIT_S = 30.0


class Host:
    """One host: its SMP process and the agent's connection to it."""

    def __init__(self, name: str, directory: Path, *options: str) -> None:
        self.name = name
        self.directory = directory / name
        self.directory.mkdir(mode=0o700, parents=True)
        self.options = options
        self.heard: list[p.ServerMessage] = []
        self.fds: tuple[int, ...] = ()
        self.rank: Rank | None = None
        self.start()

    def start(self, *, environ: dict[str, str] | None = None) -> None:
        """Starts the SMP, on the memory that is left if there is any."""
        adopt = ["--fds", ",".join(map(str, self.fds))] if self.fds else []
        with (self.directory / "smp.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxft.host.smp", "--job", "test"),
                    *("--host", self.name, "--dir", str(self.directory)),
                    *("--orphan-s", "20", "--rejoin-s", "0.5", *adopt, *self.options),
                ],
                pass_fds=self.fds,
                stderr=log,
                env={**os.environ, **(environ or {})},
            )
        self.join()

    def join(self) -> None:
        """The agent's hello."""
        self.channel: LocalChannel = connect(self.directory / "smp.sock", WAIT_S)
        self.channel.send(p.encode(p.Hello(role="agent", pid=os.getpid())))
        received = self.channel.receive(WAIT_S)
        assert received is not None
        welcome = p.decode_server(received.payload)
        assert isinstance(welcome, p.Welcome)
        self.welcome = welcome
        for fd in self.fds:
            os.close(fd)
        self.fds = received.fds

    def say(self, message: p.ClientMessage) -> None:
        self.channel.send(p.encode(message))

    def listen(self) -> list[p.ServerMessage]:
        """What the agent has heard so far."""
        self.heard += [p.decode_server(message.payload) for message in self.channel.drain()]
        return self.heard

    def until(self, kind: type, timeout_s: float = WAIT_S, **facts: object) -> p.ServerMessage:
        """Waits for a message of this kind with these fields."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for message in self.listen():
                if isinstance(message, kind) and all(
                    getattr(message, key) == value for key, value in facts.items()
                ):
                    return message
            time.sleep(0.01)
        raise AssertionError(f"{self.name} heard no {kind.__name__} {facts}: {self.heard}")

    def inspect(self) -> dict[str, object]:
        """What the SMP says of itself."""
        channel = connect(self.directory / "smp.sock", WAIT_S)
        channel.send(p.encode(p.Inspect()))
        received = channel.receive(WAIT_S)
        assert received is not None
        message = p.decode_server(received.payload)
        channel.close()
        assert isinstance(message, p.Inspection)
        return dict(message.values)

    def end_rank(self) -> None:
        if self.rank is not None:
            self.rank.kill()
            self.rank = None

    def kill(self) -> None:
        """SIGKILL to the SMP."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def lose(self) -> None:
        """The whole host is gone, with its memory."""
        self.end_rank()
        self.kill()
        self.channel.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.lose()


def generation_of(
    hosts: list[Host],
    number: int,
    code: Code,
    *,
    fresh: bool = False,
    holders: tuple[Host, ...] = (),
) -> Generation:
    """A generation with one rank a host."""

    def member(host: Host, ranks: int) -> Member:
        return Member(host.name, "agent", host.welcome.arena, host.welcome.address, ranks)

    return Generation(
        job="test",
        number=number,
        nonce=secrets.token_hex(4),
        hosts=tuple(member(host, 1) for host in hosts),
        holders=tuple(member(host, 0) for host in holders),
        groups=form_groups(len(hosts), code),
        code=code,
        fresh=fresh,
    )


class World:
    """Hosts of one generation, and a rank on each."""

    def __init__(
        self,
        hosts: list[Host],
        number: int,
        code: Code,
        *,
        storage: tuple[StorageEntry, ...] | None = None,
        fresh: bool = False,
        holders: tuple[Host, ...] = (),
    ) -> None:
        self.hosts = hosts
        self.generation = generation_of(hosts, number, code, fresh=fresh, holders=holders)
        self.options = RankOptions(every_steps=1, storage=storage)
        for host in (*hosts, *holders):
            host.end_rank()
        for host in (*hosts, *holders):
            host.say(p.Enter(generation=self.generation))
        self.ranks = [self.start_rank(place) for place in range(len(hosts))]

    def start_rank(self, place: int) -> Rank:
        host = self.hosts[place]
        hello = greeting(
            "rank",
            generation=self.generation.number,
            nonce=self.generation.nonce,
            rank=place,
            options=self.options,
        )
        host.rank = Rank(host.directory / "smp.sock", hello)
        return host.rank

    def all(self, what: str, *args: Any) -> list[Any]:
        """Has every rank do the same."""
        for rank in self.ranks:
            rank.ask(what, *args)
        return [rank.answer() for rank in self.ranks]

    def plan(self, after: int = 0) -> Plan:
        """The one plan that every rank is told."""
        plans = self.all("plan", after)
        assert all(one == plans[0] for one in plans)
        return plans[0]

    def settle(self, how: str = "verified") -> Plan:
        plan = self.plan()
        self.all("restored", plan.attempt, how)
        self.all("settled")
        return plan

    def save(self, seq: int, step: int, datas: list[bytes]) -> Outcome:
        """Every rank stages its bytes as snapshot `seq`; the one outcome."""
        for rank, data in zip(self.ranks, datas, strict=True):
            rank.do("want", seq, step, len(data))
        for rank, data in zip(self.ranks, datas, strict=True):
            rank.ask("put", seq, data)
        for rank in self.ranks:
            rank.answer()
        return self.outcome(seq)

    def outcome(self, seq: int) -> Outcome:
        outcomes = self.all("outcome", seq)
        assert all(one == outcomes[0] for one in outcomes)
        return outcomes[0]

    def check(self, datas: list[bytes], places: list[int] | None = None) -> None:
        """Every rank reads every segment of the planned snapshot."""
        for rank in self.ranks:
            for place in range(len(datas)) if places is None else places:
                assert rank.do("read", place, 0, len(datas[place])) == datas[place]


def some_bytes(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def segments(count: int, seed: int = 0) -> list[bytes]:
    """Bytes for each host, of sizes that differ and are no multiples of anything."""
    return [some_bytes(seed * 100 + i, 3 * CHUNK + 1234 * (i + 1)) for i in range(count)]
