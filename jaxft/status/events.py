"""The event log: what happened, one JSON object a line, a file a process.

Every line has `t` (seconds since the epoch), `host`, `role` ("agent", "smp", "rank", "launcher"),
`pid`, `event`, and the event's own fields. A line is written with one system call, so that a reader
never sees half of one unless the writer died in it; such a line is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxft.errors import ConfigError

Event = dict[str, Any]


class EventLog:
    """Appends events of one process; without a directory it does nothing.

    Args:
        directory: where the files are; made if missing.
        host: name of the host.
        role: what this process is.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: Path | None, *, host: str, role: str) -> None:
        self.host = host
        self.role = role
        self._fd: int | None = None
        if directory is not None:
            path = directory / f"{host}-{role}-{os.getpid()}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, flags, 0o600)
            except OSError as error:
                raise ConfigError(f"JAXFT_EVENTS={directory} cannot be used: {error}") from error

    @property
    def is_on(self) -> bool:
        """Is there a directory?"""
        return self._fd is not None

    def emit(self, event: str, **fields: object) -> None:
        """Appends one event."""
        if self._fd is None:
            return
        line = {
            "t": time.time(),
            "host": self.host,
            "role": self.role,
            "pid": os.getpid(),
            "event": event,
            **fields,
        }
        # A full disk costs events and no training.
        with contextlib.suppress(OSError):
            os.write(self._fd, (json.dumps(line, default=str) + "\n").encode())

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class EventReader:
    """Follows the event logs of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """The events that were written since the last call, in the order of their time."""
        fresh: list[Event] = []
        for path in sorted(self.directory.glob("*.jsonl")):
            fresh += self._read(path)
        return sorted(fresh, key=lambda event: float(event["t"]))

    def _read(self, path: Path) -> Iterator[Event]:
        found, self._offsets[path] = whole_lines(path, self._offsets.get(path, 0))
        for event in found:
            if isinstance(event, dict) and "t" in event and "event" in event:
                yield event


def whole_lines(path: Path, start: int) -> tuple[list[Any], int]:
    """What a growing file of JSON lines has from this byte on, and where its last whole line ends.

    Left out are lines that are no JSON: their writer was killed in the middle of them.
    """
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    end = data.rfind(b"\n") + 1
    found: list[Any] = []
    for line in data[:end].splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found, start + end
