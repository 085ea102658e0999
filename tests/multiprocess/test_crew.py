"""A script whose ranks nobody of jaxft's has started: on two hosts, two of them on one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import free_ports
from tests.reports import status

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("crew.py"))
HOSTS = ("n1", "n1", "n2")
WAIT_S = 150.0


class Crew:
    """Starts of the script, one after the other."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = f"sqlite://{base}/store.db"
        inherited = {key: val for key, val in os.environ.items() if not key.startswith("JAXFT_")}
        self.environ = {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "JAXFT_RUN_DIR": str(base / "run"),
            "JAX_PLATFORMS": "cpu",
        }
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self, **more: str) -> None:
        coordinator = f"127.0.0.1:{free_ports(1)[0]}"
        self.ranks = []
        for rank, host in enumerate(HOSTS):
            command = [sys.executable, SCRIPT, str(self.base), self.store, coordinator]
            with (self.base / f"out-{rank}").open("ab") as out:
                self.ranks.append(
                    subprocess.Popen(
                        [*command, str(rank), str(len(HOSTS))],
                        env={**self.environ, "SLURMD_NODENAME": host, **more},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                    )
                )

    def said(self, rank: int, what: str) -> list[Any]:
        path = self.base / f"rank-{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        pid = self.ranks[rank].pid
        facts = [json.loads(line) for line in lines]
        return [one[what] for one in facts if one["pid"] == pid and one.get(what) is not None]

    def newest(self, what: str) -> int:
        return min((self.said(rank, what) or [-1])[-1] for rank in range(len(HOSTS)))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what}\n{self.text()}"
            time.sleep(0.02)

    def until_gone(self) -> list[int]:
        """The statuses of all ranks, once all have ended."""
        self.until(lambda: all(one.poll() is not None for one in self.ranks), "end of all ranks")
        return [one.returncode for one in self.ranks]

    def processes(self, part: str) -> dict[int, str]:
        """Living processes of this test, with this in their command lines."""
        found = {}
        mark = f"JAXFT_RUN_DIR={self.base}/run\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes().decode()
                if mark in (path / "environ").read_bytes() and part in command:
                    found[int(path.name)] = command
        return found

    def text(self) -> str:
        paths = [*self.base.glob("out-*"), *(self.base / "run").rglob("*.log")]
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in paths)

    def close(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while left := self.processes(""):
            assert time.monotonic() < deadline_s, left
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for one in self.ranks:
            one.wait(WAIT_S)


@pytest.fixture
def crew() -> Iterator[Crew]:
    base = Path(tempfile.mkdtemp(prefix="jx-"))
    one = Crew(base)
    try:
        yield one
    finally:
        one.close()
        shutil.rmtree(base, ignore_errors=True)


def test_the_next_start_of_a_script_goes_on_from_the_memory_of_the_one_before(crew: Crew) -> None:
    crew.start()
    crew.until(lambda: crew.newest("latest") >= 6, "snapshots")
    assert [crew.said(rank, "host") for rank in range(3)] == [["n1"], ["n1"], ["n2"]]
    exit_status, report = status("crew", crew.environ)
    assert (exit_status, report["problems"]) == (0, [])
    assert [(one["host"], one["ranks"]) for one in report["hosts"]] == [("n1", 2), ("n2", 1)]
    smps = set(crew.processes("jaxft.host.smp"))
    assert len(smps) == 2

    # One is killed: the others would wait for it in a collective. The memory stays.
    crew.ranks[2].kill()
    assert crew.until_gone() == [-signal.SIGKILL] * 3
    crew.until(lambda: not crew.processes("jaxft.launch.crew"), "end of the agents")
    exit_status, report = status("crew", crew.environ)
    assert exit_status == 1
    (gone,) = [one for one in report["failures"] if one["kind"] == "rank_gone"]
    assert gone["detail"].startswith(f"rank 2 (process {crew.ranks[2].pid}) on n2 is gone")

    protected = crew.newest("latest")
    crew.start(CHECKPOINTS=str(crew.base / "checkpoints"))
    crew.until(lambda: crew.newest("step") > protected + 6, "steps of the second start")
    assert all(crew.said(rank, "restored")[0] >= protected for rank in range(3))
    assert {source for rank in range(3) for source in crew.said(rank, "source")} == {"own"}
    assert all(all(crew.said(rank, "right")) for rank in range(3))
    assert set(crew.processes("jaxft.host.smp")) == smps

    # It is done when all ranks are, and nothing is left.
    last = max(crew.said(rank, "step")[-1] for rank in range(3)) + 50
    (crew.base / "order").write_text(str(last))
    (crew.base / "order").rename(crew.base / "last")
    assert crew.until_gone() == [0, 0, 0], crew.text()
    crew.until(lambda: not crew.processes(""), "end of all processes")
    newest = max(int(path.name) for path in (crew.base / "checkpoints").iterdir())
    assert last - 3 < newest <= last
    # But for notes for the next run of the job.
    assert [path for path in (crew.base / "run").rglob("*") if path.name[0] != "."] == []


def test_a_manager_goes_on_from_the_memory_of_the_start_before(crew: Crew) -> None:
    directory = str(crew.base / "managed")
    crew.start(MANAGED=directory)
    crew.until(lambda: crew.newest("latest") >= 6, "snapshots")
    crew.ranks[0].kill()
    crew.until_gone()
    crew.until(lambda: not crew.processes("jaxft.launch.crew"), "end of the agents")

    # Every third step is taken: the newest was on its way at least, the one before it protected.
    crew.start(MANAGED=directory)
    crew.until(lambda: crew.newest("restored") >= 4, "restore")
    assert all(all(crew.said(rank, "right")) for rank in range(3))
    assert all(step < 4 for step in crew.said(0, "on_storage")[0])
