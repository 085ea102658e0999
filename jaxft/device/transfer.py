"""Staging: taking the bytes of the state before the next step may overwrite them.

`stage_leaves` runs on the training thread, within `save`. When it returns, the caller may donate
the arrays and change the NumPy leaves: what is needed of them is held or copied. `copy_into` of
what it returns runs on a background thread and writes the process's part.

How the bytes are held until then:
- "view": a NumPy view holds the CPU buffer, without a copy. XLA then does not reuse that buffer for
  the step that donates it, and allocates instead, until the view is let go. (The buffer of another
  device is copied to the host before it returns: safe, and slow.)
- "pinned_host": the device copies the owned ranges to its host's pinned memory. The copy is
  dispatched before it returns, and the device orders whatever comes after behind it.
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
from jax.sharding import SingleDeviceSharding

from jaxft.device.aside import aside, begin_aside
from jaxft.device.bits import bits_of
from jaxft.device.contexts import own_contexts
from jaxft.device.copying import Bytes, PartCopy, Source
from jaxft.device.garbage import not_collected
from jaxft.device.gather import Gatherer
from jaxft.device.layout import Batch, Owned
from jaxft.device.leaves import show, stored, with_literals
from jaxft.device.pieces import Places, way_to_pieces
from jaxft.device.shards import Plan
from jaxft.device.sources import UNREACHABLE, GatheredRun, Held, staging_error, unreachable
from jaxft.device.views import View, Views
from jaxft.errors import ConfigError, StagingError
from jaxft.group.manifest import Leaf

Staging = Literal["view", "pinned_host", "device"]

# Ranges that one compiled program takes: compile time grows faster than their number.
PROGRAM_RANGES = 256

# From so many batches on, two threads start their programs.
THREADED_MIN = 8

# Fewer shards than these are looked at sooner than a program has gathered them.
VIEWS_MIN = 128


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


def wait_computed(tree: Any) -> bool:
    """Waits until whatever still computes a tree's arrays is done; `stage_leaves` says what is
    wrong with one that could not be.

    Returns:
        Whether there was anything to wait for.
    """
    with contextlib.suppress(RuntimeError):
        for leaf in jax.tree_util.tree_leaves(tree):
            is_ready = getattr(leaf, "is_ready", None)
            if is_ready is not None and not is_ready():
                jax.block_until_ready(tree)  # type: ignore[no-untyped-call]
                return True
        return False
    return True


def stage_leaves(
    plan: Plan, values: list[Any], staging: Staging, gatherer: Gatherer | None = None
) -> StagedLeaves:
    """Holds the owned ranges of a tree's leaves, so that the tree may be donated or changed.

    Blocks until a step that still computes the arrays is done for "view"; does not otherwise.

    Args:
        plan: the plan of this very tree.
        values: its leaves; arrays must not have been donated already.
        staging: how the bytes are held.
        gatherer: takes those batches whose programs it has; it is that of the same staging.

    Raises:
        StagingError: a leaf could not be taken; names it.
        ConfigError: an unknown staging.
    """
    check_staging(staging)
    with not_collected():
        leaves = with_literals(plan.leaves, values, plan.literals)
        return StagedLeaves(plan, leaves, _hold(plan, leaves, values, staging, gatherer))


# What was held of some leaves; called once, it gives the sources of the part that they are.
Taken = Callable[[], Sequence[Source]]


def _hold(
    plan: Plan,
    leaves: tuple[Leaf, ...],
    values: list[Any],
    staging: Staging,
    gatherer: Gatherer | None,
) -> list[Taken]:
    """Holds all that the plan owns."""

    def gather_and_look() -> tuple[list[jax.Array | None], Views, list[View]]:
        gathered = _gather_all(plan, values, gatherer)
        views = _views(plan, _one_by_one(gathered), staging)
        return gathered, views, views.look(values)

    gathered, views, looked = aside(gather_and_look, len(plan.leaves))
    taken: list[Taken] = [functools.partial(views.sources, looked, leaves)]
    for batch, rows in zip(plan.batches, gathered, strict=True):
        if rows is not None:
            taken.append(functools.partial(_gathered, batch, leaves, rows))
    if staging != "view":
        shards = _Shards(plan.leaves, values)
        for number in _one_by_one(gathered):
            for program in _programs(plan, number, staging):
                taken.append(functools.partial(_copied, program, leaves, program.run(shards, plan)))
    return taken


def _one_by_one(gathered: Sequence[jax.Array | None]) -> tuple[int, ...]:
    """The batches whose leaves are taken one by one; -1: what is in no batch."""
    return -1, *(number for number, rows in enumerate(gathered) if rows is None)


def hold_some(
    plan: Plan,
    leaves: tuple[Leaf, ...],
    values: list[Any],
    staging: Staging,
    members: frozenset[int],
) -> list[Taken]:
    """Holds what the plan owns of these leaves, one by one.

    Raises:
        StagingError, ConfigError: a leaf could not be taken; names it.
    """
    taken: list[Taken] = []
    if staging != "view":
        shards = _Shards(plan.leaves, values)
        for program in _programs_of_some(plan, members, staging):
            taken.append(functools.partial(_copied, program, leaves, program.run(shards, plan)))
    views = _views_of_some(plan, members, staging)
    taken.append(functools.partial(views.sources, views.look(values), leaves))
    return taken


def _gathered(batch: Batch, leaves: tuple[Leaf, ...], gathered: jax.Array) -> list[Source]:
    return [GatheredRun(run, leaves, gathered) for run in batch.runs]


def _copied(program: _Program, leaves: tuple[Leaf, ...], outputs: list[jax.Array]) -> list[Source]:
    pairs = zip(program.ranges, outputs, strict=True)
    return [Held(owned, leaves, output, None) for owned, output in pairs]


def _gather_all(plan: Plan, values: list[Any], gatherer: Gatherer | None) -> list[jax.Array | None]:
    """Every batch as one array, where its program is there. Many of them are started by two
    threads: JAX lets go of the interpreter lock while it starts a program, so that one thread puts
    together the arguments of the next."""
    count = len(plan.batches)
    found: list[jax.Array | None] = [None] * count
    if gatherer is None:
        return found

    def gather(numbers: range) -> None:
        for number in numbers:
            found[number] = _gather(plan.batches[number], plan, values, gatherer)

    if count < THREADED_MIN:
        gather(range(count))
        return found
    wait_for_others = begin_aside(functools.partial(gather, range(1, count, 2)))
    try:
        gather(range(0, count, 2))
    finally:
        wait_for_others()
    return found


def _gather(batch: Batch, plan: Plan, values: list[Any], gatherer: Gatherer) -> jax.Array | None:
    """Takes a batch as one array, if its program is there."""
    try:
        return gatherer.gather(batch.kind, [values[leaf] for leaf in batch.leaves])
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        arrays = {leaf: values[leaf] for leaf in batch.leaves}
        gone = (n for n, one in arrays.items() if isinstance(one, jax.Array) and one.is_deleted())
        if (leaf := next(gone, None)) is not None:
            raise staging_error(plan.leaves[leaf], error) from error
        if all(isinstance(one, jax.Array) for one in arrays.values()):
            gatherer.refuse(batch.kind, error)
        return None


class _Shards:
    """The pieces that a tree's leaves consist of, by device."""

    def __init__(self, leaves: tuple[Leaf, ...], values: list[Any]) -> None:
        self._leaves = leaves
        self._values = values
        self._places = Places()

    def on(self, device: Device, leaf: int) -> jax.Array:
        """The shard of a leaf that a device holds, as key data where it is a key."""
        value = self._values[leaf]
        try:
            array = stored(self._leaves[leaf], value)
            return way_to_pieces()(array)[self._places.of(array)[device]]
        except UNREACHABLE as error:
            raise unreachable(self._leaves[leaf], value, error) from error


@dataclass(frozen=True, eq=False)
class _Program:
    """A compiled copy of some of a device's owned ranges into memory that no step can touch."""

    device: Device
    ranges: tuple[Owned, ...]
    copy: Callable[[list[jax.Array]], list[jax.Array]]

    def run(self, shards: _Shards, plan: Plan) -> list[jax.Array]:
        inputs = [shards.on(self.device, owned.range.leaf) for owned in self.ranges]
        try:
            with own_contexts():
                return self.copy(inputs)
        except (RuntimeError, ValueError, MemoryError) as error:
            names = ", ".join(show(plan.leaves[one.range.leaf].path) for one in self.ranges[:4])
            raise StagingError(
                f"{len(self.ranges)} leaves on {self.device} ({names}, ...) could not be copied: "
                f"{type(error).__name__}: {error}"
            ) from error


def _ranges_of(plan: Plan, batch: int) -> tuple[Owned, ...]:
    """What the plan owns of a batch, by number; -1: of no batch."""
    if batch < 0:
        return plan.singles
    return tuple([one for run in plan.batches[batch].runs for one in run.owned()])


@functools.lru_cache(maxsize=16)
def _views(plan: Plan, batches: tuple[int, ...], staging: Staging) -> Views:
    """What is viewed of these batches: everything, or what is on no device."""
    ranges = [one for batch in batches for one in _ranges_of(plan, batch)]
    return _viewed(plan, ranges, staging)


@functools.lru_cache(maxsize=4)
def _views_of_some(plan: Plan, members: frozenset[int], staging: Staging) -> Views:
    return _viewed(plan, [one for one in plan.owned if one.range.leaf in members], staging)


def _viewed(plan: Plan, ranges: Sequence[Owned], staging: Staging) -> Views:
    return Views(plan, [one for one in ranges if staging == "view" or one.device is None])


@functools.lru_cache(maxsize=64)
def _programs(plan: Plan, batch: int, staging: Staging) -> tuple[_Program, ...]:
    """The programs that copy all that the plan owns on devices of a batch, or of no batch, compiled
    at their first run."""
    return _programs_for(_ranges_of(plan, batch), staging)


@functools.lru_cache(maxsize=4)
def _programs_of_some(
    plan: Plan, members: frozenset[int], staging: Staging
) -> tuple[_Program, ...]:
    ranges = [one for one in plan.owned if one.range.leaf in members]
    return _programs_for(ranges, staging)


def _programs_for(ranges: Sequence[Owned], staging: Staging) -> tuple[_Program, ...]:
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
        length: bytes of the part.
        parity_bytes: how many of these, behind what the plan says, are parity of the part's lanes
            that the devices have made; 0: they have made none.
    """

    def __init__(
        self,
        plan: Plan,
        leaves: tuple[Leaf, ...],
        taken: list[Taken],
        parity_bytes: int = 0,
    ) -> None:
        self.leaves = leaves
        self.parity_bytes = parity_bytes
        self.length = plan.length + parity_bytes
        self._taken: list[Taken] | None = taken

    def copy_into(
        self,
        dest: Bytes,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> bytes:
        """Writes the part. Can be called once: each source is let go as soon as it is copied.

        Args:
            dest: uint8, contiguous, at least `length` long; bytes between ranges become zero.
            on_progress: called after each range, or batch of them, with the number of bytes of the
                part done so far.

        Returns:
            The part's checksums: little-endian xxh3_64 of each CHUNK.

        Raises:
            StagingError: a leaf could not be copied; names it. The other sources are let go too.
        """
        assert dest.dtype == np.uint8, "a part is bytes"
        assert len(dest) >= self.length, "the part does not fit"
        taken, self._taken = self._taken, None
        assert taken is not None, "copied twice"
        sources = [source for one in taken for source in one()]
        del taken
        sources.sort(key=attrgetter("offset"))
        copy = PartCopy(dest[: self.length], sources, on_progress)
        del sources
        return copy.run()

    def release(self) -> None:
        """Lets go of all sources without copying them."""
        self._taken = None
