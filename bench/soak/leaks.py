"""What grows while it should not: processes, descriptors, memory, files.

Rules, all looked at in a calm, when the job has recovered and nothing is wrong
- A host that is on has one agent, one SMP, at most one rank, one that waits to become one, and one
  process that writes to storage; one that is off has none. None has a zombie.
- An agent or SMP that has lived through more than one calm has about as many descriptors as in its
  first ones (FDS_MORE: a world of other hosts has other connections), and about as much memory
  (MEMORY_MORE and MEMORY_MORE_BYTES: interpreters take a while until they have all they need). A
  spare's count apart: once it is a member it has connections to all others, and snapshots.
- A host's run directory has at most FILES files beside its logs, and its directory for temporary
  files at most TEMPORARY.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from bench.apart.network import Network
from bench.soak.hosts import Machine, command_of, roles, zombies
from bench.soak.record import Record

WATCHED = ("agent", "SMP")
FDS_MORE = 16
MEMORY_MORE = 1.25
MEMORY_MORE_BYTES = 24 << 20
SETTLED = 3  # calms after which an interpreter has all it needs
FILES = 24
TEMPORARY = 8


class Sample(msgspec.Struct, frozen=True):
    """One process in one calm. Memory is its own: that which it shares is counted apart."""

    fds: int
    own_bytes: int
    shared_bytes: int


def sampled(pid: int) -> Sample | None:
    """Of a process (proc(5)); None if it is gone."""
    with contextlib.suppress(OSError):
        found = {}
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found[name] = int(rest.split()[0]) << 10
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        return Sample(fds, found["RssAnon"], found["RssShmem"])
    return None


class Growth:
    """How the processes of one soak grow, from calm to calm."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str, int, bool], list[Sample]] = {}

    def note(
        self, host: str, role: str, pid: int, sample: Sample, *, is_member: bool = True
    ) -> list[str]:
        """What is wrong with it, of what was seen of this process before, while its host was a
        member of the world as now, or was none."""
        seen = self._samples.setdefault((host, role, pid, is_member), [])
        seen.append(sample)
        if len(seen) <= SETTLED:
            return []
        first = seen[:SETTLED]
        wrong = []
        fds = max(one.fds for one in first)
        if sample.fds > fds + FDS_MORE:
            wrong.append(f"the {role} of {host} ({pid}) has {sample.fds} descriptors, had {fds}")
        for what, now, then in (
            ("memory", sample.own_bytes, max(one.own_bytes for one in first)),
            ("shared memory", sample.shared_bytes, max(one.shared_bytes for one in first)),
        ):
            if now > then * MEMORY_MORE + MEMORY_MORE_BYTES:
                wrong.append(
                    f"the {role} of {host} ({pid}) has {now >> 20} MiB of {what}, had {then >> 20}"
                )
        return wrong

    def summary(self) -> dict[str, dict[str, list[int]]]:
        """By role: what the one that was seen longest had, from calm to calm."""
        found: dict[str, dict[str, list[int]]] = {}
        for role in WATCHED:
            mine = [seen for (_, one, _, _), seen in self._samples.items() if one == role]
            if not mine:
                continue
            longest = max(mine, key=len)
            found[role] = {
                "fds": [one.fds for one in longest],
                "own_mib": [one.own_bytes >> 20 for one in longest],
                "shared_mib": [one.shared_bytes >> 20 for one in longest],
            }
        return found


def unexpected(network: Network, machines: Iterable[Machine], record: Record) -> list[str]:
    """Processes that should not be there, or should; they may just be coming or going."""
    wrong = []
    for machine in machines:
        there = roles(network, machine.name, record.pid(machine.name, "rank"))
        for pid in there.pop("other", []):
            wrong.append(f"{machine.name} has a process {pid}: {command_of(pid)}")
        most = 1 if machine.agent else 0
        for role, pids in there.items():
            if len(pids) > most:
                wrong.append(f"{machine.name} has {len(pids)} processes of kind {role}: {pids}")
        if machine.agent and any(len(there.get(role, [])) != 1 for role in WATCHED):
            wrong.append(f"{machine.name} has not one agent and one SMP: {there}")
        dead = zombies([pid for pids in there.values() for pid in pids])
        if dead:
            wrong.append(f"{machine.name} has zombies: {dead}")
    return wrong


def files_left(bases: Mapping[str, Path]) -> list[str]:
    """Files of which there are more than there may be, by host."""
    wrong = []
    for name, base in bases.items():
        for directory, most in ((base / "run", FILES), (base / "tmp", TEMPORARY)):
            found = [path for path in directory.rglob("*") if "logs" not in path.parts]
            if len(found) > most:
                names = ", ".join(str(path.relative_to(base)) for path in found[:40])
                wrong.append(f"{name} has {len(found)} files: {names}")
    return wrong
