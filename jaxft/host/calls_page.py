"""A page that a rank and its agent share, in which the rank counts its calls of `save`.

The agent makes it and looks at it, the rank writes it: a call costs the rank one store into memory
and nobody a message. It has no name; the rank opens the agent's descriptor of it in /proc.

Layout (little endian, aligned, so that no word is seen half written):

    0   MAGIC, written by the agent
    8   calls of `save`
    16  process id of the rank, 0 until it has opened the page
    24  signal at which it writes its stacks to its log, 0: none
    32  identity of the thread that calls `save`, as `threading.get_ident` gives it
    40  1 once it will not call any more
    48  until when it is in a long phase, monotonic time, a double; 0.0: in none
    64  the phase's name, UTF-8, zeros behind it
    128 what the rank's JAX goes by (`startup.surroundings`), as JSON, zeros behind it
"""

from __future__ import annotations

import os
import time

from jaxft.group.hanging import Reading
from jaxft.host.memory import Arena

MAGIC = int.from_bytes(b"jaxft c1", "little")
SIZE_BYTES = 4096
_CALLS, _PID, _SIGNAL, _THREAD, _CLOSED, _UNTIL = 1, 2, 3, 4, 5, 6
_NAME = slice(64, 128)
_SURROUNDINGS = slice(128, SIZE_BYTES)


class CallsPage:
    """One rank's page.

    Attributes:
        counter: a word, the calls of `save`; the rank writes it.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        """Without an arena it is one that nobody looks at."""
        self._arena = arena
        own = memoryview(bytearray(SIZE_BYTES))
        whole = own if arena is None else arena.view(0, SIZE_BYTES).data
        self._words = whole[:64].cast("Q")
        self._times = whole[:64].cast("d")
        self._name = whole[_NAME]
        self._surroundings = whole[_SURROUNDINGS]
        self.counter = self._words[_CALLS : _CALLS + 1]

    # -------------------------------------------------------------------- the agent's side

    @classmethod
    def create(cls) -> CallsPage:
        """A new one. Raises MemoryLimitError if there is no memory for it."""
        page = cls(Arena.create("jaxft-calls", SIZE_BYTES))
        page._words[0] = MAGIC
        return page

    @property
    def path(self) -> str:
        """Where the rank opens it, as long as this process lives."""
        assert self._arena is not None
        return f"/proc/{os.getpid()}/fd/{self._arena.fd}"

    def read(self) -> Reading:
        """What the rank says."""
        return Reading(
            calls=self.counter[0],
            until_s=self._times[_UNTIL],
            phase=bytes(self._name).rstrip(b"\0").decode(errors="replace"),
            closed=bool(self._words[_CLOSED]),
            arrived=bool(self._words[_PID]),
        )

    @property
    def surroundings(self) -> str:
        """What the rank's JAX goes by; "" until the rank has said so."""
        return bytes(self._surroundings).rstrip(b"\0").decode(errors="replace")

    @property
    def pid(self) -> int:
        return self._words[_PID]

    @property
    def signal(self) -> int:
        return self._words[_SIGNAL]

    @property
    def thread(self) -> int:
        return self._words[_THREAD]

    def close(self) -> None:
        """Nobody can open it any more; views of it stay."""
        if self._arena is not None:
            self._arena.close()

    # -------------------------------------------------------------------- the rank's side

    @classmethod
    def open(cls, path: str) -> CallsPage:
        """The page that an agent has made.

        Raises:
            OSError: it cannot be opened.
            ValueError: something else is there.
            MemoryLimitError: it cannot be mapped.
        """
        page = cls(Arena.adopt(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)))
        if page._words[0] != MAGIC:
            raise ValueError(f"{path} is no page of an agent's")
        return page

    def arrive(self, pid: int, thread: int, number: int) -> None:
        """The rank is there; its stacks are written at signal `number`."""
        self._words[_THREAD], self._words[_SIGNAL] = thread, number
        self._words[_PID] = pid

    def tell_surroundings(self, text: str) -> None:
        """What this rank's JAX goes by. Too much of it is not told."""
        told = text.encode()
        if len(told) <= len(self._surroundings):
            self._surroundings[: len(told)] = told

    def enter_phase(self, name: str, at_most_s: float) -> tuple[float, bytes]:
        """A long phase begins; returns what `leave_phase` needs."""
        before = self._times[_UNTIL], bytes(self._name)
        self._name[:] = name.encode()[: len(self._name)].ljust(len(self._name), b"\0")
        self._times[_UNTIL] = max(before[0], time.monotonic() + at_most_s)
        return before

    def leave_phase(self, before: tuple[float, bytes]) -> None:
        """The phase is over, and what was before it goes on."""
        self._times[_UNTIL], self._name[:] = before

    def end(self) -> None:
        """No call comes any more."""
        self._words[_CLOSED] = 1
