"""A process that nobody launched gets its place: one rank, alone on its host.

`Snapshotter` in a plain script or notebook attaches to the host's *keeper of one*
(`jaxft.launch.solo`), which is started if it is not there, detached. It keeps the SMP and its
memory over the script's crashes and restarts, gives each script that comes a generation of its own,
and ends with the SMP when a script has finished, or after a while without one.

The script keeps the connection for as long as it lives; a second one at the same time is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from jaxft import config
from jaxft.errors import JobInUse, LaunchError, ProtocolError, WireError
from jaxft.host.local import LocalChannel, connect, make_private

HOST = "alone"
SOCKET = "solo.sock"
START_S = 30.0
# Exit status of a keeper that found another one there; and how long that may take to end.
IN_USE = 2
END_S = 10.0


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Script: I want to be the rank of this job. `floor` is the newest generation that its storage
    knows of."""

    floor: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Script: the job is done, the memory may go."""


class Seated(msgspec.Struct, frozen=True, kw_only=True, tag="seated"):
    """You are the rank; this is where you stand."""

    env: config.RankEnv


class Occupied(msgspec.Struct, frozen=True, kw_only=True, tag="occupied"):
    """Process `pid` is the rank of this job already."""

    pid: int


ScriptMessage = Attach | Finished
SoloMessage = Seated | Occupied


def encode(message: ScriptMessage | SoloMessage) -> bytes:
    return msgspec.msgpack.encode(message)


class Seat:
    """A rank's place. `finish` says that the job is done; `leave` only lets go of the place."""

    def __init__(self, env: config.RankEnv, channel: LocalChannel | None = None) -> None:
        self.env = env
        self._channel = channel

    def finish(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(WireError):
                self._channel.send(encode(Finished()))
        self.leave()

    def leave(self) -> None:
        if self._channel is not None:
            self._channel.close()


def default_job() -> str:
    """The name of a script's job: its file name, and where it lies; in a kernel the notebook's, if
    Jupyter says it, since all kernels are one and the same script."""
    script = Path(sys.argv[0] or "notebook").resolve()
    if script.stem.endswith("kernel_launcher") and config.notebook():
        script = Path(config.notebook()).resolve()
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("._-")[:24] or "script"
    return f"{stem}-{hashlib.sha256(str(script).encode()).hexdigest()[:8]}"


def attach(job: str | None, floor: int = 0) -> Seat:
    """The place of this process in job `job` (None: named after the script).

    `floor`: its generation is to be larger than this.

    Raises:
        JobInUse: another process has it, or `jaxft run` runs the job here.
        LaunchError: the keeper could not be started; says why, and where its log is.
        ConfigError: the run directory cannot be used.
    """
    name = default_job() if job is None else config.check_name("job", job)
    directory = config.host_dir(config.run_dir().absolute(), name, HOST)
    deadline_s = time.monotonic() + START_S
    ending_s = time.monotonic() + END_S
    started: subprocess.Popen[bytes] | None = None
    while time.monotonic() < deadline_s:
        try:
            return _ask(connect(directory / SOCKET, 0.0), name, floor)
        except WireError:  # it is not there, or about to end
            if started is None:
                started = _start(name, directory)
            elif started.poll() == IN_USE and time.monotonic() < ending_s:
                started = None
            elif started.poll() is not None:
                break
            time.sleep(0.02)
    ended = started is not None and started.poll() is not None
    how = "ended at once" if ended else f"did not start within {START_S:g} s"
    log = directory / "logs" / "solo.log"
    raise LaunchError(
        f"job {name}: the keeper of its snapshots {how}: {_last_line(log)} (log: {log})"
    )


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        return (log.read_text(errors="replace").rstrip().splitlines() or ["it said nothing"])[-1]
    return "it said nothing"


def _ask(channel: LocalChannel, job: str, floor: int) -> Seat:
    """Asks the keeper for the place. The connection is the place: whatever goes wrong, an interrupt
    of a notebook's cell too, closes it (the exception's traceback would keep it open)."""
    try:
        channel.send(encode(Attach(floor=floor)))
        received = channel.receive(START_S)
        if received is None:
            raise ProtocolError("the keeper does not answer")
        message = msgspec.msgpack.decode(received.payload, type=SoloMessage)
        if isinstance(message, Occupied):
            raise JobInUse(_who_sits_there(message.pid, job))
        return Seat(message.env, channel)
    except BaseException:
        channel.close()
        raise


def _who_sits_there(pid: int, job: str) -> str:
    if pid == os.getpid():
        return (
            f"this process has a Snapshotter of job {job}: use that one, or end it first. Its "
            "close() ends the job and lets its memory go, close(failing=True) keeps it"
        )
    return (
        f"process {pid} runs this job already: wait for it to end, stop it, or give this script "
        "another name with Snapshotter(job=...)"
    )


def _start(job: str, directory: Path) -> subprocess.Popen[bytes]:
    """Starts the keeper, in a session of its own."""
    make_private(directory / "logs")
    with (directory / "logs" / "solo.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxft.launch.solo", "--job", job],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if key != "JAXFT_FAULTS"},
        )
