"""Boxes: rectangular pieces of an array, in global coordinates.

A box is (start, stop), two tuples with one number a dimension, stop exclusive. The box of an array
of shape () is ((), ()) and holds one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Box = tuple[tuple[int, ...], tuple[int, ...]]


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of an array of this shape."""
    return (0,) * len(shape), tuple(shape)


def from_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of a shard's index, as shardings give it; dimensions that it leaves out are whole."""
    start, stop = whole(shape)
    cut = [part.indices(size) for part, size in zip(index, shape, strict=False)]
    return (
        tuple(begin for begin, _, _ in cut) + start[len(cut) :],
        tuple(end for _, end, _ in cut) + stop[len(cut) :],
    )


def sides(box: Box) -> tuple[int, ...]:
    """The box's shape."""
    return tuple(stop - start for start, stop in zip(*box, strict=True))


def count(box: Box) -> int:
    """How many elements the box holds."""
    return math.prod(sides(box))


def intersect(one: Box, other: Box) -> Box | None:
    """The elements that both boxes hold, or None."""
    start = tuple(map(max, one[0], other[0]))
    stop = tuple(map(min, one[1], other[1]))
    if any(begin >= end for begin, end in zip(start, stop, strict=True)):
        return None
    return start, stop


def within(array: np.ndarray[Any, Any], origin: Sequence[int], box: Box) -> np.ndarray[Any, Any]:
    """A view of the box in an array whose first element is at `origin`."""
    cut: list[Any] = [
        slice(begin - zero, end - zero)
        for begin, end, zero in zip(box[0], box[1], origin, strict=True)
    ]
    view: np.ndarray[Any, Any] = array[(*cut, ...)]  # an array even where there are no dimensions
    return view


def cut_rows(box: Box, parts: int) -> list[Box]:
    """Cuts a box of at least one dimension into `parts` boxes of whole rows of nearly equal number.

    Where there are fewer rows than parts, some of the boxes are empty.
    """
    (first, *start), (last, *stop) = box
    rows = last - first
    edges = [first + rows * part // parts for part in range(parts + 1)]
    return [((begin, *start), (end, *stop)) for begin, end in itertools.pairwise(edges)]
