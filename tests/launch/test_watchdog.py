"""A rank that hangs is found, named and shown, and training goes on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from jaxft.launch.stacks import innermost
from tests.launch.local_runs import run
from tests.launch.training import train

QUICK = ("--hang-s", "2", "--silence-s", "1.5")
LATE = "rank 1 has not called save for"

DUMPED = """
step 12
Thread 0x00007f01 (most recent call first):
  File "threading.py", line 320 in wait

Current thread 0x00007f02 [main] (most recent call first):
  File "train.py", line 42 in load
  File "train.py", line 74 in main
"""
SPIED = """
Process 77: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {} (active){}
    load (train.py:42)
    main (train.py:74)
Thread 78 (idle): "jaxft-stage"
    wait (threading.py:320)
"""

# A rank without JAX, which calls all the time; in the second generation rank 1 never does.
COUNTS = """
import os, time
from jaxft.watched import be_watched
page = be_watched()
while True:
    if (os.environ["JAXFT_GENERATION"], os.environ["JAXFT_RANK"]) == ("2", "1"):
        time.sleep(600)
    page.counter[0] += 1
    if page.counter[0] == 10:
        print("of generation", os.environ["JAXFT_GENERATION"], flush=True)
    time.sleep(0.01)
"""


def test_where_a_rank_is_is_read_out_of_its_log() -> None:
    dumped = 'File "train.py", line 42 in load\nFile "train.py", line 74 in main'
    spied = "load (train.py:42)\nmain (train.py:74)"
    assert innermost(DUMPED, 0x7F02, 77) == dumped
    assert innermost(SPIED.format(77, ""), 0x7F02, 77) == spied
    assert innermost(SPIED.format("0x7F", ': "MainThread"'), 0x7F02, 77) == spied
    assert innermost(SPIED.format(77, "") + DUMPED, 0x7F02, 77) == dumped
    assert innermost("step 12\n", 0x7F02, 77) == ""


def test_a_rank_that_hangs_is_named_and_training_goes_on_bit_for_bit_case_36(
    tmp_path: Path,
) -> None:
    with train(2, *QUICK, "--log-dir", str(tmp_path)) as training:
        world = training.world
        training.until("latest", 10)
        at = training.newest(1, "latest")
        (world.base / "hang-1").touch()
        fault = world.wait("fault")
        assert (fault["kind"], fault["host"], fault["generation"]) == ("hung", "host1", 1)
        assert "rank 1 on host1 hangs: it has not called save for" in fault["detail"]
        assert "in load" in fault["detail"]
        formed = world.wait("generation_formed", number=2)
        assert "rank 1 on host1 hangs" in formed["reason"]
        logs = [(tmp_path / f"host{rank}/gen1/rank{rank}.log").read_text() for rank in (0, 1)]
        assert all("(most recent call first)" in log for log in logs)
        assert "in load" in logs[1]
        assert "| File" in world.errors()

        # An announced phase is no hang, nor is it one to wait for it.
        training.until("latest", training.newest(1, "restored") + 10)
        late = world.errors().count(LATE)
        (world.base / "evaluate-0").touch()
        world.until(lambda: world.errors().count(LATE) > late, "rank 1 that waits")
        (world.base / "evaluate-0").unlink()
        training.until("step", max(training.newest(rank, "step") for rank in (0, 1)) + 10)
        assert training.end() == 0, world.text()
        assert not world.events("fault", generation=2), world.text()
        restored = next(one for one in training.said(1) if one.get("restored") is not None)
        assert restored["w"] == restored["restored"] >= at
        last = training.said(1)[-1]
        assert last["w"] == last["step"]
        world.assert_nothing_left()


def test_a_rank_that_is_stopped_hangs_and_so_does_one_that_never_calls() -> None:
    quick = (*QUICK, "--start-s", "2")
    with run("--local-hosts", "2", *quick, command=(sys.executable, "-c", COUNTS)) as world:
        world.running(1, 2)
        os.kill(world.pid("host0", "rank"), signal.SIGSTOP)
        fault = world.wait("fault")
        assert (fault["kind"], fault["host"]) == ("hung", "host0")
        assert "it is stopped by a signal" in fault["detail"]
        fault = world.wait("fault", generation=2)
        assert (fault["kind"], fault["host"]) == ("hung", "host1")
        assert "rank 1 on host1 hangs: it has not called save for" in fault["detail"]
        assert "s, not once (the other ranks are at call" in fault["detail"]
        world.wait("generation_formed", number=3)
