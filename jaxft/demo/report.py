"""What the two runs showed: are they equal, and what did each failure cost?

Everything here is computed from the event logs. Equal means: every loss that any rank of the
disturbed run computed, also in steps that were run again, has the same bits as the reference's, and
so has every byte of the state at the end. Where the world shrinks, sums are added up in another
order, so there it is each restored state that must equal the snapshot it came from, bit for bit,
and losses may differ by LOSS_TOLERANCE.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxft.demo.controller import RunLog, Strike
from jaxft.demo.digest import ReplicasDiffer, combine
from jaxft.demo.plan import DemoOptions
from jaxft.status.events import Event
from jaxft.status.live import SOURCES

# Relative. After 9 steps in a smaller world 2e-7 was measured; long runs drift further apart.
LOSS_TOLERANCE = 2e-2
DIFFERENCES_SHOWN = 10

_NOTICED = ("fault", "host_lost", "rank_exited", "smp_died")


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """What one failure cost; times in seconds from the kill, None if it did not come to that.

    `restore_s` is what the slowest rank took to restore, `resume_s` the time until the next step
    was done. Where an SMP dies nothing is restored and training goes on: `resume_s` is the time
    until the next snapshot was protected.
    """

    kind: str
    host: str
    at_step: int
    restored_step: int | None
    lost_steps: int | None
    source: str | None
    detect_s: float | None
    restore_s: float | None
    resume_s: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdict, and what it is made of. `differences` says in words what is not as it should be;
    `bitwise_equal` and `loss_difference_max` (relative) are about the two runs. `stall_ms` is what
    calls of `save` that were due took of both runs' training: the median, and the most, which is
    mostly of a first call, that has programs compiled."""

    hosts: int
    code: str
    steps: int
    elastic: bool
    bitwise_equal: bool
    differences: tuple[str, ...]
    loss_difference_max: float
    failures: tuple[FailureReport, ...]
    snapshots: dict[str, int]
    orbax_restores: int
    stall_ms: dict[str, float]
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Everything equal, and every failure got over."""
        return not self.differences and all(f.resume_s is not None for f in self.failures)

    def to_json(self) -> dict[str, Any]:
        """As the option --json writes it."""
        return asdict(self) | {"passed": self.passed}


def summarise(options: DemoOptions, reference: RunLog, disturbed: RunLog) -> Report:
    """Compares the runs, and tells what each failure cost."""
    unlike = [*_ended(options, reference, "reference"), *_ended(options, disturbed, "disturbed")]
    worst = _loss_difference(reference.events, disturbed.events)
    beside = list(_never_struck(options, disturbed))
    if options.elastic:
        unlike += _restored_unlike_saved(disturbed.events)
        if worst > LOSS_TOLERANCE:
            beside.append(f"losses differ by {worst:.2g}, more than {LOSS_TOLERANCE:g}")
    else:
        unlike += _losses_unlike(reference.events, disturbed.events)
        unlike += _state_unlike(reference.events, disturbed.events)
    failures = tuple(_failures(disturbed))
    return Report(
        hosts=options.hosts,
        code=str(options.code),
        steps=options.steps,
        elastic=options.elastic,
        bitwise_equal=not unlike,
        differences=(*unlike, *beside),
        loss_difference_max=worst,
        failures=failures,
        snapshots=_snapshots(disturbed.events),
        orbax_restores=sum(failure.source == "orbax" for failure in failures),
        stall_ms=_stalls([*reference.events, *disturbed.events]),
        seconds={"reference": round(reference.wall_s, 2), "disturbed": round(disturbed.wall_s, 2)},
    )


# ------------------------------------------------------------------------------ are they equal?


def _ended(options: DemoOptions, run: RunLog, name: str) -> Iterator[str]:
    """What is missing from a run that should have done all its steps."""
    if run.status != 0:
        yield f"the {name} run ended with status {run.status}; its logs are in {run.logs}"
    done = {event["step"] for event in _named(run.events, "step")}
    missing = set(range(1, options.steps + 1)) - done
    if missing:
        yield f"the {name} run never did step {min(missing)}"
    if not _named(run.events, "final"):
        yield f"no rank of the {name} run told its last state"


def _never_struck(options: DemoOptions, run: RunLog) -> Iterator[str]:
    struck = [strike.failure for strike in run.strikes]
    for failure in options.failures:
        if failure not in struck:
            yield f"the failure {failure.kind}@{failure.at_step} did not come to be"


def _losses_unlike(reference: Sequence[Event], disturbed: Sequence[Event]) -> Iterator[str]:
    """Each step's loss, on each rank, each time the step was run."""
    expected: dict[int, str] = {}
    for name, events in (("reference", reference), ("disturbed", disturbed)):
        for event in _named(events, "step"):
            bits = expected.setdefault(event["step"], event["bits"])
            if event["bits"] != bits:
                yield (
                    f"step {event['step']} on {event['host']} of the {name} run: loss "
                    f"{event['bits']}, expected {bits}"
                )


def _loss_difference(reference: Sequence[Event], disturbed: Sequence[Event]) -> float:
    """The largest relative difference of a step's loss between the runs."""
    expected = {event["step"]: event["loss"] for event in _named(reference, "step")}
    return max(
        (
            abs(event["loss"] - expected[event["step"]]) / abs(expected[event["step"]])
            for event in _named(disturbed, "step")
            if event["step"] in expected
        ),
        default=0.0,
    )


def _state_unlike(reference: Sequence[Event], disturbed: Sequence[Event]) -> Iterator[str]:
    digests = []
    for name, events in (("reference", reference), ("disturbed", disturbed)):
        try:
            digests.append(combine(event["digest"] for event in _named(events, "final")))
        except ReplicasDiffer as error:
            yield f"last state of the {name} run: {error}"
            return
    if digests[0] != digests[1]:
        yield f"the last states differ: {digests[0]} and {digests[1]}"


def _restored_unlike_saved(events: Sequence[Event]) -> Iterator[str]:
    """Each restored state against the snapshot it came from.

    A generation's snapshot of the step it restored is what it restored, so that counts as saved.
    """
    saved: dict[tuple[int, int], list[dict[str, str]]] = {}
    restored: dict[tuple[int, int, int | None], list[dict[str, str]]] = {}
    for event in _named(events, "digest"):
        saved.setdefault((event["generation"], event["step"]), []).append(event["digest"])
        if event["when"] == "restored":
            key = (event["generation"], event["step"], event["of"])
            restored.setdefault(key, []).append(event["digest"])
    for (generation, step, of), parts in restored.items():
        source = saved.get((of, step)) if of is not None else None
        if source is None:
            yield f"generation {generation} restored step {step}, which nobody said was saved"
            continue
        try:
            before, after = combine(source), combine(parts)
        except ReplicasDiffer as error:
            yield f"generation {generation}, step {step}: {error}"
            continue
        if before != after:
            yield f"generation {generation} restored step {step} as {after}, saved was {before}"


# ------------------------------------------------------------------------------ what did it cost?


def _failures(run: RunLog) -> Iterator[FailureReport]:
    """Each failure, from what happened between it and the next one."""
    ends = [*(strike.t for strike in run.strikes[1:]), float("inf")]
    for strike, end in zip(run.strikes, ends, strict=False):
        after = [event for event in run.events if strike.t <= float(event["t"]) < end]
        in_place = strike.failure.kind == "smp" and _stayed(strike, after)
        yield _mended(strike, after) if in_place else _recovered(strike, after)


def _stayed(strike: Strike, after: Sequence[Event]) -> bool:
    """Whether the world went on as it was."""
    numbers = [event["number"] for event in _named(after, "generation_formed")]
    return max(numbers, default=0) <= strike.generation


def _mended(strike: Strike, after: Sequence[Event]) -> FailureReport:
    """Training did not stop: it is over when the next snapshot is protected."""
    back = _first(after, "smp_restarted")
    later = [event for event in after if back is not None and event["t"] >= back["t"]]
    return FailureReport(
        kind=strike.failure.kind,
        host=", ".join(strike.failure.hosts),
        at_step=strike.failure.at_step,
        restored_step=strike.failure.at_step,
        lost_steps=0,
        source="own",
        detect_s=_since(strike, _first(after, *_NOTICED)),
        restore_s=None,
        resume_s=_since(strike, _first(later, "committed")),
    )


def _recovered(strike: Strike, after: Sequence[Event]) -> FailureReport:
    """It is over with the first step of a later generation; what led there is the recovery."""
    steps = _named(after, "step")
    first = next((event for event in steps if event["generation"] > strike.generation), None)
    until = [event for event in after if first is not None and event["t"] <= first["t"]]
    chosen = next(reversed(_named(until, "chosen")), None)
    restores = [
        float(event["restore_s"])
        for event in _named(until, "restored")
        if chosen is not None and event["t"] >= chosen["t"]
    ]
    restored_step = None if chosen is None else int(chosen["step"])
    return FailureReport(
        kind=strike.failure.kind,
        host=", ".join(strike.failure.hosts),
        at_step=strike.failure.at_step,
        restored_step=restored_step,
        lost_steps=None if restored_step is None else strike.failure.at_step - restored_step,
        source=None if chosen is None else str(chosen["source"]),
        detect_s=_since(strike, _first(after, *_NOTICED)),
        restore_s=round(max(restores), 3) if restores else None,
        resume_s=_since(strike, first),
    )


def _first(events: Sequence[Event], *names: str) -> Event | None:
    return next(iter(_named(events, *names)), None)


def _since(strike: Strike, event: Event | None) -> float | None:
    return None if event is None else round(float(event["t"]) - strike.t, 3)


def _snapshots(events: Sequence[Event]) -> dict[str, int]:
    """How many were begun, protected (told by the root alone), and not taken in their turn."""
    generation_of = {event["pid"]: event["generation"] for event in _named(events, "rank_started")}

    def distinct(name: str, key: str) -> int:
        return len({(generation_of.get(e["pid"]), e[key]) for e in _named(events, name)})

    return {
        "taken": distinct("saved", "seq"),
        "protected": len(_named(events, "committed")),
        "skipped": distinct("save_skipped", "step"),
    }


def _stalls(events: Sequence[Event]) -> dict[str, float]:
    stalls_ms = [1e3 * float(event["stall_s"]) for event in _named(events, "stall")]
    if not stalls_ms:
        return {}
    return {
        "median": round(statistics.median(stalls_ms), 2),
        "most": round(max(stalls_ms), 2),
    }


def _named(events: Sequence[Event], *names: str) -> list[Event]:
    return [event for event in events if event["event"] in names]


# ------------------------------------------------------------------------------ for a person


def table(report: Report) -> Table:
    """One row a failure."""
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    drawn.add_column("killed", max_width=20)
    for column in ("at step", "noticed", "back to", "from", "in", "lost", "resumed"):
        drawn.add_column(column, justify="left" if column == "from" else "right", no_wrap=True)
    for failure in report.failures:
        lost = failure.lost_steps
        drawn.add_row(
            f"{'host' if failure.kind == 'hosts' else failure.kind} {failure.host}",
            str(failure.at_step),
            _time(failure.detect_s),
            "-" if failure.restored_step is None else f"step {failure.restored_step}",
            SOURCES.get(failure.source or "", failure.source or "-"),
            "-" if failure.restore_s is None else _time(failure.restore_s),
            "-" if lost is None else f"{lost} step{'' if lost == 1 else 's'}",
            _time(failure.resume_s),
        )
    return drawn


def _time(value_s: float | None) -> str:
    return "never" if value_s is None else f"{value_s:.2f} s"


def verdict(report: Report) -> str:
    """The last words."""
    snapshots = report.snapshots
    counts = (
        f"{snapshots['taken']} snapshots taken, {snapshots['protected']} protected, "
        f"{snapshots['skipped']} calls of save not due; {report.orbax_restores} Orbax restores"
    )
    if report.stall_ms:
        counts += f"\nsave took {report.stall_ms['median']:.1f} ms of training (median)"
    if report.passed and report.elastic:
        equal = (
            "Every restored state equals its snapshot bit for bit; losses differ by at most "
            f"{report.loss_difference_max:.1e} from the undisturbed run's."
        )
    elif report.passed:
        equal = "Every loss and the last state equal the undisturbed run's, bit for bit."
    else:
        stuck = [
            f"{f.kind} ({f.host}) was not recovered" for f in report.failures if f.resume_s is None
        ]
        equal = "\n".join(["FAILED:", *report.differences[:DIFFERENCES_SHOWN], *stuck])
    return f"{counts}\n{equal}"
