"""The peer: a plain restart loop around the ranks of one machine, as a few lines of shell would be.

When a rank ends, all are killed and started again, at once. (A loop on each host alone would wait
for JAX to notice, which takes 100 s.)
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


class RestartLoop:
    """The ranks. `turn` waits until one ends, and starts all anew.

    Args:
        command: of a rank.
        ranks: how many.
        environ: of all of them; which one each is comes with it.
        log: descriptor of the file that they write to.
    """

    def __init__(
        self, command: Sequence[str], ranks: int, environ: Mapping[str, str], log: int
    ) -> None:
        self._command = (sys.executable, *command)
        self._count = ranks
        self._environ = environ
        self._log = log
        self._number = 0
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._start()

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self._ranks]

    @property
    def generation(self) -> int:
        """How often they were started."""
        return self._number

    def _start(self) -> None:
        self._number += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(self._count):
            place = {
                "BENCH_GENERATION": str(self._number),
                "BENCH_RANK": str(rank),
                "BENCH_RANKS": str(self._count),
                "BENCH_COORDINATOR": f"127.0.0.1:{port}",
            }
            started = subprocess.Popen(
                self._command,
                env={**self._environ, **place},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
            self._ranks.append(started)

    def turn(self, timeout_s: float) -> None:
        """Waits until one ends; then all are killed and started again.

        Raises:
            TimeoutError: none ends.
        """
        fds = [os.pidfd_open(pid) for pid in self.pids]
        try:
            if not select.select(fds, [], [], timeout_s)[0]:
                raise TimeoutError(f"no rank has ended within {timeout_s:g} s")
        finally:
            for fd in fds:
                os.close(fd)
        self.close()
        self._start()

    def close(self) -> None:
        """Kills all."""
        for one in self._ranks:
            one.kill()
        for one in self._ranks:
            one.wait()
        self._ranks = []
