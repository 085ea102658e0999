"""When a world is restarted, without whom, and when it is not: real processes, trivial ranks."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.launch.local_runs import Run, run

QUICK = ("--lease-s", "2", "--settle-s", "1", "--agent-grace-s", "3")


def formed(world: Run, number: int) -> list[str]:
    return list(world.wait("generation_formed", number=number)["hosts"])


def test_a_rank_that_is_left_behind_and_a_host_that_flaps() -> None:
    options = ("--local-hosts", "3", "--hosts", "2:3", "--exit-grace-s", "1", "--flap-s", "60")
    with run(*options, "--lease-s", "2", "--settle-s", "60") as world:
        world.running(1, 3)
        # A rank ends well, and the others do not follow.
        world.exit_rank(1, 0)
        assert world.wait("fault", generation=1)["kind"] == "left_behind"
        world.running(2, 3)
        # A host that is lost is taken in again at once, and when it is lost again it waits.
        world.kill("host2", "agent", "smp", "rank")
        world.running(3, 3)
        assert formed(world, 3) == ["host0", "host1", "host2"]
        world.kill("host2", "agent", "smp", "rank")
        world.running(4, 2)
        assert formed(world, 4) == ["host0", "host1"]
        why = "host2 was lost 2 times lately, the last time in generation 3, so it waits 60 s"
        said = f"generation 4 runs without this host: {why}"
        world.until(lambda: said in world.errors(), "word of host2's")
        status = subprocess.run(
            [sys.executable, "-m", "jaxft", "status", "--job", "j", "--json"],
            env=world.environ,
            capture_output=True,
            text=True,
        )
        assert why in json.loads(status.stdout)["world"]["left_out"]["host2"], status
        logs = {path.relative_to(world.run_dir / "j") for path in world.run_dir.rglob("rank*.log")}
        assert {"gen1", "gen2", "gen3", "gen4"} == {path.parent.name for path in logs}
        assert world.finish() == 0, world.text()
        world.assert_nothing_left()


def test_a_job_that_is_restarted_too_often_ends_and_says_what_came_first() -> None:
    with run("--host", "a", "--max-restarts", "2", "--same-step-max", "9", *QUICK) as world:
        for number in (1, 2, 3):
            world.running(number, 1)
            world.kill("a", "rank")
        assert world.ended() == 1, world.text()
        said = world.errors()
        error, first, *_ = said.partition("jaxft: error: ")[2].splitlines()
        assert error.startswith("rank 0 on a ended with signal 9 (SIGKILL) after")
        assert "(generation 3); the job has been restarted 2 times within 3600 s already" in error
        assert first == "  what happened, the first of 3 on top:"
        assert said.index("generation 1: rank 0") < said.index("generation 3: rank 0")
        world.assert_nothing_left()
        # The next run counts on.
        world.process = world.start(*QUICK, "--host", "a", command=world.command)
        world.running(4, 1)
        assert world.finish() == 0
        world.assert_nothing_left()


def test_a_script_that_refuses_its_options_is_started_once() -> None:
    code = "from jaxft.errors import ConfigError; raise ConfigError('every=-1: expected more')"
    with run("--local-hosts", "2", *QUICK, command=(sys.executable, "-c", code)) as world:
        assert world.ended() == 1, world.text()
        assert {one["generation"] for one in world.events("rank_started")} == {1}
        error = world.errors().partition("jaxft: error: ")[2].splitlines()[0]
        assert "jaxft.errors.ConfigError: every=-1: expected more" in error
        assert "the script refuses what it was told, which no restart changes" in error
        world.assert_nothing_left()
