"""Hosts on several machines: one is lost, and one is cut off and comes back."""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.apart.trainer import expected
from bench.apart.world import Host, World, apart

OPTIONS = ("--hosts", "1:2", "--lease-s", "2", "--settle-s", "1", "--rejoin-s", "1")


@pytest.fixture
def base() -> Iterator[Path]:
    # Short, for the limit of Unix sockets.
    path = Path(tempfile.mkdtemp(prefix="jx-"))
    yield path
    shutil.rmtree(path)


def goes_on_bit_for_bit(host: Host, generation: int, least: int) -> bool:
    """Whether it has restored, and protects snapshots again."""
    restored = host.newest("restored", generation)
    if restored < 0 or host.newest("latest", generation) < restored + 4:
        return False
    assert restored >= least
    said = [(one.get("step", one.get("restored")), one) for one in host.said("digest")]
    digests = expected(max(step for step, _ in said) + 1)
    for step, one in said:
        assert one["digest"] == digests[step], one
    return True


def keeps_to_its_address(world: World, host: Host) -> None:
    """All that it listens at for others is at its own address, and nobody else has its key."""
    address = world.network.address(host.name)
    listening = world.network.listening(host.name)
    places = host.events("registered")[-1]["address"].replace("tcp://", "").split(",")
    assert set(places) <= listening
    assert all(place.startswith(f"{address}:") for place in places)
    assert not [
        one for one in listening if ipaddress.ip_address(one.partition(":")[0]).is_unspecified
    ]
    for pid in world.network.processes(host.name):
        process = Path(f"/proc/{pid}")
        assert b"JOB_KEY" not in (process / "environ").read_bytes()
        assert b"--job-key" not in (process / "cmdline").read_bytes()


def test_a_host_is_lost_and_another_is_cut_off_and_returns(base: Path) -> None:
    with apart(base, "a", "b", "c") as world:
        a, b, c = world.hosts.values()
        a.start(*OPTIONS)
        b.start(*OPTIONS)
        world.until(
            lambda: min(a.newest("latest", 1), b.newest("latest", 1)) >= 4,
            "snapshots that both hosts protect",
        )
        keeps_to_its_address(world, a)
        c.start(*OPTIONS)
        world.until(lambda: c.events("registered"), "a spare")

        # Its power fails: the spare takes its place, with its memory rebuilt from the other's.
        known = b.newest("latest")
        world.network.kill("b")
        world.until(lambda: goes_on_bit_for_bit(a, 2, known), "the one that stays goes on")
        world.until(lambda: goes_on_bit_for_bit(c, 2, known), "the spare has taken over")

        # Its cable is pulled, for longer than its lease: the other goes on, and it does not.
        known = c.newest("latest")
        world.network.cut("c")
        world.until(lambda: goes_on_bit_for_bit(a, 3, known), "the one that stays goes on alone")
        world.until(lambda: c.events("ranks_killed", generation=2), "the other has stopped")
        before = c.newest("step")
        world.network.mend("c")
        world.until(lambda: world.is_registered("c"), "it is back")
        assert [one["generation"] for one in c.events("rank_started")] == [2]
        assert not c.events("generation_formed")
        assert c.newest("step") == before

        # And takes part again, in the next world.
        os.kill(a.events("rank_started")[-1]["pid"], signal.SIGKILL)
        known = a.newest("latest")
        for host in (a, c):
            world.until(
                lambda h=host: goes_on_bit_for_bit(h, 4, known),  # type: ignore[misc]
                f"{host.name} trains in a world of both",
            )
        last = a.newest("step") + 100
        for host in (a, c):
            host.end_at(last)
        assert (a.ended(), c.ended()) == (0, 0), world.text()
