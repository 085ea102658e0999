"""A view of running worlds for a terminal, fed by the event log: hosts, steps, snapshots, failures.

`RunView` is what is known of one run; it takes events and no clock, so it can be drawn from a
recorded list. `Display` shows one view after the other: redrawn in place on a terminal, else one
line for each thing that happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxft.status.events import Event

RECENT_LINES = 6
REFRESH_HZ = 6.0
PLAIN_STEPS = 5

_STATE_STYLES = {
    "starting": "yellow",
    "loading": "yellow",
    "restoring": "cyan",
    "training": "green",
    "stopped": "yellow",
    "lost": "bold red",
    "done": "bold green",
}

# What a restore's source is called.
SOURCES = {
    "own": "own memory",
    "peer": "peers",
    "rebuilt": "parity",
    "orbax": "Orbax",
    "none": "the start",
}


def _seconds(event: Event, name: str) -> str:
    return f"{float(event.get(name) or 0):.2f} s"


# What is worth a line, in which colour. `{host}` and the event's own fields are filled in.
_LINES: dict[str, tuple[str, Callable[[Event], str]]] = {
    "generation_formed": (
        "bold",
        lambda e: f"generation {e['number']} of {len(e['hosts'])} hosts: {e.get('reason', '')}",
    ),
    "struck": (
        "bold red",
        lambda e: f"SIGKILL to {e['what']} of {e['target']} after step {e['step']}",
    ),
    "fault": ("red", lambda e: f"{e.get('kind')}: {e.get('detail', '')}"),
    "host_lost": ("red", lambda e: f"{e['host']} is lost"),
    "smp_restarted": ("yellow", lambda e: f"{e['host']} has its snapshot process back"),
    "smp_adopted": ("yellow", lambda e: f"{e['host']} adopts the snapshot process it finds"),
    "chosen": ("cyan", lambda e: f"restoring step {e['step']} from {SOURCES[e['source']]}"),
    "restored": ("green", lambda e: f"restored step {e['step']} in {_seconds(e, 'restore_s')}"),
    "aborted": ("yellow", lambda e: f"snapshot of step {e['step']} aborted: {e.get('reason', '')}"),
    "held": ("red", lambda e: f"snapshots are held: {e['reason']}"),
    "held_over": ("green", lambda e: "snapshots go on"),
    "last_snapshot": ("cyan", lambda e: f"{e['host']} ends; last snapshot: {e['result']}"),
    "persisted": ("blue", lambda e: f"step {e['step']} is on storage"),
    "exported": ("blue", lambda e: f"step {e['step']} is on storage"),
    "persist_failed": (
        "red",
        lambda e: f"persist failed: {e.get('result', '')}",
    ),
    "job_finished": ("bold green", lambda e: "finished"),
}


# News that every host has, and that is told once a generation.
_TOLD_ONCE = ("generation_formed", "chosen", "restored", "job_finished")


def describe(event: Event) -> Text | None:
    """One line for a person, or None for what is not worth one."""
    if event["event"] not in _LINES or event.get("source") == "none":
        return None
    style, text = _LINES[event["event"]]
    return Text(" ".join(text(event).split()), style=style, no_wrap=True, overflow="ellipsis")


class Display:
    """Shows runs, one after the other; use it in a `with` statement.

    Args:
        console: where to.
        live: redraw in place; by default if the console is a terminal.
    """

    def __init__(self, console: Console, *, live: bool | None = None) -> None:
        self.console = console
        self._views: list[RunView] = []
        self._plain_step = -1
        redraw = console.is_terminal if live is None else live
        self._live = (
            Live(console=console, refresh_per_second=REFRESH_HZ, get_renderable=self._draw)
            if redraw
            else None
        )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: RunView) -> None:
        """Goes on with another run; those before stay as they are."""
        self._views.append(view)
        self._plain_step = -1
        if self._live is None:
            self.console.print(Text(view.title, style="bold"))

    def update(self, event: Event) -> None:
        """Takes in one event of the run shown last."""
        view = self._views[-1]
        line = view.update(event)
        if self._live is not None:
            return
        if line is not None:
            self.console.print(line, soft_wrap=True)
        elif event["event"] == "step" and view.step != self._plain_step:
            self._plain_step = view.step
            if view.step % PLAIN_STEPS == 0:
                self.console.print(Text(f"          step {view.step}: loss {event['loss']:.4f}"))

    def _draw(self) -> RenderableType:
        return Group(*(view.brief() for view in self._views[:-1]), *self._views[-1:])


class _Host:
    """What is known of one host."""

    def __init__(self) -> None:
        self.state = "starting"
        self.rank_pid: int | None = None
        self.step: int | None = None


class RunView:
    """What is known of one run.

    Args:
        title: shown above it.
        steps: how many steps the run has.
    """

    def __init__(self, title: str, steps: int) -> None:
        self.title = title
        self.steps = steps
        self.step = 0
        self.generation = 0
        self.committed: int | None = None
        self.persisted: int | None = None
        self.failures = 0
        self.recovered: set[tuple[str, int]] = set()
        self.hosts: dict[str, _Host] = {}
        self._recent: deque[Text] = deque(maxlen=RECENT_LINES)
        self._told: set[tuple[int, str, str]] = set()
        self._begun_t: float | None = None

    def update(self, event: Event) -> Text | None:
        """Takes in one event. Returns the line it is worth, if any."""
        if self._begun_t is None:
            self._begun_t = float(event["t"])
        handler = _HANDLERS.get(event["event"])
        if handler is not None:
            handler(self, event)
        line = self._line(event)
        if line is not None:
            self._recent.append(line)
        return line

    def _line(self, event: Event) -> Text | None:
        """The event's line with its time; the same news from another host is none."""
        line = describe(event)
        if line is None or self._begun_t is None:
            return None
        name = str(event["event"])
        news = (self.generation, name, "" if name in _TOLD_ONCE else line.plain)
        if news in self._told:
            return None
        self._told.add(news)
        time_s = float(event["t"]) - self._begun_t
        return Text.assemble((f"{time_s:6.1f} s  ", "dim"), line, no_wrap=True, overflow="ellipsis")

    def host(self, event: Event) -> _Host:
        return self.hosts.setdefault(str(event["host"]), _Host())

    def brief(self) -> RenderableType:
        """The run in one line."""
        return self._head()

    def __rich__(self) -> RenderableType:
        lines = list(self._recent)
        lines += [Text("")] * (RECENT_LINES - len(lines))
        return Group(self._head(), self._hosts(), *lines)

    def _head(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=max(1, self.steps), completed=self.step, width=24),
            Text(f"step {self.step}/{self.steps}"),
            Text(f"failures {self.failures}, recovered {len(self.recovered)}", style="dim"),
        )
        return row

    def _hosts(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("host", "state", "pid", "step", "protected", "storage"):
            table.add_column(column, justify="left" if column in ("host", "state") else "right")
        for name, host in sorted(self.hosts.items(), key=lambda item: (len(item[0]), item[0])):
            table.add_row(
                name,
                Text(host.state, style=_STATE_STYLES.get(host.state, "")),
                _number(host.rank_pid),
                _number(host.step),
                _number(self.committed),
                _number(self.persisted),
            )
        return table


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _on_formed(view: RunView, event: Event) -> None:
    view.generation = max(view.generation, int(event["number"]))
    for name in event["hosts"]:
        view.hosts.setdefault(str(name), _Host())


def _on_rank_started(view: RunView, event: Event) -> None:
    host = view.host(event)
    host.rank_pid = int(event["pid"])
    host.state = "loading"


def _on_rank_gone(view: RunView, event: Event) -> None:
    host = view.host(event)
    host.rank_pid = None
    if host.state not in ("done", "lost"):
        host.state = "stopped"


def _on_restored(view: RunView, event: Event) -> None:
    host = view.host(event)
    host.state, host.step = "training", int(event["step"])
    if view.generation > 1:
        view.recovered.add(("generation", view.generation))


def _on_step(view: RunView, event: Event) -> None:
    host = view.host(event)
    host.state, host.step = "training", int(event["step"])
    view.step = host.step


def _on_lost(view: RunView, event: Event) -> None:
    host = view.host(event)
    host.state, host.rank_pid, host.step = "lost", None, None


def _on_restarted(view: RunView, event: Event) -> None:
    view.recovered.add(("smp", int(event["pid"])))


def _on_struck(view: RunView, event: Event) -> None:
    view.failures += 1


def _on_committed(view: RunView, event: Event) -> None:
    view.committed = int(event["step"])


def _on_persisted(view: RunView, event: Event) -> None:
    view.persisted = int(event["step"])


def _on_final(view: RunView, event: Event) -> None:
    view.host(event).state = "done"


_HANDLERS: dict[str, Callable[[RunView, Event], None]] = {
    "generation_formed": _on_formed,
    "rank_started": _on_rank_started,
    "rank_exited": _on_rank_gone,
    "ranks_killed": _on_rank_gone,
    "restored": _on_restored,
    "smp_restarted": _on_restarted,
    "step": _on_step,
    "host_lost": _on_lost,
    "struck": _on_struck,
    "committed": _on_committed,
    "persisted": _on_persisted,
    "final": _on_final,
}
