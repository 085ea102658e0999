"""The keeper of one: `python -m jaxft.launch.solo`, for a script that nobody launched.

It is the agent of a world of one host whose rank it did not start: it keeps the SMP, gives every
script that attaches (see `host.attach`) a generation of its own, and starts persist helpers. When
the script says that it has finished, the SMP and its memory go; when it dies, they wait `orphan_s`
for the next one. Before they go, the newest snapshot is written to storage, if it has a place.
No store is needed: the generation's number is in the SMP's memory.

A keeper that is killed leaves the SMP and the script, which starts the next keeper. That adopts the
SMP and takes the script back in its generation. Until then the place is the script's, as long as it
lives and has not left: nobody else gets it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import select
import signal
import sys
import time
from types import FrameType

import msgspec

from jaxft import config
from jaxft.errors import JaxftError, JobInUse, WireError
from jaxft.group.placement import form_groups
from jaxft.group.world import Code, Generation, Member
from jaxft.host import attach, protocol
from jaxft.host.local import LocalChannel, LocalListener, make_private
from jaxft.launch.child import Child, kill_all
from jaxft.launch.console import last_lines, now
from jaxft.launch.hostdir import Lock, remove
from jaxft.launch.options import KILL_S, RunOptions
from jaxft.launch.persisting import Persisting
from jaxft.launch.progress import ProgressLog
from jaxft.launch.ranks import EXPORTER, export_environment, rank_environment
from jaxft.launch.smp_process import SnapshotProcess, Up

TICK_S = 0.1
ORPHAN_S = 600.0
EXPORT_S = 600.0


class Solo:
    """One host, one job, one script at a time.

    Raises:
        JobInUse: this job is run here by somebody else.
    """

    def __init__(self, job: str, orphan_s: float) -> None:
        self.options = RunOptions(
            job=job,
            host=attach.HOST,
            command=("attached",),
            store="",
            orphan_s=orphan_s,
            log_dir=None,
        )
        self.directory = self.options.directory().absolute()
        make_private(self.options.logs())
        self._lock = Lock(self.directory / "lock", f"job {job} on this host")
        self._listener = LocalListener(self.directory / attach.SOCKET)
        log = self.options.logs() / "smp.log"
        self._smp = SnapshotProcess(self.options, self.directory, log, _say)
        self._identity = secrets.token_hex(8)
        self._number = 0
        self._generation: Generation | None = None
        self._script: LocalChannel | None = None
        self._left_over: dict[int, int] = {}  # scripts of a dead keeper that live, with pidfds
        self._asking: list[LocalChannel] = []
        self._persisting = Persisting(self.options, self._smp)
        self._progress = ProgressLog()
        self._finished = False
        self._told_to_end = False
        self._left_s = time.monotonic()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serves scripts until one has finished, none has come for `orphan_s`, or on SIGTERM.

        Raises:
            LaunchError: the SMP does not stay alive.
        """
        reason = "it was told to"
        signal.signal(signal.SIGTERM, self._on_signal)
        self._smp.begin()
        try:
            while not self._over():
                self._wait()
                for happening in self._smp.poll():
                    self._smp_happened(happening)
                self._serve()
                if failure := self._persisting.poll():
                    _say(failure)
            self._export()
        except BaseException as error:
            reason = str(error) or repr(error)
            raise
        finally:
            self._shut_down(reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told_to_end = True
        with contextlib.suppress(OSError):  # It is closed in the end.
            os.write(self._wake_w, b"!")

    def _export(self) -> None:
        """Writes the newest snapshot to storage, if it has a place there and is not there yet. A
        script that comes meanwhile waits for the next keeper."""
        export, welcome = self._progress.unsaved, self._smp.welcome
        if export is None or welcome is None or self._told_to_end:
            return
        generation = msgspec.structs.replace(
            self._next_generation(welcome), attached=False, export=export, reason="the job ends"
        )
        self._persisting.leave()
        self._smp.enter(generation)
        env = rank_environment(generation, self.options.host, 0, self._smp.socket)
        log = self.options.logs() / "export.log"
        child = Child(EXPORTER, env=env | export_environment(generation, self.options), log=log)
        deadline_s = time.monotonic() + EXPORT_S
        try:
            while child.status() is None and not self._is_told(deadline_s):
                select.select([child.pidfd, self._wake_r], [], [], TICK_S)
                for happening in self._smp.poll():
                    self._smp_happened(happening)
        finally:
            kill_all([child], KILL_S)
        if child.status() == 0:
            _say(f"step {self._progress.step} is on storage, in {export.directory}")
        else:
            _say(f"the newest snapshot did not get to storage: {last_lines(log, lines=1)}")

    def _is_told(self, deadline_s: float) -> bool:
        return self._told_to_end or time.monotonic() > deadline_s

    def _over(self) -> bool:
        if self._who_sits_there() is not None:
            self._left_s = time.monotonic()
        alone_s = time.monotonic() - self._left_s
        return self._finished or self._told_to_end or alone_s > self.options.orphan_s

    def _wait(self) -> None:
        poller = select.poll()
        channels = [*self._asking, *([self._script] if self._script is not None else [])]
        fds = [self._wake_r, self._listener.fileno(), *self._smp.fds(), *self._persisting.fds()]
        for fd in (*fds, *(channel.fileno() for channel in channels)):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        calm = self._smp.is_calm and self._script is not None
        poller.poll(1000 * (self._smp.look_s if calm else TICK_S))

    def _shut_down(self, reason: str) -> None:
        if self._script is not None:
            with contextlib.suppress(WireError):
                self._script.send(attach.encode(attach.Over(reason=reason)), timeout_s=1.0)
        self._listener.close()
        for channel in (*self._asking, *([self._script] if self._script is not None else [])):
            channel.close()
        self._persisting.kill()
        self._smp.stop()
        wake, self._wake_w = self._wake_w, -1
        os.close(wake)
        os.close(self._wake_r)
        self._nobody_is_left()
        remove(self.directory, self._lock, keep_logs=not self._finished)

    # -------------------------------------------------------------------- the SMP

    def _smp_happened(self, happening: object) -> None:
        match happening:
            case Up(welcome, _):
                self._number = max(self._number, welcome.generation)
                if self._generation is not None:
                    self._smp.enter(self._generation)
                else:
                    self._find_left_over(welcome.writers)
            case protocol.RankLeft(pid=pid):
                self._forget_left_over(pid)
            case protocol.PersistTold(order=order):
                self._persisting.ordered(order, self._generation)
            case protocol.FaultTold(reason=reason):
                _say(f"the world of one cannot go on: {reason}")
            case protocol.Announced(kind=kind, detail=detail):
                _say(f"{kind} {detail}")
                if kind in ("settled", "committed", "persisted"):
                    self._progress.announced(kind, detail)
            case _:
                pass

    # -------------------------------------------------------------------- a dead keeper's script

    def _find_left_over(self, pids: tuple[int, ...]) -> None:
        """Processes that the SMP says are its rank; nobody has been seated by this keeper yet."""
        self._nobody_is_left()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._left_over[pid] = os.pidfd_open(pid)

    def _forget_left_over(self, pid: int) -> None:
        fd = self._left_over.pop(pid, -1)
        if fd >= 0:
            os.close(fd)

    def _nobody_is_left(self) -> None:
        for pid in list(self._left_over):
            self._forget_left_over(pid)

    def _who_sits_there(self) -> int | None:
        """The process that has the place, or may come back to it."""
        if self._script is not None:
            return self._script.peer_pid
        for pid, fd in list(self._left_over.items()):
            if not select.select([fd], [], [], 0)[0]:
                return pid
            self._forget_left_over(pid)
        return None

    def _comes_back(self, wish: attach.Attach, welcome: protocol.Welcome) -> bool:
        """Is it the script whose memory this is, and which nobody has followed since?"""
        generation = wish.generation
        return (
            generation is not None
            and self._script is None
            and self._generation in (None, generation)
            and generation.hosts[0].arena == welcome.arena
            and generation.number >= welcome.generation
        )

    def _take_back(self, script: LocalChannel, wish: attach.Attach) -> None:
        """Gives a script its place again, in its generation."""
        assert wish.generation is not None
        self._number = wish.generation.number
        self._enter(script, wish.generation)
        if self._smp.welcome is not None:
            self._progress.come_back(self._smp.welcome.options)
        _say(f"process {script.peer_pid} has come back, in generation {self._number}")

    # -------------------------------------------------------------------- scripts

    def _serve(self) -> None:
        channel = self._listener.accept()
        if channel is not None:
            self._asking.append(channel)
        if self._script is not None:
            self._listen_to_script(self._script)
        # One that is about to end seats nobody: whoever asks finds the connection closed, and
        # starts another keeper.
        if self._smp.welcome is not None and not self._over():
            for asking in list(self._asking):
                self._answer(asking, self._smp.welcome)

    def _listen_to_script(self, script: LocalChannel) -> None:
        with contextlib.suppress(WireError):
            for payload, _ in script.drain():
                message = msgspec.msgpack.decode(payload, type=attach.ScriptMessage)
                self._finished = self._finished or isinstance(message, attach.Finished)
        if script.ended:
            script.close()
            self._script = None

    def _answer(self, asking: LocalChannel, welcome: protocol.Welcome) -> None:
        """Seats a script that has said what it wants, or tells it who sits there."""
        wishes: list[attach.Attach] = []
        try:
            for payload, _ in asking.drain():
                wishes.append(msgspec.msgpack.decode(payload, type=attach.Attach))
        except (WireError, msgspec.MsgspecError) as error:
            _say(f"process {asking.peer_pid} is sent away: {error}")
            asking.close()
        if not wishes and not asking.ended:
            return
        self._asking.remove(asking)
        if asking.ended:
            asking.close()
            return
        wish, sits_there = wishes[0], self._who_sits_there()
        if sits_there in (None, asking.peer_pid) and self._comes_back(wish, welcome):
            self._take_back(asking, wish)
        elif sits_there is None:
            self._seat(asking, wish, welcome)
        else:
            with contextlib.suppress(WireError):
                asking.send(attach.encode(attach.Occupied(pid=sits_there)))
            asking.close()

    def _seat(self, script: LocalChannel, wish: attach.Attach, welcome: protocol.Welcome) -> None:
        """Gives a script the place, in a generation of its own. One whose memory was lost with its
        keeper keeps the place so; the SMP tells its rank that it belongs nowhere any more."""
        left = 0 if wish.generation is None else wish.generation.number
        self._number = max(self._number, wish.floor, left)
        self._enter(script, self._next_generation(welcome))

    def _enter(self, script: LocalChannel, generation: Generation) -> None:
        self._script, self._generation = script, generation
        self._nobody_is_left()
        self._persisting.leave()
        self._progress.enter(generation)
        self._smp.enter(generation)
        env = config.RankEnv(
            job=self.options.job,
            host=self.options.host,
            generation=generation.number,
            nonce=generation.nonce,
            rank=0,
            ranks=1,
            coordinator="",
            smp=str(self._smp.socket),
        )
        with contextlib.suppress(WireError):
            script.send(attach.encode(attach.Seated(env=env, generation=generation)))

    def _next_generation(self, welcome: protocol.Welcome) -> Generation:
        self._number += 1
        code = Code()
        member = Member(self.options.host, self._identity, welcome.arena, welcome.address)
        return Generation(
            job=self.options.job,
            number=self._number,
            nonce=secrets.token_hex(8),
            hosts=(member,),
            groups=form_groups(1, code),
            code=code,
            attached=True,
            reason="a script attached",
        )


def _say(text: str) -> None:
    print(now(), text, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the keeper; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jaxft.launch.solo", description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--orphan-s", type=float, default=ORPHAN_S)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Solo(args.job, args.orphan_s).run()
    except JobInUse as error:
        _say(str(error))
        return attach.IN_USE
    except JaxftError as error:
        _say(f"ended: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
