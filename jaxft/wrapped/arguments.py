"""Arguments: which of a call's are the state, what is saved of them, and whether they are one.

A step that holds its state (a `functools.partial`, `nnx.cached_partial`) has the batch as its first
argument, and that would be what is saved. What the first call gives back shows it.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxft.device import calls
from jaxft.errors import ConfigError

_log = logging.getLogger(__name__)

_EITHER_WAY = inspect.Parameter.POSITIONAL_OR_KEYWORD


class Place(NamedTuple):
    """Where an argument is in a call: at its position, or under its name, as far as these are
    known."""

    position: int | None
    name: str | None

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.position is not None and self.position < len(args):
            return args[self.position]
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        asked = self.position if self.name is None else self.name
        raise ConfigError(
            f"wrap(state=...) names the argument {asked!r}; this call has {len(args)} positional "
            f"ones and {sorted(kwargs)}"
        )


def places(step: Any, names: tuple[int | str, ...]) -> tuple[Place, ...]:
    """Where those arguments of a step are; each may be given either way, as in any call.

    Raises:
        ConfigError: it has no such argument.
    """
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # it does not say
        return tuple(
            Place(name, None) if isinstance(name, int) else Place(None, name) for name in names
        )
    return tuple(_place(parameters, name) for name in names)


def _place(parameters: list[inspect.Parameter], name: int | str) -> Place:
    kinds = {parameter.kind for parameter in parameters}
    in_order = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, _EITHER_WAY)]
    for position, one in enumerate(in_order):
        if name in (position, one.name):
            return Place(position, one.name if one.kind == _EITHER_WAY else None)
    if isinstance(name, int):
        if name >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds:
            return Place(name, None)
    elif inspect.Parameter.VAR_KEYWORD in kinds or any(one.name == name for one in parameters):
        return Place(None, name)
    has = ", ".join(str(one) for one in parameters)
    raise ConfigError(f"wrap(state={name!r}): the step has no such argument, it has ({has})")


def tree_of(state: list[Any]) -> Any:
    """What is saved of these arguments."""
    values = state[0] if len(state) == 1 else tuple(state)
    return calls.nnx_state(values) if calls.has_nnx(state) else values


class Doubt:
    """Whether what a step is given as its state is one: it gives something that looks like a leaf
    of it back, or changes it in place.

    Attributes:
        is_holder: whether the step has nnx modules beside its arguments.
    """

    def __init__(self, step: Any, names: Sequence[int | str]) -> None:
        self._said = f"state={names[0] if len(names) == 1 else tuple(names)!r}"
        held = calls.held_by(step)
        self.is_holder = any(map(calls.has_nnx, held))
        self._holds = self.is_holder or any(map(calls.has_array, held))

    def about(self, state: list[Any]) -> Callable[[Any], None]:
        """What is to be told the outputs of a call that has this state.

        Raises:
            ConfigError: (what it gives) it is none, and the step holds what may be.
        """
        given = jax.tree_util.tree_leaves(tree_of(state))

        def check(outputs: Any) -> None:
            if not _comes_back(state, given, outputs):
                self._tell()
            elif self.is_holder:
                _log.warning(
                    "jaxft.wrap: the step holds nnx modules beside its arguments, which are not "
                    "saved. If it trains them, make them arguments, and name these in state=..."
                )

        return check

    def _tell(self) -> None:
        nothing = f"wrap(...), {self._said}: nothing of it is among what the step gives back"
        if self._holds:
            raise ConfigError(
                f"{nothing}, and what the step holds itself (by functools.partial, "
                "nnx.cached_partial or a closure) is not saved. Wrap the function that it is made "
                "of, and give it the state in each call: wrap(step, snapshotter, state=(0, 1)) for "
                "step(model, optimizer, batch)"
            )
        _log.warning(
            "jaxft.%s. If that is a batch, and the state another argument, say state=...", nothing
        )


def _comes_back(state: list[Any], given: list[Any], outputs: Any) -> bool:
    now = jax.tree_util.tree_leaves(tree_of(state))
    is_same = len(now) == len(given) and all(map(operator.is_, now, given))
    looks = set(filter(None, map(_look, given)))
    if calls.has_nnx(state) or not is_same or not looks:
        return True
    return not looks.isdisjoint(map(_look, jax.tree_util.tree_leaves(outputs)))


def _look(leaf: Any) -> tuple[tuple[int, ...], Any] | None:
    """Shape and dtype, as JAX takes it; None of what it does not."""
    try:
        kind = jax.typeof(leaf)
    except TypeError:
        return None
    return kind.shape, kind.dtype
