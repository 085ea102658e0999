"""`jaxft export`: a snapshot out of a job's memory by hand, whoever of the job still lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft import salvage
from jaxft.checkpoint import read_record
from jaxft.errors import ConfigError
from tests.launch.test_export import plain
from tests.launch.training import train


def newest(world: object) -> int:
    return max(int(event["step"]) for event in world.events("committed"))  # type: ignore[attr-defined]


def test_memory_is_exported_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the job trains; after its launcher and agents, and so its ranks, were killed; and after
    one of its two hosts was lost, too."""
    monkeypatch.setattr(salvage, "set_jax_apart", lambda processes: None)
    with train(5) as training:
        world = training.world
        monkeypatch.setenv("JAXFT_RUN_DIR", str(world.run_dir))
        training.until("latest", 11)
        step = salvage.export("j", tmp_path / "a")
        assert plain(tmp_path / "a") == [(step, step)]
        assert step >= 11
        training.until("latest", step + 10)  # training goes on, and no slot is kept from it

        with pytest.raises(
            ConfigError, match=r"no snapshot process of job k .* the jobs here are j"
        ):
            salvage.export("k", tmp_path / "a")
        with pytest.raises(ConfigError, match=r"no snapshot of step 3: it has \d+, \d+"):
            salvage.export("j", tmp_path / "a", step=3)
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="checkpoints cannot go to"):
            salvage.export("j", tmp_path / "file")

        monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "elsewhere"))
        with pytest.raises(ConfigError, match="no job runs here; for hosts on other machines"):
            salvage.export("j", tmp_path / "a")
        store = f"sqlite://{world.run_dir}/j/store.db"
        step = salvage.export("j", tmp_path / "d", store=store)
        assert plain(tmp_path / "d") == [(step, step)]
        monkeypatch.setenv("JAXFT_RUN_DIR", str(world.run_dir))

        ranks = {world.pid(host, "rank") for host in ("host0", "host1")}
        world.process.kill()
        world.until_gone(ranks | {world.pid(host, "agent") for host in ("host0", "host1")})
        world.seen += world._reader.poll()
        command = [sys.executable, "-m", "jaxft", "export", "--job", "j", str(tmp_path / "b")]
        done = subprocess.run(
            command, env=world.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        [(last, w)] = plain(tmp_path / "b")
        assert (last, w) == (last, last)
        assert last >= newest(world)
        assert f"step {last} of job j is in {tmp_path / 'b'}" in done.stdout

        before = last - 5
        assert salvage.export("j", tmp_path / "b", step=before) == before
        assert plain(tmp_path / "b") == [(before, before), (last, last)]

        smp = world.pid("host1", "smp")
        os.kill(smp, signal.SIGKILL)
        world.until_gone({smp})
        assert salvage.export("j", tmp_path / "c") == last
        assert plain(tmp_path / "c") == [(last, last)]
        assert read_record(tmp_path / "c" / str(last)).job == "j"
