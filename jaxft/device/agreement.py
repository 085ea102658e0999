"""Agreement: whether all processes of the world say yes to the same question.

A step and its twin are different programs with collectives in them: if one process ran the one and
another the other, both would hang. What each knows of snapshots comes over the network at its own
time, so before the twin is run they ask each other, over `jax.distributed`'s own service. Its
barriers end the same way for all: whoever comes too late hears that it has failed.
"""

from __future__ import annotations

import logging
from typing import Any

import jax

_log = logging.getLogger(__name__)

# The service keeps about a kilobyte of each barrier for ever, so their names come again. One that
# has failed may fail once more under its name, for all, until its count is the same everywhere.
BARRIERS = 64


class Agreement:
    """Questions to all processes.

    Args:
        name: what keeps these questions apart from others'.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def all_say(self, question: str, number: int, yes: bool, timeout_s: float) -> bool:
        """Asks, and waits for the others' answers.

        Args:
            question: the same on all processes.
            number: likewise, and each time another one.
            yes: what this process says.
            timeout_s: whoever has not answered by then says no.

        Raises:
            RuntimeError: all have answered, and this process cannot hear what.
        """
        if jax.process_count() == 1:
            return yes
        client = coordination_service()
        if client is None:
            return False
        name = f"jaxft/{self._name}/{question}"
        place = f"{name}/{number}"
        try:
            if not yes:
                client.key_value_set(f"{place}/no/{jax.process_index()}", "no")
            client.wait_at_barrier(f"{name}/all/{number % BARRIERS}", int(1000 * timeout_s))
        except RuntimeError as error:
            _log.info("%s: %s", place, error)
            return False
        # All are past the barrier now, and act upon what they read: a rank that cannot read it
        # must not take that for a no.
        return not client.key_value_dir_get(f"{place}/no")


def coordination_service() -> Any:
    """The client of `jax.distributed`'s service, which JAX keeps in a private place; None: there is
    none."""
    try:
        from jax._src import distributed
    except ImportError:
        return None
    return getattr(distributed.global_state, "client", None)
