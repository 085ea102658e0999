"""Staging: taking the bytes of the state before the next step may overwrite them.

`stage` runs on the training thread, within `save`. When it returns, the caller may donate the
arrays and change the NumPy leaves: what is needed of them is held or copied. `copy_into` of what it
returns runs on a background thread and writes the process's part.

How the bytes are held until then:
- "view": a NumPy view holds the CPU buffer, without a copy. XLA then does not reuse that buffer for
  the step that donates it, and allocates instead, until the view is let go. (The buffer of another
  device is copied to the host before `stage` returns: safe, and slow.)
- "pinned_host": the device copies the owned ranges to its host's pinned memory. The copy is
  dispatched before `stage` returns, and the device orders whatever comes after behind it.
- "device": the same into device memory, to be read in the background: 1/R of the state in extra
  device memory, for devices whose copies to pinned memory are slow.

Elements are bit-cast to unsigned integers before they are sliced: XLA changes the payload of some
floats' NaNs otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import Device
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from jaxft.device.leaves import SUB_BYTE_BITS, show, with_literals
from jaxft.device.shards import Owned, Plan
from jaxft.errors import ConfigError, StagingError
from jaxft.group.manifest import CHUNK, Leaf

Staging = Literal["view", "pinned_host", "device"]

# Ranges that one compiled program takes: compile time grows faster than their number.
PROGRAM_RANGES = 256

# Bytes copied before they are checksummed: small enough to be in the cache still, and large enough
# that the thread asks for the interpreter lock seldom.
PIECE = 4 * CHUNK


def default_staging() -> Staging:
    """What suits the backend: a view on CPU, pinned host memory elsewhere."""
    return "view" if jax.default_backend() == "cpu" else "pinned_host"


def check_staging(staging: Staging | None) -> Staging:
    """The staging that was asked for; what suits the backend if None was.

    Raises:
        ConfigError: an unknown one.
    """
    if staging is None:
        return default_staging()
    if staging not in get_args(Staging):
        raise ConfigError(f"staging={staging!r}: expected one of {', '.join(get_args(Staging))}")
    return staging


def stage(plan: Plan, tree: Any, staging: Staging) -> StagedLeaves:
    """Holds the owned ranges of a tree's leaves, so that the tree may be donated or changed.

    Blocks until a step that still computes the arrays is done for "view"; does not otherwise.

    Args:
        plan: the plan of this very tree.
        tree: the state; its arrays must not have been donated already.
        staging: how the bytes are held.

    Raises:
        StagingError: a leaf could not be taken; names it.
        ConfigError: an unknown staging.
    """
    check_staging(staging)
    values, treedef = jax.tree_util.tree_flatten(tree)
    assert treedef == plan.treedef, "the plan is of another tree"
    shards = _Shards(plan.leaves, values)
    leaves = with_literals(plan.leaves, values)
    held: list[_Held | None] = [None] * len(plan.owned)
    taken: set[int] = set()
    if staging != "view":
        for program in _programs(plan, staging):
            taken.update(program.slots)
            for slot, output in zip(program.slots, program.run(shards, plan), strict=True):
                held[slot] = _Held(output, None)
    for slot, owned in enumerate(plan.owned):
        if slot not in taken:
            held[slot] = shards.view(owned)
    return StagedLeaves(plan, leaves, held)


@dataclass(frozen=True)
class _Held:
    """The source of one owned range: an array of it, or of its shard, of which `rows` are owned."""

    data: Any
    rows: tuple[int, int] | None

    def bytes_of(self, dtype: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The range's canonical bytes; a view where the array is contiguous."""
        array = np.asarray(jax.device_get(self.data))
        if self.rows is not None:
            array = array[slice(*self.rows)]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return data & _mask(dtype) if dtype in SUB_BYTE_BITS else data


def _mask(dtype: str) -> np.uint8:
    return np.uint8((1 << SUB_BYTE_BITS[dtype]) - 1)


class _Shards:
    """The single-device arrays that a tree's leaves consist of."""

    def __init__(self, leaves: tuple[Leaf, ...], values: list[Any]) -> None:
        self._leaves = leaves
        self._values = values
        self._by_device: dict[int, dict[Device, jax.Array]] = {}

    def on(self, device: Device, leaf: int) -> jax.Array:
        """The shard of a leaf that a device holds, as key data where it is a key."""
        if leaf not in self._by_device:
            try:
                self._by_device[leaf] = self._take_apart(leaf)
            except ConfigError:
                raise
            except (RuntimeError, ValueError, MemoryError) as error:
                raise _staging_error(self._leaves[leaf], error) from error
        return self._by_device[leaf][device]

    def _take_apart(self, leaf: int) -> dict[Device, jax.Array]:
        value = self._values[leaf]
        if not isinstance(value, jax.Array):
            raise ConfigError(
                f"leaf {show(self._leaves[leaf].path)} is a {type(value).__name__}, which has no "
                "bytes to save; save the arrays themselves"
            )
        if self._leaves[leaf].kind == "key":
            value = jax.random.key_data(value)
        return {shard.device: shard.data for shard in value.addressable_shards}

    def view(self, owned: Owned) -> _Held:
        """Holds a range without a copy if it is a device's, and by a copy if it is NumPy's."""
        leaf = self._leaves[owned.range.leaf]
        if owned.device is None:
            return _Held(np.array(self._values[owned.range.leaf], order="C"), owned.rows)
        data = self.on(owned.device, owned.range.leaf)
        try:
            return _Held(np.asarray(data), owned.rows)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise _staging_error(leaf, error) from error


def _staging_error(leaf: Leaf, error: BaseException) -> StagingError:
    return StagingError(
        f"leaf {show(leaf.path)} ({leaf.dtype}{list(leaf.shape)}) could not be copied: "
        f"{type(error).__name__}: {error}"
    )


@dataclass(frozen=True, eq=False)
class _Program:
    """A compiled copy of some of a device's owned ranges into memory that no step can touch.

    `slots` are the ranges' numbers in the plan.
    """

    device: Device
    slots: tuple[int, ...]
    copy: Callable[[list[jax.Array]], list[jax.Array]]

    def run(self, shards: _Shards, plan: Plan) -> list[jax.Array]:
        inputs = [shards.on(self.device, plan.owned[slot].range.leaf) for slot in self.slots]
        try:
            # The caller may be within `jax.set_mesh`, whose devices are not this program's.
            with jax.set_mesh(_mesh_of(self.device)):
                return self.copy(inputs)
        except (RuntimeError, ValueError, MemoryError) as error:
            names = ", ".join(
                show(plan.leaves[plan.owned[slot].range.leaf].path) for slot in self.slots[:4]
            )
            raise StagingError(
                f"{len(self.slots)} leaves on {self.device} ({names}, ...) could not be copied: "
                f"{type(error).__name__}: {error}"
            ) from error


@functools.lru_cache
def _mesh_of(device: Device) -> Mesh:
    grid = np.empty(1, dtype=object)
    grid[0] = device
    return Mesh(grid, ("device",), axis_types=(AxisType.Auto,))


@functools.lru_cache(maxsize=8)
def _programs(plan: Plan, staging: Staging) -> tuple[_Program, ...]:
    """The programs that copy all that the plan owns on devices, compiled at their first run."""
    by_device: dict[Device, list[int]] = {}
    for slot, owned in enumerate(plan.owned):
        if owned.device is not None:
            by_device.setdefault(owned.device, []).append(slot)
    return tuple(
        _program(plan, staging, device, tuple(slots[first : first + PROGRAM_RANGES]))
        for device, slots in by_device.items()
        for first in range(0, len(slots), PROGRAM_RANGES)
    )


def _program(plan: Plan, staging: Staging, device: Device, slots: tuple[int, ...]) -> _Program:
    rows = [plan.owned[slot].rows for slot in slots]
    in_device_memory = SingleDeviceSharding(device)

    def copy(shards: list[jax.Array]) -> list[jax.Array]:
        # State that is offloaded to host memory passes through the device.
        here = [jax.device_put(shard, in_device_memory) for shard in shards]
        return [_owned_bits(shard, cut) for shard, cut in zip(here, rows, strict=True)]

    memory = in_device_memory if staging == "device" else _pinned(device)
    return _Program(device, slots, jax.jit(copy, out_shardings=memory))


def _pinned(device: Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def _owned_bits(shard: jax.Array, rows: tuple[int, int] | None) -> jax.Array:
    bits = _bits(shard)
    # Without the copy, a shard that is taken whole and unchanged could be the output itself.
    return jnp.copy(bits) if rows is None else bits[slice(*rows)]


def _bits(array: jax.Array) -> jax.Array:
    """The elements as unsigned integers of the same bytes (a complex one as two)."""
    dtype = array.dtype
    if dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    if dtype.name in SUB_BYTE_BITS:
        unsigned = jnp.dtype(f"uint{SUB_BYTE_BITS[dtype.name]}")
        return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([_bits(jax.lax.real(array)), _bits(jax.lax.imag(array))], axis=-1)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * dtype.itemsize}"))


class StagedLeaves:
    """The owned ranges of one snapshot, held until they are copied.

    Attributes:
        leaves: every leaf of the tree, with the values of literals.
    """

    def __init__(self, plan: Plan, leaves: tuple[Leaf, ...], held: list[_Held | None]) -> None:
        self.leaves = leaves
        self._plan = plan
        self._held = held

    def copy_into(
        self,
        dest: np.ndarray[Any, np.dtype[np.uint8]],
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """Writes the part. Can be called once: each source is let go as soon as it is copied.

        Args:
            dest: uint8, contiguous, at least `plan.length` long; bytes between ranges become zero.
            on_progress: called after each range with the number of bytes of the part done so far.

        Returns:
            The part's checksums: little-endian xxh3_64 of each CHUNK.

        Raises:
            StagingError: a leaf could not be copied; names it. The other sources are let go too.
        """
        assert dest.dtype == np.uint8, "a part is bytes"
        assert len(dest) >= self._plan.length, "the part does not fit"
        writer = _PartWriter(dest[: self._plan.length])
        try:
            for slot, owned in enumerate(self._plan.owned):
                held, self._held[slot] = self._held[slot], None
                assert held is not None, "copied twice"
                leaf = self.leaves[owned.range.leaf]
                try:
                    writer.write(owned.range.offset, held.bytes_of(leaf.dtype))
                    if on_progress is not None:
                        on_progress(writer.done)
                except (OSError, RuntimeError, ValueError, MemoryError) as error:
                    raise _staging_error(leaf, error) from error
        finally:
            self.release()
        return writer.finish()

    def release(self) -> None:
        """Lets go of all sources without copying them."""
        self._held = [None] * len(self._held)


class _PartWriter:
    """Writes a part from front to back, and checksums each chunk as soon as it is complete."""

    def __init__(self, part: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.done = 0
        self._part = part
        self._checksums = bytearray()
        self._checked = 0

    def write(self, offset: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._part[self.done : offset] = 0
        self.done = offset
        taken = 0
        while taken < len(data):
            # Pieces end where chunks end.
            size = min(len(data) - taken, PIECE - self.done % PIECE)
            np.copyto(self._part[self.done : self.done + size], data[taken : taken + size])
            taken += size
            self.done += size
            self._check(self.done // CHUNK * CHUNK)

    def _check(self, end: int) -> None:
        while self._checked < end:
            chunk = self._part[self._checked : min(self._checked + CHUNK, end)]
            self._checksums += xxhash.xxh3_64_intdigest(chunk.data).to_bytes(8, "little")
            self._checked += len(chunk)

    def finish(self) -> bytes:
        """The checksums of the whole part."""
        self._check(len(self._part))
        return bytes(self._checksums)
