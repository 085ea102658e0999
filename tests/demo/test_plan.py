"""The plan of failures: what is read, what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest

from jaxft.demo.plan import DemoOptions, Failure, exceeds_parity, parse_failures, plan_demo
from jaxft.errors import ConfigError
from jaxft.group.world import Code


def _parse(*texts: str, hosts: int = 4, code: str = "3+1", **given: int) -> tuple[Failure, ...]:
    steps, every = given.get("steps", 30), given.get("every", 2)
    return parse_failures(texts, hosts=hosts, code=Code.parse(code), steps=steps, every=every)


def _plan(**given: Any) -> DemoOptions:
    asked: dict[str, Any] = {
        "hosts": 4,
        "code": "3+1",
        "steps": 30,
        "every": 2,
        "seed": 0,
        "elastic": False,
        "fallback": False,
        "fail": [],
    }
    return plan_demo(**(asked | given))


def test_by_default_a_rank_and_then_a_host_just_before_a_snapshot_is_due() -> None:
    rank, host = _parse()
    assert (rank.kind, rank.at_step, rank.hosts) == ("rank", 9, ("host1",))
    assert (host.kind, host.at_step, host.hosts) == ("host", 19, ("host2",))
    assert [failure.at_step % 5 for failure in _parse(every=5)] == [4, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank@7", ("rank", 7, ("host1",))),
        ("smp@7:host0", ("smp", 7, ("host0",))),
        ("agent@1", ("agent", 1, ("host2",))),
        ("host@29:host3", ("host", 29, ("host3",))),
        ("hosts:2@10", ("hosts", 10, ("host2", "host3"))),
        ("hosts:3@10:host3", ("hosts", 10, ("host3", "host0", "host1"))),
    ],
)
def test_a_failure_is_read(text: str, expected: tuple[str, int, tuple[str, ...]]) -> None:
    (failure,) = _parse(text)
    assert (failure.kind, failure.at_step, failure.hosts) == expected


def test_failures_come_in_the_order_of_their_steps() -> None:
    assert [f.kind for f in _parse("host@20", "smp@5", "rank")] == ["smp", "host", "rank"]


def test_several_hosts_are_of_one_group() -> None:
    (failure,) = _parse("hosts:2@10:host1", hosts=8)
    assert failure.hosts == ("host1", "host3")


def test_none_is_no_failure() -> None:
    assert _parse("none") == ()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["disk@3"], "none, rank, smp, agent, host, hosts"),
        (["rank@"], "not of the form"),
        (["rank@3:4"], "not of the form"),
        (["hosts@3"], "needs a count"),
        (["rank:2@3"], "needs a count"),
        (["hosts:5@3"], "has 4 hosts; choose 1 to 4"),
        (["hosts:0@3"], "choose 1 to 4"),
        (["rank@30"], "after step 1 to 29"),
        (["rank@0"], "after step 1 to 29"),
        (["rank@3:host4"], "there is no host4, the last is host3"),
        (["rank@3", "host@3"], "the same step"),
        (["none", "rank"], "give it alone"),
    ],
)
def test_what_cannot_be_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _parse(*texts)


def test_only_losing_more_hosts_than_the_parity_needs_storage() -> None:
    def needs(text: str, code: str) -> bool:
        (failure,) = _parse(text, code=code)
        return exceeds_parity(failure, hosts=4, code=Code.parse(code))

    assert needs("hosts:2@10", "3+1")
    assert not needs("hosts:2@10", "2+2")
    assert not needs("host@10", "3+1")
    assert not needs("rank@10", "3+1")
    assert not needs("agent@10", "3+1")


def test_storage_is_used_only_where_a_failure_needs_it_or_it_is_wanted() -> None:
    assert not _plan().fallback
    assert _plan(fallback=True).fallback
    beyond = _plan(fail=["hosts:2@15"])
    assert beyond.fallback
    assert beyond.pause_step == 1
    assert _plan(fallback=True).pause_step is None
    assert not _plan(fail=["hosts:2@15"], code="2+2").fallback


def test_an_elastic_world_may_shrink_by_the_hosts_that_fail() -> None:
    assert _plan(elastic=True).hosts_min == 3
    assert _plan(elastic=True, fail=["hosts:2@9", "rank@12"], code="2+2").hosts_min == 2
    assert _plan().hosts_min == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hosts": 0}, "1 to 16 hosts"),
        ({"hosts": 1}, "--code 3[+]0"),
        ({"steps": 1}, "at least 2 steps"),
        ({"every": 0}, "between snapshots"),
        ({"code": "three"}, "K[+]M"),
        ({"fail": ["hosts:2@5"]}, "strike at step 6"),
        ({"fail": ["hosts:2@9", "rank@3"]}, "strike at step 6"),
        ({"elastic": True, "fail": ["hosts:4@9"]}, "leave no host"),
    ],
)
def test_options_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(**given)
