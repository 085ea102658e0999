"""The mesh of now takes the devices there are, whole hosts at a time."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import pytest
from jax.sharding import AxisType

from jaxft.device import mesh as mesh_module
from jaxft.device.mesh import make_mesh
from jaxft.errors import ConfigError


def test_the_elastic_axis_takes_what_is_left() -> None:
    mesh = make_mesh({"data": -1, "model": 2})
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert dict(make_mesh({"data": -1}, devices=jax.devices()[:3]).shape) == {"data": 3}


def test_devices_are_ordered_by_host_whatever_order_they_come_in() -> None:
    mesh = make_mesh({"data": -1}, devices=jax.devices()[::-1])
    assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_one_host_leaves_devices_idle_that_do_not_fit() -> None:
    assert dict(make_mesh({"data": -1, "model": 3}).shape) == {"data": 2, "model": 3}
    assert dict(make_mesh({"data": 2, "model": 2}).shape) == {"data": 2, "model": 2}


def test_axis_types() -> None:
    assert make_mesh({"data": -1}, axis_types=AxisType.Explicit).axis_types == (AxisType.Explicit,)
    mixed = make_mesh({"data": -1, "m": 2}, axis_types=(AxisType.Auto, AxisType.Explicit))
    assert mixed.axis_types == (AxisType.Auto, AxisType.Explicit)
    with pytest.raises(ConfigError, match="expected 2 axis types, found 1"):
        make_mesh({"data": -1, "m": 2}, axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "at least one axis"),
        ({"a": -1, "b": -1}, "one axis at most is -1"),
        ({"a": 0}, "sizes are at least 1"),
        ({"a": -2}, "sizes are at least 1"),
        ({"a": 16}, "exactly 16 devices on whole hosts; found 8"),
        ({"a": -1, "b": 9}, "a multiple of 9 devices"),
    ],
)
def test_sizes_that_cannot_be(axes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_mesh(axes)


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


def usable(axes: dict[str, int], hosts: list[int]) -> int:
    """How many devices are used of a world whose hosts have these numbers of devices."""
    devices = [
        FakeDevice(100 * host + number, host)
        for host, size in enumerate(hosts)
        for number in range(size)
    ]
    fixed = mesh_module._fixed_size(axes)
    return mesh_module._usable(axes, fixed, devices)  # type: ignore[arg-type]


def test_hosts_are_left_out_whole() -> None:
    assert usable({"data": -1, "model": 2}, [4, 4, 4]) == 12
    assert usable({"data": -1, "model": 8}, [4, 4, 4]) == 8
    assert usable({"data": 2, "model": 2}, [4, 4]) == 4
    with pytest.raises(ConfigError, match="multiple of 3"):
        usable({"data": -1, "model": 3}, [4, 4])
    with pytest.raises(ConfigError, match="exactly 6"):
        usable({"data": 3, "model": 2}, [4, 4])
