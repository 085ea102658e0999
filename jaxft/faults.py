"""Faults on purpose, as data: named points in the code where a test or the demo lets it fail.

The plan is read once from the environment variable JAXFT_FAULTS (see `config`):

    point[:key=value,...]=action[;...]

A point is reached with its facts (rank, host, step, seq, ...); an entry strikes when every
`key=value` given equals the fact of that name, and it strikes once. Actions:

    kill         SIGKILL to this process
    kill_group   SIGKILL to this process's group
    stop         SIGSTOP to this process
    raise        RuntimeError at the point
    exit:N       leave with status N at once
    touch:PATH   make an empty file, and go on
    wait:PATH    wait until the file is there (at most 60 s)

Points cost a dictionary look-up; without a plan, a comparison.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from jaxft.errors import ConfigError

WAIT_MAX_S = 60.0


class Fault(NamedTuple):
    """Strike at `point` when the facts contain `match`."""

    point: str
    match: tuple[tuple[str, str], ...]
    action: str
    argument: str


def parse(text: str) -> list[Fault]:
    """Reads a plan. Raises ConfigError for what it does not know."""
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        where, _, action = entry.rpartition("=")
        point, _, match = where.partition(":")
        action, _, argument = action.partition(":")
        if action not in _ACTIONS or not point:
            raise ConfigError(f'fault "{entry}": expected point[:key=value,...]=action')
        pairs = tuple(tuple(pair.split("=", 1)) for pair in match.split(",") if "=" in pair)
        faults.append(Fault(point, pairs, action, argument))  # type: ignore[arg-type]
    return faults


_plan: list[Fault] = []


def arm(text: str) -> None:
    """Replaces the plan of this process."""
    _plan[:] = parse(text)


def reach(point: str, **facts: object) -> None:
    """The code is at `point` now."""
    if not _plan:
        return
    for fault in list(_plan):
        if fault.point == point and all(str(facts.get(key)) == val for key, val in fault.match):
            _plan.remove(fault)
            _ACTIONS[fault.action](fault)


def _wait(fault: Fault) -> None:
    deadline = time.monotonic() + WAIT_MAX_S
    while not Path(fault.argument).exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"fault on purpose at {fault.point}")


_ACTIONS = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "kill_group": lambda fault: os.killpg(os.getpgrp(), signal.SIGKILL),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "exit": lambda fault: os._exit(int(fault.argument or 1)),
    "touch": lambda fault: Path(fault.argument).touch(),
    "wait": _wait,
}
