"""The mesh of now: named axes over the devices that there are, one of them elastic.

Devices are ordered by process and then by id, so that the devices of a host are neighbours along
the last axes. What is too much for the sizes asked for is left out by whole hosts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxft.errors import ConfigError

_log = logging.getLogger(__name__)

ELASTIC = -1


def make_mesh(
    axes: dict[str, int],
    *,
    axis_types: AxisType | Sequence[AxisType] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Builds a mesh from the devices there are now.

    `make_mesh({"data": -1, "model": 2})` gives "data" half of the devices, whatever their number:
    the same line is right before and after the world has changed its size.

    Args:
        axes: the size of each axis by name, in order; at most one is -1 and takes what is left.
        axis_types: one type for all axes, or one each; Auto by default (`jax.make_mesh` has
            Explicit).
        devices: the devices to use; by default all of the world.

    Raises:
        ConfigError: sizes that cannot be had with these devices and whole hosts.
    """
    found = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    fixed = _fixed_size(axes)
    used = found[: _usable(axes, fixed, found)]
    if len(used) < len(found):
        _log.warning(
            "make_mesh(%s) takes %d of %d devices; the others have nothing to do",
            axes,
            len(used),
            len(found),
        )
    sizes = [len(used) // fixed if size == ELASTIC else size for size in axes.values()]
    grid = np.empty(len(used), dtype=object)
    grid[:] = used
    return Mesh(grid.reshape(sizes), tuple(axes), axis_types=_axis_types(axes, axis_types))


def _fixed_size(axes: dict[str, int]) -> int:
    """How many devices one place on the elastic axis takes."""
    if not axes:
        raise ConfigError('a mesh needs at least one axis, for example {"data": -1}')
    wrong = {name: size for name, size in axes.items() if size != ELASTIC and size < 1}
    elastic = [name for name, size in axes.items() if size == ELASTIC]
    if wrong or len(elastic) > 1:
        raise ConfigError(
            f"mesh axes {axes}: sizes are at least 1, and one axis at most is -1 (what is left)"
        )
    return math.prod(size for size in axes.values() if size != ELASTIC)


def _usable(axes: dict[str, int], fixed: int, devices: list[jax.Device]) -> int:
    """How many of the devices the mesh takes: the most that fit and leave out whole hosts only.

    With one host there is none to leave out, and some of its own devices stay idle instead.
    """
    processes = [device.process_index for device in devices]
    ends = [
        end
        for end in range(len(devices), 0, -1)
        if end == len(devices) or processes[end - 1] != processes[end] or len(set(processes)) == 1
    ]
    elastic = ELASTIC in axes.values()
    for end in ends:
        if (end % fixed == 0) if elastic else (end == fixed):
            return end
    rule = f"a multiple of {fixed}" if elastic else f"exactly {fixed}"
    raise ConfigError(
        f"mesh axes {axes} need {rule} devices on whole hosts; found {len(devices)} on "
        f"{len(set(processes))} hosts (possible: {ends[:8]}); change the sizes of the axes "
        "(on CPU, JAX_NUM_CPU_DEVICES says how many devices each process has)"
    )


def _axis_types(
    axes: dict[str, int], given: AxisType | Sequence[AxisType] | None
) -> tuple[AxisType, ...]:
    if given is None:
        given = AxisType.Auto
    types = (given,) * len(axes) if isinstance(given, AxisType) else tuple(given)
    if len(types) != len(axes):
        raise ConfigError(f"mesh axes {axes}: expected {len(axes)} axis types, found {len(types)}")
    return types
