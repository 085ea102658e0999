"""The stacks of this host's ranks, written to their logs before they are killed.

Rules
- First each rank is asked by the signal that it has named (`watched`), and only if it is in its
  process group: the interpreter writes all its threads' stacks, from C. A stopped one does not.
- Then py-spy, if it is installed beside this Python or on PATH, which reads them from outside, also
  those of a stopped process, and does not hold it: it may not hang after all.
- Neither is waited for longer than DUMP_S and SPY_S, and nobody is held up: `poll` says when they
  are done.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from jaxft import config
from jaxft.launch.child import is_in_group, state_of
from jaxft.launch.ranks import Watched

DUMP_S = 2.0
QUIET_S = 0.15
SPY_S = 5.0
LINES_MAX = 12
STOPPED = ("T", "t")
READ_BYTES = 1 << 20

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):$")
_SPIED = re.compile(r'^Thread (\w+) \([^)]*\)(?:: "(.*)")?$')


def innermost(text: str, thread: int, pid: int) -> str:
    """The innermost lines of one thread's stack, innermost first; "" where there is none.

    Args:
        text: what the interpreter's fault handler has written, or py-spy, or both.
        thread: its identity, by which the first has it.
        pid: of the process, of which py-spy's is the main thread.
    """
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        header, spied = _THREAD.match(line), _SPIED.match(line)
        if header is not None and int(header[1], 16) == thread:
            lines = found["dumped"] = []
        elif spied is not None and (spied[1] == str(pid) or spied[2] == "MainThread"):
            lines = found["spied"] = []
        elif lines is not None and line.startswith("  "):
            lines.append(line.strip())
        else:
            lines = None
    best = found.get("dumped") or found.get("spied") or []
    return "\n".join(best[:LINES_MAX])


class _Dump:
    """One rank's."""

    def __init__(self, watched: Watched) -> None:
        self.rank = watched.rank
        self._log = watched.log
        self._thread = watched.page.thread
        self._pid = watched.page.pid
        self.is_there = is_in_group(self._pid, watched.group)
        with watched.log.open("ab") as log:
            log.write(b"\njaxft: this job seems to hang; where this rank is:\n")
            self._start = log.tell()
        self._size, self._quiet_since_s = self._start, time.monotonic()
        hears = self.is_there and state_of(self._pid) not in STOPPED
        self._asked = hears and watched.page.signal > 0
        if self._asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, watched.page.signal)

    def has_answered(self) -> bool:
        """Has the interpreter written something, and nothing more for a moment?"""
        size, now_s = self._log.stat().st_size, time.monotonic()
        if size != self._size:
            self._size, self._quiet_since_s = size, now_s
        came = size > self._start and now_s - self._quiet_since_s > QUIET_S
        return came or not self._asked

    def spy(self, program: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [program, "dump", "--nonblocking", "--pid", str(self._pid)],
                env={name: one for name, one in os.environ.items() if name not in config.SECRETS},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stack(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._start)
            text = log.read(READ_BYTES).decode(errors="replace")
        return innermost(text, self._thread, self._pid)


class Stacks:
    """Those of these ranks, from now on."""

    def __init__(self, watched: Iterable[Watched]) -> None:
        self._began_s = time.monotonic()
        self._dumps = [_Dump(one) for one in watched]
        self._spies: list[subprocess.Popen[bytes]] | None = None

    def poll(self) -> dict[int, str] | None:
        """The innermost lines of each rank's stack; None while they are waited for."""
        now_s = time.monotonic()
        if self._spies is None:
            waits = [dump for dump in self._dumps if not dump.has_answered()]
            if waits and now_s - self._began_s < DUMP_S:
                return None
            program = _py_spy()
            there = [dump for dump in self._dumps if dump.is_there]
            self._began_s = now_s
            self._spies = [dump.spy(program) for dump in there] if program else []
        if any(spy.poll() is None for spy in self._spies):
            if now_s - self._began_s < SPY_S:
                return None
            self.close()
        return {dump.rank: dump.stack() for dump in self._dumps}

    def close(self) -> None:
        """Ends what is still on its way."""
        for spy in self._spies or ():
            spy.kill()
            spy.wait()


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
