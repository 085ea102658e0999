"""Which memory is usual, this process's own devices say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxft.device.memory import is_usual


class Elsewhere:
    """A device of another process, as that of a TPU is."""

    def default_memory(self) -> Any:
        raise RuntimeError("UNIMPLEMENTED: DefaultMemory is not supported")


@pytest.mark.parametrize(("kind", "usual"), [(None, True), ("device", True), ("mine", False)])
def test_devices_of_other_processes_are_not_asked(kind: str | None, usual: bool) -> None:
    own = SimpleNamespace(default_memory=lambda: SimpleNamespace(kind="device"))
    sharding: Any = SimpleNamespace(
        memory_kind=kind, addressable_devices={1: own}.values(), device_set=[Elsewhere(), own]
    )
    assert is_usual(sharding) is usual


def test_arrays_are_in_usual_memory_unless_they_are_put_elsewhere() -> None:
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    usual = device.default_memory().kind
    assert {kind for kind in kinds if is_usual(SingleDeviceSharding(device, memory_kind=kind))} == {
        usual
    }
    assert is_usual(jax.device_put(1.0).sharding)
