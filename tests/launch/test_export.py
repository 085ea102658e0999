"""A run that ends leaves its newest snapshot on storage, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxft import OrbaxFallback
from tests.launch.training import Training, train

SELDOM = 10**6


def plain(directory: str | Path) -> list[tuple[int, int]]:
    """The step of each checkpoint, and what plain Orbax gives of its state."""
    found = []
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {"w": jax.ShapeDtypeStruct((4000,), np.dtype("float32"), sharding=one)}
    with ocp.CheckpointManager(epath.Path(directory)) as manager:
        for entry in OrbaxFallback(directory).entries():
            restored = manager.restore(entry.step, args=ocp.args.StandardRestore(like))
            w = np.asarray(restored["w"])
            assert (w == w[0]).all()
            found.append((entry.step, round(float(w[0]))))
    return found


def stored(training: Training) -> list[tuple[int, int]]:
    return plain(training.world.base / "checkpoints")


def test_sigterm_to_all_hosts_leaves_the_last_snapshot_on_storage_case_38() -> None:
    with train(SELDOM, "--grace-s", "90", persist=SELDOM) as one:
        world = one.world
        one.until("step", 20)
        world.process.send_signal(signal.SIGTERM)
        assert world.ended(90) == 128 + signal.SIGTERM
        ends = world.events("last_snapshot")
        assert {end["result"] for end in ends} == {"protected"}, world.text()
        [step] = {end["step"] for end in ends}
        assert step > 20
        assert stored(one)[-1] == (step, step), world.text()
        assert f"step {step} is on storage, in {world.base / 'checkpoints'}" in world.errors()
        world.assert_nothing_left()


def test_a_job_that_is_done_leaves_its_newest_snapshot_on_storage() -> None:
    with train(5, persist=SELDOM) as one:
        one.until("latest", 11)
        assert one.end() == 0, one.world.text()
        newest = max(event["step"] for event in one.world.events("committed"))
        assert stored(one)[-1] == (newest, newest), one.world.text()
        one.world.assert_nothing_left()
        goes_on_from_storage(one, newest)


def test_an_exporter_that_is_killed_costs_the_last_step_and_no_checkpoint() -> None:
    """When it has written all, and nobody can see it yet; the job ends as it would have."""
    fault = "export.committing:rank=0=kill"
    with train(5, persist=SELDOM, JAXFT_FAULTS=fault) as one:
        world = one.world
        world.wait("persisted")  # the first, which is to be in `before`
        by_hand = [sys.executable, "-m", "jaxft", "export", "--job", "j"]
        directory = world.base / "checkpoints"
        subprocess.run([*by_hand, str(directory)], env=world.environ, check=True, timeout=60)
        before = stored(one)
        step, w = before[-1]
        assert step == w
        assert one.end() == 0, world.text()
        assert step < max(event["step"] for event in world.events("committed"))
        assert stored(one) == before, world.text()
        assert "the newest snapshot did not get to storage" in world.errors()
        assert not world.events("exported")
        world.assert_nothing_left()


def goes_on_from_storage(one: Training, step: int) -> None:
    """The next run of the job counts its generations from the last one at once: it does not start
    its ranks first to find out that those on storage are newer."""
    world = one.world
    [last] = world.events("exported")
    (world.base / "last").unlink()
    options = ("--local-hosts", "2", "--settle-s", "1")
    world.process = world.start(*options, command=world.command)
    settled = world.wait("settled", 3)
    assert settled["generation"] == last["generation"] + 1, world.text()
    restored = world.wait("restored", generation=settled["generation"])
    assert (restored["source"], restored["step"]) == ("orbax", step)
    assert not world.events("generation_floor")
    one.until("latest", step + 5)
    assert one.end() == 0, world.text()


def test_what_too_few_hosts_hold_gets_to_storage() -> None:
    """The segment of the lost host is rebuilt for it."""
    options = ("--no-respawn", "--form-timeout-s", "5", "--lease-s", "1.5", "--agent-grace-s", "0")
    with train(5, *options, persist=SELDOM) as one:
        world = one.world
        one.until("latest", 11)
        world.kill("host0", "agent", "smp", "rank")
        exported = world.wait("exported", host="host1")
        assert world.ended(60) == 3, world.text()
        newest = max(event["step"] for event in world.events("committed"))
        assert exported["step"] == newest
        assert stored(one)[-1] == (newest, newest), world.text()
        assert "1 of 2 hosts are there" in world.errors()
        assert f"the snapshot of step {newest} is on storage" in world.errors()
        world.assert_nothing_left()


def test_a_host_that_goes_alone_does_not_stay_for_an_export() -> None:
    with train(SELDOM, "--hosts", "1:2", "--no-respawn", "--grace-s", "25", persist=SELDOM) as one:
        world = one.world
        one.until("step", 5)
        os.kill(world.pid("host1", "agent"), signal.SIGTERM)
        world.wait("agent_ended", of="host1")
        assert world.wait("restored", generation=2)["step"] > 5
        assert not world.events("exported")
