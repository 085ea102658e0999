"""`python -m bench soak --minutes M --seed N`: the command line, the log, and the table."""

from __future__ import annotations

import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.apart.world import apart
from bench.soak.plan import KINDS
from bench.soak.soak import Orders, Outcome, Soak, Violated, trainer_arguments
from jaxft.errors import ConfigError
from jaxft.group.world import Code
from jaxft.launch.options import parse_hosts

EXIT_VIOLATED = 1
EXIT_USAGE = 2
EXIT_BROKEN = 3
EXIT_STOPPED = 130
HOSTS_MAX = 6  # the trainer's state divides among so many
TABLE_WIDTH = 100

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Log:
    """Says it, with the seconds since the beginning, and writes it down."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began_s:8.1f}  {text}"
        print(line, flush=True)
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


@app.command()
def main(
    minutes: Annotated[float, typer.Option(help="How long failures go on.")] = 30.0,
    seed: Annotated[int, typer.Option(help="The same one draws the same failures.")] = 1,
    hosts: Annotated[str, typer.Option(help="MIN:MAX of the job; one more takes part.")] = "4:6",
    code: Annotated[str, typer.Option(help="K+M of the job.")] = "3+1",
    kinds: Annotated[
        str, typer.Option(help=f"What may happen, by commas (default: all): {', '.join(KINDS)}.")
    ] = "",
    patience_s: Annotated[float, typer.Option(help="How long a recovery may take.")] = 120.0,
    json: Annotated[Path | None, typer.Option(help="Write the result into this file.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep all logs in any case.")] = False,
) -> None:
    """Trains on hosts that are apart while all that may fail does, and looks at everything."""
    try:
        orders = _orders(minutes, seed, hosts, code, kinds, patience_s)
    except ConfigError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    base = Path(tempfile.mkdtemp(prefix="jxs-"))
    log = Log(base / "soak.log")
    log.say(f"soak: seed {seed}, {minutes:g} minutes, hosts {hosts}, code {code}; logs in {base}")
    status, why, soak = _run(orders, base, log)
    log.close()
    rows = summary(soak.struck, soak.outcomes) if soak else {}
    figures = soak.figures if soak else {}
    report = {
        "seed": seed,
        "minutes": minutes,
        "hosts": hosts,
        "code": code,
        "status": status,
        "wrong": why,
        "episodes": soak.outcomes if soak else [],
        "kinds": rows,
        **figures,
    }
    (base / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    if json is not None:
        shutil.copyfile(base / "soak.json", json)
    _show(rows, figures)
    if status in (EXIT_VIOLATED, EXIT_BROKEN) or keep:
        print(f"seed {seed}; the logs of all hosts are in {base}", flush=True)
    else:
        shutil.rmtree(base)
    raise typer.Exit(status)


def _orders(
    minutes: float, seed: int, hosts: str, code: str, kinds: str, patience_s: float
) -> Orders:
    low, high = parse_hosts(hosts)
    if not 1 <= low <= high <= HOSTS_MAX:
        raise ConfigError(f"--hosts {hosts}: expected 1 <= MIN <= MAX <= {HOSTS_MAX}")
    wanted = tuple(kind.strip() for kind in kinds.split(",")) if kinds else tuple(KINDS)
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise ConfigError(f"--kinds: {', '.join(unknown)}: expected some of {', '.join(KINDS)}")
    return Orders(
        minutes=minutes,
        seed=seed,
        hosts=(low, high),
        code=Code.parse(code),
        kinds=wanted,
        patience_s=patience_s,
    )


def _run(orders: Orders, base: Path, log: Log) -> tuple[int, str, Soak | None]:
    """Exit status, what was wrong, and the soak as far as it came."""
    soak = None
    names = string.ascii_lowercase[: orders.hosts[1] + 1]
    try:
        _heed(signal.default_int_handler)
        with apart(base, *names, trainer=trainer_arguments(base / "checkpoints")) as world:
            soak = Soak(world, orders, log.say)
            try:
                soak.run()
            except Violated as violation:
                log.say(f"VIOLATED: {violation}")
                soak.evidence()
                return EXIT_VIOLATED, str(violation), soak
            finally:
                _heed(signal.SIG_IGN)  # what was made is taken away
    except KeyboardInterrupt:
        log.say("stopped")
        return EXIT_STOPPED, "", soak
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.say(f"the soak itself cannot go on: {error}")
        return EXIT_BROKEN, str(error), soak
    log.say("all is well")
    return 0, "", soak


def _heed(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background has SIGINT ignored
        signal.signal(number, handler)


def summary(struck: Mapping[str, int], outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """By kind of failure; what recovery from an episode took counts for all its failures."""
    found: dict[str, dict[str, Any]] = {}
    for kind in (kind for kind in KINDS if struck.get(kind)):
        mine = [one for one in outcomes if kind in one.kinds]
        stood_s = [one.stood_s for one in mine] or [0.0]
        found[kind] = {
            "count": struck[kind],
            "recovered": sum(one.kinds.count(kind) for one in mine),
            "stood_s_median": round(median(stood_s), 2),
            "stood_s_max": max(stood_s),
            "protected_s_max": max((one.protected_s for one in mine), default=0.0),
            "steps_again_max": max((one.steps_again for one in mine), default=0),
        }
    return found


def _show(rows: dict[str, dict[str, Any]], figures: dict[str, Any]) -> None:
    table = Table(box=None, header_style="bold")
    heads = ("count", "recovered", "stood still, s", "at most", "protected, at most", "steps again")
    table.add_column("failure", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    for kind, row in rows.items():
        table.add_row(kind, *(f"{value:g}" for value in row.values()))
    out = Console()
    if not out.is_terminal:
        out.width = TABLE_WIDTH
    out.print(table)
    if figures:
        count, generations = figures["lines_checked"], figures["generations"]
        out.print(f"{count} lines of ranks checked, {generations} generations", highlight=False)
        for role, seen in figures["growth"].items():
            fds, own = seen["fds"], seen["own_mib"]
            out.print(
                f"an {role} through {len(fds)} calms: {fds[0]} to {fds[-1]} descriptors, at most "
                f"{max(fds)}; {own[0]} to {own[-1]} MiB, at most {max(own)}",
                highlight=False,
            )
