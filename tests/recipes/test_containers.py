"""What docs/containers.md says, in namespaces and a control group such as a container has."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.local_runs import RANK as OBEYS
from tests.recipes.conftest import environ
from tests.recipes.places import ROOT

RANK = str(Path(__file__).with_name("contained.py"))
SHM_BYTES = 64 << 20
WAIT_S = 60.0


def said(output: str) -> dict[str, Any]:
    """What the rank has found."""
    line = next(line for line in output.splitlines() if '"step"' in line)
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def in_a_container(*command: str) -> list[str]:
    """A user without capabilities, 64 MB of /dev/shm, the command as the first process."""
    inside = (
        f"mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && ip link set lo up && "
        f"exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs {shlex.join(command)}"
    )
    return [
        *("unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork"),
        *("--kill-child", "--mount-proc", "sh", "-c", inside),
    ]


def test_a_rank_goes_on_from_memory_in_a_container_of_defaults(base, programs):
    done = subprocess.run(
        in_a_container("jaxft", "run", "--job", "c", "--", "python", RANK, "96", "dies"),
        env=environ(programs, JAXFT_RUN_DIR=str(base / "run"), PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    found = said(done.stdout)
    assert found["first"].split()[1:4] == ["-m", "jaxft", "run"]
    assert int(found["capabilities"], 16) == 0
    assert (found["step"], found["source"], found["same"]) == (1, "own", True), done.stderr
    assert found["shm_total_bytes"] == SHM_BYTES
    assert found["shm_used_bytes"] == 0
    assert found["zombies"] == 0
    assert not (base / "run").exists() or not list((base / "run").rglob("*.sock"))


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("fate", "status"), [("fails", 1), ("told", 128 + signal.SIGTERM), ("killed", 128 + 9)]
)
def test_the_containers_status_is_that_of_the_run(base, programs, fate, status):
    """Of a script that fails, of a container that is told to end, of an agent that is killed."""
    command = in_a_container(
        *("jaxft", "run", "--job", "c", "--", sys.executable, "-S", "-c", OBEYS, str(base))
    )
    env = environ(programs, JAXFT_RUN_DIR=str(base / "run"), PYTHONPATH=str(ROOT))
    with (base / "out").open("wb") as out:
        container = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        deadline_s = time.monotonic() + WAIT_S
        if fate == "fails":
            (base / "exit-0").write_text("7")
        while fate != "fails" and "of generation 1" not in (base / "out").read_text():
            assert time.monotonic() < deadline_s, (base / "out").read_text()
            time.sleep(0.02)
        if fate != "fails":
            (first,) = children(container.pid)
            (agent,) = children(first)
            os.kill(*((first, signal.SIGTERM) if fate == "told" else (agent, signal.SIGKILL)))
        while fate == "fails" and container.poll() is None:
            assert time.monotonic() < deadline_s, (base / "out").read_text()
            if not (base / "exit-0").exists():  # The first one has ended, and the next one is to.
                (base / "order").write_text("7")
                (base / "order").rename(base / "exit-0")
            time.sleep(0.02)
        assert container.wait(WAIT_S) == status, (base / "out").read_text()
    finally:
        container.kill()
        container.wait()


@pytest.fixture
def memory_group() -> Iterator[tuple[Path, str]]:
    """A control group for memory below this process's own, and the name of its limit."""
    for place, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", place, f"jaxft-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            break
        group.rmdir()
    else:
        pytest.fail("no control group for memory can be made below /sys/fs/cgroup: run as root")
    yield group, limit
    deadline_s = time.monotonic() + 10.0
    while left := (group / "cgroup.procs").read_text().split():
        assert time.monotonic() < deadline_s, left
        for pid in left:  # The keeper of the script, which waits for another one.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    group.rmdir()


def test_what_does_not_fit_a_containers_memory_is_refused_in_words(base, programs, memory_group):
    group, limit = memory_group
    (group / limit).write_text(str(1 << 30))
    inside = f"echo $$ >{group}/cgroup.procs && exec {shlex.join([sys.executable, RANK, '300'])}"
    done = subprocess.run(
        ["sh", "-c", inside],
        env=environ(programs, JAXFT_RUN_DIR=str(base / "run"), PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 1, f"{done.stdout}{done.stderr}"
    assert "MemoryLimitError: " in done.stderr
    assert "Raise the memory limit of the container" in done.stderr
