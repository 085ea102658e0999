"""Memory: which kind of it an array is in, as far as that tells arrays apart; and how much is free.

A device has a usual kind, that an array is in if nobody says otherwise. Asked for it is a device of
this process only: those of other processes need not know (of a TPU's they do not).
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Device
from jax.sharding import Sharding


def is_usual(sharding: Sharding) -> bool:
    """Whether arrays of this sharding, with devices of this process, are in their usual memory."""
    own: set[Device] = sharding.addressable_devices
    kind = sharding.memory_kind
    return kind is None or kind in {device.default_memory().kind for device in own}


def missing_bytes(compiled: jax.stages.Compiled, devices: tuple[Device, ...]) -> int:
    """How many bytes more a program wants, beside its arguments, than are free now on one of its
    devices of this process; 0 also where that is not known, as on CPU."""
    wanted: Any = compiled.memory_analysis()
    if wanted is None:
        return 0
    beside = wanted.temp_size_in_bytes + wanted.output_size_in_bytes - wanted.alias_size_in_bytes
    most = 0
    for device in devices:
        own = device.process_index == jax.process_index()
        stats = device.memory_stats() if own else None
        if stats and "bytes_limit" in stats:
            free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
            most = max(most, beside - free)
    return most
