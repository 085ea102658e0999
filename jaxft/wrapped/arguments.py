"""Arguments: which of a call's are the state, and what is saved of them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from jaxft.device import calls
from jaxft.errors import ConfigError

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
