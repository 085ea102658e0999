"""What could be lost and still be rebuilt, against the rules of restoring themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.group.exposure import Exposure, expose
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Ledger, Lineage, Slot
from jaxft.group.placement import form_groups
from jaxft.group.recovery import Holder, choose
from jaxft.group.world import Code, World

OLD, NEW = SnapshotId(1, 4, "n"), SnapshotId(1, 5, "n")
# Of each host, the states of its shares of OLD and NEW; "" holds none.
States = Mapping[str, tuple[str, str]]


def world_of(count: int, code: str) -> World:
    names = tuple(f"h{index}" for index in range(count))
    return World(names, form_groups(count, Code.parse(code)))


def holders(world: World, states: States, base: SnapshotId | None = None) -> list[Holder]:
    """Hosts that know OLD, or `base` if that is newer, to be committed."""

    def slot(host: str, identity: SnapshotId, state: str) -> Slot:
        if not state:
            return Slot()
        place = world.hosts.index(host)
        return Slot(state=state, id=identity, step=identity.seq * 10, host=place, world=world)

    return [
        Holder(
            host,
            host,
            Ledger(
                arena=host,
                generation=2,
                slots=(slot(host, OLD, old), slot(host, NEW, new)),
                committed=base or OLD,
                lineage=(Lineage(2, base),) if base is not None else (),
            ),
        )
        for host, (old, new) in states.items()
    ]


def all_coded(world: World, lost: Collection[str] = ()) -> States:
    return {host: ("coded", "") for host in world.hosts if host not in lost}


def more(exposure: Exposure) -> list[int]:
    return [group.more for group in exposure.groups]


def test_a_whole_world_can_lose_its_parity_in_every_group() -> None:
    world = world_of(8, "3+1")
    found = expose(holders(world, all_coded(world)))
    assert (found.snapshot, found.step, found.lost, found.reasons) == (OLD, 40, None, ())
    assert more(found) == [1, 1]
    assert found.fatal == ()


def test_a_group_that_has_lost_its_parity_names_who_must_not_go() -> None:
    world = world_of(8, "3+1")
    found = expose(holders(world, all_coded(world, lost=["h2"])))
    hurt, whole = found.groups
    assert (hurt.hosts, hurt.missing, hurt.more) == (("h0", "h2", "h4", "h6"), ("h2",), 0)
    assert (whole.missing, whole.more) == ((), 1)
    assert found.fatal == ("h0", "h4", "h6")


def test_without_parity_every_host_is_needed() -> None:
    world = world_of(1, "3+1")
    found = expose(holders(world, all_coded(world)))
    assert (more(found), found.fatal) == ([0], ("h0",))


def test_more_is_lost_than_can_be_rebuilt() -> None:
    world = world_of(4, "3+1")
    found = expose(holders(world, all_coded(world, lost=["h1", "h2"])))
    assert (found.snapshot, found.newest, found.lost) == (None, OLD, OLD)
    [reason] = found.reasons
    assert "2 shares are missing (h1, h2), its parity is 1" in reason


def test_what_the_store_knows_and_memory_has_not_is_lost_and_the_rest_is_judged() -> None:
    world = world_of(4, "3+1")
    newer = SnapshotId(1, 9, "n")
    found = expose(holders(world, all_coded(world)), expected=newer, expected_step=90)
    assert (found.snapshot, found.newest, found.lost) == (OLD, newer, newer)
    assert found.reasons == ("snapshot 1.9 of step 90: no host holds its segment whole",)
    assert more(found) == [1]


def test_nothing_is_there() -> None:
    assert expose([]) == Exposure()
    assert expose(holders(world_of(2, "1+1"), {"h0": ("", "")}, None)).snapshot is None


def test_a_snapshot_that_is_being_coded_is_passed_over() -> None:
    """It could be finished, but not after a loss: the one before is what counts."""
    world = world_of(4, "3+1")
    states = {host: ("coded", "staged" if host < "h2" else "coded") for host in world.hosts}
    found = expose(holders(world, states))
    assert (found.snapshot, more(found), found.fatal) == (OLD, [1], ())


def test_the_first_one_counts_while_it_is_coded_and_no_loss_is_survived() -> None:
    world = world_of(4, "3+1")
    found = expose(holders(world, dict.fromkeys(world.hosts, ("", "staged"))))
    assert (found.snapshot, more(found), found.fatal) == (NEW, [0], world.hosts)


def test_a_base_that_was_half_coded_survives_as_much_as_is_coded() -> None:
    """What a generation has gone on from: shares that are not coded count as missing then."""
    world = world_of(4, "2+2")
    states = {host: ("", "staged" if host == "h0" else "coded") for host in world.hosts}
    found = expose(holders(world, states, base=NEW))
    assert (found.snapshot, more(found), found.fatal) == (NEW, [1], ())


SHARES = st.sampled_from(["coded", "coded", "coded", "staged", ""])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_as_many_more_as_it_says_can_be_lost_and_no_more(data: st.DataObject) -> None:
    """In each group alone, whoever of it goes, by the rules of restoring."""
    world = world_of(data.draw(st.integers(1, 6)), data.draw(st.sampled_from(["2+1", "2+2"])))
    base = data.draw(st.sampled_from([None, NEW]))
    states = {host: ("coded", data.draw(SHARES)) for host in world.hosts}
    there = holders(world, states, base)
    found = expose(there)
    now = choose(there, attempt=0)
    if found.snapshot is None:
        assert now.chosen is None
        return
    assert now.chosen is not None
    assert now.chosen >= found.snapshot

    def kept(lost: Collection[str]) -> bool:
        left = choose([one for one in there if one.name not in lost], attempt=0).chosen
        return left is not None and found.snapshot is not None and left >= found.snapshot

    assert found.fatal == tuple(host for host in world.hosts if not kept([host]))
    for group in found.groups:
        living = [host for host in group.hosts if host not in group.missing]
        assert all(kept(lost) for lost in combinations(living, group.more))
        if group.more < len(living):
            assert not all(kept(lost) for lost in combinations(living, group.more + 1))
