"""The machines of a soak: what a scheduler does for each, and which processes each has.

A scheduler (systemd, Kubernetes, SLURM with requeue) starts an agent that has died again. Here it
waits for as long as the failure says, or a second.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from bench.apart.network import Network
from bench.apart.trainer import __file__ as TRAINER
from bench.apart.world import Host

AGAIN_S = 1.0
TOLD_TO_END = 128 + 15
KILLED = -9
# Of a host's processes, by what their command lines have in them; the first that fits.
_ROLES = (
    ("jaxft.host.smp", "SMP"),
    ("jaxft.persist", "helper"),
    ("jaxft.exporter", "exporter"),
    ("\0jaxft\0run\0", "agent"),
    ("warm_rank.py", "waiting rank"),  # and a rank that has waited, which is known otherwise
    (TRAINER, "rank"),
)


class Machine:
    """One host, and whether it is to be on.

    Args:
        host: of the world.
        options: of its `jaxft run`.
        env: variables of it.
    """

    def __init__(self, host: Host, options: Sequence[str], env: dict[str, str]) -> None:
        self.name = host.name
        self.wanted = False
        self.last = False  # the job is about to end
        self._host = host
        self._options = tuple(options)
        self._env = env
        self._start_s = 0.0
        self._runs = False

    @property
    def agent(self) -> int:
        """Its agent's process; 0: it has none."""
        return self._host.pid if self._runs else 0

    def hold(self, for_s: float) -> None:
        """It is not started for so long."""
        self._start_s = time.monotonic() + for_s

    def turn(self) -> str:
        """Starts it if it is to be started. What is to be told of how it has ended, or ""."""
        wrong = ""
        if self._runs and self._host.status is not None:
            self._runs = False
            status = self._host.status
            if status not in (KILLED, TOLD_TO_END) and not self.last:
                wrong = f"the agent of {self.name} has ended by itself, with status {status}"
            self._start_s = max(self._start_s, time.monotonic() + AGAIN_S)
        if self.wanted and not self._runs and not self.last and time.monotonic() > self._start_s:
            self._host.start(*self._options, **self._env)
            self._runs = True
        return wrong


def roles(network: Network, name: str, rank: int) -> dict[str, list[int]]:
    """The processes of a host by what they are; "other" are those that nobody expects.

    Args:
        rank: its rank's process, if it has one.
    """
    found: dict[str, list[int]] = {}
    for pid in network.processes(name):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if command:  # else it is just ending
                role = next((role for mark, role in _ROLES if mark in command), "other")
                role = "rank" if pid == rank else role
                found.setdefault(role, []).append(pid)
    return found


def command_of(pid: int) -> str:
    """What a process was started with, for a person."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return "?"


def zombies(parents: Sequence[int]) -> list[int]:
    """Children of these processes that have ended and that nobody has taken note of (proc(5))."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if fields[0] == "Z" and int(fields[1]) in parents:
                    found.append(int(name))
    return found
