"""One job on three hosts whose network is not what it should be: each test leaves a world that
trains to the next."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.apart.world import World, apart
from tests.apart.seen import (
    SOON,
    all_go_on,
    goes_on_bit_for_bit,
    newest,
    protected,
    rank_of,
    smp_of,
)

OPTIONS = ("--hosts", "2:3", "--code", "2+1", "--silence-s", "3", "--flap-s", "10", *SOON)


@pytest.fixture(scope="module")
def world(module_base: Path) -> Iterator[World]:
    with apart(module_base, "a", "b", "c") as made:
        for host in made.hosts.values():
            host.start(*OPTIONS)
        made.until(lambda: protected(made, "abc", 1) >= 4, "snapshots that all hosts protect")
        yield made


def smp_ports(world: World) -> list[int]:
    """At which the snapshot processes of all hosts listen."""
    found = []
    for host in world.hosts.values():
        places = host.events("registered")[-1]["address"].replace("tcp://", "").split(",")
        found += [int(place.rpartition(":")[2]) for place in places]
    return found


@contextlib.contextmanager
def smps_closed_off(world: World, name: str) -> Iterator[int]:
    """No snapshot process reaches that of this host, and the other way round, while its ranks and
    its agent reach all. Waits until that is known; gives a step of that time."""
    told = len(world["a"].events("held"))
    world.network.spoil(name, ports=smp_ports(world))
    try:
        world.until(lambda: len(world["a"].events("held")) > told, "snapshots are held")
        yield world["a"].newest("step")
    finally:
        world.network.mend(name)


def goes_on_somehow(world: World, names: str, generation: int, known: int) -> None:
    """Waits until these hosts have restored, in a generation that may end at any moment since
    another host is waiting to be taken in."""
    world.until(
        lambda: min(world[name].newest("restored", generation) for name in names) >= known,
        f"{names} restore in generation {generation}",
    )


def test_a_slow_and_lossy_cable_costs_time_and_nothing_else(world: World) -> None:
    world.network.spoil("c", delay_s=0.02, loss=0.01, seed=1)
    known = protected(world, "abc")
    world.until(
        lambda: protected(world, "abc") >= known + 10, "snapshots are protected all the same"
    )
    world.network.mend("c")
    assert newest(world) == 1


def test_a_store_that_is_away_for_longer_than_leases_last_costs_nothing(world: World) -> None:
    """It lives on and lets them lapse; who reaches it first, when it is back, does not take the
    others for lost."""
    before, known = newest(world), world["b"].newest("step")
    world.network.cut("store")
    world.until(
        lambda: not any(world.is_registered(name) for name in "abc"), "no lease is left there"
    )
    world.until(lambda: "the store does not answer" in world["a"].text(), "it says so")
    world.network.mend("store")
    world.until(
        lambda: all(world.is_registered(name) for name in "abc"), "all have registered again"
    )
    world.until(lambda: "the store answers again" in world["a"].text(), "it says so")
    assert world["a"].text().count("the store does not answer") == 1
    world.until(lambda: protected(world, "abc") > known + 10, "training has gone on")
    assert newest(world) == before


def test_without_the_smps_network_training_goes_on_and_is_protected_when_it_is_back(
    world: World,
) -> None:
    with smps_closed_off(world, "c") as step:
        world.until(lambda: world["b"].newest("step") > step + 20, "training goes on")
        known = protected(world, "a")
        world.until(lambda: world["b"].newest("step") > step + 100, "training goes on")
        assert protected(world, "a") == known
        assert "snapshots are held, training goes on: " in world["a"].text()
        assert "at the network between it and that of host a" in world["a"].text()
    world.until(lambda: protected(world, "abc") > step, "snapshots are protected again")
    assert "snapshots are held no longer" in world["a"].text()
    assert newest(world) == 1


def test_hosts_that_hold_different_newest_steps_go_on_from_the_common_one_case_29(
    world: World,
) -> None:
    with smps_closed_off(world, "c") as step:
        known = protected(world, "abc")
        os.kill(rank_of(world["b"]), signal.SIGKILL)
    all_go_on(world, "abc", 2, known)
    restored = {world[name].newest("restored", 2) for name in "abc"}
    assert len(restored) == 1
    assert known <= min(restored) <= step


def test_a_host_that_comes_and_goes_waits_before_it_is_taken_in_again(world: World) -> None:
    c, number, known = world["c"], newest(world) + 1, protected(world, "abc")
    for names in ("abc", "ab"):
        os.kill(c.events("agent_started")[-1]["pid"], signal.SIGKILL)
        c.start(*OPTIONS)
        goes_on_somehow(world, names, number, known)
        number += 1
    world.until(lambda: "c was lost 2 times lately" in c.text(), "it says why it waits")
    goes_on_somehow(world, "abc", number, known)


def test_a_world_that_cannot_restore_with_a_host_goes_on_without_it_and_takes_it_in_later(
    world: World,
) -> None:
    """The root is the one: it hears nobody, and somebody else is the root then."""
    known, number = protected(world, "abc"), newest(world) + 3  # twice in vain
    with smps_closed_off(world, "a"):
        os.kill(rank_of(world["b"]), signal.SIGKILL)
        goes_on_somehow(world, "bc", number, known)
    world.until(
        lambda: all(goes_on_bit_for_bit(world[name], newest(world), known) for name in "abc"),
        "all three go on",
    )


def test_a_job_with_a_hung_smp_ends_within_5_s_case_42(world: World) -> None:
    os.kill(smp_of(world["c"]), signal.SIGSTOP)
    for host in world.hosts.values():
        os.kill(host.pid, signal.SIGINT)
    assert world["c"].ended() == 128 + signal.SIGINT
    # Ranks have a time of their own.
    assert time.time() - world["c"].events("rank_exited")[-1]["t"] < 5
    assert [world[name].ended() for name in "ab"] == [128 + signal.SIGINT] * 2
    assert [world.network.processes(name) for name in "abc"] == [[], [], []]
