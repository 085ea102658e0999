"""`python -m bench [NAME...] [--json FILE]`: measures, and says what holds.

Exit status: 0 if every row holds, 1 if one does not, 2 for a name that is not known, 3 if a
measurement failed. Run it from the root of the repository.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from bench import worker
from bench.rows import Row
from bench.sizes import GIB, QUICK, Sizes
from bench.subjects import GROUPS, NAMES, in_full, subjects_of

EXIT_MISSED = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
TABLE_WIDTH = 140
ROOT = Path(__file__).parents[1]

console = Console(stderr=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Failed(Exception):
    """A measurement came to no end."""


@app.command()
def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"What to measure: {', '.join((*NAMES, *GROUPS))}. Default: all."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows into this file.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Tiny sizes, to see that it runs; rows that miss do not count."
        ),
    ] = False,
) -> None:
    """Measures jaxft beside its peers and the limits of this machine."""
    wanted = in_full(names or NAMES)
    try:
        subjects = subjects_of(wanted)
    except ValueError as error:
        console.print(f"bench: error: {error}", style="red", highlight=False)
        raise typer.Exit(EXIT_USAGE) from None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        rows = _measure(subjects, QUICK if quick else Sizes())
    except Failed as error:
        console.print(f"bench: error: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(EXIT_FAILED) from None
    rows = [one for one in rows if one.name.partition("[")[0] in wanted]
    if json is not None:
        report = {"rows": rows, "machine": _machine()}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    out = Console()
    if not out.is_terminal:
        out.width = TABLE_WIDTH
    out.print(_table(rows))
    if not quick and not all(one.holds for one in rows):
        raise typer.Exit(EXIT_MISSED)


def _measure(subjects: list[str], sizes: Sizes) -> list[Row]:
    rows: list[Row] = []
    columns = (
        TextColumn("{task.description:40}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        total = bar.add_task("all", total=len(subjects))
        for subject in subjects:
            task = bar.add_task(subject, total=None)

            def show(done: int, of: int, what: str, task: TaskID = task) -> None:
                bar.update(task, description=what, completed=done, total=of)

            rows += _run(subject, sizes, show)
            bar.remove_task(task)
            bar.advance(total)
    return rows


def _run(subject: str, sizes: Sizes, show: Callable[[int, int, str], None]) -> list[Row]:
    """Has a process of its own measure a subject."""
    command = [sys.executable, "-m", "bench.worker", subject, msgspec.json.encode(sizes).decode()]
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        rows: list[Row] | None = None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                message = msgspec.json.decode(line)
                if "rows" in message:
                    rows = list(msgspec.convert(message, worker.Finished).rows)
                else:
                    progress = msgspec.convert(message, worker.Progress)
                    show(progress.done, progress.of, progress.what)
            if process.wait() or rows is None:
                raise Failed(f"{subject} ended with {process.returncode}:\n{_tail(log)}")
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
    return rows


def _tail(log: BinaryIO) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4000))
    return log.read().decode(errors="replace")


def _machine() -> dict[str, Any]:
    """What the figures were taken on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    packages = ("jax", "numpy", "orbax-checkpoint", "pyeclib", "pyzmq")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / GIB, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("row", "figure", "unit", "peer", "limit", "ratio", "target", "holds"):
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for one in rows:
        numbers = [_show(getattr(one, name)) for name in _NUMBERS]
        verdict = "[green]yes[/]" if one.holds else "[red]no[/]"
        name = one.name.replace("[", r"\[")
        table.add_row(name, numbers[0], one.unit, *numbers[1:], one.target, verdict)
    return table


_NUMBERS = ("figure", "peer", "limit", "ratio")


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["soak"]:  # which measures nothing, and has options of its own
        from bench.soak.command import app as soak

        soak(sys.argv[2:], prog_name="python -m bench soak")
    app(prog_name="python -m bench")
