"""The processes of a measurement: found by the run directory that they were started with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.01
END_S = 10.0
STOP_S = 30.0


def below(run_dir: Path) -> list[int]:
    """The other processes of this user that have this run directory in their environment."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    wanted = str(run_dir)
    return [
        pid for pid in pids if pid != os.getpid() and variables(pid).get("JAXFT_RUN_DIR") == wanted
    ]


def variables(pid: int) -> dict[str, str]:
    """What a process was started with; none if it is gone or is not this user's."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (one.partition("=") for one in text.split("\0"))}


def end_all(run_dir: Path) -> None:
    """Kills what is left of a measurement, and waits until it is gone."""
    deadline_s = time.monotonic() + END_S
    while (left := below(run_dir)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def end_run(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Ends a `jaxft run`, and all that it has started.

    Raises:
        TimeoutError: something of it lives on.
    """
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end_all(run_dir)
    until(lambda: not below(run_dir), f"the end of all processes of {run_dir}", END_S)


def until(ready: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """Waits until `ready()` gives something true.

    Raises:
        TimeoutError: it did not.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (found := ready()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return found
