"""What is killed comes back: ranks, SMPs, agents, whole hosts; and what is not killed stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.launch.local_runs import Run, run

NAMES = ["host0", "host1", "host2"]
TWO_NAMES = NAMES[:2]
QUICK = ("--lease-s", "2", "--settle-s", "1", "--agent-grace-s", "3")
TWO = ("--local-hosts", "2", *QUICK)
THREE = ("--local-hosts", "3", *QUICK)


def killed_within(world: Run, since: float, hosts: list[str]) -> float:
    """When the ranks of these hosts were dead, counted from `since`."""
    events = [world.wait("ranks_killed", generation=1, host=host) for host in hosts]
    return max(float(event["t"]) for event in events) - since


def test_a_rank_that_fails_takes_all_ranks_along_and_the_job_goes_on() -> None:
    with run(*THREE) as world:
        world.running(1, 3)
        since = world.exit_rank(1, 3)
        assert killed_within(world, since, ["host0", "host2"]) < 1.0
        fault = world.wait("fault")
        assert (fault["host"], fault["kind"], fault["generation"]) == ("host1", "rank_exited", 1)
        world.running(2, 3)
        world.kill("host2", "rank")
        fault = world.wait("fault", generation=2)
        assert (fault["host"], fault["kind"]) == ("host2", "rank_killed")
        world.running(3, 3)
        formed = world.wait("generation_formed", number=3)
        assert formed["hosts"] == NAMES
        assert "rank 2 on host2 ended with signal 9" in formed["reason"]
        assert world.finish() == 0, world.text()
        # All hosts speak on one console here.
        for ends in (1, 2):
            assert world.errors().count(f"generation {ends} ends: ") == 1, world.text()
        world.assert_nothing_left()


def test_each_host_says_why_a_generation_has_ended_on_a_console_of_its_own(
    tmp_path: Path,
) -> None:
    shared = ("--hosts", "2", "--store", str(tmp_path / "store.db"), *QUICK)
    with run("--host", "a", *shared) as world:
        other = world.start("--host", "b", *shared, command=world.command)
        world.running(1, 2)
        world.exit_rank(1, 3)
        world.running(2, 2)
        assert world.finish() == 0, world.text()
        assert other.wait(60) == 0
        for host in "ab":
            ends = f"jaxft [{host}] generation 1 ends: rank 1 on b ended with status 3"
            assert world.errors().count(ends) == 1, world.text()
            assert world.errors().count(f"jaxft [{host}] generation 2 (a, b;") == 1, world.text()
        world.assert_nothing_left()


def test_a_killed_smp_comes_back_with_its_memory_and_training_goes_on_case_25() -> None:
    with run(*TWO) as world:
        world.running(1, 2)
        arena = world.wait("smp_started", host="host1")["arena"]
        world.kill("host1", "smp")
        assert world.wait("smp_restarted", host="host1")["arena"] == arena
        assert world.finish() == 0, world.text()
        assert len(world.events("generation_formed")) == 1, world.text()
        assert not world.events("fault")
        world.assert_nothing_left()


def test_a_killed_agent_comes_back_and_adopts_its_smp() -> None:
    with run(*TWO) as world:
        world.running(1, 2)
        smp, rank = world.pid("host0", "smp"), world.pid("host0", "rank")
        since = world.kill("host0", "agent")
        assert world.wait("smp_adopted", host="host0")["pid"] == smp
        assert killed_within(world, since, ["host1"]) < 3.0
        world.running(2, 2)
        assert rank not in world.processes()
        assert world.events("generation_formed", number=2)[0]["hosts"] == TWO_NAMES
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()


def test_a_lost_host_comes_back_empty_at_its_place_case_34() -> None:
    with run(*TWO) as world:
        world.running(1, 2)
        arena = world.wait("smp_started", host="host0")["arena"]
        world.kill("host0", "agent", "smp", "rank")
        world.running(2, 2)
        fault = world.wait("fault", generation=1, host="host0")
        assert fault["kind"] in ("memory_lost", "host_lost")
        assert world.events("smp_started", host="host0")[-1]["arena"] != arena
        assert world.events("generation_formed", number=2)[0]["hosts"] == TWO_NAMES
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()


def test_a_world_without_a_lost_host_shrinks() -> None:
    with run(*THREE, "--hosts", "2:3", "--no-respawn") as world:
        world.running(1, 3)
        world.kill("host1", "agent", "smp", "rank")
        world.running(2, 2)
        assert world.wait("host_lost")["host"] == "host1"
        formed = world.wait("generation_formed", number=2)
        assert (formed["hosts"], formed["holders"]) == (["host0", "host2"], [])
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()


def test_memory_without_an_agent_is_waited_for_and_then_only_asked() -> None:
    with run(*THREE, "--hosts", "2:3", "--no-respawn") as world:
        world.running(1, 3)
        since = world.kill("host1", "agent")
        world.running(2, 2)
        formed = world.wait("generation_formed", number=2)
        assert (formed["hosts"], formed["holders"]) == (["host0", "host2"], ["host1"])
        assert float(formed["t"]) - since > 3.0
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()


def test_an_smp_that_hangs_is_killed_and_started_again_on_its_memory() -> None:
    with run(*TWO, "--silence-s", "1.5") as world:
        world.running(1, 2)
        arena = world.wait("smp_started", host="host1")["arena"]
        os.kill(world.pid("host1", "smp"), signal.SIGSTOP)
        fault = world.wait("fault")
        assert (fault["kind"], fault["host"]) == ("unreachable", "host1")
        assert world.wait("smp_restarted", host="host1")["arena"] == arena
        world.running(2, 2)
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()


def test_an_agent_that_was_stopped_leaves_the_world_and_joins_the_next_one() -> None:
    with run(*TWO) as world:
        world.running(1, 2)
        os.kill(world.pid("host1", "agent"), signal.SIGSTOP)
        fault = world.wait("fault")
        assert (fault["kind"], fault["host"]) == ("host_lost", "host1")
        world.wait("ranks_killed", host="host0", generation=1)
        os.kill(world.pid("host1", "agent"), signal.SIGCONT)
        world.wait("ranks_killed", host="host1", generation=1)
        world.running(2, 2)
        assert world.finish() == 0, world.text()
        assert len(world.events("generation_formed")) == 2, world.text()
        world.assert_nothing_left()


def test_nobody_is_lost_while_all_cores_are_busy() -> None:
    with run(*TWO) as world:
        world.running(1, 2)
        burn = [sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 8: pass"]
        burners = [subprocess.Popen(burn) for _ in range(2 * (os.cpu_count() or 1))]
        try:
            time.sleep(4.0)  # two leases
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        assert world.finish() == 0, world.text()
        assert not world.events("fault"), world.text()
        assert len(world.events("generation_formed")) == 1


def test_ranks_do_not_train_on_without_the_store() -> None:
    with run(*TWO, "--lease-s", "1", "--store-grace-s", "1.5") as world:
        world.running(1, 2)
        began_s = time.monotonic()
        (world.run_dir / "j" / "store.db").rename(world.base / "away.db")
        world.wait("ranks_killed", 2, generation=1)
        assert 1.0 < time.monotonic() - began_s < 4.0
        (world.base / "away.db").rename(world.run_dir / "j" / "store.db")
        world.running(2, 2)
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()


def test_without_the_store_a_lost_host_is_found_by_its_snapshot_process() -> None:
    """Its lease says nothing then, and the other ranks would wait in a collective for the grace."""
    grace_s = 20.0
    options = (*TWO, "--lease-s", "1", "--store-grace-s", str(grace_s), "--no-respawn")
    with run(*options) as world:
        world.running(1, 2)
        (world.run_dir / "j" / "store.db").rename(world.base / "away.db")
        since = world.kill("host1", "agent", "smp", "rank")
        assert killed_within(world, since, ["host0"]) < grace_s / 2
        assert "the snapshot processes of host1 have not for 1 s" in world.errors()


def test_what_a_rank_has_started_ends_with_it() -> None:
    code = (
        "import os, subprocess, time; g = os.environ['JAXFT_GENERATION']; "
        "p = subprocess.Popen(['sleep', '60']) if g == '1' else None; "
        "print('child', p and p.pid, flush=True); "
        "time.sleep(60 if g == '1' and os.environ['JAXFT_RANK'] == '0' else 0.2); "
        "raise SystemExit(g == '1')"
    )
    command = (sys.executable, "-S", "-c", code)
    with run("--local-hosts", "2", "--lease-s", "2", command=command) as world:
        assert world.ended() == 0, world.text()
        assert world.printed().count("child") == 4
        world.assert_nothing_left()


def test_a_respawned_world_finds_its_memory_again_after_the_launcher_was_killed() -> None:
    with run(*TWO) as world:
        world.running(1, 2)
        smps = {host: world.pid(host, "smp") for host in TWO_NAMES}
        world.process.kill()
        world.process.wait()
        world.until_gone({world.pid(host, "agent") for host in TWO_NAMES})
        world.process = world.start(*TWO, command=world.command)
        for host in TWO_NAMES:
            assert world.wait("smp_adopted", host=host)["pid"] == smps[host]
        # The numbers go on: the memory knows of generation 1.
        world.running(2, 2)
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()
