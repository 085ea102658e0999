"""Bytes that change by themselves or are cut off: noticed, rebuilt, and never given to anybody."""

from __future__ import annotations

import os

import msgspec
import pytest

from jaxft.group.manifest import CHUNK
from jaxft.group.messages import Slot
from jaxft.group.world import Code
from jaxft.host import ledger as banks
from jaxft.host import protocol as p
from tests.host.conftest import MakeHosts
from tests.host.test_smp_losses import TWO, XOR, replace
from tests.host.world import Host, World, segments

# Five chunks make three data fragments of two chunks under 3+1, and two of three under 2+2.
CHUNKS = 5


def flip(host: Host, seq: int, offset: int, of: str = "segment") -> None:
    """One bit of the share of the newest snapshot with this number, through the test's mapping."""
    number, slot = find(host, seq)
    start = 0 if of == "segment" else getattr(slot, of).offset
    arena = host.arena(1 + number)
    arena.view(start + offset, 1)[:] ^= 0x10
    arena.close()


def find(host: Host, seq: int) -> tuple[int, Slot]:
    found = [
        (number, slot)
        for number, slot in enumerate(host.ledger().slots)
        if slot.id is not None and slot.id.seq == seq
    ]
    return max(found, key=lambda one: one[1].id)


def two_snapshots(world: World, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Snapshots 0 and 1 are committed; what they hold."""
    old, new = segments(4, seed, CHUNKS), segments(4, seed + 100, CHUNKS)
    assert world.save(0, 0, old).ok
    assert world.save(1, 1, new).ok
    return old, new


@pytest.mark.parametrize("code", [XOR, TWO], ids=str)
def test_a_flipped_byte_of_data_is_rebuilt_case_27(make_hosts, code):
    """Found by the rank in its host's own memory and by the others as they read it."""
    hosts = make_hosts(4)
    number, world = 1, World(hosts, 1, code)
    world.restore()
    for flips in [
        [(1, 10)],
        [(0, 10), (3, 4 * CHUNK + 10)],
        [(2, 10), (2, 3 * CHUNK + 10), (2, 5 * CHUNK + 10)],
    ]:
        _, new = two_snapshots(world, number)
        for place, offset in flips:
            flip(hosts[place], 1, offset)
        number, world = number + 1, World(hosts, number + 1, code)
        plan = world.restore(new)
        assert (plan.step, plan.source) == (1, "rebuilt")
        assert {damage.host for damage in plan.damaged} == {place for place, _ in flips}


def test_more_flipped_bytes_of_a_stripe_than_parity_go_back_a_snapshot_case_27(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    old, _ = two_snapshots(world, 0)
    # Stripe 0 is the first fragment of hosts 1, 2 and 3.
    flip(hosts[1], 1, 10)
    flip(hosts[2], 1, 20)
    plan = World(hosts, 2, XOR).restore(old)
    assert plan.step == 0
    assert "2 fragments of a stripe are damaged" in plan.reasons[0]


@pytest.mark.parametrize("code", [XOR, TWO], ids=str)
def test_a_flipped_byte_of_parity_is_noticed_when_it_is_used_case_27(make_hosts, code):
    hosts = make_hosts(4)
    world = World(hosts, 1, code)
    world.restore()
    old, new = two_snapshots(world, 0)
    replace(make_hosts, hosts, 1)
    if code == TWO:
        replace(make_hosts, hosts, 3)
    for offset in (10, CHUNK + 10):
        flip(hosts[2], 1, offset, "parity")
    world = World(hosts, 2, code)
    # One host lost and one fragment damaged is more than one parity, two and one more than two.
    plan = world.restore(old)
    assert plan.step == 0
    assert "fragments of a stripe are damaged" in plan.reasons[0]
    assert world.save(0, 2, new).ok


def test_a_flipped_byte_of_parity_within_what_two_parities_survive_case_27(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, TWO)
    world.restore()
    _, new = two_snapshots(world, 0)
    replace(make_hosts, hosts, 1)
    for place in (0, 2, 3):
        flip(hosts[place], 1, 10, "parity")
    plan = World(hosts, 2, TWO).restore(new)
    assert (plan.step, plan.source) == (1, "rebuilt")


@pytest.mark.parametrize("blob", ["own", "group"])
def test_a_flipped_byte_of_a_manifest_is_a_lost_share_case_27(make_hosts, blob):
    hosts = make_hosts(4)
    number, world = 1, World(hosts, 1, XOR)
    world.restore()
    for offset in (3, 40):
        _, new = two_snapshots(world, number)
        flip(hosts[2], 1, offset, blob)
        number, world = number + 1, World(hosts, number + 1, XOR)
        plan = world.restore(new)
        assert (plan.step, plan.source) == (1, "rebuilt")
        assert [segment.rebuilt for segment in plan.segments] == [False, False, True, False]
        assert hosts[2].until(p.Announced, kind="slot_damaged")


def test_a_manifest_that_is_damaged_after_the_inventory_is_noticed_too_case_27(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    _, new = two_snapshots(world, 0)
    again = World(hosts, 2, XOR)
    for rank in again.ranks:
        rank.do("plan", 0)
    flip(hosts[2], 1, 40, "own")
    assert again.restore(new).source == "rebuilt"


def test_a_flipped_byte_of_the_ledger_makes_it_new_memory_case_27(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    _, new = two_snapshots(world, 0)
    hosts[2].kill()
    arena = hosts[2].arena(0)
    for bank in (0, banks.BANK_BYTES):
        arena.view(bank + 100, 1)[:] ^= 1
    arena.close()
    before = hosts[2].welcome.arena
    hosts[2].start()
    assert hosts[2].welcome.arena != before
    plan = World(hosts, 2, XOR).restore(new)
    assert plan.source == "rebuilt"


@pytest.mark.parametrize("cut", ["segment", "manifest", "parity"])
def test_a_slot_that_was_cut_short_counts_as_lost_case_28(make_hosts, cut):
    hosts = make_hosts(4)
    world = World(hosts, 1, XOR)
    world.restore()
    _, new = two_snapshots(world, 0)
    number, slot = find(hosts[2], 1)
    length = {"segment": CHUNK, "manifest": slot.own.offset + 8, "parity": slot.parity.offset + 8}
    hosts[2].kill()
    os.ftruncate(hosts[2].fds[1 + number], length[cut])
    hosts[2].start()
    plan = World(hosts, 2, XOR).restore(new)
    assert (plan.step, plan.source) == (1, "rebuilt")


def test_a_ledger_that_names_a_shorter_blob_or_segment_counts_as_lost_case_28(make_hosts):
    hosts = make_hosts(4)
    number, world = 1, World(hosts, 1, XOR)
    world.restore()
    for field in ("own", "group", "length"):
        _, new = two_snapshots(world, number)
        hosts[1].kill()
        cut_short(hosts[1], field)
        hosts[1].start()
        number, world = number + 1, World(hosts, number + 1, XOR)
        plan = world.restore(new)
        assert (plan.step, plan.source) == (1, "rebuilt")


def cut_short(host: Host, field: str) -> None:
    number, slot = find(host, 1)
    value = getattr(slot, field)
    if field == "length":
        less = value - 1
    else:
        less = msgspec.structs.replace(value, length=value.length - 1)
    ledger = host.ledger()
    slots = list(ledger.slots)
    slots[number] = msgspec.structs.replace(slot, **{field: less})
    arena = host.arena(0)
    changed = msgspec.structs.replace(ledger, slots=(slots[0], slots[1]))
    banks.Ledger(arena).write(msgspec.msgpack.encode(changed))
    arena.close()


def test_a_byte_that_is_flipped_before_it_is_coded_aborts_the_snapshot_case_27(
    make_hosts: MakeHosts, tmp_path
):
    go_on = tmp_path / "go-on"
    hosts = make_hosts(4, faults=f"smp.coding:seq=1=wait:{go_on}")
    world = World(hosts, 1, Code(data=3, parity=1))
    world.restore()
    kept, new = segments(4, 0, CHUNKS), segments(4, 1, CHUNKS)
    assert world.save(0, 0, kept).ok
    world.begin(1, 1, new)
    world.put()
    world.all("staged", 1)
    flip(hosts[1], 1, 10)
    go_on.touch()
    outcome = world.outcome(1)
    assert "fragments on h1 do not have their checksums" in outcome.reason
    assert World(hosts, 2, Code(data=3, parity=1)).restore(kept).step == 0
