"""Gathering: a batch of small leaves taken from their devices as one array, by a compiled program.

To reach the shards of a leaf from Python takes longer than to copy a small one. A program gets the
arrays as they are, and its output is a new buffer: whatever is donated afterwards waits until the
program has read it.

The rules:
- Every device puts together its own shards; nothing moves between devices.
- Elements are gathered as unsigned integers (see `bits`). Each leaf begins at a multiple of ALIGN,
  with zeros behind it, as in a part.
- Programs are compiled by `prepare`, away from the training thread. A batch whose program is not
  there is taken leaf by leaf.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxft.device.bits import bits_of, changes_when_joined
from jaxft.device.contexts import own_contexts
from jaxft.device.layout import BatchKind
from jaxft.device.shards import Plan
from jaxft.group.manifest import ALIGN, align

_log = logging.getLogger(__name__)

# Programs that are kept: those of several trees, each with leaves of many kinds.
PROGRAMS_MAX = 256

_Program = Callable[..., jax.Array]


class Gatherer:
    """The programs that gather batches into memory of one kind.

    Args:
        memory_kind: where the outputs go; None leaves them in the memory of the device.
        shards_min: how many shards have to be wanted of a batch for a program to be compiled.

    `gather` is for one thread, `prepare` for another.
    """

    def __init__(self, memory_kind: str | None = None, *, shards_min: int = 0) -> None:
        self._memory_kind = memory_kind
        self._shards_min = shards_min
        self._programs: OrderedDict[BatchKind, _Program | None] = OrderedDict()

    def gather(self, kind: BatchKind, values: Sequence[jax.Array]) -> jax.Array | None:
        """The shards of these leaves that each device holds, as one row for each leaf.

        Returns:
            An array with a shard on each device: uint8, 16, 32 or 64 of shape (leaves, row), rows
            being a multiple of ALIGN bytes. None if the program is not there (yet).

        Raises:
            RuntimeError, ValueError, TypeError: a leaf was deleted, memory is out, or an array is
                laid out in another way than others of its kind.
        """
        program = self._programs.get(kind)
        if program is None:
            return None
        with own_contexts():
            return program(*values)

    def prepare(self, plan: Plan, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Compiles the programs that a plan's batches need, one by one for as long as it may."""
        for batch in plan.batches:
            wanted = sum(len(run.leaves) for run in batch.runs)
            if batch.kind in self._programs or wanted < self._shards_min:
                continue
            if not may_go_on():
                return
            try:
                self._programs[batch.kind] = _compile(batch.kind, self._memory_kind)
            # What JAX and XLA raise for a kind they cannot lower or compile, or have no memory for.
            # It costs speed alone: `refuse` says so, and the leaves are taken one by one.
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                self.refuse(batch.kind, error)
            while len(self._programs) > PROGRAMS_MAX:
                self._programs.popitem(last=False)

    def refuse(self, kind: BatchKind, error: Exception) -> None:
        """Such batches are taken leaf by leaf from now on."""
        self._programs[kind] = None
        _log.warning(
            "leaves of %s%s are saved one by one, which is slower: %s: %s",
            kind.dtype,
            list(kind.shape),
            type(error).__name__,
            error,
        )


def _compile(kind: BatchKind, memory_kind: str | None) -> _Program:
    """Compiles a program, and runs it once: the first run takes longer than all others."""
    sharding = kind.sharding
    described = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type
    )
    with own_contexts():
        lowered = _gathering(sharding, kind.count, memory_kind).lower(*[described] * kind.count)
        program: _Program = lowered.compile()
        program(*[_zeros(kind)] * kind.count).block_until_ready()
    return program


def _gathering(sharding: Any, count: int, memory_kind: str | None) -> Any:
    """The program before it is compiled."""
    if isinstance(sharding, NamedSharding):
        everywhere = PartitionSpec(tuple(sharding.mesh.axis_names))  # type: ignore[no-untyped-call]
        each = jax.shard_map(
            _rows,
            mesh=sharding.mesh,
            in_specs=(sharding.spec,) * count,
            out_specs=everywhere,
            check_vma=False,
        )
        out = NamedSharding(sharding.mesh, everywhere, memory_kind=memory_kind)
        return jax.jit(each, out_shardings=out)
    assert isinstance(sharding, SingleDeviceSharding), "batches are of such leaves only"
    device = next(iter(sharding.device_set))
    return jax.jit(_rows, out_shardings=SingleDeviceSharding(device, memory_kind=memory_kind))


def _rows(*shards: jax.Array) -> jax.Array:
    """One row of unsigned integers for each shard."""
    flat = [shard.reshape(-1) for shard in shards]
    if changes_when_joined(flat[0].dtype):
        rows = jnp.stack([bits_of(one) for one in flat])
    else:
        # One kernel for all of them, where the other way takes one more for each.
        rows = bits_of(jnp.stack(flat)).reshape(len(flat), -1)
    itemsize = rows.dtype.itemsize
    missing = align(rows.shape[1] * itemsize, ALIGN) // itemsize - rows.shape[1]
    return jnp.pad(rows, ((0, 0), (0, missing)))


def _zeros(kind: BatchKind) -> jax.Array:
    def part(index: Any) -> np.ndarray[Any, Any]:
        sides = [range(*one.indices(size)) for one, size in zip(index, kind.shape, strict=True)]
        return np.zeros([len(side) for side in sides], kind.dtype)

    return jax.make_array_from_callback(kind.shape, kind.sharding, part)
