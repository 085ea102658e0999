"""What a world's agents and ranks have said so far, read from their files as these are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bench.apart.world import World
from jaxft.status.events import whole_lines

Line = dict[str, Any]

# A generation ends for these, and nothing is wrong.
PEACEFUL = ("grown", "memory_returned")
_PID_EVENTS = {
    "agent_started": "agent",
    "smp_started": "SMP",
    "smp_restarted": "SMP",
    "smp_adopted": "SMP",
    "rank_started": "rank",
}


class Tail:
    """The lines that are added to the files of a directory, each one JSON object."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory = directory
        self._pattern = pattern
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Line]:
        """Those since the last call, each file's in their order."""
        found: list[Line] = []
        for path in sorted(self._directory.glob(self._pattern)):
            start = self._offsets.get(path, 0)
            if path.stat().st_size <= start:
                continue
            lines, self._offsets[path] = whole_lines(path, start)
            found += lines
        return found


class Formed(msgspec.Struct, frozen=True):
    """A generation, as it was formed."""

    number: int
    hosts: tuple[str, ...]
    reason: str


class Record:
    """Of all hosts of a world."""

    def __init__(self, world: World) -> None:
        self._events = {
            name: Tail(host.base / "events", "*-agent-*.jsonl")
            for name, host in world.hosts.items()
        }
        self._lines = {name: Tail(host.base, "rank-*") for name, host in world.hosts.items()}
        self._pids: dict[tuple[str, str], int] = {}
        self._ports: dict[str, tuple[int, ...]] = {}
        self.formed: dict[int, Formed] = {}
        self.faulty: list[int] = []
        self.persisted = -1
        self.ended = ""

    def events(self) -> list[Line]:
        """What agents have said since the last call, by time."""
        fresh = [event for tail in self._events.values() for event in tail.poll()]
        fresh.sort(key=lambda event: float(event["t"]))
        for event in fresh:
            self._note(event)
        return fresh

    def lines(self) -> list[tuple[str, Line]]:
        """What ranks have said since the last call, with their hosts."""
        return [(name, line) for name, tail in self._lines.items() for line in tail.poll()]

    def pid(self, host: str, role: str) -> int:
        """The newest "agent", "SMP" or "rank" of a host; 0: there has been none."""
        return self._pids.get((host, role), 0)

    def ports(self, host: str) -> tuple[int, ...]:
        """Those at which its SMP listens."""
        return self._ports.get(host, ())

    @property
    def newest(self) -> Formed:
        """The newest generation; number 0: there has been none."""
        return self.formed[max(self.formed)] if self.formed else Formed(0, (), "")

    def _note(self, event: Line) -> None:
        kind, host = event["event"], event["host"]
        role = _PID_EVENTS.get(kind)
        if role is not None:
            self._pids[host, role] = int(event["pid"])
        match kind:
            case "generation_formed":
                number = int(event["number"])
                self.formed[number] = Formed(number, tuple(event["hosts"]), event["reason"])
            case "registered":
                places = str(event["address"]).split(",")
                self._ports[host] = tuple(int(place.rpartition(":")[2]) for place in places)
            case "fault" if event["kind"] not in PEACEFUL:
                self.faulty.append(int(event["generation"]))
            case "persisted" | "exported":
                self.persisted = max(self.persisted, int(event["step"]))
            case "job_finished":
                self.ended = self.ended or str(event["reason"])
