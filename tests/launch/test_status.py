"""`jaxft status` beside a job that trains: hosts of one machine, one of which is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxft.errors import StoreError
from jaxft.launch.stores import jobs_of, open_store, read_entries
from tests.launch.training import train
from tests.reports import status


def test_a_job_that_trains_and_one_of_its_two_hosts_that_is_killed() -> None:
    with train(5, "--no-respawn", "--lease-s", "1", "--form-timeout-s", "60") as training:
        world = training.world
        training.until("latest", 10)
        exit_status, report = status("j", world.environ)
        assert exit_status == 0, report
        assert report["store"] == {"url": f"sqlite://{world.run_dir}/j/store.db", "problem": ""}
        assert (report["world"]["generation"], report["world"]["phase"]) == (1, "running")
        assert report["newest"]["step"] >= 10
        assert [one["more"] for one in report["losses"]["groups"]] == [1]
        assert [(one["agent"], one["smp"], one["ranks"]) for one in report["hosts"]] == [
            ("alive", "alive", 1),
            ("alive", "alive", 1),
        ]
        training.until("latest", report["newest"]["step"] + 10)  # it goes on

        world.kill("host1", "agent", "smp")
        world.wait("fault")
        exit_status, report = status("j", world.environ)
        assert exit_status == 1
        assert report["world"]["phase"] == "failed"
        alive, killed = report["hosts"]
        assert (alive["host"], alive["agent"], alive["smp"]) == ("host0", "alive", "alive")
        assert (killed["host"], killed["smp"]) == ("host1", "silent")
        assert report["losses"]["fatal_hosts"] == ["host0"]
        assert report["losses"]["groups"][0]["missing"] == ["host1"]
        assert report["losses"]["lost"] is None
        losses = [one for one in report["failures"] if one["kind"] == "host_lost"]
        assert [one["host"] for one in losses] == ["host1"]
        assert abs(report["now_s"] - losses[0]["at_s"]) < 30


def test_a_store_in_a_file_is_only_read(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with pytest.raises(StoreError, match="is not there"):
        read_entries(str(path), "j")
    assert not list(tmp_path.iterdir())
    store = open_store(str(path), job="j")
    store.commit({}, {"a": b"1"})
    store.lease("host/a", b"2", 0.1)
    assert read_entries(str(path), "j") == store.read()
    assert read_entries(str(path), "k") == {}
    assert jobs_of(f"sqlite://{path}") == {"j"}
    store.close()
    before = path.read_bytes()
    assert read_entries(str(path), "j").keys() == {"a", "host/a"}  # nobody is there to expire it
    assert path.read_bytes() == before
    path.write_text("no database")
    with pytest.raises(StoreError):
        read_entries(str(path), "j")
