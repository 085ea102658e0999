"""What a person sees of a run: the ranks' output, and the agent's own words."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO, TextIO

from jaxft import config

COLOURS = (36, 33, 32, 35, 34, 31)
LINE_BYTES_MAX = 8192
READ_BYTES = 1 << 16


def now() -> str:
    """The machine's date and local time, as lines that a person reads later begin."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def colour(stream: TextIO, index: int, text: str) -> str:
    """In the colour number `index`, if the stream is a terminal, and nobody wants it plain."""
    if not stream.isatty() or config.no_colour():
        return text
    return f"\x1b[{COLOURS[index % len(COLOURS)]}m{text}\x1b[0m"


class Console:
    """Prints with this host's name in front.

    Args:
        host: its name.
        quiet: leave out what the ranks print.
    """

    def __init__(self, host: str, *, quiet: bool) -> None:
        self.host = host
        self.quiet = quiet

    def say(self, text: str) -> None:
        """The agent's own word, on standard error, with the machine's time in front."""
        _write(sys.stderr, f"{now()} jaxft [{self.host}] {text}\n")

    def rank_line(self, rank: int, text: str) -> None:
        """A line that a rank printed, on standard output."""
        if not self.quiet:
            _write(sys.stdout, f"{colour(sys.stdout, rank, f'[{self.host} {rank}]')} {text}\n")


def _write(stream: TextIO, text: str) -> None:
    """A console that is gone must not end the job."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return


class LogFollower:
    """Shows what is appended to a rank's log."""

    def __init__(self, console: Console, rank: int, path: Path) -> None:
        self._console = console
        self._rank = rank
        self._file: BinaryIO = path.open("rb")
        self._rest = b""

    def poll(self) -> bool:
        """Shows the whole lines that have come, and a last one that has grown too long; whether
        anything has come."""
        came = False
        while data := self._file.read(READ_BYTES):
            came = True
            lines = (self._rest + data).split(b"\n")
            self._rest = lines.pop()
            for line in lines:
                self._show(line)
            if len(self._rest) > LINE_BYTES_MAX:
                self._show(self._rest)
                self._rest = b""
        return came

    def close(self) -> None:
        """Shows the rest."""
        self.poll()
        if self._rest:
            self._show(self._rest)
        self._file.close()

    def _show(self, line: bytes) -> None:
        self._console.rank_line(self._rank, line.decode(errors="replace").rstrip("\r"))


def last_lines(path: Path, lines: int = 20, size_bytes: int = 4000) -> str:
    """The end of a log."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
