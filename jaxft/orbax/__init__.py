"""`orbax.checkpoint`, whose CheckpointManager keeps what it saves in the hosts' memory as well.

    import jaxft.orbax as ocp  # instead of: import orbax.checkpoint as ocp

Every name of `orbax.checkpoint` is here, as Orbax has it (its version too), except
`CheckpointManager`. See docs/orbax.md.
"""

from __future__ import annotations

from typing import Any

from orbax import checkpoint as _orbax

from jaxft.orbax.manager import CheckpointManager as CheckpointManager


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [one for one in __dir__() if not one.startswith("_")]
    if hasattr(_orbax, name):
        return getattr(_orbax, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has orbax.checkpoint")


def __dir__() -> list[str]:
    return sorted({*dir(_orbax), "CheckpointManager"})
