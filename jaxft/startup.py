"""How a rank comes into its world, jax.distributed from what the agent said or alone, and how one
that has failed leaves it.

JAX lets a process end only when all have come to its end, for up to five minutes. A rank that has
failed is the one that the others wait for, in a collective: it would never come to be seen dead. So
it waits FAILED_S for them, and ends.

A rank tells its agent what JAX goes by in it, so that the next one can wait with JAX imported
(`warm_rank`). That was before its script has begun; if the script sets something else by which JAX
goes, the rank begins anew.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import msgspec

from jaxft import config
from jaxft.config import RankEnv, host_name
from jaxft.device.roll_call import roll_call
from jaxft.errors import ConfigError
from jaxft.group.messages import RankOptions
from jaxft.host.attach import Seat, attach, default_job
from jaxft.host.enlist import Crew, Enlist, enlist
from jaxft.meeting import meet
from jaxft.overhead import Auto
from jaxft.schedule import parse_interval
from jaxft.watched import calls_page

if TYPE_CHECKING:
    from jaxft.fallback import OrbaxFallback

INITIALIZE_S = 300
FAILED_S = 2.0

_taken: set[RankEnv] = set()
_left: list[SystemExit] = []


class _Waited(NamedTuple):
    """What JAX went by when it was imported, and what this process would have been otherwise."""

    surroundings: Mapping[str, str]
    command: Sequence[str]
    environ: Mapping[str, str]


_waited: list[_Waited] = []


def initialize() -> None:
    """Joins `jax.distributed` as the agent says. Call it before anything else of JAX.

    Alone (no `jaxft run`, or a world of one rank) it does nothing. JAX's own handler for SIGTERM is
    turned off: it can make a rank that is told to end wait for minutes.

    Raises:
        ConfigError: the variables that the agent sets are incomplete.
    """
    _tell_surroundings()
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]
    env = RankEnv.from_environ()
    if env is None or env.ranks == 1:
        return
    atexit.register(_leave_if_failed)  # the last one registered is the first one to be called
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) in (None, "none"):
        jax.config.update(  # type: ignore[no-untyped-call]
            "jax_cpu_collectives_implementation", "gloo"
        )
    meet(env.coordinator, env.ranks, env.rank, address=env.address, timeout_s=INITIALIZE_S)


def surroundings() -> dict[str, str]:
    """What JAX goes by in this process: variables (`config.surroundings`), and where it is from."""
    return {**config.surroundings(), "the path of JAX": str(jax.__file__)}


def come_warm(
    surroundings: Mapping[str, str], command: Sequence[str], environ: Mapping[str, str]
) -> None:
    """This process has waited to be a rank (`warm_rank`).

    Args:
        surroundings: what JAX went by when it was imported.
        command, environ: what begins this rank anew.
    """
    _waited[:] = [_Waited(surroundings, command, environ)]


@functools.cache
def _tell_surroundings() -> None:
    """Says what JAX goes by here, unless it went by something else when it was imported. Once: what
    it sets itself, when it finds devices, does not count."""
    now = surroundings()
    for was, command, environ in _waited:
        names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
        if names:
            print(
                f"jaxft: this rank begins anew: JAX was imported before the script, which sets "
                f"{', '.join(names)}",
                file=sys.stderr,
            )
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os.execvpe(command[0], list(command), environ)
    calls_page().tell_surroundings(json.dumps(now))


def leaves_by(error: SystemExit) -> None:
    """This rank is about to end with the error's status (Python does not say so at its exit)."""
    _left[:] = [error] if error.code not in (None, 0) else []


def _leave_if_failed() -> None:
    """Ends this process FAILED_S from now, whatever it waits for, if it has failed."""
    status = 1 if getattr(sys, "last_value", None) is not None else 0
    for error in _left:
        status = error.code if isinstance(error.code, int) else 1
    if status:
        timer = threading.Timer(FAILED_S, _end, (status,))
        timer.daemon = True
        timer.start()


def _end(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def take_seat(
    job: str | None, floor: Callable[[], int] = lambda: 0, store: str = "", code: str = ""
) -> Seat:
    """Where this rank stands: as its agent said; or, in a process that `jaxft run` has not started,
    among the ranks that were started together with it, whose hosts meet in `store`; or, without a
    store, as the one rank of a job of its own.

    Raises:
        ConfigError: the job's name is not the one that the agent runs, the run that this process's
            variables are of is over, JAX does not know of the other ranks, or this process has had
            its place already.
        JobInUse: another process is the rank of this job.
    """
    env = RankEnv.from_environ()
    if env is None and store:
        return _enlist(job, floor(), store, code)
    if env is None and code:
        raise ConfigError(
            f'Snapshotter(code="{code}"): a script alone has no other hosts to protect it; name '
            "the store in which its hosts meet, Snapshotter(store=...), or use `jaxft run --code`"
        )
    if env is None:
        _check_world(0, 1)
        return attach(job, floor)
    if not Path(env.smp).parent.is_dir():
        raise ConfigError(
            f"JAXFT_SMP={env.smp} is left of a run that is over: unset the JAXFT_* variables of "
            "this shell, or start the script with `jaxft run`, which sets them anew"
        )
    if job is not None and job != env.job:
        raise ConfigError(
            f'Snapshotter(job="{job}"): `jaxft run` runs this script as "{env.job}": leave job= '
            f"out, or say `jaxft run --job {job}`"
        )
    _tell_surroundings()
    _check_world(env.rank, env.ranks)
    if env in _taken:
        raise ConfigError(
            f"rank {env.rank} of generation {env.generation} has had its Snapshotter: make one for "
            "each process, and use it for all that is saved"
        )
    _taken.add(env)
    return Seat(env)


def _enlist(job: str | None, floor: int, store: str, code: str) -> Seat:
    run, places = roll_call(host_name(), config.scheduler_tasks())
    wish = Enlist(
        crew=Crew.of(run, places), rank=jax.process_index(), floor=floor, store=store, code=code
    )
    seat = enlist(wish, default_job() if job is None else config.check_name("job", job))
    _check_world(seat.env.rank, seat.env.ranks)
    return seat


def _check_world(rank: int, ranks: int) -> None:
    """Each rank saves the part of the state that JAX gives to its process: both must mean the same
    world, or parts would be missing, or saved twice.
    """
    index, count = jax.process_index(), jax.process_count()
    if count == ranks and index == rank:
        return
    if ranks == 1:
        raise ConfigError(
            f"for JAX this is process {index} of {count}, and nobody launched it as a rank of so "
            "many: start the script with `jaxft run`, which keeps all processes together, or name "
            "the store in which their hosts meet: Snapshotter(store=...)"
        )
    raise ConfigError(
        f"this is rank {rank} of {ranks}, and for JAX it is process {index} of {count}: call "
        "jaxft.initialize() before anything else of JAX"
    )


def rank_options(every: int | str | Auto, fallback: OrbaxFallback | None) -> RankOptions:
    """What this rank asks of its world.

    Raises:
        ConfigError: an interval that is none.
    """
    if isinstance(every, Auto):
        wanted = RankOptions(overhead=every.overhead)
    else:
        steps, seconds = parse_interval(every)
        wanted = RankOptions(every_steps=steps, every_s=seconds)
    if fallback is None:
        return wanted
    return msgspec.structs.replace(
        wanted,
        directory=str(fallback.directory),
        persist_every=fallback.every,
        persist_keep=fallback.keep,
        storage=fallback.entries(),
    )
