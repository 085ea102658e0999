"""Worlds with real snapshot processes, in which the test is the agent of every host.

`Host` is one host's SMP and the agent's connection to it, `generation_of` what the agents of a
world agree on. A rank is either this very process (`seat`), or a process of its own (`Ranks`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxft.config import RankEnv
from jaxft.errors import WireError
from jaxft.group.placement import form_groups
from jaxft.group.world import Code, Generation, Member
from jaxft.host import protocol as p
from jaxft.host.local import LocalChannel, connect

WAIT_S = 60.0
JOB = "test"
TOP = Path(__file__).parents[2]


def until(ready: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Waits until `ready()` gives something true."""
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.005)
    return found


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """That of a child: what pytest itself was given of jaxft's variables is not for it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JAXFT_")}
    path = os.pathsep.join(filter(None, (str(TOP), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **more}


class Host:
    """One host. `faults` are faults on purpose in its SMP."""

    def __init__(
        self, name: str, directory: Path, *, faults: str = "", memory_max_mib: int | None = None
    ) -> None:
        self.name = name
        self.directory = directory / name
        self.directory.mkdir(mode=0o700, parents=True)
        self._limit = "" if memory_max_mib is None else str(memory_max_mib)
        self._fds: tuple[int, ...] = ()
        self._entered: Generation | None = None
        self.heard: list[p.ServerMessage] = []
        self.start(faults=faults)

    def start(self, *, faults: str = "") -> None:
        """Starts the SMP, on the memory that is left if there is any, and enters again."""
        command = [sys.executable, "-m", "jaxft.host.smp", "--job", JOB, "--host", self.name]
        command += ["--dir", str(self.directory), "--orphan-s", "20", "--rejoin-s", "0.3"]
        if self._fds:
            command += ["--fds", ",".join(map(str, self._fds))]
        with (self.directory / "smp.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                pass_fds=self._fds,
                stderr=log,
                env=environment({"JAXFT_FAULTS": faults, "JAXFT_MEMORY_MAX_MIB": self._limit}),
            )
        self._join()
        if self._entered is not None:
            self.enter(self._entered)

    def _join(self) -> None:
        """The agent's hello. It keeps the memory's descriptors."""
        self._channel: LocalChannel = connect(self.directory / "smp.sock", WAIT_S)
        self._channel.send(p.encode(p.Hello(role="agent", pid=os.getpid())))
        received = self._channel.receive(WAIT_S)
        assert received is not None
        welcome = p.decode_server(received.payload)
        assert isinstance(welcome, p.Welcome)
        self.welcome = welcome
        self._drop_fds()
        self._fds = received.fds
        threading.Thread(target=self._listen, args=(self._channel,), daemon=True).start()

    def _listen(self, channel: LocalChannel) -> None:
        """Takes what the SMP says: it gives up an agent that does not."""
        with contextlib.suppress(WireError):
            while True:
                received = channel.receive(1.0)
                if received is not None:
                    self.heard.append(p.decode_server(received.payload))

    def say(self, message: p.ClientMessage) -> None:
        self._channel.send(p.encode(message))

    def move(self, name: str) -> None:
        """The host has another name from now on, and the memory it had."""
        self.kill()
        self._entered = None
        self.name = name
        self.directory = self.directory.with_name(name)
        self.directory.mkdir(mode=0o700)
        self.start()

    def enter(self, generation: Generation) -> None:
        self._entered = generation
        self.say(p.Enter(generation=generation))

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

    def kill(self) -> None:
        """SIGKILL to the SMP; its memory lives on in the descriptors kept here."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self._channel.close()

    def close(self) -> None:
        """The host is gone, with its memory."""
        self.kill()
        self._drop_fds()

    def _drop_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


def generation_of(
    hosts: Sequence[Host],
    number: int,
    code: Code,
    *,
    ranks: int = 1,
    fresh: bool = False,
    holders: Sequence[Host] = (),
) -> Generation:
    """A generation with `ranks` ranks on each host."""

    def member(host: Host, ranks: int) -> Member:
        return Member(host.name, "agent", host.welcome.arena, host.welcome.address, ranks)

    return Generation(
        job=JOB,
        number=number,
        nonce=secrets.token_hex(4),
        hosts=tuple(member(host, ranks) for host in hosts),
        holders=tuple(member(host, 0) for host in holders),
        groups=form_groups(len(hosts), code),
        code=code,
        fresh=fresh,
    )


def seat(host: Host, generation: Generation, rank: int = 0, coordinator: str = "") -> RankEnv:
    """Where rank `rank`, on this host, stands."""
    return RankEnv(
        job=JOB,
        host=host.name,
        generation=generation.number,
        nonce=generation.nonce,
        rank=rank,
        ranks=generation.rank_count,
        coordinator=coordinator,
        smp=str(host.directory / "smp.sock"),
    )


class Ranks:
    """The training processes of one generation; each runs `train.py`.

    Args:
        hosts: the world's; `holders` only lend what their memory holds.
        directory: where logs and results go.
        steps: the ranks train up to this step and end.
        ranks: of each host.
        faults: faults on purpose in the ranks.
        wrap, parity: see `train.py`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        number: int,
        directory: Path,
        *,
        steps: int,
        code: Code,
        every: int | dict[str, float] = 1,
        ranks: int = 1,
        devices: int = 2,
        fresh: bool = False,
        holders: Sequence[Host] = (),
        faults: str = "",
        wrap: str = "",
        parity: str = "host",
    ) -> None:
        self._number = number
        self._directory = directory
        generation = generation_of(hosts, number, code, ranks=ranks, fresh=fresh, holders=holders)
        for host in (*hosts, *holders):
            host.enter(generation)
        # Held, so that nobody else gets the port: the coordinator's socket may share it.
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{held.getsockname()[1]}"
            self.processes = [
                self._start(
                    seat(host, generation, ranks * place + local, coordinator),
                    {
                        "steps": steps,
                        "every": every,
                        "devices": devices,
                        "wrap": wrap,
                        "parity": parity,
                    },
                    faults,
                )
                for place, host in enumerate(hosts)
                for local in range(ranks)
            ]
            until(lambda: self.ended or self.said(0, "started"), "the ranks meet", 60.0)

    def _start(self, env: RankEnv, options: dict[str, Any], faults: str) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("train.py")
        more = {**env.to_environ(), "JAX_PLATFORMS": "cpu", "JAXFT_FAULTS": faults}
        out = {"out": str(self._path(env.rank, "jsonl"))}
        with self._path(env.rank, "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(script), json.dumps({**options, **out})],
                env=environment(more),
                stdout=log,
                stderr=log,
            )

    def _path(self, rank: int, kind: str) -> Path:
        return self._directory / f"generation{self._number}-rank{rank}.{kind}"

    @property
    def ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def said(self, rank: int, event: str) -> list[dict[str, Any]]:
        """What a rank has said of this kind so far."""
        path = self._path(rank, "jsonl")
        lines = path.read_text().splitlines() if path.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == event]

    def finish(self, timeout_s: float = 90.0) -> None:
        """Waits until all have ended, and well."""
        until(lambda: self._all_ended() or self._failed(), "the ranks end", timeout_s)
        failed = self._failed()
        self.kill()
        assert not failed, f"ranks {failed} failed\n{self.log(failed[0])}"

    def die(self, rank: int, timeout_s: float = 90.0) -> None:
        """Waits until this rank was killed, and kills the others, which wait for it for ever."""
        until(lambda: self.ended, f"rank {rank} dies", timeout_s)
        codes = [process.poll() for process in self.processes]
        self.kill()
        assert codes[rank] == -signal.SIGKILL, f"{codes}\n{self.log(rank)}"

    def _all_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def _failed(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll()]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(WAIT_S)

    def log(self, rank: int) -> str:
        return self._path(rank, "log").read_text()[-3000:]
