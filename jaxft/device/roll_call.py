"""Who is where: every process says its host's name, over `jax.distributed`'s own service."""

from __future__ import annotations

import itertools
import secrets

import jax

from jaxft.device.agreement import coordination_service
from jaxft.errors import ConfigError, LaunchError

WAIT_S = 120.0
_calls = itertools.count()


def roll_call(host: str, tasks: int) -> tuple[str, tuple[str, ...]]:
    """A random name of this start of the script, and the host of each of its processes, in order.
    All processes call it, as often as each other.

    Args:
        host: this process's.
        tasks: how many processes the scheduler says it has started; 0: it does not say.

    Raises:
        ConfigError: the others are not known to JAX.
        LaunchError: one of them did not come.
    """
    count, index = jax.process_count(), jax.process_index()
    if tasks > 1 and count == 1:
        raise ConfigError(
            f"{tasks} tasks were started, and each is alone for JAX: call "
            "jax.distributed.initialize() before anything else of JAX"
        )
    own = secrets.token_hex(8)
    if count == 1:
        return own, (host,)
    service = coordination_service()
    if service is None:
        raise ConfigError(
            "JAX's coordination service is not found: call jax.distributed.initialize() before "
            "anything else of JAX"
        )
    place = f"jaxft/roll/{next(_calls)}"
    try:
        service.key_value_set(f"{place}/{index}", f"{own} {host}")
        said = [
            service.blocking_key_value_get(f"{place}/{one}", int(1000 * WAIT_S)).split(" ", 1)
            for one in range(count)
        ]
    except RuntimeError as error:
        raise LaunchError(f"not all {count} processes have said where they are: {error}") from error
    return said[0][0], tuple(name for _, name in said)
