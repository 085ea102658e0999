"""How a rank comes into its world: jax.distributed from what the agent said, or alone."""

from __future__ import annotations

import ipaddress

import jax

from jaxft.config import RankEnv
from jaxft.errors import ConfigError
from jaxft.group.world import Code

HEARTBEAT_S = 100
INITIALIZE_S = 300


def initialize() -> None:
    """Joins `jax.distributed` as the agent says. Call it before anything else of JAX.

    Alone (no `jaxft run`, or a world of one rank) it does nothing. JAX's own handler for SIGTERM is
    turned off: it can make a rank that is told to end wait for minutes.

    Raises:
        ConfigError: the variables that the agent sets are incomplete.
    """
    jax.config.update("jax_enable_preemption_service", False)
    env = RankEnv.from_environ()
    if env is None or env.ranks == 1:
        return
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=env.coordinator,
        num_processes=env.ranks,
        process_id=env.rank,
        coordinator_bind_address=_bind_address(env.coordinator),
        initialization_timeout=INITIALIZE_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
    )


def _bind_address(coordinator: str) -> str | None:
    """A coordinator on loopback listens there only (JAX would listen on every interface)."""
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        return coordinator if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None


def rank_environment(*, job: str | None, code: Code | None) -> RankEnv:
    """Where this rank stands.

    Raises:
        ConfigError: it was not started by an agent.
    """
    env = RankEnv.from_environ()
    if env is None:
        raise ConfigError(
            "this process was not started by `jaxft run`: start it with "
            "`jaxft run --local-hosts 1 -- python train.py`"
        )
    return env
