"""Where a host says that it is, on a machine with a network."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import jaxft.launch.addresses
from bench.apart.network import Network
from bench.apart.world import ROOT
from jaxft.errors import ConfigError
from jaxft.launch.addresses import own_address

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
        made.give_down("a", "spare", "10.78.0.1")
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
        "there is none; there are lo, ": {"interface": "eth7"},
        "--interface spare: it is down": {"interface": "spare"},
        f"--address {'a' * 70}: ": {"address": "a" * 70},
        "does not lead to one host": {"address": "0.0.0.0"},  # noqa: S104
        "--address nobody: ": {"address": "nobody"},
        "use one of them": {"address": "10.77.0.1", "interface": "net"},
    }
    answers = asked(network, *((STORE, said) for said in reasons.values()))
    for answer, reason in zip(answers, reasons, strict=True):
        assert answer.startswith("ConfigError: ")
        assert reason in answer
    unreached, unnamed = asked(network, ("192.0.2.1", {}), ("a" * 70, {}))
    assert unreached.startswith("LaunchError: no way to the store from here (192.0.2.1: ")
    assert unnamed.startswith("LaunchError: no way to the store from here (aaa")


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """From now on the name "many" has these IPv4 addresses."""
    real = socket.getaddrinfo
    places = [(socket.AF_INET, 0, 0, "", (address, 7)) for address in addresses]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *rest, **more: places if name == "many" else real(name, *rest, **more),
    )


def test_of_a_name_with_several_addresses_one_that_serves_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named(monkeypatch, "255.255.255.255", "127.0.0.1")  # there is no way to the first one
    assert own_address([("many", 2379)]) == ""
    named(monkeypatch, "203.0.113.1", "127.0.0.1")  # the first one is not this machine's
    assert own_address([("127.0.0.1", 2379)], address="many") == "127.0.0.1"
    named(monkeypatch, "203.0.113.1", "203.0.113.2")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1 is not an address of this machine"):
        own_address([("127.0.0.1", 2379)], address="many")


def test_an_address_that_others_take_for_one_of_their_own_network_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jaxft.launch.addresses, "_toward", lambda endpoints: "fe80::1%net")
    with pytest.raises(ConfigError, match=r"from fe80::1%net, which .* --address, or --interface"):
        own_address([("fe80::2%net", 2379)])
