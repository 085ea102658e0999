"""What a measurement comes to: a row, and the bounds that it has to hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import msgspec

Against = Literal["limit", "peer", "itself"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure.

    Attributes:
        name: what was measured; several figures of one name are told apart by `name[variant]`.
        figure: ours, a median of rounds.
        unit: of `figure`, `peer` and `limit`.
        peer: the same of the program that we are compared with, None if there is none.
        limit: what the machine, or the reference method, gives; None if there is none.
        ratio: figure / limit; figure / peer where there is no limit.
        target: the bounds in words.
        holds: whether the figure is within all of them.
    """

    name: str
    figure: float
    unit: str
    peer: float | None
    limit: float | None
    ratio: float | None
    target: str
    holds: bool


class Bound(msgspec.Struct, frozen=True):
    """A figure has to be at most (or `at_least`) `factor` times what it is held `against`."""

    factor: float
    against: Against
    at_least: bool = False

    def holds(self, figure: float, peer: float | None, limit: float | None) -> bool:
        base = {"limit": limit, "peer": peer, "itself": 1.0}[self.against]
        assert base is not None, f"nothing to hold it against: {self.against}"
        bound = self.factor * base
        return figure >= bound if self.at_least else figure <= bound

    def text(self, unit: str) -> str:
        sign = ">=" if self.at_least else "<="
        if self.against == "itself":
            return f"{sign} {self.factor:g} {unit}".rstrip()
        fraction = Fraction(self.factor).limit_denominator(100)
        factor = str(fraction) if fraction.numerator == 1 and fraction < 1 else f"{self.factor:g}"
        return f"{sign} {factor} x {self.against}"


def at_most(factor: float, against: Against) -> Bound:
    return Bound(factor, against)


def at_least(factor: float, against: Against) -> Bound:
    return Bound(factor, against, at_least=True)


def row(
    name: str,
    unit: str,
    figure: float,
    *bounds: Bound,
    peer: float | None = None,
    limit: float | None = None,
) -> Row:
    """Judges a figure. Without bounds it is only stated, and holds."""
    base = peer if limit is None else limit
    return Row(
        name=name,
        figure=figure,
        unit=unit,
        peer=peer,
        limit=limit,
        ratio=figure / base if base else None,
        target=", ".join(bound.text(unit) for bound in bounds) or "stated",
        holds=all(bound.holds(figure, peer, limit) for bound in bounds),
    )


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
