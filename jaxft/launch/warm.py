"""Processes that wait, with JAX imported, to become the next generation's ranks (`warm_rank`).

Rules
- Only for a training command that is an interpreter of Python with a script or a module; whatever
  else it is (a shell, `torchrun`, `srun`, `python -c`), all ranks are started when they are wanted.
- They are started once the ranks of now train, so as not to be in the way of their beginning, and
  with what JAX goes by in these. One that finds something else ends, and there are no more of them.
  Spares learn that from the store.
- One becomes a rank only if the rank would have been started with the same environment, but for
  jaxft's own variables, which nothing looks at before that. It is killed otherwise.
- They are in nobody's way: each sleeps on a pipe, has no device, and is the first that the kernel
  ends if memory runs out. They die with their agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxft.launch.child import Child, kill_all
from jaxft.launch.console import last_lines
from jaxft.launch.options import KILL_S

# When the ranks of now count as training: after so many calls of `save`, and so long.
CALLS_MIN = 3
AFTER_S = 5.0
PROGRAM = Path(__file__).parents[1] / "warm_rank.py"

_INTERPRETER = re.compile(r"python(3(\.\d+)?t?)?")
_ELF = b"\x7fELF"
_ALONE = frozenset("bBdEIOPqRsSuv")
_WITH_VALUE = frozenset("WX")


class Script(NamedTuple):
    """A training command: `program options arguments`, where arguments begin with the script."""

    program: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]

    def waiting(self) -> tuple[str, ...]:
        """The command that waits to become this one."""
        return (self.program, *self.options, str(PROGRAM), *self.arguments)


def script_of(command: Sequence[str], path: str | None = None) -> Script | None:
    """The parts of `python [OPTIONS] SCRIPT.py ...` or `python [OPTIONS] -m MODULE ...`; None for
    all that is something else, or may be.

    Args:
        command: the command.
        path: where programs are looked for, PATH.
    """
    if not command:
        return None
    program, *rest = command
    found = shutil.which(program, path=path)
    if found is None or not _INTERPRETER.fullmatch(Path(program).name) or not _is_elf(Path(found)):
        return None
    count = 0
    while count < len(rest) and (taken := _option(rest[count:])):
        count += taken
    options, arguments = tuple(rest[:count]), tuple(rest[count:])
    if not arguments:
        return None
    is_module = arguments[0] == "-m" and len(arguments) > 1
    is_script = not arguments[0].startswith("-") and arguments[0].endswith(".py")
    return Script(program, options, arguments) if is_module or is_script else None


def _option(words: Sequence[str]) -> int:
    """How many words the option takes with which they begin; 0: that is none that is known."""
    word = words[0]
    if len(word) < 2 or word[0] != "-":
        return 0
    for place, letter in enumerate(word[1:], 2):
        if letter in _WITH_VALUE:
            return 1 if word[place:] else 2
        if letter not in _ALONE:
            return 0
    return 1


def _is_elf(path: Path) -> bool:
    """A program, and no script that may do anything before it calls one."""
    try:
        with path.open("rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False


class _Waiting(NamedTuple):
    child: Child
    pipe: int
    environ: Mapping[str, str]


class WarmRanks:
    """Those of one host.

    Args:
        command: the training command.
        logs: the directory of the ranks' logs.
        say: tells a person.
    """

    def __init__(self, command: Sequence[str], logs: Path, say: Callable[[str], None]) -> None:
        self._script = script_of(command, os.environ.get("PATH"))
        self._logs = logs
        self._say = say
        self._waiting: list[_Waiting] = []

    @property
    def may_be(self) -> bool:
        """Can there be any?"""
        return self._script is not None

    @property
    def pids(self) -> list[int]:
        return [one.child.pid for one in self._waiting]

    def fds(self) -> list[int]:
        """Readable when one ends."""
        return [one.child.pidfd for one in self._waiting if one.child.pidfd >= 0]

    def start(self, ranks: Iterable[tuple[Mapping[str, str], str]]) -> None:
        """Starts one for each of these ranks of now: with its environment, and what JAX goes by in
        it, as JSON."""
        assert self._script is not None
        assert not self._waiting
        try:
            for number, (environ, surroundings) in enumerate(ranks):
                log = self._logs / f"waits{number}.log"
                log.unlink(missing_ok=True)
                one = _start(self._script, environ, log)
                self._waiting.append(one)
                _write(one.pipe, {"surroundings": json.loads(surroundings)})
        except OSError as error:
            self._give_up(str(error))  # the job does as well without

    def poll(self) -> None:
        """Notes who has ended; if one did so by itself, there are no more of them."""
        for one in list(self._waiting):
            code = one.child.status()
            if code is None:
                continue
            assert one.child.log is not None
            self._waiting.remove(one)
            os.close(one.pipe)
            if code > 0:
                self._give_up(last_lines(one.child.log, lines=1))

    def _give_up(self, why: str) -> None:
        if self._script is not None:
            self._script = None
            self._say(f"no process waits to follow a rank that is lost: {why}")

    def take(self, environ: Mapping[str, str], log: Path) -> Child | None:
        """One of them, which becomes a rank with this environment and this log; None if there is
        none that can."""
        self.poll()
        while self._waiting:
            one = self._waiting.pop(0)
            if _others(environ) == _others(one.environ) and _tell(one, environ):
                one.child.begin(log)
                return one.child
            self._end([one])
        return None

    def kill(self) -> None:
        """Ends them all. Raises LaunchError if one does not die."""
        waiting, self._waiting = self._waiting, []
        self._end(waiting)

    def _end(self, waiting: list[_Waiting]) -> None:
        for one in waiting:
            with contextlib.suppress(OSError):
                os.close(one.pipe)
        kill_all([one.child for one in waiting], KILL_S)
        for one in waiting:
            assert one.child.log is not None
            one.child.log.unlink(missing_ok=True)


def _start(script: Script, environ: Mapping[str, str], log: Path) -> _Waiting:
    """Starts one. Raises OSError."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(writing, False)
        child = Child(script.waiting(), env=environ, log=log, stdin=reading)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return _Waiting(child, writing, environ)


def _others(environ: Mapping[str, str]) -> dict[str, str]:
    """All variables but jaxft's own."""
    return {name: one for name, one in environ.items() if not name.startswith("JAXFT_")}


def _tell(one: _Waiting, environ: Mapping[str, str]) -> bool:
    """Makes it a rank with this environment; whether it could be told."""
    changed = {name: text for name, text in environ.items() if one.environ.get(name) != text}
    order = {"set": changed, "remove": sorted(one.environ.keys() - environ.keys())}
    told = one.child.status() is None and _write(one.pipe, order)
    if told:
        os.close(one.pipe)
    return told


def _write(pipe: int, word: object) -> bool:
    """A line of JSON; whether it went through, which it does at once or not at all."""
    line = json.dumps(word).encode() + b"\n"
    try:
        return os.write(pipe, line) == len(line)
    except OSError:
        return False
