"""Directories, stores and variables that cannot work: one line says so, before anything starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jaxft.errors import LaunchError
from jaxft.host.local import make_private
from jaxft.launch import smp_process
from jaxft.launch.options import RunOptions
from jaxft.launch.ranks import _last_words
from jaxft.launch.smp_process import SnapshotProcess
from tests.launch.local_runs import run

TWO = ("--local-hosts", "2")
QUICK = (*TWO, "--lease-s", "0.5", "--store-grace-s", "1", "--form-timeout-s", "1")

BAD = {
    "a store of no kind": (("--store", "redis://x"), {}, 2, "unknown kind redis"),
    "a store without a directory": (("--store", "/no/such/x.db"), {}, 3, "/no/such/x.db cannot be"),
    "logs that go nowhere": (("--log-dir", "/proc/no"), {}, 2, "/proc/no/host0 cannot be used"),
    "events that go nowhere": ((), {"JAXFT_EVENTS": "/proc/no"}, 2, "JAXFT_EVENTS=/proc/no cannot"),
    "faults of no form": ((), {"JAXFT_FAULTS": "x"}, 2, 'fault "x": expected point'),
    "memory of no size": ((), {"JAXFT_MEMORY_MAX_MIB": "x"}, 2, "JAXFT_MEMORY_MAX_MIB=x: expected"),
    "a run directory nowhere": ((), {"JAXFT_RUN_DIR": "/proc/no"}, 2, "/proc/no/j cannot be used"),
    "a long run directory": ((), {"JAXFT_RUN_DIR": "{base}/" + 99 * "d"}, 2, "shorter name"),
    "an open run directory": ((), {"JAXFT_RUN_DIR": "{base}/open"}, 2, "mode 755: it must"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_every_agent_would_fail_at_is_said_once(what: str, tmp_path: Path) -> None:
    options, variables, status, message = BAD[what]
    (tmp_path / "open").mkdir(mode=0o755)
    environ = {name: text.replace("{base}", str(tmp_path)) for name, text in variables.items()}
    with run(*TWO, *options, command=("true",), **environ) as world:
        assert world.ended() == status, world.text()
        assert message in world.errors()
        assert world.errors().startswith("jaxft: error: ")
        assert len(world.errors().splitlines()) == 1, world.errors()
        world.assert_nothing_left()


@pytest.mark.parametrize("ends", [False, True], ids=["training", "done"])
def test_a_store_that_is_deleted_ends_the_job_after_a_while(ends: bool) -> None:
    with run(*QUICK) as world:
        world.running(1, 2)
        for path in world.run_dir.glob("j/store.db*"):
            path.unlink()
        if ends:
            world.go()
        began_s = time.monotonic()
        assert world.ended() == 3, world.text()
        assert time.monotonic() - began_s < 20.0
        assert world.errors().count("jaxft: error: ") == 1
        assert "was deleted or replaced while in use" in world.errors()
        assert len(world.errors().splitlines()) < 15, world.errors()
        world.assert_nothing_left()


def test_a_job_whose_run_directory_is_deleted_leaves_nothing() -> None:
    with run(*QUICK) as world:
        world.running(1, 2)
        for path in sorted(world.run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        assert world.ended() == 3, world.text()
        world.assert_nothing_left()


def test_the_run_directory_and_what_is_in_it_is_made_for_one_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "run"))
    make_private(tmp_path / "run" / "job" / "host" / "logs")
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 4
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def poll_to_the_end(smp: SnapshotProcess) -> None:
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        smp.poll()


def test_an_smp_that_never_answers_is_given_up_however_long_it_takes_to_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smp_process, "QUICK_S", 0.0)
    monkeypatch.setattr(smp_process.sys, "executable", "/bin/false")
    options = RunOptions(job="j", host="a", command=("true",), store="")
    smp = SnapshotProcess(options, tmp_path, tmp_path / "smp.log", lambda text: None)
    smp.begin()
    with pytest.raises(LaunchError, match="host a: the SMP died 6 times before it had answered"):
        poll_to_the_end(smp)
    smp.stop()


def test_a_full_disk_is_part_of_a_ranks_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("step 3\n")
    assert _last_words(tmp_path / "log") == "step 3"
    monkeypatch.setattr("jaxft.launch.ranks.FULL_BYTES", 1 << 60)
    assert f"the disk of {tmp_path} is full" in _last_words(tmp_path / "log")
