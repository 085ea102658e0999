"""A job's report for a person at a terminal: what is wrong first, then who is there, then what for.

Nothing here decides anything; colour only stresses what the words say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxft.status import report as r

_STYLES = {
    r.PROTECTED: "bold green",
    r.DEGRADED: "bold red",
    r.ENDED: "bold yellow",
    r.UNREACHABLE: "bold red",
}
_BAD = {"gone": "red", "lapsed": "red", "silent": "bold red", "unknown": "yellow"}
FAILURES_SHOWN = 5
DETAIL_CHARS = 240


def printed(report: r.JobReport) -> RenderableType:
    """All of a job."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, text in _facts(report):
        facts.add_row(name, text)
    parts: list[RenderableType] = [_head(report)]
    parts += [Text(f"  - {one}", style="red") for one in report.problems]
    parts += [facts, *_tables(report)]
    if report.failures:
        parts += [Text("last failures", style="dim"), _failures(report)]
    return Group(*parts)


def printed_jobs(report: r.JobsReport) -> RenderableType:
    """The jobs that were found."""
    table = _table("job", "hosts", "newest committed step")
    for one in report.jobs:
        table.add_row(one.job, ", ".join(one.hosts), "-" if one.step is None else str(one.step))
    parts: list[RenderableType] = [table] if report.jobs else [Text("no job is found")]
    parts += [Text(f"  - {one}", style="yellow") for one in report.problems]
    if report.jobs:
        parts.append(Text(f"more: jaxft status --job {report.jobs[0].job}", style="dim"))
    return Group(*parts)


def _head(report: r.JobReport) -> Text:
    style = _STYLES[report.health]
    return Text.assemble(
        ("job ", "bold"),
        (report.job, "bold"),
        ": ",
        (report.health.upper() if report.health != r.PROTECTED else report.health, style),
        (f"  ({_clock(report.now_s)})", "dim"),
    )


# ------------------------------------------------------------------------------ facts


def _facts(report: r.JobReport) -> Iterable[tuple[str, str]]:
    world = report.world
    if world is not None:
        since = "" if world.age_s is None else f" since {_clock(report.now_s - world.age_s)}"
        yield (
            "world",
            f"generation {world.generation}, {world.phase}{since}"
            f"{_ago(world.age_s, ' ({})')}: {_count(len(world.hosts), 'host')}, "
            f"{_count(world.ranks, 'rank')}, code asked for {world.code}",
        )
        yield "formed", world.reason
        for why in world.left_out.values():
            yield "left out", why
    yield "newest", _newest(report)
    if report.health not in (r.UNREACHABLE, r.ENDED):
        yield "to lose", _to_lose(report.losses)
    yield "storage", _storage(report.storage)
    if report.held is not None:
        yield "held", f"{_ago(report.held.age_s, 'for {}: ')}{report.held.reason}"
    if report.store.url is not None:
        yield "store", report.store.url + (" (does not answer)" if report.store.problem else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _newest(report: r.JobReport) -> str:
    newest = report.newest
    if newest is None and report.health == r.UNREACHABLE:
        return "not known"
    if newest is None:
        return "no snapshot is committed"
    step = "?" if newest.step is None else newest.step
    age = "at a time not known here" if newest.age_s is None else _ago(newest.age_s, "{} ago")
    return f"step {step} (snapshot {newest.snapshot}), committed {age}"


def _to_lose(losses: r.LossesReport) -> str:
    """What could be lost right now."""
    if losses.snapshot is None:
        return "memory gives nothing back now"
    counts = {one.more for one in losses.groups}
    hosts = f"of step {losses.step}: "
    if len(losses.groups) == 1 or len(counts) == 1:
        where = "" if len(losses.groups) == 1 else " of every group"
        hosts += f"{_any(min(counts))}{where}"
    else:
        hosts += "; ".join(f"group {one.group}: {_any(one.more)}" for one in losses.groups)
    if losses.fatal_hosts:
        hosts += f". Memory is lost with any of: {', '.join(losses.fatal_hosts)}"
    return hosts


def _any(more: int) -> str:
    if more <= 0:
        return "no host"
    return "any 1 more host" if more == 1 else f"any {more} more hosts"


def _storage(storage: r.StorageReport) -> str:
    if not storage.directory and storage.step is None:
        return "none is configured, as far as is known here"
    step = "no checkpoint yet" if storage.step is None else f"step {storage.step}"
    text = f"{step}{_ago(storage.age_s, ', {} ago')}{' in ' if storage.directory else ''}"
    text += storage.directory
    if storage.persist is not None:
        one = storage.persist
        ready = [host for host, state in one.helpers.items() if state not in ("starting", "failed")]
        helpers = f", {len(ready)} of {len(one.helpers)} helpers ready" if one.helpers else ""
        when = "step" if one.state == "writing" else "the first snapshot from step"
        text += f"; a persist of {when} {one.step} is under way ({one.state}{helpers})"
    return text


# ------------------------------------------------------------------------------ tables


def _tables(report: r.JobReport) -> Iterable[RenderableType]:
    domains = any(host.domain for host in report.hosts)
    columns = ["host", "role", "address", "domain", "agent", "smp", "ranks", "slot 0", "slot 1"]
    if not domains:
        columns.remove("domain")
    hosts = _table(*columns)
    for host in report.hosts:
        cells: list[Text | str] = [
            host.host,
            "root" if host.is_root and host.role == "member" else host.role,
            _place(host.address),
            *([host.domain or "-"] if domains else []),
            Text(host.agent, style=_BAD.get(host.agent, "")),
            Text(host.smp, style=_BAD.get(host.smp, "")),
            _ranks(host),
            *(_slots(host.slots)),
        ]
        hosts.add_row(*cells)
    yield hosts
    if not report.groups:
        return
    groups = _table("group", "members", "code", "same domain")
    for group in report.groups:
        code = Text(group.code, style="red" if group.less_than_asked else "")
        if group.less_than_asked:
            code.append(" (less than asked)")
        together = "; ".join(f"{one.domain}: {', '.join(one.hosts)}" for one in group.domains)
        groups.add_row(str(group.group), ", ".join(group.hosts), code, together or "-")
    yield groups


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _ranks(host: r.HostReport) -> Text:
    if host.ranks is None:
        return Text("?")
    short = host.ranks < host.ranks_expected
    return Text(f"{host.ranks}/{host.ranks_expected}", style="red" if short else "")


def _slots(slots: Sequence[r.SlotReport]) -> list[str]:
    return [_slot(one) for one in slots] or ["?", "?"]


def _slot(slot: r.SlotReport) -> str:
    if slot.snapshot is None:
        return slot.state
    # Which is the newest one is said above.
    pinned = f", {slot.pinned}" if slot.pinned not in ("", "newest") else ""
    return f"{slot.step} {slot.state}{pinned}"


def _place(address: str | None) -> str:
    """Where a host is, for a person: its IP address, or this machine."""
    control = (address or "").partition(",")[0]
    scheme, _, rest = control.partition("://")
    if scheme == "tcp":
        return rest.rpartition(":")[0].strip("[]")
    return "local" if scheme == "ipc" else "?"


def _failures(report: r.JobReport) -> Table:
    table = Table.grid(padding=(0, 2))
    for one in report.failures[:FAILURES_SHOWN]:
        when = "?" if one.at_s is None else _clock(one.at_s, report.now_s)
        what = f"{one.kind}: {' '.join(one.detail.split())}"
        what = what if len(what) <= DETAIL_CHARS else f"{what[: DETAIL_CHARS - 1]}…"
        table.add_row(Text(f"  {when}", style="dim"), one.host, Text(what))
    return table


# ------------------------------------------------------------------------------ times


def _clock(at_s: float, now_s: float | None = None) -> str:
    """The time of day; with the date where that is another day than `now_s`."""
    at = time.localtime(at_s)
    same_day = now_s is None or time.localtime(now_s)[:3] == at[:3]
    return time.strftime("%H:%M:%S" if same_day else "%m-%d %H:%M:%S", at)


def _ago(seconds: float | None, form: str) -> str:
    """A duration in this form, "" if it is not known."""
    if seconds is None:
        return ""
    seconds = max(0.0, seconds)
    if seconds < 100:
        text = f"{seconds:.0f} s"
    elif seconds < 6000:
        text = f"{seconds / 60:.0f} min"
    else:
        text = f"{seconds / 3600:.1f} h"
    return form.format(text)
