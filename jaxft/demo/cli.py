"""`jaxft demo`: trains twice, once undisturbed and once while things are killed, and compares."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from jaxft.demo.controller import RunLog, run_training
from jaxft.demo.plan import DemoOptions, plan_demo
from jaxft.demo.report import Report, summarise, table, verdict
from jaxft.errors import ConfigError, LaunchError
from jaxft.status.live import Display, RunView

FAILED = 1

_FAIL_HELP = (
    "What to kill: none, rank, smp (which holds a host's snapshots), agent (which supervises a "
    "host), host (all of it) or hosts:N, with @step or @step:hostK. May be given several times; by "
    "default a rank and then a host."
)


def demo(
    fail: Annotated[list[str] | None, typer.Option(help=_FAIL_HELP)] = None,
    hosts: Annotated[int, typer.Option(help="How many simulated hosts.")] = 4,
    code: Annotated[str, typer.Option(help="Erasure code K+M of a group of hosts.")] = "3+1",
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 30,
    every: Annotated[int, typer.Option(help="Steps between snapshots.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the parameters and the batches.")] = 0,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Replace no host: the world shrinks.")
    ] = False,
    wrap: Annotated[
        bool, typer.Option("--wrap", help="Save with jaxft.wrap instead of save.")
    ] = False,
    parity: Annotated[
        str, typer.Option(help="Who computes parity: host, or device (with --wrap).")
    ] = "host",
    fallback: Annotated[
        bool,
        typer.Option("--fallback", help="Write Orbax checkpoints even if no failure needs one."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep logs and events in this directory.")
    ] = None,
) -> None:
    """Train a small transformer, kill a process and a host, and compare with an undisturbed run.

    Exit status 0 only if every loss and the last state are equal, bit for bit. With --elastic the
    restored state is, and the losses after it agree within a tolerance: sums over fewer hosts
    round differently.
    """
    console = Console(highlight=False)
    _check_installed()
    options = plan_demo(
        hosts=hosts,
        code=code,
        steps=steps,
        every=every,
        seed=seed,
        elastic=elastic,
        fallback=fallback,
        fail=fail or [],
        wrap=wrap,
        parity=parity,
    )
    if json_file is not None and not os.access(json_file.absolute().parent, os.W_OK):
        raise ConfigError(f"--json {json_file}: its directory has to be there and writable")
    started_s = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with _workplace(keep) as directory:
        report = _run(options, directory, console)
    _tell(report, console, time.monotonic() - started_s)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if keep is None and report.passed:
        shutil.rmtree(directory)
    else:
        console.print(f"Logs and events: {directory}", style="dim")
    raise typer.Exit(0 if report.passed else FAILED)


def _end(number: int, frame: FrameType | None) -> None:
    """Leaves through every `finally`, so that no process stays behind."""
    sys.exit(128 + number)


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    """Where logs and events go; what was interrupted leaves nothing, unless it is to be kept.

    Raises:
        ConfigError: there is something already.
    """
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            is_empty = not any(keep.iterdir())
        except OSError as error:
            raise ConfigError(f"--keep {keep}: it cannot be used: {error}") from error
        if not is_empty:
            raise ConfigError(f"--keep {keep}: there is something in it; name an empty directory")
    directory = Path(tempfile.mkdtemp(prefix="jaxft-demo-")) if keep is None else keep.absolute()
    try:
        yield directory
    except (KeyboardInterrupt, SystemExit):
        if keep is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _check_installed() -> None:
    missing = [name for name in ("flax", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {' and '.join(missing)}: pip install 'jaxft[demo]'")


def _run(options: DemoOptions, directory: Path, console: Console) -> Report:
    console.print(
        f"{options.hosts} hosts, code {options.code}, {options.steps} steps, "
        f"a snapshot every {options.every}",
        style="dim",
    )
    runs: list[RunLog] = []
    with Display(console) as display:
        for name, failures in (("reference", ()), ("disturbed", options.failures)):
            display.show(RunView(name, options.steps))
            run = run_training(name, options, failures, directory, display.update)
            runs.append(run)
            if run.status != 0 and not failures:
                raise LaunchError(
                    f"the {name} run ended with status {run.status}; see {run.logs}/console.log"
                )
    return summarise(options, *runs)


def _tell(report: Report, console: Console, wall_s: float) -> None:
    if report.failures:
        console.print(table(report))
    console.print(verdict(report), style="green" if report.passed else "red", markup=False)
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    console.print(f"{wall_s:.1f} s in all ({phases})", style="dim")
