"""Memory: which kind of it an array is in, as far as that tells arrays apart.

A device has a usual kind, that an array is in if nobody says otherwise. Asked for it is a device of
this process only: those of other processes need not know (of a TPU's they do not).
"""

from __future__ import annotations

from jax import Device
from jax.sharding import Sharding


def is_usual(sharding: Sharding) -> bool:
    """Whether arrays of this sharding, with devices of this process, are in their usual memory."""
    own: set[Device] = sharding.addressable_devices
    kind = sharding.memory_kind
    return kind is None or kind in {device.default_memory().kind for device in own}
