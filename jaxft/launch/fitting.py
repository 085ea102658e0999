"""Which hosts can take part in a job together: they reach each other, and were started with what
has to be the same on all.

Rules
- Who fits is measured by one host: the first member of the newest world that is there, since a
  world does not end for a newcomer. Before there is a world it is the first one by name.
- A member whose agent was started again is a newcomer.
- Others decide as if a host that does not fit were not there.
- A record of a run that was killed stays until its lease lapses, and that run may have been started
  otherwise, with a longer lease too. So a host that does not fit waits for as long as any of the
  records may stay before it gives up, and takes part in nothing meanwhile.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

import msgspec

from jaxft.errors import ConfigError
from jaxft.group.records import HostRecord, View
from jaxft.launch.addresses import REMEDY


class Fitting:
    """One agent's look at who fits.

    Args:
        host: its host's name.
        say: tells a person.
    """

    def __init__(self, host: str, say: Callable[[str], None]) -> None:
        self._host = host
        self._say = say
        self._said: dict[str, str] = {}
        self._since_s: float | None = None

    def only_those(self, view: View) -> View | None:
        """The view without the hosts that do not fit; None while this host is one of them.

        Args:
            view: what is in the store.

        Raises:
            ConfigError: this host does not fit, and the others are there to stay.
        """
        wrong = misfits(view)
        mine = wrong.get(self._host)
        if mine is None:
            self._since_s = None
            self._tell({host: f"it takes no part: {why}" for host, why in wrong.items()})
            hosts = {host: one for host, one in view.hosts.items() if host not in wrong}
            return msgspec.structs.replace(view, hosts=hosts) if wrong else view
        patience_s = max(one.lapse_s for one in view.hosts.values())
        if self._since_s is None:
            self._since_s = time.monotonic()
            self._say(
                f"host {self._host}: {mine}. In case that is of a run that has ended, it waits "
                f"for {patience_s:.0f} s"
            )
        if time.monotonic() >= self._since_s + patience_s:
            raise ConfigError(mine)
        return None

    def _tell(self, words: dict[str, str]) -> None:
        """Says of each of these hosts what has not been said."""
        for host, text in words.items():
            if self._said.get(host) != text:
                self._say(f"host {host}: {text}")
        self._said = words


def misfits(view: View) -> dict[str, str]:
    """The hosts that cannot take part, and why.

    Args:
        view: what is in the store.
    """
    if not view.hosts:
        return {}
    world = () if view.generation is None else view.generation.hosts
    there = {record.agent: record for record in view.hosts.values()}
    members = [there[one.agent] for one in world if one.agent in there]
    measure = members[0] if members else view.hosts[min(view.hosts)]
    newcomers = [one for one in view.hosts.values() if one not in members]
    return {one.host: why for one in newcomers if (why := _differs(one, measure))}


def _differs(one: HostRecord, measure: HostRecord) -> str:
    return _apart(one, measure) or _asks_else(one, measure)


def _apart(one: HostRecord, measure: HostRecord) -> str:
    """Why they could not talk to each other."""
    if measure.address.partition(":")[0] != one.address.partition(":")[0]:
        local, far = (one, measure) if one.address.startswith("ipc") else (measure, one)
        return (
            f"host {local.host} can only be reached on its own machine (it finds the store at "
            f"a loopback address), and host {far.host} is at {far.address}: on host "
            f"{local.host}, {REMEDY}"
        )
    ours, theirs = one.member().ip, measure.member().ip
    if ours and theirs and _version(ours) != _version(theirs):
        return (
            f"host {measure.host} is at {theirs}, and host {one.host} at {ours}: one is an "
            f"IPv{_version(theirs)} address, the other an IPv{_version(ours)} one, and hosts only "
            f"reach each other by one kind: {REMEDY}"
        )
    if measure.trust != one.trust:
        return (
            f"host {measure.host} has job key {measure.trust}, and host {one.host} has "
            f"{one.trust}: all hosts need the same key (--job-key-file, JAXFT_JOB_KEY, or none of "
            "these, for the one in the store), and --trust-network on all or on none"
        )
    return ""


def _asks_else(one: HostRecord, measure: HostRecord) -> str:
    """Which option they were started with that has to be the same, and is not. Crews of two starts
    of a script meet where the one follows the other, and are not of one world."""
    if one.run != measure.run:
        return ""
    wanted = dict(measure.asks)
    for option, value in one.asks:
        if wanted.get(option, value) != value:
            return (
                f"host {measure.host} was started with {option} {wanted[option]}, and host "
                f"{one.host} with {option} {value}: all hosts of a job need the same (to change "
                "it, end the job on all of them first)"
            )
    return ""


def _version(ip: str) -> int:
    return ipaddress.ip_address(ip).version
