"""An agent that has nothing to do hardly wakes up, and shows all the same what its ranks print."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.launch.local_runs import run

WATCHED_S = 3.0
# A rank that prints when a file is there, once a line in it.
ECHO = """
import pathlib, sys, time
said, deadline = 0, time.monotonic() + 60
print("here", flush=True)
while time.monotonic() < deadline:
    order = pathlib.Path(sys.argv[1]) / "say"
    lines = order.read_text().splitlines() if order.exists() else []
    for line in lines[said:]:
        print(line, flush=True)
    said = len(lines)
    time.sleep(0.005)
"""


def wakes(pid: int) -> int:
    """How often the threads of a process have gone to sleep."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                count += int(line.split()[1])
    return count


def test_agents_whose_ranks_run_and_say_nothing_sleep() -> None:
    with run("--local-hosts", "3", "--lease-s", "3", "--settle-s", "1") as world:
        world.running(1, 3)
        time.sleep(1.0)
        pids = [world.pid(f"host{index}", "agent") for index in range(3)]
        pids.append(world.process.pid)
        before, began_s = [wakes(pid) for pid in pids], time.monotonic()
        time.sleep(WATCHED_S)
        often = [wakes(pid) - count for pid, count in zip(pids, before, strict=True)]
        passed_s = time.monotonic() - began_s
        # Three renewals a lease, each with a look at the leases, and the loop once.
        assert max(often[:3]) <= 2 * passed_s + 3, often
        assert often[3] <= 1.5 * passed_s + 3, often


def test_what_a_rank_prints_after_a_while_of_silence_is_shown_at_once() -> None:
    command = (sys.executable, "-S", "-c", ECHO, "BASE")
    with run("--local-hosts", "1", "--settle-s", "0.1", command=command) as world:
        world.until(lambda: "here" in world.printed(), "a rank that prints")
        late_s = []
        for number in range(3):
            time.sleep(0.6)  # it is silent for longer than its log is looked at
            said_s = time.monotonic()
            with (world.base / "say").open("a") as file:
                file.write(f"line {number}\n")
            world.until(lambda line=f"line {number}": line in world.printed(), "the line")
            late_s.append(time.monotonic() - said_s)
        assert min(late_s) < 0.5, late_s
