"""`jaxft status` of real snapshot processes: on this machine, by a store, and of a lone script."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxft.__main__ import main
from jaxft.errors import ConfigError, LaunchError
from jaxft.group.account import Account
from jaxft.group.identity import SnapshotId
from jaxft.group.records import GENERATION, HOST, HostRecord
from jaxft.group.world import Code, encode
from jaxft.launch import show_status as command
from jaxft.launch.show_status import show_status
from jaxft.launch.stores import open_store
from jaxft.launch.survey import _ask_through, look_at
from tests.host.world import Host, World, segments, until

CODE = Code(data=2, parity=1)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Three hosts of job "test", below this machine's run directory."""
    run = tmp_path / "r"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("JAXFT_RUN_DIR", str(run))
    made = [Host(f"h{number}", run) for number in range(3)]
    for host in made:
        host.join()
    yield made
    for host in made:
        host.close()


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs it as `--json` does: the exit status and the object."""

    def run(job: str = "test", store: str = "") -> tuple[int, Any]:
        capsys.readouterr()
        exit_status = show_status(job, store, as_json=True, watch=False)
        return exit_status, json.loads(capsys.readouterr().out)

    return run


def states(report: Any) -> list[tuple[str, str, list[str]]]:
    return [
        (host["host"], host["smp"], [slot["state"] for slot in host["slots"]])
        for host in report["hosts"]
    ]


def test_a_world_that_is_whole_then_hangs_then_loses_a_host(
    hosts: list[Host], status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(hosts, 1, CODE)
    assert status()[1]["newest"] is None
    world.restore()
    exit_status, report = status()
    assert exit_status == 1
    assert report["problems"] == ["nothing is in memory yet: no snapshot has been committed"]

    for seq in range(2):
        assert world.save(seq, 10 * seq + 10, segments(3, seq)).ok
    exit_status, report = until(lambda: (found := status())[0] == 0 and found, "protected")
    assert (report["health"], report["problems"], report["failures"]) == ("protected", [], [])
    assert report["newest"]["step"] == 20
    assert 0 <= report["newest"]["age_s"] < 20
    assert [group["more"] for group in report["losses"]["groups"]] == [1]
    both = ["committed", "committed"]
    assert states(report) == [("h0", "alive", both), ("h1", "alive", both), ("h2", "alive", both)]
    assert [host["is_root"] for host in report["hosts"]] == [True, False, False]

    # By way of a host's own snapshot process, which has the key that others want to see.
    relay = hosts[0].directory / "smp.sock"
    told = _ask_through(relay, "h2")
    assert isinstance(told, Account)
    assert (told.host, told.ledger.committed) == ("h2", SnapshotId(1, 1, world.generation.nonce))
    assert "takes part in no generation with it" in str(_ask_through(relay, "h9"))

    # By a store, from where nothing of the job is: its hosts are asked over their own network.
    store = str(tmp_path / "store.db")
    opened = open_store(store, job="test")
    records = {
        f"{HOST}{one.host}": encode(
            HostRecord(host=one.host, agent="a", arena="", address=one.address, coordinator="")
        )
        for one in world.generation.hosts
    }
    opened.commit({}, {**records, GENERATION: encode(world.generation)})
    opened.close()
    run = tmp_path / "r"
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(LaunchError, match=r"no job test is found in .*: no job runs here"):
        show_status("test", "", as_json=True, watch=False)
    hosts[1].signal(signal.SIGSTOP)
    started_s = time.monotonic()
    exit_status, report = status(store=store)
    assert time.monotonic() - started_s < 2 * 2.0 + 2.0  # one deadline, twice at most
    assert exit_status == 1
    assert states(report) == [("h0", "alive", both), ("h1", "silent", []), ("h2", "alive", both)]
    assert "h1: its snapshot process is silent: it does not answer" in report["problems"][0]
    assert report["losses"]["fatal_hosts"] == ["h0", "h2"]
    jobs = command.jobs_there(store)
    assert [(one.job, one.hosts) for one in jobs.jobs] == [("test", ("h0", "h1", "h2"))]
    hosts[1].signal(signal.SIGCONT)

    monkeypatch.setenv("JAXFT_RUN_DIR", str(run))
    hosts[2].lose()
    exit_status, report = status(store=str(tmp_path / "none.db"))
    assert exit_status == 1
    assert report["losses"]["snapshot"] == "1.1"
    assert report["losses"]["fatal_hosts"] == ["h0", "h1"]
    assert report["losses"]["groups"][0]["missing"] == ["h2"]
    assert "the store does not answer" in report["problems"][-1]
    hosts[1].lose()
    exit_status, report = status()
    assert (exit_status, report["losses"]["snapshot"], report["losses"]["lost"]) == (1, None, "1.1")
    assert "2 shares are missing (h1, h2), its parity is 1" in " ".join(report["problems"])


def test_a_script_that_nobody_launched_and_its_end(
    hosts: list[Host], status: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(hosts[:1], 1, Code(), attached=True)
    world.restore()
    assert world.save(0, 10, segments(1)).ok
    exit_status, report = until(lambda: (found := status())[0] == 0 and found, "protected")
    assert (exit_status, report["losses"]["fatal_hosts"]) == (0, ["h0"])
    world.ranks[0].kill()
    _, report = until(lambda: (found := status())[0] == 1 and found, "its end")
    assert report["problems"] == ["h0: 0 of 1 ranks are connected"]
    assert [one["kind"] for one in report["failures"]] == ["rank_gone"]

    assert show_status("test", "", as_json=False, watch=False) == 1
    said = capsys.readouterr().out
    assert "job test: DEGRADED" in said
    assert "to lose  of step 10: no host. Memory is lost with any of: h0" in said
    assert "\x1b" not in said
    assert show_status("", "", as_json=False, watch=False) == 0
    assert "jaxft status --job test" in capsys.readouterr().out


def test_usage_and_jobs_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "r"))

    def ends(*options: str) -> int:
        monkeypatch.setattr("sys.argv", ["jaxft", "status", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(str(ended.value.code))

    assert ends() == 3
    assert "no job is found" in capsys.readouterr().out
    assert ends("--job", "k", "--json") == 3
    assert "no job k is found" in capsys.readouterr().err
    assert ends("--job", "a/b") == 2
    assert ends("--job", "k", "--store", "redis://x") == 2
    assert ends("--store", str(tmp_path / "none.db"), "--json") == 3
    assert "is not there" in json.loads(capsys.readouterr().out)["problems"][0]
    assert not (tmp_path / "none.db").exists()
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError):
        show_status("k", "etcd://u:p@h", as_json=True, watch=False)


def test_it_goes_on_looking_until_it_is_interrupted(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    World(hosts, 1, CODE).restore()
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            for host in hosts:
                host.lose()
                (host.directory / "smp.sock").unlink()
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert show_status("test", "", as_json=True, watch=True) == 3
    first, second, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["health"], second["health"]) == ("degraded", "degraded")
    assert "no job test is found" in last["error"]


def test_who_looks_for_a_job_of_another_user_is_told_where_such_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jaxft-7").mkdir()
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(LaunchError, match=f"others have .*{tmp_path}/jaxft-7.*: look as the user"):
        look_at("j")
