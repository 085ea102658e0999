"""A job that loses the memory of all its hosts says so, and does not begin anew."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from jaxft.group.records import read_view
from jaxft.launch.stores import open_store
from tests.launch.local_runs import Run, run

HOSTS = ("host0", "host1")
OPTIONS = (
    *("--local-hosts", "2", "--code", "1+1"),
    *("--lease-s", "2", "--settle-s", "1", "--agent-grace-s", "3", "--rejoin-s", "0.5"),
)
END_S = 90.0

TRAIN = """
import time
import numpy as np
import jaxft
jaxft.initialize()
state = {"w": np.arange(1000.0)}
with jaxft.Snapshotter(every=1) as snapshotter:
    restored = snapshotter.restore(state)
    print("trains from step", restored.step if restored is not None else 0, flush=True)
    for step in range(1, 3000):
        snapshotter.save(step, state)
        time.sleep(0.02)
"""


def until_on_record(job: Run, path: str) -> None:
    """Until the store knows of a committed snapshot."""
    store = open_store(path, job="j")
    try:
        job.until(
            lambda: any(one.snapshot for one in read_view(store.read()).progress.values()),
            "committed snapshot in the store",
        )
    finally:
        store.close()


def test_all_memory_is_lost_and_the_job_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    command = (sys.executable, "-c", TRAIN)
    with run(*OPTIONS, "--store", path, command=command, JAX_PLATFORMS="cpu") as job:
        job.wait("committed")
        until_on_record(job, path)
        roles = ("agent", "smp", "rank")
        pids = [job.pid(host, role) for host in HOSTS for role in roles]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        assert job.ended(END_S) == 3, job.text()
        assert job.printed().count("trains from step") == len(HOSTS), job.text()
        told = job.errors()
        assert "what was protected is lost" in told, job.text()
        assert "NothingRecoverable: snapshot 1." in told, job.text()
        assert "--fresh" in told
        assert "the script fails whenever it is started" not in told
        formed = job.events("generation_formed")
        assert [one["number"] for one in formed] == [1, 2, 3], job.text()
        job.assert_nothing_left()
