"""A run that is told to end takes a last snapshot, though none is due."""

from __future__ import annotations

import os
import signal

import pytest

from tests.launch.training import train

SELDOM = 10**6


def test_sigterm_to_a_run_gives_a_protected_snapshot_of_a_step_that_was_not_due() -> None:
    with train(SELDOM, "--grace-s", "50") as training:
        world = training.world
        training.until("step", 20)
        # As from a scheduler that tells every process.
        for host in ("host0", "host1"):
            os.kill(world.pid(host, "smp"), signal.SIGTERM)
        world.process.send_signal(signal.SIGTERM)
        assert world.ended() == 128 + signal.SIGTERM
        [asked] = world.events("out_of_turn")
        assert "is told to end" in asked["reason"]
        ends = {one["host"]: one for one in world.events("last_snapshot")}
        results = {host: end["result"] for host, end in ends.items()}
        assert results == {"host0": "protected", "host1": "protected"}, world.text()
        [step] = {end["step"] for end in ends.values()}
        assert step > 20
        assert [one["step"] for one in world.events("committed")] == [1, step]
        for rank in (0, 1):
            assert [one["step"] for one in training.said(rank) if one.get("begun")] == [1, step]
        said = world.text()
        assert "generation 1 (host0, host1; code 1+1): 2 hosts are there" in said
        assert (
            f"a last snapshot, of step {step}, is protected in the memory of the job's hosts"
            in said
        )
        world.assert_nothing_left()


def test_the_hosts_that_stay_go_on_from_the_last_snapshot_of_one_that_goes() -> None:
    """Only the agent of host 1 is told to end, as when its machine is taken away."""
    with train(SELDOM, "--grace-s", "50") as training:
        world = training.world
        training.until("step", 20)
        os.kill(world.pid("host1", "agent"), signal.SIGTERM)
        end = world.wait("last_snapshot", host="host1")
        assert (end["result"], end["step"] > 20) == ("protected", True), world.text()
        assert world.wait("restored", generation=2)["step"] == end["step"]


def test_a_host_that_goes_lends_its_memory_to_those_who_cannot_do_without() -> None:
    """More of a group go at once than it may lose: here one, of a code that has no parity."""
    with train(SELDOM, "--hosts", "1:2", "--code", "1+0", "--grace-s", "50") as training:
        world = training.world
        training.until("step", 20)
        os.kill(world.pid("host1", "agent"), signal.SIGTERM)
        end = world.wait("last_snapshot", host="host1")
        assert (end["result"], end["step"] > 20) == ("protected", True), world.text()
        number = end["generation"] + 1
        assert world.wait("generation_formed", number=number)["hosts"] == ["host0"]
        assert world.wait("restored", generation=number)["step"] == end["step"]


def test_a_rank_that_hangs_costs_no_more_than_the_grace() -> None:
    with train(SELDOM, "--grace-s", "5") as training:
        world = training.world
        training.until("step", 5)
        os.kill(world.pid("host1", "rank"), signal.SIGSTOP)
        world.process.send_signal(signal.SIGTERM)
        assert world.ended() == 128 + signal.SIGTERM
        results = {one["result"] for one in world.events("last_snapshot")}
        assert results == {"there was no time for it"}
        world.assert_nothing_left()


def test_a_sigint_after_the_sigterm_ends_all_waiting() -> None:
    """Of the agents, which only this run's own process can tell, and then of their ranks."""
    with train(SELDOM, "--grace-s", "120") as training:
        world = training.world
        training.until("step", 5)
        os.kill(world.pid("host1", "rank"), signal.SIGSTOP)
        world.process.send_signal(signal.SIGTERM)
        world.wait("out_of_turn")
        world.process.send_signal(signal.SIGINT)
        assert world.ended(timeout_s=15) == 128 + signal.SIGTERM
        results = {one["result"] for one in world.events("last_snapshot")}
        assert results == {"SIGINT ended the wait for it"}
        world.assert_nothing_left()


@pytest.mark.parametrize(
    ("host", "why_not"),
    [
        ("host1", "rank 1 of this host has ended"),
        ("host0", "generation 1 has ended: rank 0 on host0 ended with signal 9"),
    ],
)
def test_what_kept_a_last_snapshot_from_being_taken_is_named(host: str, why_not: str) -> None:
    """Host 1 is told to end; its rank stands still, so that the snapshot does not come at once."""
    with train(SELDOM, "--grace-s", "120") as training:
        world = training.world
        training.until("step", 5)
        os.kill(world.pid("host1", "rank"), signal.SIGSTOP)
        os.kill(world.pid("host1", "agent"), signal.SIGTERM)
        world.wait("out_of_turn")
        os.kill(world.pid(host, "rank"), signal.SIGKILL)
        assert why_not in world.wait("last_snapshot", host="host1")["result"]
