"""Hosts on several machines: one is lost, and one is cut off and comes back."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from bench.apart.world import Host, World, apart
from tests.apart.seen import SOON, all_go_on, goes_on_bit_for_bit

OPTIONS = ("--hosts", "1:2", *SOON)


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


def test_a_host_is_lost_and_another_is_cut_off_and_comes_back_case_31(base: Path) -> None:
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
        formed = [one for host in (a, c) for one in host.events("generation_formed", number=2)]
        # At once: nobody else was waited for.
        assert [one["reason"].rpartition("; ")[2] for one in formed] == ["2 hosts are there"]
        assert "runs without this host, a spare" in c.text()

        # Its cable is pulled, for longer than its lease: the other goes on, and it does not.
        known = c.newest("latest")
        world.network.cut("c")
        world.until(lambda: goes_on_bit_for_bit(a, 3, known), "the one that stays goes on alone")
        world.until(lambda: c.events("ranks_killed", generation=2), "the other has stopped")
        before = c.newest("step")
        known = a.newest("latest")
        world.network.mend("c")

        # It is back, and the world takes it in; by itself it has done nothing meanwhile.
        all_go_on(world, "ac", 4, known)
        assert [one["generation"] for one in c.events("rank_started")] == [2, 4]
        assert not c.events("generation_formed", number=3)
        assert c.newest("step", 2) == before
        assert "so the world grows from 1 to 2 hosts" in a.text()
        last = a.newest("step") + 100
        for host in (a, c):
            host.end_at(last)
        assert (a.ended(), c.ended()) == (0, 0), world.text()
