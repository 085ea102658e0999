"""Processes that wait to become ranks: what they become is what would have been started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.measure import cpu_s
from jaxft.launch.child import Child, kill_all
from jaxft.launch.warm import Script, WarmRanks, script_of
from tests.launch.local_runs import ROOT, run
from tests.launch.training import TRAINER

WAIT_S = 120.0
PYTHON = sys.executable

# What a script finds, and what becomes of it.
SCRIPT = """
import atexit, json, multiprocessing, os, pickle, signal, sys, threading

SET_BY_JAX = ("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY")

def double(x):
    return 2 * x

class Kept:
    pass

def facts():
    main = sys.modules["__main__"]
    names = {name: repr(value) for name, value in vars(main).items() if name.startswith("__")}
    names["__loader__"] = type(main.__loader__).__name__, main.__loader__.path
    return {
        "vars": names,
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "environ": sorted(n for n in os.environ if n not in SET_BY_JAX),
        "place": [os.environ["JAXFT_RANK"], os.environ["JAXFT_GENERATION"]],
        "cwd": os.getcwd(),
        "streams": [repr(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
        "stdin": [os.readlink("/proc/self/fd/0"), sys.stdin.read()],
        "score": open("/proc/self/oom_score_adj").read(),
        "fds": sorted(os.listdir("/proc/self/fd")),
        "signals": [repr(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)],
        "session": os.getsid(0) == os.getpid(),
        "pickled": [pickle.loads(pickle.dumps(one)).__module__ for one in (double, Kept())],
        "threads": threading.active_count(),
    }

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "facts":
        for what, value in facts().items():
            print(what, value)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [1, 2]), pool.apply(Kept).__class__)
        atexit.register(print, "at exit")
        threading.Thread(target=print, args=("thread",)).start()
        sys.exit(3)
    if how == "raise":
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("the loss is not a number") from error
    if how == "signals":
        signal.signal(signal.SIGTERM, lambda number, frame: print("told to end"))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
"""
COMMANDS = {
    "facts": ("-u", "-Xutf8", "./far/../train.py", "facts", "--lr", "1e-3"),
    "raise": ("-W", "error", "train.py", "raise"),
    "raise in a module": ("-OO", "-m", "pack.train", "raise"),
    "signals": ("train.py", "signals"),
    "syntax": ("wrong.py",),
    "missing": ("missing.py",),
}

OPTIONS = ("-uOO", "-W", "error", "-Xdev")

# Sets what JAX goes by, which the ranks before it did not.
SETS = """
import os
os.environ["JAX_ENABLE_X64"] = "1"
import jax, jaxft
jaxft.initialize()
print("x64", jax.config.jax_enable_x64)
"""
DEVICES = """
import sys
there = "jax" in sys.modules
from jax._src import xla_bridge
print(f"JAX: {there}, devices: {list(xla_bridge._backends)}")
"""


class Ended(NamedTuple):
    status: int | None
    said: str


class Site:
    """A directory with scripts, and an environment of a rank's."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for name, text in (("train.py", SCRIPT), ("wrong.py", "x = (\n"), ("sets.py", SETS)):
            (base / name).write_text(text)
        for name in ("pack", "far"):
            (base / name).mkdir()
        (base / "pack" / "__init__.py").touch()
        (base / "pack" / "train.py").write_text(SCRIPT)
        kept = {n: one for n, one in os.environ.items() if not n.startswith(("JAXFT_", "JAX_"))}
        self.environ = {**kept, "PYTHONPATH": str(ROOT), "JAXFT_RANK": "0"}
        code = "from jaxft import startup; import json; print(json.dumps(startup.surroundings()))"
        self.surroundings = subprocess.run(
            [PYTHON, "-c", code], env=self.environ, capture_output=True, text=True, check=True
        ).stdout
        self.said: list[str] = []

    def warm(self, *words: str) -> WarmRanks:
        """One process that waits to be this command."""
        logs = self.base / f"logs{len(list(self.base.glob('logs*')))}"
        logs.mkdir()
        found = WarmRanks((PYTHON, *words), logs, self.said.append)
        found.start([(self.environ, self.surroundings)])
        return found

    def next(self) -> dict[str, str]:
        """The environment of the rank that is wanted."""
        return {**self.environ, "JAXFT_RANK": "1", "JAXFT_GENERATION": "2"}

    def cold(self, *words: str) -> Child:
        log = self.base / "cold.log"
        log.unlink(missing_ok=True)
        return Child((PYTHON, *words), env=self.next(), log=log)


def ended(child: Child) -> Ended:
    deadline_s = time.monotonic() + WAIT_S
    while child.status() is None and time.monotonic() < deadline_s:
        time.sleep(0.005)
    kill_all([child], WAIT_S)
    assert child.log is not None
    return Ended(child.status(), child.log.read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    before = Path.cwd()
    site = Site(tmp_path_factory.mktemp("site"))
    os.chdir(site.base)
    yield site
    os.chdir(before)


@pytest.fixture(scope="module")
def warm(site: Site) -> Iterator[dict[str, WarmRanks]]:
    """All at once: they take their time to import JAX."""
    found = {name: site.warm(*words) for name, words in COMMANDS.items()}
    yield found
    for one in found.values():
        one.kill()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_warm_rank_is_what_a_cold_one_would_have_been(
    name: str, site: Site, warm: dict[str, WarmRanks]
) -> None:
    (pid,) = warm[name].pids
    log = site.base / "warm.log"
    child = warm[name].take(site.next(), log)
    assert child is not None
    assert (child.pid, child.log, warm[name].pids) == (pid, log, [])
    cold = ended(site.cold(*COMMANDS[name]))
    became = ended(child)
    assert became.said.splitlines() == cold.said.splitlines()
    assert became == cold
    assert cold.status == {"facts": 3, "signals": -signal.SIGINT, "missing": 2}.get(
        name.split()[0], 1
    )
    assert site.said == []


def still(pid: int) -> bool:
    """Has it used no processor time for a while, once it was loaded?"""
    before_s = cpu_s(pid)
    time.sleep(0.3)
    return cpu_s(pid) == before_s


def test_a_process_that_waits_takes_no_time_and_no_device(site: Site) -> None:
    (site.base / "devices.py").write_text(DEVICES)
    waits = site.warm("devices.py")
    (pid,) = waits.pids
    deadline_s = time.monotonic() + WAIT_S
    while cpu_s(pid) < 0.3 or not still(pid):
        assert time.monotonic() < deadline_s, f"process {pid} does not come to wait"
    assert int((Path("/proc") / str(pid) / "oom_score_adj").read_text()) == 1000
    child = waits.take(site.next(), site.base / "warm.log")
    assert child is not None
    assert ended(child) == Ended(0, "JAX: True, devices: []\n")


def test_what_the_script_sets_itself_is_found_out(site: Site) -> None:
    begins_anew = site.warm("sets.py")
    expected = json.dumps({**json.loads(site.surroundings), "JAX_ENABLE_X64": "0"})
    ends = WarmRanks((PYTHON, "sets.py"), site.base / "logs0", site.said.append)
    ends.start([(site.environ, expected)])
    (pid,) = ends.pids
    deadline_s = time.monotonic() + WAIT_S
    while ends.pids:
        assert time.monotonic() < deadline_s, f"process {pid} waits"
        select.select(ends.fds(), [], [], 1.0)
        ends.poll()
    assert not ends.may_be
    assert "its script sets JAX_ENABLE_X64, by which JAX goes: set it for" in site.said.pop()
    child = begins_anew.take(site.next(), site.base / "warm.log")
    assert child is not None
    status, said = ended(child)
    first, rest = said.split("\n", 1)
    assert "this rank begins anew: JAX was imported before the script, which sets JAX_EN" in first
    assert Ended(status, rest) == ended(site.cold("sets.py"))
    assert rest == "x64 True\n"


def test_a_rank_that_would_have_another_environment_is_not_a_warm_one(site: Site) -> None:
    waits = site.warm("train.py", "facts")
    (pid,) = waits.pids
    log = site.base / "warm.log"
    assert waits.take({**site.next(), "CUDA_VISIBLE_DEVICES": "1"}, log) is None
    assert waits.pids == []
    assert not (Path("/proc") / str(pid)).exists()


def test_a_rank_that_is_lost_is_followed_by_the_one_that_waits_and_a_spare_has_one_too() -> None:
    options = ("--local-hosts", "2", "--hosts", "1", "--warm")
    with run(*options, command=(PYTHON, TRAINER, "BASE", "1")) as world:
        host = world.wait("rank_started")["host"]
        (spare,) = {"host0", "host1"} - {host}
        (follows,), (waits,) = (
            world.wait("warm_started", host=one)["pids"] for one in (host, spare)
        )
        world.kill(host, "rank")
        started = world.wait("rank_started", generation=2)
        assert (started["host"], started["pid"], started["warm"]) == (host, follows, True)
        world.wait("restored", generation=2)
        assert waits in world.processes()
        (world.base / "last").write_text("1")
        assert world.ended() == 0
        world.assert_nothing_left()


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python3 train.py --x -m y", Script("python3", (), ("train.py", "--x", "-m", "y"))),
        ("python3 -uOO -W error -Xdev a/b.py", Script("python3", OPTIONS, ("a/b.py",))),
        ("python3 -m pack.train -u", Script("python3", (), ("-m", "pack.train", "-u"))),
        ("python3 -c pass", None),
        ("python3 -i train.py", None),
        ("python3 -h", None),
        ("python3 -u", None),
        ("python3 -W", None),
        ("python3 -m", None),
        ("python3 - train.py", None),
        ("python3 -- train.py", None),
        ("python3 --version", None),
        ("python3 --check-hash-based-pycs never train.py", None),
        ("python3 archive.zip", None),
        ("python3", None),
        ("torchrun train.py", None),
        ("srun python3 train.py", None),
        ("env X=1 python3 train.py", None),
        ("nowhere/python3 train.py", None),
        ("./python3 train.py", None),
        ("", None),
    ],
)
def test_only_what_is_surely_a_script_of_python_can_wait(
    command: str, found: Script | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shim = tmp_path / "python3"
    shim.write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
    shim.chmod(0o755)
    path = str(Path(PYTHON).parent)
    assert script_of(command.split(), path) == found
