"""A host that is to go: its notice, its last snapshot, and what becomes of the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jaxft.checkpoint import Directory
from jaxft.launch.preemption import PreemptionNotice
from tests.launch.training import train

EVERY = 10
PERSIST = 20


def test_all_memory_is_lost_one_host_is_told_to_go_and_then_the_other(tmp_path: Path) -> None:
    notice = str(tmp_path / "go-{host}")
    options = ("--hosts", "1:2", "--lease-s", "2", "--grace-s", "90", "--preemption-file", notice)
    with train(EVERY, *options, persist=PERSIST) as training:
        world = training.world
        # More is lost than memory can give back: it goes on from storage.
        world.wait("persisted")
        for host in ("host0", "host1"):
            world.kill(host, "agent", "smp", "rank")
        chosen = world.wait("chosen", source="orbax")
        stored = {int(one["step"]) for one in world.events("persisted")}
        assert chosen["step"] in stored, world.text()
        training.until("restored", chosen["step"])
        training.until("step", chosen["step"] + EVERY + 3)
        # One host is told: all take a snapshot at one step, and the other goes on from that.
        Path(notice.format(host="host1")).touch()
        last = world.wait("last_snapshot", host="host1")
        assert (last["result"], last["step"] > chosen["step"]) == ("protected", True), world.text()
        number = last["generation"] + 1
        assert world.wait("generation_formed", number=number)["hosts"] == ["host0"]
        assert world.wait("restored", generation=number)["step"] == last["step"]
        world.until(lambda: "host1 is gone, and stays away: the preem" in world.errors(), "word")
        # Then the other: the newest snapshot gets to storage before all memory goes.
        world.until(lambda: training.newest(0, "step") > last["step"] + 3, "steps of one host")
        Path(notice.format(host="host0")).touch()
        assert world.ended(60) == 128 + 15, world.text()
        end = world.wait("last_snapshot", host="host0")
        assert end["result"] == "protected", world.text()
        found = [one.entry.step for one in Directory(world.base / "checkpoints").found()]
        assert max(found) == end["step"] > last["step"]
        assert f"step {end['step']} is on storage" in world.errors()
        world.assert_nothing_left()


def test_a_notice_that_is_there_at_the_start_is_named(tmp_path: Path) -> None:
    options = ("--host", "a", "--preemption-file", str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-m", "jaxft", "run", *options, "--", "true"],
        env=os.environ | {"JAXFT_RUN_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = f"the preemption file {tmp_path} is there: this host leaves before it has joined the job"
    assert (ran.returncode, said in ran.stderr) == (143, True), ran.stderr


def test_a_notice_is_a_file_whatever_it_is(tmp_path: Path) -> None:
    notice = PreemptionNotice(str(tmp_path / "{host}" / "go"), "a")
    assert not notice.is_there()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "go").symlink_to("nowhere")
    assert notice.is_there()
    assert str(notice) == f"the preemption file {tmp_path}/a/go is there"
    assert not PreemptionNotice("", "a").is_there()
