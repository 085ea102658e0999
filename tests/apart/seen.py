"""What tests of worlds that are apart look at again and again."""

from __future__ import annotations

from bench.apart.trainer import expected
from bench.apart.world import Host, World

# Everything soon: what is waited for here is on this machine, which has few cores for many hosts.
SOON = ("--lease-s", "2", "--settle-s", "1", "--rejoin-s", "1", "--no-warm")


def goes_on_bit_for_bit(host: Host, generation: int, least: int) -> bool:
    """Whether it has restored at least this step, all its steps have had the right state, and it
    protects snapshots again."""
    restored = host.newest("restored", generation)
    if restored < 0 or host.newest("latest", generation) < restored + 4:
        return False
    assert restored >= least
    said = [(one.get("step", one.get("restored")), one) for one in host.said("digest")]
    digests = expected(max(step for step, _ in said) + 1)
    for step, one in said:
        assert one["digest"] == digests[step], one
    return True


def all_go_on(world: World, names: str, generation: int, least: int) -> None:
    """Waits until these hosts do, in this generation."""
    for name in names:
        world.until(
            lambda name=name: goes_on_bit_for_bit(world[name], generation, least),  # type: ignore[misc]
            f"{name} goes on in generation {generation}",
        )


def protected(world: World, names: str, generation: int = 0) -> int:
    """The newest step that every one of these hosts knows to be protected."""
    return min(world[name].newest("latest", generation) for name in names)


def newest(world: World) -> int:
    """The number of the newest generation."""
    hosts = world.hosts.values()
    return max(one["number"] for host in hosts for one in host.events("generation_entered"))


def rank_of(host: Host) -> int:
    """The process of its newest rank."""
    return int(host.events("rank_started")[-1]["pid"])


def smp_of(host: Host) -> int:
    """The process of its newest SMP."""
    names = ("smp_started", "smp_restarted", "smp_adopted")
    found = [one for name in names for one in host.events(name)]
    return int(max(found, key=lambda one: one["t"])["pid"])
