"""A small world for tests: real SMP and rank processes, and the agent's part in this process."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from jaxft.group.manifest import CHUNK
from jaxft.group.messages import Ledger, Outcome, Plan, RankOptions, Slot, StorageEntry
from jaxft.group.placement import form_groups
from jaxft.group.world import Code, Generation, Member
from jaxft.host import ledger as banks
from jaxft.host import protocol as p
from jaxft.host.client import greeting
from jaxft.host.local import LocalChannel, connect
from jaxft.host.memory import Arena
from tests.host import forks
from tests.host.ranks import WAIT_S, Rank, digest


def until(ready: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Waits until `ready()` gives something true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = ready()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


class Host:
    """One host: its SMP process and the agent's connection to it; `join` waits for it."""

    def __init__(
        self, name: str, directory: Path, *options: str, faults: str = "", command: bool = False
    ) -> None:
        self.name = name
        self.directory = directory / name
        self.directory.mkdir(mode=0o700, parents=True)
        self.options = options
        self.command = command
        self.heard: list[p.ServerMessage] = []
        self.fds: tuple[int, ...] = ()
        self.ranks: list[Rank] = []
        self.channel: LocalChannel | None = None
        self.process = self._launch(faults)

    def _launch(self, faults: str) -> Any:
        arguments = ["--job", "test", "--host", self.name, "--dir", str(self.directory)]
        arguments += ["--orphan-s", "20", "--rejoin-s", "0.3", *self.options]
        start = forks.Command if self.command else forks.start_smp
        return start(arguments, self.fds, self.directory / "smp.log", faults)

    def start(self, *, faults: str = "") -> None:
        """Starts the SMP again, on the memory that is left if there is any."""
        self.process = self._launch(faults)
        self.join()

    def join(self) -> None:
        """The agent's hello."""
        if self.channel is not None:
            self.channel.close()
        self.channel = connect(self.directory / "smp.sock", WAIT_S)
        self.channel.send(p.encode(p.Hello(role="agent", pid=os.getpid())))
        received = self.channel.receive(WAIT_S)
        assert received is not None
        welcome = p.decode_server(received.payload)
        assert isinstance(welcome, p.Welcome)
        self.welcome = welcome
        self._drop_fds()
        self.fds = received.fds

    def leave(self) -> None:
        """The agent is gone; it keeps no descriptor."""
        if self.channel is not None:
            self.channel.close()
        self._drop_fds()

    def _drop_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def say(self, message: p.ClientMessage) -> None:
        assert self.channel is not None
        self.channel.send(p.encode(message))

    def listen(self) -> list[p.ServerMessage]:
        """What the agent has heard so far."""
        assert self.channel is not None
        self.heard += [p.decode_server(message.payload) for message in self.channel.drain()]
        return self.heard

    def until(self, kind: type, /, timeout_s: float = WAIT_S, **facts: object) -> Any:
        """Waits for a message of this kind with these fields."""

        def found() -> p.ServerMessage | None:
            for message in self.listen():
                if isinstance(message, kind) and all(
                    getattr(message, key) == value for key, value in facts.items()
                ):
                    return message
            return None

        return until(found, f"{self.name} hears {kind.__name__} {facts}", timeout_s)

    def inspect(self) -> dict[str, Any]:
        """What the SMP says of itself."""
        channel = connect(self.directory / "smp.sock", WAIT_S)
        channel.send(p.encode(p.Inspect()))
        received = channel.receive(WAIT_S)
        assert received is not None
        message = p.decode_server(received.payload)
        channel.close()
        assert isinstance(message, p.Inspection)
        return dict(message.values)

    def log(self) -> str:
        return (self.directory / "smp.log").read_text()

    # -------------------------------------------------------------------- memory

    def arena(self, number: int) -> Arena:
        """The test's own mapping: 0 is the ledger, 1 and 2 are the slots."""
        return Arena.adopt(os.dup(self.fds[number]))

    def slot(self, number: int) -> Slot:
        """What the ledger in memory says of a slot."""
        return self.ledger().slots[number]

    def ledger(self) -> Ledger:
        """What the memory itself says that it holds."""
        arena = self.arena(0)
        payload = banks.Ledger(arena).read().payload
        arena.close()
        assert payload is not None
        return msgspec.msgpack.decode(payload, type=Ledger)

    # -------------------------------------------------------------------- losing

    def end_ranks(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks = []

    def kill(self) -> None:
        """SIGKILL to the SMP."""
        self.process.kill()
        self.reaped()

    def reaped(self) -> None:
        """Waits until the SMP is dead."""
        self.process.join(WAIT_S)
        assert not self.process.is_alive(), f"the SMP of {self.name} does not end"

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def lose(self) -> None:
        """The whole host is gone, with its memory."""
        self.end_ranks()
        self.kill()
        self.leave()

    def close(self) -> None:
        self.lose()


def generation_of(
    hosts: Sequence[Host],
    number: int,
    code: Code,
    *,
    fresh: bool = False,
    holders: Sequence[Host] = (),
    ranks: int = 1,
    attached: bool = False,
) -> Generation:
    """A generation with `ranks` ranks a host."""

    def member(host: Host, count: int) -> Member:
        return Member(host.name, "agent", host.welcome.arena, host.welcome.address, count)

    return Generation(
        job="test",
        number=number,
        nonce=secrets.token_hex(4),
        hosts=tuple(member(host, ranks) for host in hosts),
        holders=tuple(member(host, 0) for host in holders),
        groups=form_groups(len(hosts), code),
        code=code,
        fresh=fresh,
        attached=attached,
    )


class World:
    """Hosts of one generation, and their ranks.

    The agents' part: ranks of the last generation are killed (unless `kill` is False: then that
    is left to the SMPs), the SMPs are told the generation, ranks are started.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        number: int,
        code: Code,
        *,
        storage: tuple[StorageEntry, ...] | None = None,
        fresh: bool = False,
        holders: Sequence[Host] = (),
        ranks: int = 1,
        every: int = 1,
        kill: bool = True,
        attached: bool = False,
    ) -> None:
        self.hosts = list(hosts)
        self.holders = list(holders)
        self.generation = generation_of(
            hosts, number, code, fresh=fresh, holders=holders, ranks=ranks, attached=attached
        )
        self.options = RankOptions(every_steps=every, storage=storage)
        for host in (*hosts, *holders):
            if kill:
                host.end_ranks()
            host.ranks = []
        for host in (*hosts, *holders):
            self.enter(host)
        places = [host for host in hosts for _ in range(ranks)]
        self.ranks = [self._start_rank(number, host) for number, host in enumerate(places)]

    def enter(self, host: Host) -> None:
        """The agent's word, also to an SMP that was started again."""
        host.say(p.Enter(generation=self.generation))

    def restart(self, host: Host, *, faults: str = "") -> None:
        """Starts a dead SMP on its memory, within the generation."""
        host.reaped()
        host.start(faults=faults)
        self.enter(host)

    def _start_rank(self, number: int, host: Host) -> Rank:
        hello = greeting(
            "rank",
            generation=self.generation.number,
            nonce=self.generation.nonce,
            rank=number,
            options=self.options,
        )
        rank = Rank(host.directory / "smp.sock", hello)
        host.ranks.append(rank)
        return rank

    def all(self, what: str, *args: Any) -> list[Any]:
        """Has every rank do the same."""
        for rank in self.ranks:
            rank.ask(what, *args)
        return [rank.answer() for rank in self.ranks]

    # -------------------------------------------------------------------- restoring

    def plan(self, after: int = 0) -> Plan:
        """The one plan that every rank is told."""
        plans = self.all("plan", after)
        assert all(one == plans[0] for one in plans)
        return cast(Plan, plans[0])

    def restore(self, *datas: Sequence[bytes]) -> Plan:
        """Every rank restores; what it got is one of `datas` (nothing, if there are none)."""
        return restored(self.ask_restore(), *datas)

    def ask_restore(self) -> World:
        for rank in self.ranks:
            rank.ask("restore")
        return self

    # -------------------------------------------------------------------- saving

    def begin(self, seq: int, step: int, datas: Sequence[bytes], plan: str = "plan") -> None:
        """Every rank begins to stage its bytes as snapshot `seq`."""
        for rank, data in zip(self.ranks, datas, strict=True):
            rank.do("want", seq, step, len(data), plan)
        for rank, data in zip(self.ranks, datas, strict=True):
            rank.ask("put", seq, data)

    def put(self) -> None:
        """Every rank's bytes are in its slot."""
        for rank in self.ranks:
            rank.answer()

    def save(self, seq: int, step: int, datas: Sequence[bytes]) -> Outcome:
        """Every rank stages its bytes as snapshot `seq`; the one outcome."""
        self.begin(seq, step, datas)
        self.put()
        return self.outcome(seq)

    def outcome(self, seq: int) -> Outcome:
        outcomes = self.all("outcome", seq)
        assert all(one == outcomes[0] for one in outcomes)
        return cast(Outcome, outcomes[0])


def restored(world: World, *datas: Sequence[bytes]) -> Plan:
    """What came of `World.ask_restore`."""
    answers = [rank.answer() for rank in world.ranks]
    plan, got = cast(tuple[Plan, dict[int, str]], answers[0])
    assert all(answer == (plan, got) for answer in answers)
    count = len(world.ranks) // len(world.hosts)
    wanted = [
        {
            place: digest(b"".join(data[place * count : (place + 1) * count]))
            for place in range(len(data) // count)
        }
        for data in datas
    ]
    assert got in (wanted or [{}]), plan
    return plan


def some_bytes(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def segments(count: int, seed: int = 0, chunks: int = 3) -> list[bytes]:
    """Bytes for each host, of sizes that differ and are no multiples of anything."""
    return [some_bytes(seed * 100 + i, chunks * CHUNK + 1234 * (i + 1)) for i in range(count)]
