"""jaxft keeps JAX training alive: snapshots in memory, coded across hosts, restored bit for bit.

    import jaxft

    jaxft.initialize()
    mesh = jaxft.make_mesh({"data": -1, "model": 2})
    with jaxft.Snapshotter(every=10) as snapshotter:
        restored = snapshotter.restore(state)
        ...
        snapshotter.save(step, state)

This module is the contents page. Names are loaded when they are first used, so that importing
`jaxft.host` or `jaxft.launch` never imports JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxft.device.mesh import make_mesh
    from jaxft.errors import (
        ChunkDamaged,
        ConfigError,
        JaxftError,
        JobInUse,
        LaunchError,
        MemoryLimitError,
        NothingRecoverable,
        PeerUnreachable,
        RestoreError,
        RestoreTimeout,
        SnapshotAborted,
        SnapshotError,
        SnapshotLost,
        SnapshotSkipped,
        StagingError,
        TreeMismatch,
        WireError,
    )
    from jaxft.fallback import OrbaxFallback
    from jaxft.group.world import Code
    from jaxft.overhead import Auto
    from jaxft.receipt import Receipt
    from jaxft.restorer import Restored
    from jaxft.snapshotter import Snapshotter
    from jaxft.startup import initialize
    from jaxft.watched import long_phase
    from jaxft.wrapping import wrap

__version__ = "0.1.0"

_HOMES = {
    "Auto": "jaxft.overhead",
    "Code": "jaxft.group.world",
    "OrbaxFallback": "jaxft.fallback",
    "Receipt": "jaxft.receipt",
    "Restored": "jaxft.restorer",
    "Snapshotter": "jaxft.snapshotter",
    "initialize": "jaxft.startup",
    "long_phase": "jaxft.watched",
    "make_mesh": "jaxft.device.mesh",
    "wrap": "jaxft.wrapping",
}

__all__ = [
    "Auto",
    "ChunkDamaged",
    "Code",
    "ConfigError",
    "JaxftError",
    "JobInUse",
    "LaunchError",
    "MemoryLimitError",
    "NothingRecoverable",
    "OrbaxFallback",
    "PeerUnreachable",
    "Receipt",
    "RestoreError",
    "RestoreTimeout",
    "Restored",
    "SnapshotAborted",
    "SnapshotError",
    "SnapshotLost",
    "SnapshotSkipped",
    "Snapshotter",
    "StagingError",
    "TreeMismatch",
    "WireError",
    "__version__",
    "initialize",
    "long_phase",
    "make_mesh",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "jaxft.errors")), name)


def __dir__() -> list[str]:
    return __all__
