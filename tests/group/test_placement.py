"""Groups for every world, and the geometry of coded lanes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.errors import CodecError, ConfigError
from jaxft.group.manifest import CHUNK
from jaxft.group.placement import Crowded, LaneGeometry, clip, crowded_domains, form_groups
from jaxft.group.world import DATA_MAX, PARITY_MAX, Code, Group

CODES = [Code(data=k, parity=m) for k in range(1, DATA_MAX + 1) for m in range(PARITY_MAX + 1)]
GEOMETRIES = [(k + m, m) for k in range(1, DATA_MAX + 1) for m in range(PARITY_MAX + 1)]


@pytest.mark.parametrize("code", CODES, ids=str)
def test_groups_of_every_world(code: Code) -> None:
    for count in range(1, 65):
        groups = form_groups(count, code)
        sizes = [len(group.hosts) for group in groups]
        assert sorted(host for group in groups for host in group.hosts) == list(range(count))
        assert all(list(group.hosts) == sorted(group.hosts) for group in groups)
        assert len(groups) == max(1, min(-(-count // code.hosts), count // (code.parity + 1)))
        assert max(sizes) - min(sizes) <= 1
        for group in groups:
            assert group.parity == min(code.parity, len(group.hosts) - 1)
            LaneGeometry.of(group, 1)  # every group has a code that is supported
        if count > code.parity:
            assert {group.parity for group in groups} == {code.parity}
        assert form_groups(count, code) == groups


def test_a_lone_host_has_no_parity() -> None:
    assert form_groups(1, Code(data=3, parity=1)) == (Group((0,), 0),)


def test_a_code_without_parity_forms_groups_without_parity() -> None:
    groups = form_groups(6, Code(data=4, parity=0))
    assert [len(group.hosts) for group in groups] == [3, 3]
    assert {group.parity for group in groups} == {0}


def test_neighbours_are_dealt_to_different_groups() -> None:
    assert form_groups(6, Code(data=2, parity=1)) == (Group((0, 2, 4), 1), Group((1, 3, 5), 1))


@given(
    code=st.sampled_from(CODES),
    domains=st.lists(st.sampled_from(["", "a", "b", "c", "d", "e"]), min_size=1, max_size=48),
)
@settings(deadline=None)
def test_domains_are_spread_as_far_as_numbers_allow(code: Code, domains: list[str]) -> None:
    groups = form_groups(len(domains), code, domains)
    assert sorted(host for group in groups for host in group.hosts) == list(range(len(domains)))
    sizes = [len(group.hosts) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    total = Counter(domain for domain in domains if domain)
    for group in groups:
        held = Counter(domains[host] for host in group.hosts if domains[host])
        for domain, count in held.items():
            assert count <= -(-total[domain] // len(groups))
            if total[domain] <= group.parity * len(groups):
                assert count <= group.parity
    assert crowded_domains(groups, domains) == tuple(
        Crowded(number, domain, tuple(h for h in group.hosts if domains[h] == domain))
        for number, group in enumerate(groups)
        for domain in dict.fromkeys(domains[host] for host in group.hosts)
        if domain and group.parity and sum(domains[h] == domain for h in group.hosts) > group.parity
    )


def test_crowded_domains_names_group_domain_and_hosts() -> None:
    code = Code(data=3, parity=1)
    racks = ("r1", "r1", "r2", "r3")
    assert crowded_domains(form_groups(4, code, racks), racks) == (Crowded(0, "r1", (0, 1)),)
    assert crowded_domains(form_groups(4, code), ()) == ()
    pairs = ("r1", "r1", "r2", "r2", "r3", "r3", "r4", "r4")
    groups = form_groups(8, code, pairs)
    assert groups == (Group((0, 2, 4, 6), 1), Group((1, 3, 5, 7), 1))
    assert crowded_domains(groups, pairs) == ()


def test_hosts_without_parity_are_not_called_crowded() -> None:
    racks = ("r1", "r1")
    assert crowded_domains(form_groups(2, Code(data=2, parity=0), racks), racks) == ()


@pytest.mark.parametrize("count", [0, -1])
def test_a_world_without_hosts_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="at least one host"):
        form_groups(count, Code())


def test_one_domain_a_host_is_needed() -> None:
    with pytest.raises(ConfigError, match="3 hosts need 3 failure domains, found 2"):
        form_groups(3, Code(), ("a", "b"))


# Lanes


@pytest.mark.parametrize(("n", "m"), GEOMETRIES)
def test_each_member_holds_one_fragment_of_each_stripe(n: int, m: int) -> None:
    lane = LaneGeometry(n, m, 5 * CHUNK)
    assert lane.k == n - m
    for stripe in range(n):
        assert lane.parity_holders(stripe) == tuple((stripe + j) % n for j in range(m))
        assert lane.data_holders(stripe) == tuple((stripe + m + i) % n for i in range(n - m))
        held = lane.data_holders(stripe) + lane.parity_holders(stripe)
        assert sorted(held) == list(range(n))
        for fragment, member in enumerate(held):
            assert lane.holder(stripe, fragment) == member
            assert lane.fragment_of(member, stripe) == fragment


@pytest.mark.parametrize(("n", "m"), GEOMETRIES)
@pytest.mark.parametrize("length", [0, 1, CHUNK, 7 * CHUNK + 13])
def test_data_and_parity_tile_what_a_member_stores(n: int, m: int, length: int) -> None:
    lane = LaneGeometry(n, m, length)
    size = lane.fragment_bytes
    assert size % CHUNK == 0
    assert size * lane.k >= length
    assert size - CHUNK < -(-length // lane.k) <= size
    assert lane.parity_bytes == m * size
    for member in range(n):
        stripes = lane.stripes_of_data(member)
        assert list(stripes) == sorted(stripes)
        assert [lane.data_range(member, s) for s in stripes] == [
            (f * size, size) for f in range(lane.k)
        ]
        assert all(member in lane.data_holders(s) for s in stripes)
        parity = lane.stripes_of_parity(member)
        assert [j for _, j in parity] == list(range(m))
        assert all(lane.parity_holders(s)[j] == member for s, j in parity)
        assert [lane.parity_range(member, s) for s, _ in parity] == [
            (j * size, size) for j in range(m)
        ]
        assert sorted(stripes + tuple(s for s, _ in parity)) == list(range(n))


def test_the_table_in_the_module_docstring() -> None:
    lane = LaneGeometry(4, 1, CHUNK)
    table = [[lane.fragment_of(member, stripe) for member in range(4)] for stripe in range(4)]
    assert table == [[3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0], [0, 1, 2, 3]]


def test_a_range_of_the_wrong_kind_is_refused() -> None:
    lane = LaneGeometry(4, 1, CHUNK)
    with pytest.raises(CodecError, match="member 0 of 4 holds no data of stripe 0"):
        lane.data_range(0, 0)
    with pytest.raises(CodecError, match="member 1 of 4 holds no parity of stripe 0"):
        lane.parity_range(1, 0)


def test_clipping_leaves_what_is_really_there() -> None:
    lane = LaneGeometry(4, 1, 3 * CHUNK)
    own = CHUNK + 5
    spans = [clip(lane.data_range(0, stripe), own) for stripe in lane.stripes_of_data(0)]
    assert spans == [(0, CHUNK), (CHUNK, 5), (2 * CHUNK, 0)]


@given(
    geometry=st.sampled_from(GEOMETRIES),
    length=st.integers(0, 64 * CHUNK),
    share=st.floats(0, 1),
    member=st.integers(0, 19),
)
@settings(deadline=None)
def test_clipped_fragments_tile_the_members_own_bytes(
    geometry: tuple[int, int], length: int, share: float, member: int
) -> None:
    n, m = geometry
    member %= n
    own = int(length * share)
    lane = LaneGeometry(n, m, length)
    end = 0
    for stripe in lane.stripes_of_data(member):
        offset, size = clip(lane.data_range(member, stripe), own)
        if size:
            assert offset == end
            end += size
    assert end == own


@pytest.mark.parametrize(("n", "m"), [(4, 1), (5, 2), (3, 0), (1, 0), (6, 4)])
def test_sources_are_k_fragments_data_first(n: int, m: int) -> None:
    lane = LaneGeometry(n, m, CHUNK)
    for count in range(n + 1):
        for lost in itertools.combinations(range(n), count):
            for stripe in range(n):
                missing = lane.missing(stripe, lost)
                assert {lane.holder(stripe, fragment) for fragment in missing} == set(lost)
                found = lane.sources(missing)
                if count > m:
                    assert found is None
                    continue
                assert found is not None
                assert len(found) == lane.k
                assert not missing & set(found)
                assert list(found) == sorted(found)
                data_left = [i for i in range(lane.k) if i not in missing]
                assert list(found[: len(data_left)]) == data_left


@pytest.mark.parametrize(("n", "m"), [(0, 0), (1, 1), (2, 2), (6, 5), (18, 1), (17, 0), (3, -1)])
def test_a_group_without_a_code_is_refused(n: int, m: int) -> None:
    with pytest.raises(CodecError, match=f"a group of {n} with {m} parity has no code"):
        LaneGeometry(n, m, 0)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(CodecError, match="-1 bytes"):
        LaneGeometry(2, 1, -1)
