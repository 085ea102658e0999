"""One subject in a process of its own: `python -m bench.worker SUBJECT SIZES`.

Standard output has one JSON object a line: `{"done", "of", "what"}` after each round, and at the
end `{"rows": [...]}`. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.rows import Row
from bench.sizes import Sizes
from bench.subjects import measurement


class Progress(msgspec.Struct, frozen=True):
    """Rounds done of how many, and of what."""

    done: int
    of: int
    what: str


class Finished(msgspec.Struct, frozen=True):
    """What was measured."""

    rows: tuple[Row, ...]


def main(arguments: Sequence[str]) -> None:
    subject, sizes = arguments
    # What was started and written is taken away also when this process is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: Any) -> None:
        channel.write(msgspec.json.encode(message) + b"\n")

    def report(done: int, of: int, what: str) -> None:
        say(Progress(done, of, what))

    rows = measurement(subject)(msgspec.json.decode(sizes, type=Sizes), report)
    say(Finished(tuple(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
