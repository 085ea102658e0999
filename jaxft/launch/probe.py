"""Does anybody listen at the address of an SMP? All that is asked of a host without an agent."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from jaxft.group.world import Member

PROBE_S = 0.3


def answering(members: Iterable[Member]) -> dict[str, bool]:
    """For each host's name, whether its SMP's control address takes a connection."""
    return {member.host: listens(member.address.partition(",")[0]) for member in members}


def listens(address: str) -> bool:
    """Whether a connection to `tcp://HOST:PORT` or `ipc://PATH` is taken within PROBE_S."""
    scheme, _, rest = address.partition("://")
    with contextlib.ExitStack() as stack:
        try:
            if scheme == "ipc":
                probe = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                probe.settimeout(PROBE_S)
                probe.connect(rest)
            else:
                host, _, port = rest.rpartition(":")
                target = (host.strip("[]"), int(port))
                stack.enter_context(socket.create_connection(target, PROBE_S))
        except (OSError, ValueError):
            return False
        return True
