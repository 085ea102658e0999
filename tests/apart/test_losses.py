"""One job on four hosts, two of which it may lose at a time. It loses this and that, in this order:
each test leaves a world that trains to the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.apart.world import World, apart
from tests.apart.seen import SOON, all_go_on, newest, protected, rank_of, smp_of

OPTIONS = ("--hosts", "2:4", "--code", "2+2", "--hang-s", "6", *SOON)
STALE = {
    "JAXFT_GENERATION": "77",
    "JAXFT_NONCE": "old",
    "JAXFT_RANK": "5",
    "JAXFT_RANKS": "6",
    "JAXFT_COORDINATOR": "10.77.0.9:1",
    "JAXFT_SMP": "/no/smp.sock",
}
TAKE = """
import json, socket, sys
taken = []
for address, port in json.loads(sys.argv[1]):
    thief = socket.socket()
    try:
        thief.bind((address, port))
        taken.append(port)
    except OSError:
        pass
print(taken)
"""


@pytest.fixture(scope="module")
def world(module_base: Path) -> Iterator[World]:
    with apart(module_base, "a", "b", "c", "d") as made:
        for host in made.hosts.values():
            host.start(*OPTIONS, **STALE)
        yield made


def test_variables_of_an_earlier_generation_lose_and_ports_are_nobody_elses_case_39_40(
    world: World,
) -> None:
    world.until(lambda: protected(world, "abcd", 1) >= 4, "snapshots that all hosts protect")
    host = world["a"]
    places = host.events("registered")[-1]["address"].replace("tcp://", "").split(",")
    listening = world.network.listening("a")
    assert set(places) < listening  # and the coordinator
    ports = [(one.partition(":")[0], int(one.partition(":")[2])) for one in listening]
    command = [*world.network.enter("a"), sys.executable, "-S", "-c", TAKE, json.dumps(ports)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_rank_that_sleeps_for_ever_is_named_case_36(world: World) -> None:
    # Before there are longer pauses, of which it would learn to wait longer.
    number, known = newest(world) + 1, protected(world, "abcd")
    os.kill(rank_of(world["c"]), signal.SIGSTOP)
    all_go_on(world, "abcd", number, known)
    faults = [one for host in world.hosts.values() for one in host.events("fault", kind="hung")]
    assert {one["host"] for one in faults} == {"c"}
    assert "rank 2 on c" in faults[0]["detail"]


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_killed_smp_comes_back_with_its_memory_case_25_34(world: World, name: str) -> None:
    """Of the root, and of another host, whenever that is: a snapshot is nearly always under way."""
    before, step = newest(world), world["b"].newest("step")
    os.kill(smp_of(world[name]), signal.SIGKILL)
    world.until(lambda: world[name].events("smp_restarted"), "it is started again")
    # What the ranks know to be protected has gone further since, on all hosts.
    world.until(lambda: protected(world, "abcd") > step + 4, "snapshots are protected again")
    assert newest(world) == before


def test_process_0_is_killed_case_34(world: World) -> None:
    number, known = newest(world) + 1, protected(world, "abcd")
    os.kill(rank_of(world["a"]), signal.SIGKILL)
    all_go_on(world, "abcd", number, known)
    # Each host's own log says why, once.
    ends = f"generation {number - 1} ends: rank 0 on a ended with signal 9"
    assert [world[name].text().count(ends) for name in "abcd"] == [1, 1, 1, 1], world.text()


def test_the_first_agent_is_killed_and_its_host_comes_back_by_another_name_case_22_34(
    world: World,
) -> None:
    """What its snapshot process still holds is used, from where it is."""
    a = world["a"]
    number, known, smp = newest(world) + 1, protected(world, "abcd"), smp_of(a)
    os.kill(a.events("agent_started")[-1]["pid"], signal.SIGKILL)
    a.start(*OPTIONS, "--host", "a2")
    all_go_on(world, "abcd", number, known)
    assert smp in world.network.processes("a")
    formed = [one for host in world.hosts.values() for one in host.events("generation_formed")]
    [last] = [one for one in formed if one["number"] == number]
    assert (last["hosts"], last["holders"]) == (["a2", "b", "c", "d"], ["a"])


def test_a_host_is_lost_while_another_is_rebuilt_and_ranks_get_other_numbers_case_22_32(
    world: World,
) -> None:
    number, known = newest(world) + 1, protected(world, "abcd")
    world.network.kill("a")
    world.until(lambda: world["b"].events("chosen", generation=number), "what is rebuilt is chosen")
    world.network.kill("c")
    all_go_on(world, "bd", number + 1, known)
    assert [world[name].events("rank_started")[-1]["rank"] for name in "bd"] == [0, 1]


def test_all_ranks_end_well_and_so_does_the_job_case_35(world: World) -> None:
    before, last = newest(world), world["b"].newest("step") + 100
    for name in "bd":
        world[name].end_at(last)
    assert [world[name].ended() for name in "bd"] == [0, 0], world.text()
    assert newest(world) == before
