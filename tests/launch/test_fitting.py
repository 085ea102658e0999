"""Hosts that cannot be of one job are told so, and a world that is there goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import jaxft.launch.fitting
from jaxft.errors import ConfigError
from jaxft.group.placement import form_groups
from jaxft.group.records import HostRecord, View
from jaxft.group.world import Code, Generation
from jaxft.launch.fitting import Fitting, misfits
from jaxft.launch.options import RunOptions
from tests.launch.local_runs import run

NEAR_PLACE, FAR_PLACE = "ipc:///c,ipc:///b", "tcp://10.0.0.1:1,"


def record(host: str, address: str = NEAR_PLACE, **more: object) -> HostRecord:
    plain = HostRecord(host=host, agent=f"{host}1", arena="", address=address, coordinator="")
    return msgspec.structs.replace(plain, **more)


def view(*hosts: HostRecord, world: tuple[HostRecord, ...] = ()) -> View:
    generation = None
    if world:
        generation = Generation(
            job="j",
            number=1,
            nonce="",
            hosts=tuple(host.member() for host in world),
            groups=form_groups(len(world), Code()),
            code=Code(),
        )
    return View(hosts={host.host: host for host in hosts}, generation=generation)


NEAR, FAR = record("a"), record("b", FAR_PLACE)


def asking(host: str, **options: object) -> HostRecord:
    asked = RunOptions(job="j", host=host, command=("true",), store="", **options)  # type: ignore[arg-type]
    return record(host, asks=asked.asks(), lease_s=asked.lease_s)


def test_hosts_on_one_machine_and_hosts_apart_do_not_mix() -> None:
    wrong = misfits(view(NEAR, FAR))
    assert set(wrong) == {"b"}  # the first one by name is the measure
    assert "host a can only be reached on its own machine" in wrong["b"]
    assert "on host a, name the address" in wrong["b"]
    assert misfits(view(NEAR)) == misfits(view(FAR)) == misfits(view()) == {}


def test_a_world_that_is_there_does_not_end_for_a_newcomer_that_does_not_fit() -> None:
    assert set(misfits(view(NEAR, FAR, world=(NEAR,)))) == {"b"}
    assert set(misfits(view(NEAR, FAR, world=(FAR,)))) == {"a"}
    other = msgspec.structs.replace(NEAR, host="c")
    assert set(misfits(view(NEAR, FAR, other, world=(NEAR,)))) == {"b"}
    again = msgspec.structs.replace(FAR, host="a", agent="a2")
    assert set(misfits(view(again, record("b"), world=(NEAR, record("b"))))) == {"a"}


def test_hosts_with_different_keys_are_told_so() -> None:
    one, two = (record(host, FAR_PLACE, trust=f"{host}{host} encrypted") for host in "ab")
    wrong = misfits(view(one, two, world=(one,)))["b"]
    assert "host a has job key aa encrypted, and host b has bb encrypted" in wrong


def test_hosts_at_addresses_of_two_kinds_are_told_so() -> None:
    one, two = record("a", FAR_PLACE), record("b", "tcp://[fd00::2]:1,")
    wrong = misfits(view(one, two, world=(one,)))
    assert set(wrong) == {"b"}
    assert "host a is at 10.0.0.1, and host b at fd00::2" in wrong["b"]
    assert "an IPv4 address, the other an IPv6 one" in wrong["b"]


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ({"hosts_max": 2}, {"hosts_max": 3}, "with --hosts 1:2, and host b with --hosts 1:3"),
        (
            {"hosts_max": 3, "code": "2+1"},
            {"hosts_max": 3, "code": "1+1"},
            "with --code 2+1, and host b with --code 1+1",
        ),
        ({"lease_s": 5}, {"lease_s": 20}, "with --lease-s 5, and host b with --lease-s 20"),
        (
            {"store_grace_s": 60},
            {"store_grace_s": 300},
            "with --store-grace-s 60, and host b with --store-grace-s 300",
        ),
    ],
)
def test_what_has_to_be_the_same_is(
    one: dict[str, object], two: dict[str, object], words: str
) -> None:
    wrong = misfits(view(asking("a", **one), asking("b", **two)))
    assert set(wrong) == {"b"}
    assert f"host a was started {words}: all hosts of a job need the same" in wrong["b"]


def test_a_code_that_is_named_and_the_default_one_are_the_same() -> None:
    named = asking("b", hosts_max=4, code=str(Code()))
    assert misfits(view(asking("a", hosts_max=4), named)) == {}


def test_starts_of_a_script_that_follow_each_other_may_ask_for_something_else() -> None:
    one, two = asking("a", hosts_max=2), asking("b", hosts_max=3)
    two = msgspec.structs.replace(two, run="2")
    assert misfits(view(msgspec.structs.replace(one, run="1"), two)) == {}
    assert misfits(view(msgspec.structs.replace(one, run="2"), two)) != {}


def test_a_record_that_says_nothing_of_its_options_fits() -> None:
    assert misfits(view(record("a"), asking("b", hosts_max=3))) == {}


@pytest.mark.parametrize("own_lease_s", [1, 5])
def test_a_host_that_does_not_fit_waits_as_long_as_a_run_that_was_killed_may_be_on_record(
    own_lease_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(jaxft.launch.fitting.time, "monotonic", lambda: now_s[0])
    said: list[str] = []
    killed = asking("a", hosts_max=2, lease_s=5)
    mine = asking("b", hosts_max=3, lease_s=own_lease_s)
    both, alone = view(killed, mine), view(mine)
    fitting = Fitting("b", said.append)
    assert fitting.only_those(both) is None
    now_s[0] += 11
    assert fitting.only_those(both) is None
    assert len(said) == 1
    assert "it waits for 12 s" in said[0]
    assert fitting.only_those(alone) == alone
    assert fitting.only_those(both) is None  # another one
    now_s[0] += 13
    with pytest.raises(ConfigError, match="host a was started with --hosts 1:2"):
        fitting.only_those(both)


def test_the_others_decide_as_if_a_host_that_does_not_fit_were_not_there() -> None:
    said: list[str] = []
    member, other = asking("b", hosts_max=2), asking("a", hosts_max=3)
    fitting = Fitting("b", said.append)
    for _ in range(2):
        left = fitting.only_those(view(member, other, world=(member,)))
        assert left is not None
        assert set(left.hosts) == {"b"}
    [words] = said
    assert words.startswith("host a: it takes no part: host b was started with --hosts 1:2")


def test_a_host_that_was_started_otherwise_ends_and_the_world_goes_on(tmp_path: Path) -> None:
    shared = ("--store", str(tmp_path / "store.db"), "--settle-s", "0.2", "--lease-s", "1")
    with run("--host", "b", "--hosts", "1:2", *shared) as world:
        world.running(1, 1)
        other = world.start("--host", "a", "--hosts", "1:3", *shared, command=world.command)
        assert other.wait(60) == 2, world.text()
        wrong = "host b was started with --hosts 1:2, and host a with --hosts 1:3"
        assert f"jaxft: error: {wrong}" in world.errors()
        assert f"jaxft [b] host a: it takes no part: {wrong}" in world.errors()
        # With the same it is taken in.
        again = world.start("--host", "a", "--hosts", "1:2", *shared, command=world.command)
        world.wait("registered", 2, host="a")
        assert {one["number"] for one in world.events("generation_formed")} == {1}
        assert world.finish() == 0, world.text()
        assert again.wait(60) == 0
        world.assert_nothing_left()
