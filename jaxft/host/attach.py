"""A process that nobody launched gets its place: one rank, alone on its host.

`Snapshotter` in a plain script or notebook attaches to the host's *keeper of one*
(`jaxft.launch.solo`), which is started if it is not there, detached. It keeps the SMP and its
memory over the script's crashes and restarts, gives each script that comes a generation of its own,
and ends with the SMP when a script has finished, or after a while without one.

The script keeps the connection for as long as it lives; a second one at the same time is refused.
Its end without a word is the keeper's death. Then a thread of the script starts another keeper,
which adopts the SMP and takes the script back in the generation that it is in: nothing of its
snapshots is lost. A keeper that ends in order says so, and the memory goes with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from jaxft import config
from jaxft.errors import JaxftError, JobInUse, LaunchError, ProtocolError, WireError
from jaxft.group.world import Generation
from jaxft.host.local import LocalChannel, connect, make_private

_log = logging.getLogger(__name__)
HOST = "alone"
SOCKET = "solo.sock"
START_S = 30.0
# Exit status of a keeper that found another one there; and how long that may take to end.
IN_USE = 2
END_S = 10.0
# A keeper that could not be started is tried again after this long, then twice that, up to
# AGAIN_S_MAX. The end of the connection ends the wait for a message.
AGAIN_S = 5.0
AGAIN_S_MAX = 320.0
POLL_S = 60.0


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Script: I want to be the rank of this job. `floor` is the newest generation that its storage
    knows of; `generation` is the one whose rank I am already, if my keeper has died."""

    floor: int = 0
    generation: Generation | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Script: the job is done, the memory may go."""


class Seated(msgspec.Struct, frozen=True, kw_only=True, tag="seated"):
    """You are the rank of this generation; this is where you stand."""

    env: config.RankEnv
    generation: Generation


class Occupied(msgspec.Struct, frozen=True, kw_only=True, tag="occupied"):
    """Process `pid` is the rank of this job already."""

    pid: int


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """The keeper ends, and the snapshots' memory goes."""

    reason: str


ScriptMessage = Attach | Finished
SoloMessage = Seated | Occupied | Over


def encode(message: ScriptMessage | SoloMessage) -> bytes:
    return msgspec.msgpack.encode(message)


class Held(Protocol):
    """What a place hangs on."""

    def let_go(self, *, finished: bool = False) -> None: ...


class Seat:
    """A rank's place. `finish` says that the job is done; `leave` only lets go of the place."""

    def __init__(self, env: config.RankEnv, place: Held | None = None) -> None:
        self.env = env
        self._place = place
        if place is not None:
            # An interrupt may come before anybody has taken this Seat.
            weakref.finalize(self, place.let_go).atexit = False

    def finish(self) -> None:
        if self._place is not None:
            self._place.let_go(finished=True)

    def leave(self) -> None:
        if self._place is not None:
            self._place.let_go()


class Keeper(NamedTuple):
    """How the keeper of a job is found and started, also after the script has gone elsewhere."""

    job: str
    run: Path
    cwd: Path

    @property
    def directory(self) -> Path:
        return config.host_dir(self.run, self.job, HOST)

    @property
    def log(self) -> Path:
        return self.directory / "logs" / "solo.log"


class Place:
    """A script's connection to its keeper, and to the next one when a keeper dies, until `let_go`.

    Args:
        keeper: of its job.
        channel: to it; it has said where the script stands.
        generation: the one that the script is the rank of.
    """

    def __init__(self, keeper: Keeper, channel: LocalChannel, generation: Generation) -> None:
        self._keeper = keeper
        self._channel = channel
        self._generation = generation
        self._finished = False
        self._pid = os.getpid()
        self._left = threading.Event()
        # Guards the channel and whether it is needed. A finalizer may run in any thread, any time.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="jaxft-seat")

    def watch(self) -> None:
        """Looks after the keeper from now on."""
        self._thread.start()

    def let_go(self, *, finished: bool = False) -> None:
        """Leaves the place, with the job done if `finished`. Waits END_S at most for another keeper
        that is being started, which has to know that. May be repeated. The place is not a forked
        child's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._finished = self._finished or finished
            self._left.set()
            self._close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _close(self) -> None:
        if self._finished and not self._channel.ended:
            with contextlib.suppress(WireError):
                self._channel.send(encode(Finished()))
        self._channel.close()

    def _watch(self) -> None:
        while not self._left.is_set():
            try:
                received = self._channel.receive(POLL_S)
                told = received and msgspec.msgpack.decode(received.payload, type=SoloMessage)
            except (WireError, msgspec.MsgspecError) as error:
                if self._left.is_set() or not self._go_on(error):
                    return
            else:
                if isinstance(told, Over):
                    _log.info("job %s: its keeper has ended: %s", self._keeper.job, told.reason)
                    return

    def _wish(self) -> Attach:
        return Attach(generation=self._generation)

    def _go_on(self, error: Exception) -> bool:
        """Is there another keeper now, and this script's place its old one?"""
        job = self._keeper.job
        _log.warning(
            "job %s: the keeper of its snapshots has died (%s): another one is started", job, error
        )
        self._channel.close()
        pause_s = AGAIN_S
        while not self._left.is_set():
            try:
                channel, seated = _arrive(self._keeper, self._wish)
            except JobInUse as refusal:
                _log.error("job %s: this script has lost its place: %s", job, refusal)
                return False
            except (JaxftError, OSError) as failure:
                _log.warning("job %s: it is tried again in %g s: %s", job, pause_s, failure)
                self._left.wait(pause_s)
                pause_s = min(2 * pause_s, AGAIN_S_MAX)
                continue
            with self._lock:
                self._channel, self._generation = channel, seated.generation
                if self._left.is_set():
                    self._close()
            return True
        return False


def default_job() -> str:
    """The name of a script's job: its file name, and where it lies; in a kernel the notebook's, if
    Jupyter says it, since all kernels are one and the same script."""
    script = Path(sys.argv[0] or "notebook").resolve()
    if script.stem.endswith("kernel_launcher") and config.notebook():
        script = Path(config.notebook()).resolve()
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("._-")[:24] or "script"
    return f"{stem}-{hashlib.sha256(str(script).encode()).hexdigest()[:8]}"


def attach(job: str | None, floor: Callable[[], int] = lambda: 0) -> Seat:
    """The place of this process in job `job` (None: named after the script).

    `floor`: its generation is to be larger than this says when the keeper is asked; the one before
    may have been writing to storage.

    Raises:
        JobInUse: another process has it, or `jaxft run` runs the job here.
        LaunchError: the keeper could not be started; says why, and where its log is.
        ConfigError: the run directory cannot be used.
    """
    name = default_job() if job is None else config.check_name("job", job)
    keeper = Keeper(name, config.run_dir().absolute(), Path.cwd())
    channel, seated = _arrive(keeper, lambda: Attach(floor=floor()))
    place = Place(keeper, channel, seated.generation)
    try:
        place.watch()
        return Seat(seated.env, place)
    except BaseException:
        place.let_go()
        raise


def _arrive(keeper: Keeper, wish: Callable[[], Attach]) -> tuple[LocalChannel, Seated]:
    """The place that is wished for, from the keeper that is there, or from one that is started.

    Raises:
        JobInUse, LaunchError, ConfigError: as `attach`.
    """
    deadline_s = time.monotonic() + START_S
    ending_s = time.monotonic() + END_S
    started: subprocess.Popen[bytes] | None = None
    while time.monotonic() < deadline_s:
        try:
            channel = connect(keeper.directory / SOCKET, 0.0)
            return channel, _ask(channel, keeper.job, wish())
        except WireError:  # it is not there, or about to end
            if started is None:
                started = _start(keeper)
            elif started.poll() == IN_USE and time.monotonic() < ending_s:
                started = None
            elif started.poll() is not None:
                break
            time.sleep(0.02)
    ended = started is not None and started.poll() is not None
    how = "ended at once" if ended else f"did not start within {START_S:g} s"
    raise LaunchError(
        f"job {keeper.job}: the keeper of its snapshots {how}: {_last_line(keeper.log)} "
        f"(log: {keeper.log})"
    )


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        return (log.read_text(errors="replace").rstrip().splitlines() or ["it said nothing"])[-1]
    return "it said nothing"


def _ask(channel: LocalChannel, job: str, wish: Attach) -> Seated:
    """Asks the keeper for the place. The connection is the place: whatever goes wrong, an interrupt
    of a notebook's cell too, closes it (the exception's traceback would keep it open)."""
    try:
        channel.send(encode(wish))
        received = channel.receive(START_S)
        if received is None:
            raise ProtocolError("the keeper does not answer")
        message = msgspec.msgpack.decode(received.payload, type=SoloMessage)
        if isinstance(message, Occupied):
            raise JobInUse(_who_sits_there(message.pid, job))
        if isinstance(message, Over):
            raise ProtocolError(f"the keeper ends: {message.reason}")
        return message
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


def _start(keeper: Keeper) -> subprocess.Popen[bytes]:
    """Starts the keeper, in a session of its own."""
    make_private(keeper.log.parent)
    environ = {key: value for key, value in os.environ.items() if key != "JAXFT_FAULTS"}
    with keeper.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxft.launch.solo", "--job", keeper.job],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=keeper.cwd,
            env=environ | {"JAXFT_RUN_DIR": str(keeper.run)},
        )
