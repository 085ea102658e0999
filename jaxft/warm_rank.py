"""A process that waits to become a rank: `python [OPTIONS] warm_rank.py train.py ARGUMENTS...`.

Its agent starts it while the ranks of now train, by its path, in place of the training command
`python [OPTIONS] train.py ARGUMENTS...` (or `-m MODULE`). It imports what jaxft itself needs, JAX
above all, and waits. When the next generation's rank is wanted it runs the script in itself.

Rules
- The script finds what it would have found: its own `__main__`, sys.argv, sys.path, environment,
  standard streams; its tracebacks have no frame of this file. Its stack has one below it.
- Nothing of the script's is read or imported before it is wanted, and no device of JAX's is looked
  for: the process waits without any, on the agent's pipe, which is its standard input until then.
- Where JAX goes by something else here than in the ranks of now, it says what and ends.
- What cannot be run exactly so is executed as the command that it stands for.
- It ends when the agent does. If memory runs out while it waits, the kernel is to take it first.
"""

import os
import sys

if not sys.flags.safe_path:
    # As the interpreter has it for the script: before anything else is found by it.
    _where = os.getcwd() if sys.argv[1] == "-m" else os.path.realpath(sys.argv[1])
    sys.path[0] = _where if sys.argv[1] == "-m" else os.path.dirname(_where)

import builtins
import contextlib
import importlib
import json
import pkgutil
import runpy
import types
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

# What a rank imports of jaxft, and with it JAX.
NEEDED = ("jaxft.snapshotter", "jaxft.wrapping", "jaxft.device.mesh")
SCORE = Path("/proc/self/oom_score_adj")
TAKEN_FIRST = "1000"


def hear() -> Any:
    """The agent's next word, a line of JSON. Without one this process ends: the agent is gone, or
    has no use for it."""
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    return json.loads(line)


@contextlib.contextmanager
def taken_first() -> Iterator[None]:
    """While in it, this process is the first that the kernel ends if memory runs out."""
    before = ""
    with contextlib.suppress(OSError):
        before = SCORE.read_text()
        SCORE.write_text(TAKEN_FIRST)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            SCORE.write_text(before)


def wait() -> None:
    """Imports what is needed, and waits until this process is to be a rank; then it has a rank's
    environment and standard input."""
    with taken_first():
        expected = hear()["surroundings"]
        startup = importlib.import_module("jaxft.startup")
        for name in NEEDED:
            importlib.import_module(name)
        given = startup.surroundings()
        if given != expected:
            names = sorted(n for n in given | expected if given.get(n) != expected.get(n))
            sys.exit(f"its script sets {', '.join(names)}, by which JAX goes: set it for jaxft run")
        order = hear()
    for name in order["remove"]:
        os.environ.pop(name, None)
    os.environ.update(order["set"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    startup.come_warm(given, sys.orig_argv, dict(os.environ))


def script(name: str) -> Callable[[], object]:
    """What runs a script as the interpreter would."""
    path = os.path.join(os.getcwd(), name)  # as it is: the interpreter does not shorten it
    try:
        source = Path(path).read_bytes()
    except OSError:
        become_command()
    if pkgutil.get_importer(path) is not None:
        become_command()  # an archive with a `__main__` of its own
    main = sys.modules["__main__"]
    vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))

    def run() -> None:
        exec(compile(source, path, "exec", dont_inherit=True), vars(main))

    return run


def module(name: str) -> Callable[[], object]:
    """What runs a module as `python -m` does: the very function that the interpreter calls."""
    run: Callable[[str], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
    return lambda: run(name)


def become_command() -> NoReturn:
    """Leaves the rest to the command that this process stands for."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execvp(sys.orig_argv[0], sys.orig_argv)


def prepare() -> Callable[[], object]:
    """Makes this process one that has begun to run the command, and gives what runs it."""
    del sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
    del sys.argv[0]
    wait()
    main = types.ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins, __loader__=None)
    sys.modules["__main__"] = main
    if sys.argv[0] == "-m":
        return module(sys.argv.pop(1))
    return script(sys.argv[0])


if __name__ == "__main__":
    _run = prepare()
    try:
        _run()
    except BaseException as _error:
        _trace = _error.__traceback__
        while _trace is not None and _trace.tb_frame.f_code.co_filename == __file__:
            _trace = _trace.tb_next
        _error.__traceback__ = _trace
        raise  # a bare one adds no entry for this frame
