"""Numbers: which step the state is of that a call is given.

The rules are those that `jaxft.wrap` tells.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxft.snapshotter import Snapshotter

_log = logging.getLogger(__name__)

# What the next call of any wrapped step is given, by the snapshotter.
_next_numbers: weakref.WeakKeyDictionary[Snapshotter, int] = weakref.WeakKeyDictionary()


class Numbers:
    """The number of the state that each call is given."""

    def __init__(self, snapshotter: Snapshotter, asked: Callable[..., int] | None) -> None:
        self._snapshotter = snapshotter
        self._asked = asked
        self._is_first = True
        self._is_said = False  # by the state, of the last call
        self._last: Any = None

    def of(
        self, state: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: int | None
    ) -> int:
        number = said
        if number is None and self._asked is not None:
            number = self._asked(*args, **kwargs)
        if number is None:
            own = _own_step(state)
            self._is_said = own is not None
            if own is not None and own is not self._last:
                number = self._heed(int(own))
        return self._counted if number is None else number

    @property
    def _counted(self) -> int:
        """One more than the last call of a wrapped step, or what was saved or restored since."""
        return max(_next_numbers.get(self._snapshotter, 0), self._snapshotter.step or 0)

    def _heed(self, own: int) -> int:
        """What the state says of itself, unless it does not count the calls: what was restored was
        counted by them then."""
        counted = self._counted
        if not self._is_first or self._snapshotter.step is None or own == counted:
            return own
        if own < counted:
            _log.warning(
                "jaxft.wrap: the state says that it is of step %d, and the last one of this job "
                "was %d: it does not grow in each call, so calls are counted. Say "
                "wrap(..., step=...) if they are to have other numbers",
                own,
                counted,
            )
            return counted
        return own

    def gave(self, number: int, outputs: Any) -> None:
        """The step has given these: the next call is one step later if its state is among them."""
        self._is_first = False
        _next_numbers[self._snapshotter] = number + 1
        self._last = _step_among(outputs) if self._is_said else None


def _own_step(values: Sequence[Any]) -> Any:
    """The step that one of these says of itself; None if none does."""
    for value in values:
        own = getattr(value, "step", None)
        if isinstance(own, (jax.Array, np.ndarray, np.integer)):
            if own.shape == () and np.issubdtype(own.dtype, np.integer):
                return own
        elif type(own) is int:
            return own
    return None


def _step_among(outputs: Any) -> Any:
    """The same of a step's outputs, however deep in tuples, lists and dicts the state is."""
    own = _own_step([outputs])
    if own is None and isinstance(outputs, (tuple, list, dict)):
        within = outputs.values() if isinstance(outputs, dict) else outputs
        own = next((one for one in map(_step_among, within) if one is not None), None)
    return own
