"""The step's own program, kept on disk beside its twins, so that a restart does not compile it.

JAX keeps compiled programs too, but one process of a world writes them down, and not all of the
others can use them. The rules:
- The step stays JAX's: the program is put where JAX has it once it has compiled it, before the step
  is called for the first time, so calls take JAX's own short way. There is no public way to that;
  where JAX has it elsewhere, the step is compiled as ever.
- It is found by its text and all else that a kept program depends on (`executables`).
- Programs that are bound to this process (with host code, or with constants that JAX hands over at
  each call) are not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxft.device.executables import Executables, found, key_of

_log = logging.getLogger(__name__)
_BOUND = ("keepalive", "host_callbacks", "ordered_effects", "unordered_effects")


def _nothing() -> None:
    pass


def bring_back(
    executables: Executables, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], None]:
    """Gives a jitted function, before its first call with such arguments, the program that was
    kept.

    Returns:
        What is to be called after that call: it keeps the program that JAX has compiled, if none
        was kept.
    """
    try:
        lowered = fn.lower(*args, **kwargs)
        program = lowered._lowering
        devices = tuple(program._device_list or ())
        is_bound = program.const_args or any(map(program.compile_args.get, _BOUND))
        if program._executable is not None or is_bound or not devices:
            return _nothing
        key = key_of(lowered.as_text(), devices)
        kept = executables.load(key, lowered.in_tree, lowered.out_tree, devices)
        if kept is not None:
            program._executable = kept._executable
            return _nothing
    # Whatever is wrong with the step, the call itself says it, in its own way; and another version
    # of JAX may have its programs elsewhere.
    except Exception as error:  # noqa: BLE001
        _log.debug("the step's program is not looked for: %s: %s", type(error).__name__, error)
        return _nothing

    before = found()

    def keep() -> None:
        if program._executable is not None:  # else that would compile it once more
            executables.keep(key, lowered.compile(), before)

    return keep
