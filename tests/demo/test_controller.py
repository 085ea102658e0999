"""How the controller kills: at the step, only what is its own, and it leaves nothing behind.

A small script stands in for `jaxft run`: it says what the launcher would say, and its processes
only sleep.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxft.demo import controller
from jaxft.demo.plan import DemoOptions, plan_demo
from jaxft.errors import LaunchError
from jaxft.status.events import Event

_SLEEP = "import time; time.sleep(600)"

# Host "host1" with three processes; says "holding" at step 3, and ends when it is let go.
_WORLD = f"""
import os, pathlib, subprocess, sys, time
from jaxft.status.events import EventLog
log = EventLog(pathlib.Path(os.environ["JAXFT_EVENTS"]), host="host1", role="agent")
started = {{"agent": "agent_started", "smp": "smp_started", "rank": "rank_started"}}
log.emit("generation_formed", number=4, hosts=["host1"], reason="")
children = {{}}
for role, event in started.items():
    child = subprocess.Popen([sys.executable, "-S", "-c", {_SLEEP!r}], start_new_session=True)
    children[role] = child
    log.emit(event, pid=child.pid, rank=0, generation=4)
log.emit("holding", step=3)
go = pathlib.Path(os.environ["JAXFT_RUN_DIR"]) / "go-3"
deadline = time.monotonic() + 30
while not go.exists() and time.monotonic() < deadline:
    time.sleep(0.005)
time.sleep(0.1)
for role, child in children.items():
    log.emit("seen", of=role, status=child.poll())
sys.exit(5)
"""


def _options(*fail: str) -> DemoOptions:
    return plan_demo(
        hosts=4,
        code="3+1",
        steps=6,
        every=2,
        seed=0,
        elastic=False,
        fallback=False,
        fail=fail,
    )


def _run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, *fail: str
) -> tuple[controller.RunLog, list[Event]]:
    command = [sys.executable, "-c", script]
    monkeypatch.setattr(controller._World, "_command", lambda *_: command)
    options, seen = _options(*fail), list[Event]()
    log = controller.run_training("job", options, options.failures, tmp_path, seen.append)
    return log, seen


@pytest.mark.parametrize(("wrap", "parity"), [(False, "host"), (True, "host"), (True, "device")])
def test_the_ranks_save_as_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrap: bool, parity: str
) -> None:
    given: list[str] = []

    def popen(command: list[str], **_: Any) -> None:
        given.extend(command)

    monkeypatch.setattr(controller.subprocess, "Popen", popen)
    options = replace(_options(), wrap=wrap, parity=parity)
    controller._World("job", options, (), tmp_path, tmp_path)._console.close()
    assert ("--wrap" in given) == wrap
    assert given[given.index("--parity") + 1] == parity


def _alive(pid: int) -> bool:
    """Whether the process is there, and not only its exit status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _statuses(seen: list[Event]) -> dict[str, Any]:
    return {event["of"]: event["status"] for event in seen if event["event"] == "seen"}


@pytest.mark.parametrize(
    ("fail", "killed"),
    [
        ("rank@3:host1", {"rank"}),
        ("smp@3:host1", {"smp"}),
        ("agent@3:host1", {"agent"}),
        ("host@3:host1", {"rank", "smp", "agent"}),
    ],
)
def test_exactly_what_the_plan_says_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fail: str, killed: set[str]
) -> None:
    log, seen = _run(monkeypatch, tmp_path, _WORLD, fail)
    assert log.status == 5
    assert {role for role, status in _statuses(seen).items() if status == -signal.SIGKILL} == killed
    (strike,) = log.strikes
    assert (strike.failure.at_step, strike.generation) == (3, 4)
    assert [event["step"] for event in seen if event["event"] == "struck"] == [3]
    pids = [event["pid"] for event in seen if event["event"].endswith("_started")]
    assert len(pids) == 3
    assert not any(_alive(pid) for pid in pids)


def test_what_was_not_started_by_this_run_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stranger = subprocess.Popen([sys.executable, "-S", "-c", _SLEEP])
    try:
        reused = f'log.emit("rank_started", pid={stranger.pid}, rank=0, generation=4)\n'
        script = _WORLD.replace('log.emit("holding"', reused + 'log.emit("holding"')
        log, _ = _run(monkeypatch, tmp_path, script, "rank@3:host1")
        assert len(log.strikes) == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_run_in_which_nothing_happens_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(controller, "SILENCE_MAX_S", 0.2)
    with pytest.raises(LaunchError, match="nothing happened for"):
        _run(monkeypatch, tmp_path, _SLEEP, "none")
