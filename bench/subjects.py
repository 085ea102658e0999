"""What there is to measure: the names of rows, and the file that measures them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from bench.measure import Report
from bench.rows import Row
from bench.sizes import Sizes

Measure = Callable[[Sizes, Report], Sequence[Row]]

# A subject is a module `bench.<subject>` with a function `measure(sizes, report)`, and gives the
# rows of these names. What needs the same processes is one subject.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "codec": ("encode", "decode"),
    "save": ("save_stall", "staged"),
    "leaves": ("leaves",),
    "restore": ("restore_own",),
    "protect": ("protected", "cpu_per_gib"),
    "rebuild": ("rebuild",),
    "recovery": ("recovery",),
    "training": ("training_overhead",),
    "auto": ("auto",),
    "memory": ("memory",),
    "persist": ("persist",),
    "hosts": ("hosts",),
    "idle": ("idle",),
    "parity": ("parity_xla",),
    "wrapped": ("wrapped_step",),
    "twin": ("twin_compile",),
}

# Names for several rows.
GROUPS: dict[str, tuple[str, ...]] = {"device": ("parity_xla", "wrapped_step", "twin_compile")}

NAMES = tuple(name for names in SUBJECTS.values() for name in names)


def in_full(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with those of its rows in place of a group's."""
    return tuple([row for name in names for row in GROUPS.get(name, (name,))])


def subjects_of(names: Sequence[str]) -> list[str]:
    """The subjects that give these rows.

    Raises:
        ValueError: a name that is not known.
    """
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: expected some of {', '.join((*NAMES, *GROUPS))}")
    return [subject for subject, own in SUBJECTS.items() if set(own) & set(names)]


def measurement(subject: str) -> Measure:
    """Imports a subject."""
    measure: Measure = importlib.import_module(f"bench.{subject}").measure
    return measure
