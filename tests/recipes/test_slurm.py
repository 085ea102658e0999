"""The batch script for SLURM, run as it stands by a real SLURM of three nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxft.status.events import Event, EventReader
from tests.launch.conftest import free_ports
from tests.launch.local_runs import RANK
from tests.recipes.conftest import environ, marked
from tests.recipes.places import BATCH, BATCH_SRUN, CREW, ROOT, TRAINER
from tests.recipes.slurm import Cluster, cluster
from tests.reports import status


class Job:
    """One submission of the script, with what its agents say."""

    def __init__(self, one: Cluster, *command: str, script: Path = BATCH, nodes: int = 3) -> None:
        self.cluster = one
        (one.directory / "events").mkdir(exist_ok=True)
        self._reader = EventReader(one.directory / "events")
        self._seen: list[Event] = []
        self.number = one.ask(
            "sbatch", "--parsable", f"--nodes={nodes}", str(script), *command
        ).strip()
        self.run_dir = one.directory / f"jaxft-{self.number}" / f"train-{self.number}"

    def events(self, event: str, **fields: Any) -> list[Event]:
        self._seen += self._reader.poll()
        return [
            each
            for each in self._seen
            if each["event"] == event and all(each.get(name) == fields[name] for name in fields)
        ]

    def until(self, event: str, count: int = 1, **fields: Any) -> None:
        self.cluster.until(
            lambda: len(self.events(event, **fields)) >= count, f"{count} {event} {fields}"
        )

    def kill_agent(self, node: str) -> None:
        os.kill(int((self.run_dir / node / "lock").read_text()), signal.SIGKILL)

    def status(self) -> Any:
        """What `jaxft status` says of it."""
        environ = {**self.cluster.environ, "JAXFT_RUN_DIR": str(self.run_dir.parent)}
        return status(self.run_dir.name, environ)[1]

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def shared(self) -> list[str]:
        """What it has left on the file system that nodes share, but for logs."""
        return [path.name for path in self.cluster.shared.iterdir() if path.suffix != ".log"]


@pytest.fixture
def nodes(base: Path, programs: Path):
    outside = {"JAXFT_EVENTS": str(base / "events"), "SLURM_TMPDIR": str(base), "CODE": "2+1"}
    env = {key: value for key, value in environ(programs).items() if not key.startswith("SLURM_")}
    with cluster(base, 3, {**env, **outside, "PYTHONPATH": str(ROOT)}) as one:
        yield one


def test_a_job_outlives_its_agents_its_nodes_and_its_time(nodes):
    base = nodes.directory / "trainer"
    base.mkdir()

    def said(rank: int, what: str, since: int = 0) -> list[Any]:
        path = base / f"rank-{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        facts = [json.loads(line) for line in lines]
        return [one[what] for one in facts if one["generation"] >= since and what in one]

    def newest(what: str) -> int:
        found = ((said(rank, what) or [None])[-1] for rank in (0, 1))
        return min(-1 if one is None else one for one in found)

    job = Job(nodes, sys.executable, TRAINER, str(base))
    nodes.until(lambda: newest("latest") >= 6, "snapshots")
    # SLURM's topology: two of the three hang on one switch, which no choice of groups helps.
    report = job.status()
    assert [one["domain"] for one in report["hosts"]] == ["spine.leaf1"] * 2 + ["spine.leaf2"]
    (problem,) = report["problems"]
    assert "n1, n2 share domain spine.leaf1" in problem
    # An agent is killed: its task lives on, and so does the node's memory.
    (before,) = job.events("smp_started", host="n2")
    job.kill_agent("n2")
    job.until("smp_adopted", host="n2", pid=before["pid"], arena=before["arena"])
    # And SLURM gives another node up, with all that runs there: the others go on.
    nodes.ask("scontrol", "update", "nodename=n3", "state=down", "reason=test")
    job.until("generation_formed", hosts=["n1", "n2"])
    last = job.events("generation_formed", hosts=["n1", "n2"])[0]["number"]
    nodes.until(lambda: all(said(rank, "restored", last) for rank in (0, 1)), "restored ranks")
    assert min(said(0, "restored")) >= 6
    # As --signal=TERM@300 does: the steps' tasks, not the batch script.
    nodes.until(lambda: bool(said(0, "step", last)), "steps")
    trained = said(0, "step", last)[-1]
    nodes.ask("scancel", "--signal=TERM", job.number)
    nodes.until(lambda: job.state() == "PENDING", "job in the queue")
    assert nodes.job(job.number)["Restarts"] == "1"
    assert not marked(f"JAXFT_RUN_DIR={job.run_dir.parent}")
    saved = max(int(path.name) for path in (base / "checkpoints").iterdir())
    # Of a step after the signal; until their task ends, the ranks train on.
    assert trained < saved <= said(0, "step", last)[-1] + 1
    # It goes on from there, when its time has come (a requeued job waits for two minutes).
    nodes.ask("scontrol", "update", "nodename=n3", "state=resume")
    nodes.ask("scontrol", "update", f"jobid={job.number}", "starttime=now")
    nodes.until(lambda: said(0, "restored")[-1] == saved, "ranks restored from storage")
    assert said(0, "source")[-1] == "orbax"
    (base / "order").write_text(str(saved + 20))
    (base / "order").rename(base / "last")
    nodes.until(lambda: job.state() not in ("RUNNING", "COMPLETING"), "end")
    assert job.state() == "COMPLETED", nodes.logs()
    assert job.shared() == []
    assert said(0, "step")[-1] == saved + 20
    assert {right for rank in range(3) for right in said(rank, "right")} == {True}


def test_ranks_have_a_gpu_each_and_a_script_that_fails_is_not_requeued(nodes, etcd_url):
    base = nodes.directory / "obeys"
    base.mkdir()
    (nodes.directory / "rank.py").write_text(RANK)
    nodes.environ |= {"RANKS": "2", "STORE": etcd_url}
    job = Job(nodes, sys.executable, "-S", str(nodes.directory / "rank.py"), str(base))
    job.until("rank_started", 6)
    for each in job.events("rank_started"):
        environment = Path(f"/proc/{each['pid']}/environ")
        own = f"CUDA_VISIBLE_DEVICES={each['rank'] % 2}"
        nodes.until(
            lambda at=environment, own=own: own in at.read_text().split("\0"), f"own GPU: {each}"
        )
    (base / "go").touch()
    nodes.until(lambda: job.state() == "COMPLETED", "end")
    failing = Job(nodes, "false")
    nodes.until(lambda: failing.state() == "FAILED", "failed job")
    assert nodes.job(failing.number)["ExitCode"] == "1:0"
    assert nodes.job(failing.number)["Restarts"] == "0"
    assert failing.shared() == []


def test_ranks_that_srun_starts_find_their_memory_again(nodes, etcd_url):
    base = nodes.directory / "crew"
    base.mkdir()
    nodes.environ["STORE"] = etcd_url
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    rank = f'exec "$0" {CREW} {base} "$STORE" {coordinator} "$SLURM_PROCID" "$SLURM_NTASKS"'
    job = Job(nodes, "bash", "-c", rank, sys.executable, script=BATCH_SRUN, nodes=2)

    def said(number: int, what: str) -> list[Any]:
        path = base / f"rank-{number}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [one[what] for one in map(json.loads, lines) if one.get(what) is not None]

    nodes.until(lambda: all((said(one, "latest") or [0])[-1] >= 6 for one in (0, 1)), "snapshots")
    (first,) = job.events("smp_started", host="n1")
    protected = min(said(one, "latest")[-1] for one in (0, 1))
    os.kill(said(1, "pid")[-1], signal.SIGKILL)
    nodes.until(lambda: all(said(one, "restored") for one in (0, 1)), "restored ranks")
    assert min(said(0, "restored")) >= protected
    assert [said(one, "source") for one in (0, 1)] == [["own"], ["own"]]
    assert [said(one, "right") for one in (0, 1)] == [[True], [True]]
    job.until("smp_adopted", host="n1", pid=first["pid"], arena=first["arena"])
    (base / "order").write_text(str(max(said(one, "step")[-1] for one in (0, 1)) + 50))
    (base / "order").rename(base / "last")
    nodes.until(lambda: job.state() not in ("RUNNING", "COMPLETING"), "end")
    assert job.state() == "COMPLETED", nodes.logs()
    assert not marked(f"JAXFT_RUN_DIR={job.run_dir.parent}")
