"""`jaxft status`: looks, says what it saw, and ends with a status that a script can use; or goes on
looking."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from jaxft.errors import LaunchError
from jaxft.launch.survey import jobs_there, look_at
from jaxft.status import report as r
from jaxft.status.overview import overview
from jaxft.status.printed import printed, printed_jobs

EXIT_PROTECTED = 0
EXIT_DEGRADED = 1
EXIT_NOT_THERE = 3
EVERY_S = 2.0
LOOKS_MAX = 4
# Where nobody says how wide the output is, a host is to have a line.
PIPE_WIDTH = 160

_EXITS = {
    r.PROTECTED: EXIT_PROTECTED,
    r.DEGRADED: EXIT_DEGRADED,
    r.ENDED: EXIT_NOT_THERE,
    r.UNREACHABLE: EXIT_NOT_THERE,
}


class _Look(NamedTuple):
    """One look: for programs, for people, and the exit status."""

    json: bytes
    shown: RenderableType
    status: int


def show_status(job: str, store: str, *, as_json: bool, watch: bool) -> int:
    """Says how a job is, or which jobs there are ("").

    Args:
        job, store: its name; the URL of its store, "" if that is to be found here.
        as_json: one JSON object, a line for each look.
        watch: look again every EVERY_S, until interrupted.

    Returns:
        The exit status of the last look.

    Raises:
        ConfigError: bad usage.
        LaunchError: no such job, or nothing of it can be reached.
    """

    def look() -> _Look:
        return _job(job, store) if job else _jobs(store)

    first = look()
    if as_json:
        return _follow(first, look, watch, lambda one: print(one.json.decode(), flush=True))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    if not (watch and console.is_terminal):
        return _follow(first, look, watch, lambda one: console.print(one.shown))
    with Live(first.shown, console=console, auto_refresh=False, screen=False) as live:
        return _follow(first, look, watch, lambda one: live.update(one.shown, refresh=True))


def _job(job: str, store: str) -> _Look:
    report = overview(look_at(job, store))
    for _ in range(LOOKS_MAX - 1):
        if report.losses.lost is None:
            break
        # Hosts that go on are seen at different moments: what is lost stays so.
        before, report = report, overview(look_at(job, store))
        if (before.losses.lost, before.losses.snapshot) == (
            report.losses.lost,
            report.losses.snapshot,
        ):
            break
    return _Look(msgspec.json.encode(report), printed(report), _EXITS[report.health])


def _jobs(store: str) -> _Look:
    report = jobs_there(store)
    status = EXIT_PROTECTED if report.jobs else EXIT_NOT_THERE
    return _Look(msgspec.json.encode(report), printed_jobs(report), status)


def _follow(
    first: _Look, look: Callable[[], _Look], watch: bool, tell: Callable[[_Look], object]
) -> int:
    tell(first)
    status = first.status
    try:
        while watch:
            time.sleep(EVERY_S)
            try:
                seen = look()
            except LaunchError as error:
                text = str(error)
                problem = msgspec.json.encode({"version": r.VERSION, "error": text})
                seen = _Look(problem, Text(text, style="bold red"), EXIT_NOT_THERE)
            status = seen.status
            tell(seen)
    except KeyboardInterrupt:
        pass
    return status
