"""How much of everything is measured."""

from __future__ import annotations

import msgspec

MIB = 1 << 20
GIB = 1 << 30


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are what two cores and 24 GiB can hold, in half an hour or so.

    Attributes:
        state_bytes: the state of one host with four devices.
        host_bytes: a host's share of a state that four hosts hold.
        small_host_bytes: the same where there are many hosts, or many snapshots.
        codec_bytes: what is coded at once.
        leaf_count: leaves of the tree of small leaves.
        leaf_rounds: how often Orbax saves that tree, which takes it most of a minute.
        hosts: worlds of how many hosts.
        rounds: how often a figure and its peers are taken in turn.
        saves: calls of `save` that the stall is taken from.
        slow_rounds: the same where a round takes many seconds.
        memory_saves: snapshots over which memory has to stay flat.
        train_steps: steps of a training run.
        idle_s: how long nothing is done.
        twin_leaves: leaves of the states whose twins are compiled.
        recoveries: the ways of `bench.recovery` that are measured.
    """

    state_bytes: int = GIB
    host_bytes: int = 256 * MIB
    small_host_bytes: int = 64 * MIB
    codec_bytes: tuple[int, ...] = (64 * MIB, GIB)
    leaf_count: int = 10_000
    leaf_rounds: int = 2
    hosts: tuple[int, ...] = (2, 4, 8, 16)
    rounds: int = 5
    saves: int = 50
    slow_rounds: int = 3
    memory_saves: int = 200
    train_steps: int = 12
    idle_s: float = 20.0
    twin_leaves: tuple[int, ...] = (200, 1000, 3000)
    recoveries: tuple[str, ...] = ("rank", "warm", "wrapped", "spare", "shrink", "restore")


# Small enough for a test of the program itself. What comes out says nothing about speed.
QUICK = Sizes(
    state_bytes=8 * MIB,
    host_bytes=4 * MIB,
    small_host_bytes=2 * MIB,
    codec_bytes=(MIB,),
    leaf_count=200,
    leaf_rounds=1,
    hosts=(2,),
    rounds=2,
    saves=4,
    slow_rounds=1,
    memory_saves=12,
    train_steps=3,
    idle_s=0.3,
    twin_leaves=(13,),
    recoveries=("rank",),
)
