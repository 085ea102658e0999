"""How a run begins and ends: well, badly, not at all; and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxft.__main__ import app
from jaxft.errors import JobInUse
from jaxft.launch.child import Child, kill_all, living
from jaxft.launch.hostdir import Lock, RankFile, ReservedPort
from tests.launch.local_runs import run

TWO = ("--local-hosts", "2", "--lease-s", "2")


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", code


def test_all_ranks_end_well_process_0_first_case_35() -> None:
    code = "import os, time; r = int(os.environ['JAXFT_RANK']); time.sleep(r * 0.3); print('r', r)"
    with run(*TWO, command=python(code)) as world:
        assert world.ended() == 0, world.text()
        assert sorted(world.printed().splitlines()) == [f"[host{r} {r}] r {r}" for r in range(2)]
        assert len(world.events("generation_formed")) == 1
        assert [one["code"] for one in world.events("rank_exited")] == [0, 0]
        assert [one["ok"] for one in world.events("job_finished")] == [True] * 2
        world.assert_nothing_left()


def test_a_script_that_fails_at_once_ends_with_1_and_its_last_lines() -> None:
    code = "import sys; print('reading the data'); raise ValueError('no such data')"
    with run(*TWO, command=python(code)) as world:
        assert world.ended() == 1, world.text()
        error = world.errors().partition("jaxft: error: ")[2]
        assert "ended with status 1" in error.splitlines()[0]
        assert "twice in a row before anything was restored" in error.splitlines()[0]
        assert "  | reading the data" in error
        assert "  | ValueError: no such data" in error
        assert f"logs: {world.run_dir}/j" in error
        assert world.errors().count("jaxft: error: ") == 1
        assert {one["generation"] for one in world.events("rank_started")} == {1, 2}
        assert list(world.run_dir.glob("j/host*/logs/gen2/rank*.log"))
        world.assert_nothing_left()


def test_variables_of_an_earlier_generation_lose_case_39() -> None:
    code = (
        "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'JAXFT' in k}))"
    )
    stale = {"JAXFT_GENERATION": "77", "JAXFT_NONCE": "old", "JAXFT_RANK": "5", "JAXFT_SMP": "/no"}
    with run("--quiet", command=python(code), JAXFT_PERSIST="3", **stale) as world:
        world.wait("rank_started")
        log = next(world.run_dir.glob("j/*/logs/gen1/rank0.log"))
        text = log.read_text
        world.until(lambda: "}" in text() or world.process.poll() is not None, "output")
        given = json.loads(world.printed() or text())
        assert (given["JAXFT_GENERATION"], given["JAXFT_RANK"], given["JAXFT_RANKS"]) == (
            "1",
            "0",
            "1",
        )
        assert given["JAXFT_NONCE"] != "old"
        assert given["JAXFT_SMP"].endswith("/smp.sock")
        assert "JAXFT_PERSIST" not in given
        assert world.ended() == 0


BAD = {
    ("--code", "3+9"): "parity must be 0 to 4",
    ("--code", "many"): 'code "many" is not of the form K+M',
    ("--code", "2+2", "--local-hosts", "2"): "--code 2+1",
    ("--hosts", "4:2"): "expected 1 <= MIN <= MAX",
    ("--hosts", "few"): "expected N or MIN:MAX",
    ("--hosts", "2"): "--store etcd://HOST:PORT",
    ("--store", "etcd://127.0.0.1:1"): "say with --hosts MIN:MAX",
    ("--job", "x"): "command not found: no-such-program",
    (): "there is no command to run",
    ("--job", "a/b"): 'job "a/b" must be',
    ("--lease-s", "0"): "--lease-s 0: expected more than 0",
    ("--lease-s", "nan"): "--lease-s nan: expected more than 0",
    ("--settle-s", "inf"): "--settle-s inf: expected 0 or more",
    ("--local-hosts", "65"): "--local-hosts 65: expected 1 to 64",
}


@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_bad_options_are_refused_in_one_line(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "run"))
    command = [] if options == () else ["--", "no-such-program" if "x" in options else "true"]
    result = CliRunner().invoke(app, ["run", *options, *command])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("jaxft: error: ")
    assert BAD[options] in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_store_that_cannot_be_used_ends_with_3() -> None:
    with run("--host", "a", "--store", "/dev/null") as world:
        assert world.ended() == 3
        assert "is not a regular file" in world.errors()
        world.assert_nothing_left()


def test_too_few_hosts_end_with_3_and_say_what_is_missing(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    with run("--hosts", "2", "--form-timeout-s", "0.5", "--store", store) as world:
        assert world.ended() == 3
        assert "1 of 2 hosts are there, and no more came within 0.5 s" in world.errors()
        world.assert_nothing_left()


def test_a_job_name_in_use_is_refused_and_names_the_process() -> None:
    with run("--host", "a") as world:
        world.running(1, 1)
        holder = world.process.pid
        store = str(world.base / "other.db")
        for options, what in {
            ("--host", "b"): "job j on this machine",
            ("--host", "a", "--store", store): "job j on host a",
        }.items():
            assert world.start(*options, command=("true",)).wait(20) == 2
            assert f"jaxft: error: {what} is in use by process {holder}" in world.errors()
        assert world.finish() == 0
        world.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "number"), [(TWO, signal.SIGINT), ((), signal.SIGTERM)], ids=["local", "one"]
)
def test_a_signal_ends_everything(options: tuple[str, ...], number: int) -> None:
    with run(*options, "--grace-s", "1") as world:
        world.running(1, 2 if options else 1)
        world.process.send_signal(number)
        assert world.ended(10) == 128 + number, world.text()
        if number == signal.SIGINT:  # How ranks break is in their logs, for who wants to see it.
            assert "KeyboardInterrupt" not in world.text()
            logs = list(world.run_dir.glob("j/host*/logs/gen1/rank*.log"))
            assert all("KeyboardInterrupt" in log.read_text() for log in logs), logs
            assert "what they say now is in their logs" in world.errors()
        world.assert_nothing_left()


def test_shutting_down_with_a_hung_smp_takes_less_than_5_s_case_42() -> None:
    with run("--host", "a") as world:
        world.running(1, 1)
        os.kill(world.pid("a", "smp"), signal.SIGSTOP)
        began_s = time.monotonic()
        assert world.finish() == 0, world.text()
        assert time.monotonic() - began_s < 5.0
        world.assert_nothing_left()


def test_agents_and_ranks_die_with_their_launcher() -> None:
    with run(*TWO) as world:
        world.running(1, 2)
        world.process.kill()
        world.process.wait()
        smps = {world.pid(host, "smp") for host in ("host0", "host1")}
        deadline_s = time.monotonic() + 5
        while set(world.processes()) != smps and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert set(world.processes()) == smps, world.processes()


# ------------------------------------------------------------------------------ the pieces


def test_a_reserved_port_cannot_be_taken_case_40() -> None:
    port = ReservedPort()
    number = int(port.address.rpartition(":")[2])
    with socket.socket() as thief, pytest.raises(OSError):
        thief.bind(("127.0.0.1", number))
    with pytest.raises(OSError):
        socket.create_server(("", number))
    with socket.socket() as coordinator:
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        coordinator.bind(("127.0.0.1", number))
        coordinator.listen()
        for _ in range(20):
            socket.create_connection(("127.0.0.1", number), 1.0).close()
    port.close()


def test_a_child_takes_its_own_children_with_it(tmp_path: Path) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    log = tmp_path / "log"
    child = Child(python(f"{code}; time.sleep(60)"), env=os.environ, log=log)
    deadline_s = time.monotonic() + 10
    while not log.read_text().strip() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    grandchild = int(log.read_text())
    assert set(living({child.pid})) == {child.pid, grandchild}
    kill_all([child], 5.0)
    assert child.status() == -signal.SIGKILL
    assert living({child.pid}) == []


def test_what_a_dead_agent_left_of_its_ranks_is_killed(tmp_path: Path) -> None:
    child = Child(("sleep", "60"), env=os.environ)
    RankFile(tmp_path / "ranks").write([child])
    RankFile(tmp_path / "ranks").kill_left(5.0)
    assert child.status() == -signal.SIGKILL
    assert not (tmp_path / "ranks").exists()
    RankFile(tmp_path / "ranks").kill_left(5.0)


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    path = tmp_path / "private" / "lock"
    lock = Lock(path, "this")
    with pytest.raises(JobInUse, match=f"this is in use by process {os.getpid()}"):
        Lock(path, "this")
    lock.release()
    Lock(path, "this").release()
    assert not path.exists()
