"""The snapshot process dies, hangs or has no memory: what the rank's script sees of it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from jaxft.group.messages import Outcome
from jaxft.group.world import Code
from jaxft.host import protocol as p
from tests.device.snapshots import assert_same
from tests.multiprocess.jax_world import WAIT_S, generation_of
from tests.multiprocess.lone import Lone


@pytest.fixture
def make_lone(tmp_path: Path) -> Iterator[Callable[..., Lone]]:
    made: list[Lone] = []

    def make(**options: Any) -> Lone:
        made.append(Lone(tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    for lone in made:
        lone.close()


def state_of(step: int) -> dict[str, Any]:
    import jax

    mesh = jaxft.make_mesh({"data": -1})
    rows = np.full((64, 3000), step, np.float32)
    return {"rows": jax.device_put(rows, NamedSharding(mesh, P("data"))), "n": jnp.int32(step)}


def restored_step(lone: Lone) -> int:
    """What the next incarnation restores, seen to be whole."""
    lone.leave()
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore(state_of(0))
        assert restored is not None
        assert_same(restored.state, state_of(restored.step))
        return restored.step


def test_killed_between_saves_it_comes_back_with_its_memory_case_25(make_lone) -> None:
    lone = make_lone()
    snapshotter = lone.open(every=1)
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    lone.host.kill()
    waiting = snapshotter.save(2, state_of(2))
    assert not waiting.staged.done()
    lone.host.start()
    waiting.protected.result(WAIT_S)
    snapshotter.save(3, state_of(3)).protected.result(WAIT_S)
    assert lone.host.inspect()["boots"] == 2
    assert restored_step(lone) == 3


@pytest.mark.parametrize("point", ["smp.granted", "smp.sealed", "smp.outcome"])
def test_killed_during_a_save_the_snapshot_survives_case_8_25(make_lone, point: str) -> None:
    lone = make_lone(faults=f"{point}:seq=1=kill")
    snapshotter = lone.open(every=1)
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    dying = snapshotter.save(2, state_of(2))
    lone.host.process.wait(WAIT_S)
    lone.host.kill()
    lone.host.start()
    dying.protected.result(WAIT_S)
    after = snapshotter.save(3, state_of(3))
    assert after.last_failure is None
    after.protected.result(WAIT_S)
    assert restored_step(lone) == 3


def test_gone_for_good_every_receipt_says_so_at_once_case_8(make_lone) -> None:
    lone = make_lone()
    snapshotter = lone.open(every=1)
    snapshotter.client.reconnect_s = 0.5
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    os.kill(lone.host.process.pid, signal.SIGSTOP)
    cut_off = snapshotter.save(2, state_of(2))
    lone.host.kill()
    for future in (cut_off.staged, cut_off.protected, cut_off.persisted):
        with pytest.raises(jaxft.SnapshotLost, match=r"host h0, step 2: .*away for 0.5 s"):
            future.result(WAIT_S)
    began_s = time.monotonic()
    for step in (3, 4):
        failed = snapshotter.save(step, state_of(step))
        assert failed.skipped is None
        assert "step 2" in str(failed.last_failure) or "step 3" in str(failed.last_failure)
        with pytest.raises(jaxft.SnapshotLost, match=f"host h0, step {step}"):
            failed.protected.result(0)
    with pytest.raises(jaxft.SnapshotLost, match="away"):
        snapshotter.close()
    assert time.monotonic() - began_s < 5.0


def test_with_other_memory_and_generation_it_is_another_world_case_8(make_lone) -> None:
    lone = make_lone()
    snapshotter = lone.open(every=1)
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    lone.host.close()
    receipt = snapshotter.save(2, state_of(2))
    lone.host.start()
    lone.host.enter(generation_of([lone.host], 2, Code()))
    with pytest.raises(jaxft.SnapshotLost, match=r"belongs to generation 1.*in generation 2"):
        receipt.protected.result(WAIT_S)


def test_a_due_save_waits_for_the_last_and_says_so(make_lone) -> None:
    lone = make_lone()
    snapshotter = lone.open(every=1, save_wait_s=20.0)
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    os.kill(lone.host.process.pid, signal.SIGSTOP)
    undecided = snapshotter.save(2, state_of(2))
    assert undecided.wait_s == 0.0
    timer = threading.Timer(0.5, os.kill, (lone.host.process.pid, signal.SIGCONT))
    timer.start()
    waited = snapshotter.save(3, state_of(3))
    timer.join()
    assert 0.3 < waited.wait_s < 20.0
    assert undecided.protected.done()
    waited.protected.result(WAIT_S)


def test_a_save_waits_no_longer_than_it_may(make_lone) -> None:
    lone = make_lone()
    snapshotter = lone.open(every=1, save_wait_s=0.3)
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    os.kill(lone.host.process.pid, signal.SIGSTOP)
    undecided = snapshotter.save(2, state_of(2))
    for step in (3, 4):
        given_up = snapshotter.save(step, state_of(step))
        assert given_up.id is None
        assert given_up.skipped is None
        assert given_up.wait_s >= 0.3
        with pytest.raises(jaxft.SnapshotLost, match=f"step {step}: .*the outcome of snapshot 1"):
            given_up.protected.result(0)
    os.kill(lone.host.process.pid, signal.SIGCONT)
    undecided.protected.result(WAIT_S)
    snapshotter.save(5, state_of(5)).protected.result(WAIT_S)
    assert restored_step(lone) == 5


def test_a_save_that_waits_goes_on_without_when_snapshots_are_held(
    make_lone, caplog: pytest.LogCaptureFixture
) -> None:
    """The SMP stands still; what it would say of a host that it does not hear is said for it."""
    lone = make_lone()
    snapshotter = lone.open(every=1)
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    os.kill(lone.host.process.pid, signal.SIGSTOP)
    undecided = snapshotter.save(2, state_of(2))
    began_s = time.monotonic()
    held = p.HeldTold(reason="host h7 is not heard")
    timer = threading.Timer(0.3, snapshotter.client._take, (held, ()))
    timer.start()
    passed = [snapshotter.save(step, state_of(step)) for step in (3, 4, 5)]
    timer.join()
    assert time.monotonic() - began_s < 5.0
    assert passed[0].wait_s > 0.2
    for receipt in passed:
        assert (receipt.id, receipt.skipped) == (None, None)
        with pytest.raises(jaxft.SnapshotAborted, match=rf"step {receipt.step}: .*h7 is not heard"):
            receipt.protected.result(0)
    assert "h7 is not heard" in str(passed[1].last_failure)
    with pytest.raises(jaxft.SnapshotAborted, match=r"no slot yet: host h7"):
        undecided.protected.result(WAIT_S)
    assert caplog.text.count("no snapshot can be protected for now, training goes on") == 1
    snapshotter.client._take(p.HeldTold(reason=""), ())
    os.kill(lone.host.process.pid, signal.SIGCONT)
    snapshotter.save(6, state_of(6)).protected.result(WAIT_S)
    assert "snapshots go on" in caplog.text
    assert restored_step(lone) == 6


def test_a_snapshot_that_was_aborted_before_it_began_here_is_the_next_ones_last_failure(
    make_lone,
) -> None:
    lone = make_lone()
    snapshotter = lone.open(every=2)
    snapshotter.save(1, state_of(1)).protected.result(WAIT_S)
    aborted = Outcome(seq=1, step=3, ok=False, reason="host h7: leaf w", interval=2)
    snapshotter.client._take(p.OutcomeTold(outcome=aborted), ())
    receipt = snapshotter.save(3, state_of(3))
    assert receipt.skipped == "the next snapshot is due at step 5"
    with pytest.raises(jaxft.SnapshotAborted, match=r"step 3: snapshot 1 .* host h7: leaf w"):
        raise receipt.last_failure or AssertionError


def test_slots_that_do_not_fit_are_refused_before_training_case_41(
    make_lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = make_lone(memory_max_mib=4)
    state = {"rows": np.zeros(3 << 20, np.uint8)}
    message = (
        re.escape("host h0: two snapshot slots of") + r".*for 3\.0 MiB of state.*3\.9 MiB left"
    )
    for begin in ("restore", "save"):
        snapshotter = lone.open(every=1)
        with pytest.raises(jaxft.MemoryLimitError, match=message + ".*more hosts"):
            snapshotter.restore(state) if begin == "restore" else snapshotter.save(1, state)
        lone.leave()
    with lone.open(every=1) as snapshotter:
        smaller = {"rows": np.zeros(1 << 20, np.uint8)}
        assert snapshotter.restore(smaller) is None
        snapshotter.save(1, smaller).protected.result(WAIT_S)
        grown = snapshotter.save(2, state)
        with pytest.raises(jaxft.SnapshotAborted, match=r"no memory for the snapshot"):
            grown.protected.result(WAIT_S)
        snapshotter.save(3, smaller).protected.result(WAIT_S)
