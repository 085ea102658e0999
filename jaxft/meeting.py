"""How processes meet in `jax.distributed`: at the coordinator's, as soon as it listens.

JAX's client tries at once, and if nobody listens yet it sleeps a second before it tries again.
Ranks that are started at the same time find that about every other time, and a second is a third of
what it takes to be training again. So whoever is not the first looks every LOOK_S whether the
coordinator listens, and JAX's client begins when it does.
"""

from __future__ import annotations

import functools
import socket
import time

import jax
from jax._src import xla_bridge

HEARTBEAT_S = 100
LEAVE_S = 300
LOOK_S = 0.01
# A host that is not there answers nothing: so long for one look.
ANSWER_S = 1.0


def meet(
    coordinator: str,
    ranks: int,
    rank: int,
    *,
    address: str = "",
    timeout_s: int,
    leave_timeout_s: int = LEAVE_S,
) -> None:
    """Joins `jax.distributed`; returns when all have come.

    Args:
        coordinator: HOST:PORT, at which the first rank listens and nowhere else.
        ranks, rank: how many there are, and which this is.
        address: this host's, for Gloo ("": what the host's name resolves to).
        timeout_s: how long to wait for the others.
        leave_timeout_s: how long whoever ends waits for the others' ends.

    Raises:
        RuntimeError: JAX's, when not all have come in time.
    """
    gloo_listens_at(address)
    began_s = time.monotonic()
    if rank:
        wait_until_listening(coordinator, timeout_s)
    left_s = timeout_s - (time.monotonic() - began_s)
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=ranks,
        process_id=rank,
        coordinator_bind_address=coordinator,  # JAX would listen on every interface
        initialization_timeout=max(1, round(left_s)),
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=leave_timeout_s,
    )


def wait_until_listening(address: str, timeout_s: float) -> bool:
    """Did somebody listen at HOST:PORT in time? (If not, JAX's own error says it better.)"""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except OSError:
            time.sleep(LOOK_S)
        else:
            return True
    return False


def gloo_listens_at(address: str) -> None:
    """Tells Gloo, by which CPU devices of several hosts talk, where this host is ("": nothing).

    It listens at what the host's own name resolves to, which on many machines is 127.0.1.1, and JAX
    has no option for it. Should its own call for this be gone, the host's name decides again.
    """
    xla = getattr(xla_bridge, "_jax", None)
    make = getattr(xla, "make_gloo_tcp_collectives", None)
    if address and xla is not None and make is not None:
        xla.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
