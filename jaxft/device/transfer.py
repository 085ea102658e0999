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

Small leaves are gathered in batches, whichever it is, once their programs are compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device
from jax.sharding import Sharding, SingleDeviceSharding

from jaxft.device.bits import bits_of
from jaxft.device.copying import Bytes, PartCopy, Source
from jaxft.device.garbage import not_collected
from jaxft.device.gather import NO_MESH, Gatherer
from jaxft.device.layout import Batch, Owned, Run
from jaxft.device.leaves import SUB_BYTE_BITS, show, with_literals
from jaxft.device.shards import Plan
from jaxft.errors import ConfigError, JaxftError, StagingError
from jaxft.group.manifest import Leaf

Staging = Literal["view", "pinned_host", "device"]

# Ranges that one compiled program takes: compile time grows faster than their number.
PROGRAM_RANGES = 256

# Fewer shards than these are looked at sooner than a program has gathered them.
VIEWS_MIN = 128

# What comes of asking for an array that JAX cannot give, and of asking a struct.
_UNREACHABLE = (RuntimeError, ValueError, MemoryError, AttributeError, TypeError)


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


def gatherer_for(staging: Staging) -> Gatherer:
    """What gathers small leaves for this staging."""
    memory_kind = "pinned_host" if staging == "pinned_host" else None
    return Gatherer(memory_kind, shards_min=VIEWS_MIN if staging == "view" else 0)


def wait_computed(tree: Any) -> None:
    """Waits until whatever still computes a tree's arrays is done; `stage` says what is wrong with
    one that could not be."""
    with contextlib.suppress(RuntimeError):
        jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def stage(
    plan: Plan, tree: Any, staging: Staging, gatherer: Gatherer | None = None
) -> StagedLeaves:
    """Holds the owned ranges of a tree's leaves, so that the tree may be donated or changed.

    Blocks until a step that still computes the arrays is done for "view"; does not otherwise.

    Args:
        plan: the plan of this very tree.
        tree: the state; its arrays must not have been donated already.
        staging: how the bytes are held.
        gatherer: takes those batches whose programs it has; it is that of the same staging.

    Raises:
        StagingError: a leaf could not be taken; names it.
        ConfigError: an unknown staging.
    """
    check_staging(staging)
    with not_collected():
        values, treedef = jax.tree_util.tree_flatten(tree)
        assert treedef == plan.treedef, "the plan is of another tree"
        leaves = with_literals(plan.leaves, values)
        return StagedLeaves(plan, leaves, _hold(plan, leaves, values, staging, gatherer))


def _hold(
    plan: Plan,
    leaves: tuple[Leaf, ...],
    values: list[Any],
    staging: Staging,
    gatherer: Gatherer | None,
) -> list[Source]:
    """The sources of all that the plan owns, by ascending offset."""
    shards = _Shards(leaves, values)
    sources: list[Source] = []
    one_by_one: list[tuple[int, Sequence[Owned]]] = [(-1, plan.singles)]
    for number, batch in enumerate(plan.batches):
        gathered = None if gatherer is None else _gather(batch, plan, values, gatherer)
        if gathered is None:
            one_by_one.append((number, [one for run in batch.runs for one in run.owned()]))
        else:
            sources += gathered
    for number, ranges in one_by_one:
        for program in _programs(plan, number, staging) if staging != "view" else ():
            outputs = program.run(shards, plan)
            for owned, output in zip(program.ranges, outputs, strict=True):
                sources.append(_Held(owned, leaves, output, None))
        sources += [
            shards.view(owned, leaves)
            for owned in ranges
            if staging == "view" or owned.device is None
        ]
    sources.sort(key=attrgetter("offset"))
    return sources


def _gather(batch: Batch, plan: Plan, values: list[Any], gatherer: Gatherer) -> list[Source] | None:
    """Takes a batch as one array, if its program is there."""
    try:
        gathered = gatherer.gather(batch.kind, [values[leaf] for leaf in batch.leaves])
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        arrays = {leaf: values[leaf] for leaf in batch.leaves}
        gone = (n for n, one in arrays.items() if isinstance(one, jax.Array) and one.is_deleted())
        if (leaf := next(gone, None)) is not None:
            raise _staging_error(plan.leaves[leaf], error) from error
        if all(isinstance(one, jax.Array) for one in arrays.values()):
            gatherer.refuse(batch.kind, error)
        return None
    if gathered is None:
        return None
    return [_Gathered(run, plan, gathered) for run in batch.runs]


class _Held:
    """The source of one owned range: an array of it, or of its shard, of which `rows` are owned."""

    __slots__ = ("_bytes", "_data", "_leaf", "_rows", "nbytes", "offset")

    def __init__(
        self,
        owned: Owned,
        leaves: tuple[Leaf, ...],
        data: Any,
        rows: tuple[int, int] | None,
    ) -> None:
        self.offset = owned.range.offset
        self.nbytes = owned.range.nbytes
        self._leaf = leaves[owned.range.leaf]
        self._data = data
        self._rows = rows
        self._bytes: Bytes | None = None

    def bytes(self) -> Bytes:
        """The range's canonical bytes; a view where the array is contiguous."""
        if self._bytes is None:
            array = np.asarray(jax.device_get(self._data))
            if self._rows is not None:
                array = array[slice(*self._rows)]
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            dtype = self._leaf.dtype
            self._bytes = data & _mask(dtype) if dtype in SUB_BYTE_BITS else data
        return self._bytes

    def failed(self, error: BaseException) -> StagingError:
        return _staging_error(self._leaf, error)


class _Gathered:
    """The source of a run: those rows of a gathered batch that are owned."""

    def __init__(self, run: Run, plan: Plan, gathered: jax.Array) -> None:
        self.offset = run.offset
        self.nbytes = run.nbytes
        self._leaf = plan.leaves[run.leaves[0]]
        self._run = run
        self._gathered = gathered
        self._bytes: Bytes | None = None

    def bytes(self) -> Bytes:
        if self._bytes is None:
            device = self._run.piece.device
            shards = self._gathered.addressable_shards
            data = next(shard.data for shard in shards if shard.device == device)
            rows = np.asarray(jax.device_get(data))
            if len(self._run.members) < len(rows):
                rows = rows[list(self._run.members)]
            self._bytes = rows.reshape(-1).view(np.uint8)[: self.nbytes]
        return self._bytes

    def failed(self, error: BaseException) -> StagingError:
        return _staging_error(self._leaf, error)


def _mask(dtype: str) -> np.uint8:
    return np.uint8((1 << SUB_BYTE_BITS[dtype]) - 1)


class _Shards:
    """The single-device arrays that a tree's leaves consist of. Each costs some microseconds to
    reach, and a view of it some more: only those that are owned are."""

    def __init__(self, leaves: tuple[Leaf, ...], values: list[Any]) -> None:
        self._leaves = leaves
        self._values = values
        self._places: dict[Sharding, dict[Device, int]] = {}
        self._views: dict[tuple[int, Any], np.ndarray[Any, Any]] = {}

    def on(self, device: Device, leaf: int) -> jax.Array:
        """The shard of a leaf that a device holds, as key data where it is a key."""
        try:
            shards = self._array(leaf).addressable_shards
            found: jax.Array = next(one.data for one in shards if one.device == device)
        except _UNREACHABLE as error:
            raise self._failed(leaf, error) from error
        return found

    def view(self, owned: Owned, leaves: tuple[Leaf, ...]) -> _Held:
        """Holds a range without a copy if it is a device's, and by a copy if it is NumPy's. Where
        several devices of this process have the same shard, one view of it is enough."""
        leaf = owned.range.leaf
        key = (leaf, owned.shard)
        view = self._views.get(key)
        if view is None:
            try:
                view = self._views[key] = self._look(leaf, owned.device)
            except _UNREACHABLE as error:
                raise self._failed(leaf, error) from error
        return _Held(owned, leaves, view, owned.rows)

    def _look(self, leaf: int, device: Device | None) -> np.ndarray[Any, Any]:
        """A view of the shard that the device holds, or of a replica of it."""
        value = self._array(leaf)
        if isinstance(value, np.ndarray):
            return np.array(value, order="C")
        number = 0 if device is None else self._places_of(value)[device]
        return np.asarray(value.addressable_data(number))

    def _places_of(self, value: jax.Array) -> dict[Device, int]:
        """The numbers that the shards of arrays of this sharding have, by device."""
        places = self._places.get(value.sharding)
        if places is None:
            places = {one.device: number for number, one in enumerate(value.addressable_shards)}
            self._places[value.sharding] = places
        return places

    def _array(self, leaf: int) -> Any:
        """The array, as key data where it is a key."""
        value = self._values[leaf]
        return jax.random.key_data(value) if self._leaves[leaf].kind == "key" else value

    def _failed(self, leaf: int, error: Exception) -> JaxftError:
        if isinstance(self._values[leaf], jax.ShapeDtypeStruct):
            return ConfigError(
                f"leaf {show(self._leaves[leaf].path)} is a ShapeDtypeStruct, which has no bytes "
                "to save; save the arrays themselves"
            )
        return _staging_error(self._leaves[leaf], error)


def _staging_error(leaf: Leaf, error: BaseException) -> StagingError:
    return StagingError(
        f"leaf {show(leaf.path)} ({leaf.dtype}{list(leaf.shape)}) could not be copied: "
        f"{type(error).__name__}: {error}"
    )


@dataclass(frozen=True, eq=False)
class _Program:
    """A compiled copy of some of a device's owned ranges into memory that no step can touch."""

    device: Device
    ranges: tuple[Owned, ...]
    copy: Callable[[list[jax.Array]], list[jax.Array]]

    def run(self, shards: _Shards, plan: Plan) -> list[jax.Array]:
        inputs = [shards.on(self.device, owned.range.leaf) for owned in self.ranges]
        try:
            # The caller may be within `jax.set_mesh`, whose devices are not this program's.
            with jax.set_mesh(NO_MESH):
                return self.copy(inputs)
        except (RuntimeError, ValueError, MemoryError) as error:
            names = ", ".join(show(plan.leaves[one.range.leaf].path) for one in self.ranges[:4])
            raise StagingError(
                f"{len(self.ranges)} leaves on {self.device} ({names}, ...) could not be copied: "
                f"{type(error).__name__}: {error}"
            ) from error


@functools.lru_cache(maxsize=64)
def _programs(plan: Plan, batch: int, staging: Staging) -> tuple[_Program, ...]:
    """The programs that copy all that the plan owns on devices of a batch (by number; -1: of no
    batch), compiled at their first run."""
    ranges = plan.singles
    if batch >= 0:
        ranges = tuple([one for run in plan.batches[batch].runs for one in run.owned()])
    by_device: dict[Device, list[Owned]] = {}
    for owned in ranges:
        if owned.device is not None:
            by_device.setdefault(owned.device, []).append(owned)
    return tuple(
        _program(staging, device, tuple(found[first : first + PROGRAM_RANGES]))
        for device, found in by_device.items()
        for first in range(0, len(found), PROGRAM_RANGES)
    )


def _program(staging: Staging, device: Device, ranges: tuple[Owned, ...]) -> _Program:
    rows = [owned.rows for owned in ranges]
    in_device_memory = SingleDeviceSharding(device)

    def copy(shards: list[jax.Array]) -> list[jax.Array]:
        # State that is offloaded to host memory passes through the device.
        here = [jax.device_put(shard, in_device_memory) for shard in shards]
        return [_owned_bits(shard, cut) for shard, cut in zip(here, rows, strict=True)]

    memory = in_device_memory if staging == "device" else _pinned(device)
    return _Program(device, ranges, jax.jit(copy, out_shardings=memory))


def _pinned(device: Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def _owned_bits(shard: jax.Array, rows: tuple[int, int] | None) -> jax.Array:
    bits = bits_of(shard)
    # Without the copy, a shard that is taken whole and unchanged could be the output itself.
    return jnp.copy(bits) if rows is None else bits[slice(*rows)]


class StagedLeaves:
    """The owned ranges of one snapshot, held until they are copied.

    Attributes:
        leaves: every leaf of the tree, with the values of literals.
    """

    def __init__(self, plan: Plan, leaves: tuple[Leaf, ...], sources: list[Source]) -> None:
        self.leaves = leaves
        self._plan = plan
        self._sources: list[Source] | None = sources

    def copy_into(
        self,
        dest: Bytes,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """Writes the part. Can be called once: each source is let go as soon as it is copied.

        Args:
            dest: uint8, contiguous, at least `plan.length` long; bytes between ranges become zero.
            on_progress: called after each range, or batch of them, with the number of bytes of the
                part done so far.

        Returns:
            The part's checksums: little-endian xxh3_64 of each CHUNK.

        Raises:
            StagingError: a leaf could not be copied; names it. The other sources are let go too.
        """
        assert dest.dtype == np.uint8, "a part is bytes"
        assert len(dest) >= self._plan.length, "the part does not fit"
        sources, self._sources = self._sources, None
        assert sources is not None, "copied twice"
        copy = PartCopy(dest[: self._plan.length], sources, on_progress)
        del sources
        return copy.run()

    def release(self) -> None:
        """Lets go of all sources without copying them."""
        self._sources = None
