"""How a rank comes into its world: jax.distributed from what the agent said, or alone."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import jax

from jaxft.config import RankEnv
from jaxft.errors import ConfigError
from jaxft.group.messages import RankOptions
from jaxft.host.attach import Seat, attach
from jaxft.schedule import parse_interval

if TYPE_CHECKING:
    from jaxft.fallback import OrbaxFallback

HEARTBEAT_S = 100
INITIALIZE_S = 300


def initialize() -> None:
    """Joins `jax.distributed` as the agent says. Call it before anything else of JAX.

    Alone (no `jaxft run`, or a world of one rank) it does nothing. JAX's own handler for SIGTERM is
    turned off: it can make a rank that is told to end wait for minutes.

    Raises:
        ConfigError: the variables that the agent sets are incomplete.
    """
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]
    env = RankEnv.from_environ()
    if env is None or env.ranks == 1:
        return
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) in (None, "none"):
        jax.config.update(  # type: ignore[no-untyped-call]
            "jax_cpu_collectives_implementation", "gloo"
        )
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


def take_seat(job: str | None, floor: int = 0) -> Seat:
    """Where this rank stands: as its agent said, or, in a process that nobody launched, as the one
    rank of a job of its own.

    Raises:
        ConfigError: the job's name is not the one that the agent runs.
        JobInUse: another process is the rank of this job.
    """
    env = RankEnv.from_environ()
    if env is None:
        return attach(job, floor)
    if job is not None and job != env.job:
        raise ConfigError(f'Snapshotter(job="{job}"): `jaxft run` runs this script as "{env.job}"')
    return Seat(env)


def newest_generation(options: RankOptions) -> int:
    """The newest generation that storage knows of."""
    known = (entry.id.generation for entry in options.storage or () if entry.id is not None)
    return max(known, default=0)


def rank_options(every: int | str, fallback: OrbaxFallback | None) -> RankOptions:
    """What this rank asks of its world.

    Raises:
        ConfigError: an interval that is none.
    """
    steps, seconds = parse_interval(every)
    if fallback is None:
        return RankOptions(every_steps=steps, every_s=seconds)
    return RankOptions(
        every_steps=steps,
        every_s=seconds,
        directory=str(fallback.directory),
        persist_every=fallback.every,
        persist_keep=fallback.keep,
        storage=fallback.entries(),
    )
