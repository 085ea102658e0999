"""Where a host says that it is, on a machine with a network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxft.group.placement import form_groups
from jaxft.group.records import HostRecord, View
from jaxft.group.world import Code, Generation
from jaxft.launch.addresses import misfit
from tests.apart.network import Network
from tests.apart.world import ROOT

# Answers questions of a host's own address, in the host's place.
ASK = """
import json, sys
from jaxft.errors import JaxftError
from jaxft.launch.addresses import own_address
answers = []
for endpoint, said in json.loads(sys.argv[1]):
    try:
        answers.append(own_address([(endpoint, 2379)], **said))
    except JaxftError as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""
STORE = "10.77.0.2"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network("a", "store") as made:
        made.give("a", "fd77::1")
        yield made


def asked(network: Network, *questions: tuple[str, dict[str, Any]]) -> list[str]:
    command = [*network.enter("a"), sys.executable, "-c", ASK, json.dumps(questions)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return list(json.loads(ran.stdout))


def test_a_host_says_where_others_reach_it(network: Network) -> None:
    answers = asked(
        network,
        (STORE, {}),
        ("store", {}),
        ("a", {}),
        ("127.0.0.1", {}),
        ("localhost", {}),
        (STORE, {"address": "10.77.0.1"}),
        ("127.0.0.1", {"address": "10.77.0.1"}),
        ("127.0.0.1", {"address": "127.0.0.1"}),
        (STORE, {"interface": "net"}),
        (STORE, {"address": "fd77::1"}),
        ("fd77::2", {}),
    )
    own = "10.77.0.1"
    assert answers == [own, own, "", "", "", own, own, "127.0.0.1", own, "fd77::1", "fd77::1"]


def test_what_is_no_address_of_this_host_that_others_reach_is_refused(network: Network) -> None:
    reasons = {
        "is not an address of this machine": {"address": STORE},
        "is a loopback address, where nobody else": {"address": "127.0.0.1"},
        "--address a: 127.0.1.1 is a loopback address": {"address": "a"},
        "--interface lo: 127.0.0.1 is a loopback address": {"interface": "lo"},
        "there is none; there are lo, net": {"interface": "eth7"},
        "does not lead to one host": {"address": "0.0.0.0"},  # noqa: S104
        "--address nobody: ": {"address": "nobody"},
        "use one of them": {"address": "10.77.0.1", "interface": "net"},
    }
    answers = asked(network, *((STORE, said) for said in reasons.values()))
    for answer, reason in zip(answers, reasons, strict=True):
        assert answer.startswith("ConfigError: ")
        assert reason in answer
    (unreached,) = asked(network, ("192.0.2.1", {}))
    assert unreached.startswith("LaunchError: no way to the store from here (192.0.2.1: ")


def record(host: str, address: str, trust: str = "") -> HostRecord:
    return HostRecord(host=host, agent="", arena="", address=address, coordinator="", trust=trust)


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


NEAR, FAR = record("a", "ipc:///c,ipc:///b"), record("b", "tcp://10.0.0.1:1,")


def test_hosts_on_one_machine_and_hosts_apart_do_not_mix() -> None:
    for own in ("a", "b"):
        wrong = misfit(own, view(NEAR, FAR))
        assert "host a can only be reached on its own machine" in wrong
        assert "on host a, name the address" in wrong
    assert misfit("a", view(NEAR)) == misfit("b", view(FAR)) == misfit("c", view(NEAR)) == ""


def test_a_world_that_is_there_does_not_end_for_a_newcomer_that_does_not_fit() -> None:
    assert misfit("a", view(NEAR, FAR, world=(NEAR,))) == ""
    assert misfit("b", view(NEAR, FAR, world=(NEAR,))) != ""
    other = msgspec.structs.replace(NEAR, host="c")
    assert misfit("c", view(NEAR, FAR, other, world=(NEAR,))) == ""


def test_hosts_with_different_keys_are_told_so() -> None:
    one, two = (record(host, "tcp://10.0.0.1:1,", f"{host}{host} encrypted") for host in "ab")
    wrong = misfit("b", view(one, two, world=(one,)))
    assert "host a has job key aa encrypted, and this host, b, has bb encrypted" in wrong
