"""Hosts that meet in etcd and talk over TCP write to a bucket, while they train and at their end;
and a machine that is none of theirs exports what they hold. Collected only where etcd is installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from etils import epath

from jaxft import OrbaxFallback, salvage
from jaxft.errors import ConfigError
from jaxft.host.job_key import JobKey
from tests.buckets import serving
from tests.launch import local_runs
from tests.launch.local_runs import Run, run
from tests.launch.test_export import plain
from tests.launch.test_salvage import same_environment  # noqa: F401
from tests.launch.training import TRAINER, Training


@contextlib.contextmanager
def two_hosts(store: str, base: Path, directory: str) -> Iterator[tuple[Training, Run]]:
    """Each with a run directory of its own, as on another machine, at addresses of loopback."""
    command = (sys.executable, TRAINER, str(base), "5", "20", directory)
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(
                run(
                    *("--host", f"h{at}", "--address", f"127.0.0.{at + 1}", "--settle-s", "1"),
                    *("--hosts", "2", "--code", "1+1", "--store", store),
                    command=command,
                )
            )
            for at in range(2)
        ]
        yield Training(hosts[0], base), hosts[1]


def test_two_machines_write_to_a_bucket_and_a_third_exports(
    etcd_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        local_runs, "WAIT_S", 120.0
    )  # each helper and exporter starts JAX and Orbax
    with serving() as bucket, two_hosts(etcd_url, tmp_path, f"{bucket}/run") as (training, other):
        world = training.world
        written = world.wait("persisted")["step"]
        assert (training.newest(0, "step"), training.newest(1, "step")) >= (written, written)
        with ocp.CheckpointManager(epath.Path(bucket) / "run") as manager:
            assert written in manager.all_steps()
        assert plain(f"{bucket}/run")[0] == (written, written)

        monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "elsewhere"))
        with pytest.raises(ConfigError, match="no job runs here"):
            salvage.export("j", tmp_path / "a")
        step = salvage.export("j", tmp_path / "a", store=etcd_url)
        assert plain(tmp_path / "a") == [(step, step)]
        assert step >= written
        assert salvage.export("j", f"{bucket}/by-hand", store=etcd_url) >= step
        [(last, w)] = plain(f"{bucket}/by-hand")
        assert last == w
        other_key = tmp_path / "key"
        other_key.write_text(JobKey(bytes(32)).text)
        other_key.chmod(0o600)
        with pytest.raises(ConfigError, match="do not take this job key"):
            salvage.export("j", tmp_path / "a", store=etcd_url, job_key_file=str(other_key))

        assert training.end(120) == 0, world.text()
        assert other.ended(120) == 0, other.text()
        newest = max(event["step"] for event in world.events("committed"))
        assert plain(f"{bucket}/run")[-1] == (newest, newest), world.text()
        assert len(OrbaxFallback(f"{bucket}/run").entries()) <= 2
        assert f"step {newest} is on storage, in {bucket}/run" in world.errors() + other.errors()
        for host in (world, other):
            host.assert_nothing_left()
