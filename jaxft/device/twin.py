"""The twin of a step: the same step, which also gives the owned bytes of the state it was given.

    step:  state, batch ──► state', loss
    twin:  state, batch ──► state', loss, and in pinned host memory the owned ranges of `state`

The state is only read until the optimizer's update writes it, so an accelerator can copy it to its
host while it computes. What is donated stays donated: the compiler orders the reads before the
writes, so whoever calls the twin need not hold anything.

The rules:
- The step's own computation, as JAX has traced it, stands in the twin as it stands in the step's
  program, with the shardings that it asks for. (As a function that is called it would not do: its
  results are the same then only up to rounding.) What is taken of a leaf is taken behind an
  `optimization_barrier` of its own, so that the step's fusions stay what they are.
- Bytes are taken as unsigned integers (see `bits`).
- All processes of the world run the same program, so it has nothing of one process in it: which
  rows a device owns of a leaf that others hold too is told it by an argument, `starts`. A shard of
  at most SMALL_BYTES is given by every device that holds it, and its owner's is used.
- The step's outputs lie where they lay when the step itself ran, or there is no twin; and they are
  committed to their devices if, and only if, they were then: else the step would be compiled again
  after it.
- It donates what the step donates and can use.
- Leaves that the program does not get as they are are staged beside it: NumPy arrays, numbers, and
  arrays on other devices, in another order of them, or in another sharding than the step asks for.
- Where the plan has lanes, and the program gets all leaves on them, it also gives their parity (see
  `parity.exchange`), of the very bytes that it gives.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxft.device.bits import bits_of
from jaxft.device.boxes import count
from jaxft.device.calls import Call, Traced
from jaxft.device.lanes import Lanes
from jaxft.device.layout import Owned
from jaxft.device.leaves import element, stored, with_literals
from jaxft.device.memory import is_usual
from jaxft.device.parity import exchange
from jaxft.device.pieces import Places, way_to_pieces
from jaxft.device.shards import SMALL_BYTES, Plan, device_boxes
from jaxft.device.sources import Coded, Held
from jaxft.device.transfer import StagedLeaves, Staging, hold_some
from jaxft.group.manifest import Leaf

# What stands for an array where a program is only compiled is one as well.
_ARRAY = (jax.Array, jax.ShapeDtypeStruct)


class Outputs(NamedTuple):
    """What the step itself gave for a signature: sharding and dimensions of each of its outputs,
    and whether these are committed to their devices."""

    placed: tuple[tuple[Sharding, int], ...]
    committed: bool

    @classmethod
    def of(cls, outputs: Any) -> Outputs:
        arrays = jax.tree_util.tree_leaves(outputs)
        return cls(
            tuple([(array.sharding, array.ndim) for array in arrays]),
            any(getattr(array, "committed", True) for array in arrays),
        )


class _Cut(NamedTuple):
    """What the program gives of a leaf: each device's shard, or `rows` rows of it.

    `place` is the leaf's among the call's leaves, `leaf` its number in the plan; `column` is where
    in its table the first row is. It is given with `lead` dimensions of 1 before its own.
    """

    place: int
    leaf: int
    sharding: NamedSharding | SingleDeviceSharding
    rows: int = 0
    column: int = 0
    lead: int = 0


class NotTaken(Exception):
    """Arguments that look like those a program was compiled for, and JAX finds a difference: in the
    layout of sub-byte elements, for example."""


class LoweredTwin:
    """A twin before it is compiled.

    Arrays may be `jax.ShapeDtypeStruct`s, also on devices that are not there (see
    `jax.experimental.topologies`): such a twin can be compiled, and not be run.

    Args:
        call: the call that it is for. It is traced, and nothing of it is kept but the function.
        outputs: of the step itself, for the same call.
        plan: what is owned of the state.
        values: the state's leaves.
        platform: what it is for, as JAX calls it in `lowering_platforms`; None: what the devices
            are. With another one it can only be compiled by that one's compiler.

    Attributes:
        devices: the program's.
        lowered: the program.
        text: the program, as StableHLO.
        in_tree, out_tree: of the compiled program.
        lanes: those whose parity it gives; None: it gives none.

    Raises:
        ValueError: no leaf of the state goes through the step.
        Exception: whatever JAX raises for a step that cannot be within another program.
    """

    def __init__(
        self,
        call: Call,
        outputs: Outputs,
        plan: Plan,
        values: list[Any],
        *,
        platform: str | None = None,
    ) -> None:
        traced = call.trace()
        self.devices = _devices_of(call.leaves, traced.in_shardings)
        cuts = _cuts(call, traced, plan, values, self.devices)
        if not cuts:
            raise ValueError("no array of the state is an argument of the step's program")
        taken = _looks_of(call, traced.donated)
        cuts = tuple([_apart(cut, call.leaves[cut.place], taken) for cut in cuts])
        self._cuts = cuts
        self._plan = plan
        self._outputs = outputs
        self.lanes = _lanes(plan, cuts)
        self._coded_lead = _coded_lead(self.lanes, taken)
        self._told = _told(cuts, plan, self.lanes, any(map(_is_abstract, call.leaves)))
        self._out_tree = traced.out_tree
        self.lowered = self._lower(call, traced, platform)
        _commit(self.lowered, outputs.committed)
        self.text = self.lowered.as_text()
        self.in_tree = self.lowered.in_tree
        self.out_tree = self.lowered.out_tree

    def _lower(self, call: Call, traced: Traced, platform: str | None) -> jax.stages.Lowered:
        count = len(call.leaves)

        def twin(*arguments: Any) -> tuple[list[Any], list[Any]]:
            leaves, told = arguments[:count], arguments[count:]
            return traced.compute(*leaves), self._hold(leaves, told)

        program = jax.jit(
            twin,
            donate_argnums=_kept(call, traced, self._outputs),
            in_shardings=traced.in_shardings + (None,) * len(self._told),
            out_shardings=(list(traced.out_shardings), self._pinned()),
        )
        platforms = None if platform is None else (platform,)
        made = program.trace(*call.leaves, *self._told)
        lowered: jax.stages.Lowered = made.lower(lowering_platforms=platforms)
        return lowered

    def _pinned(self) -> list[NamedSharding | None]:
        """Where the program puts all that it gives of the state."""
        found = [_pinned(cut) for cut in self._cuts]
        if self.lanes is not None:
            place = _spread(self.lanes.mesh, "pinned_host", self._coded_lead)
            found += [place] * len(list(exchange.pieces(self.lanes.geometry)))
        return found

    def _hold(self, leaves: Sequence[Any], told: Sequence[Any]) -> list[Any]:
        """What is taken of the leaves, and the parity of lanes. Within `jit`."""
        values = {}
        for cut in self._cuts:
            value = stored(self._plan.leaves[cut.leaf], leaves[cut.place])
            values[cut.leaf] = jax.lax.optimization_barrier(value)  # type: ignore[no-untyped-call]
        held = _hold(self._cuts, values, told)
        if self.lanes is not None:
            cuts = {cut.leaf: cut for cut in self._cuts}
            on_lanes = [cuts[place.leaf] for place in self.lanes.places]
            specs: list[Any] = [getattr(cut.sharding, "spec", None) for cut in on_lanes]
            coded = exchange.code(
                self.lanes, specs, [values[cut.leaf] for cut in on_lanes], told[-1]
            )
            held += [_deeper(one, self._coded_lead) for one in coded]
        return held

    def compile(self) -> jax.stages.Compiled:
        compiled: jax.stages.Compiled = self.lowered.compile()
        return compiled

    def twin(self, compiled: jax.stages.Compiled) -> Twin:
        """The twin, from the compiled program.

        Raises:
            ValueError: the program's outputs lie in other places than the step's.
        """
        given, _ = compiled.output_shardings
        for mine, (own, ndim) in zip(given, self._outputs.placed, strict=True):
            if not mine.is_equivalent_to(own, ndim):
                raise ValueError(f"an output of the step is on {own}, and would be on {mine}")
        return Twin(self, compiled)


class Twin:
    """A compiled twin.

    Attributes:
        compiled: its program.
        devices: the program's.
        lanes: those whose parity it gives, if it gives any.
    """

    def __init__(self, lowered: LoweredTwin, compiled: jax.stages.Compiled) -> None:
        self.compiled = compiled
        self.devices = lowered.devices
        self.lanes = lowered.lanes
        plan, cuts = lowered._plan, lowered._cuts
        self._plan = plan
        self._told = lowered._told
        self._out_tree = lowered._out_tree
        self._count = len(cuts)
        self._beside = frozenset(range(len(plan.leaves))) - {cut.leaf for cut in cuts}
        self._wanted = _wanted(plan, cuts)

    def run(self, call: Call, values: list[Any], staging: Staging) -> tuple[StagedLeaves, Any]:
        """Runs it in place of the step.

        Args:
            call: the call; what it donates is donated.
            values: the state's leaves.
            staging: how leaves are held that do not go through the program.

        Returns:
            The state's bytes, as they were before the step, and the step's outputs.

        Raises:
            StagingError: a leaf that does not go through the program could not be taken. Nothing
                was run.
            NotTaken: JAX does not take these arguments for the program. Nothing was run.
            ValueError, RuntimeError: an argument was donated before, or the program failed.
        """
        plan = self._plan
        leaves = with_literals(plan.leaves, values, plan.literals)
        taken = hold_some(plan, leaves, values, staging, self._beside)
        try:
            given, held = self.compiled(*call.leaves, *self._told)
        except (TypeError, ValueError) as error:
            if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in call.leaves):
                raise  # as of the step itself
            raise NotTaken(f"{type(error).__name__}: {error}") from error
        parity_bytes = 0
        if self.lanes is not None:
            parity_bytes = self.lanes.parity_bytes
            held, coded = held[: self._count], held[self._count :]
            taken.append(functools.partial(_coded, self.lanes, plan.length, coded))
        taken.append(functools.partial(_sources, self._wanted, leaves, held))
        staged = StagedLeaves(plan, leaves, taken, parity_bytes)
        return staged, jax.tree_util.tree_unflatten(self._out_tree, given)


def _kept(call: Call, traced: Traced, outputs: Outputs) -> tuple[int, ...]:
    """Those of the donated leaves whose memory the step's outputs can have. XLA would give the
    memory of others to an output of their size that is to be in the host's."""
    free: Counter[Hashable] = Counter()
    for computed, (sharding, _) in zip(traced.computed, outputs.placed, strict=True):
        if computed is not None:
            shape, dtype = computed
            free[sharding.shard_shape(shape), dtype] += 1
    kept = []
    for place in traced.donated:
        leaf = call.leaves[place]
        if isinstance(leaf, _ARRAY):
            looks = (leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
            if free[looks] > 0:
                free[looks] -= 1
                kept.append(place)
    return tuple(kept)


def _devices_of(
    leaves: Sequence[Any], in_shardings: Sequence[Sharding | None]
) -> tuple[Device, ...]:
    """The devices of a program with these arguments: several, if any argument is on several, or is
    put there by it."""
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf, _ARRAY)]
    shardings += filter(None, in_shardings)
    return max(map(_in_order, shardings), key=len, default=())


def _in_order(sharding: Sharding) -> tuple[Device, ...]:
    """A sharding's devices, as a program has them; none if that is not known."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    if isinstance(sharding, SingleDeviceSharding):
        return tuple(sharding.device_set)
    return ()


def _cuts(
    call: Call, traced: Traced, plan: Plan, values: list[Any], devices: tuple[Device, ...]
) -> tuple[_Cut, ...]:
    """What the program gives: the same on all processes."""
    places = {id(leaf): place for place, leaf in enumerate(call.leaves)}
    columns: dict[Mesh, int] = {}
    cuts = []
    for number, (leaf, value) in enumerate(zip(plan.leaves, values, strict=True)):
        place = places.get(id(value))
        if place is None or not _goes_along(value, traced.in_shardings[place], devices):
            continue
        rows = _rows(leaf, value.sharding)
        column = 0
        if rows:
            column = columns.setdefault(value.sharding.mesh, 0)
            columns[value.sharding.mesh] += 1
        cuts.append(_Cut(place, number, value.sharding, rows, column))
    return tuple(cuts)


def _goes_along(value: Any, asked: Sharding | None, devices: tuple[Device, ...]) -> bool:
    """Whether a leaf is an array on the program's devices, in their usual memory, where the step
    leaves it: not elsewhere, from where it is brought to the sharding that the step asks for."""
    if not isinstance(value, _ARRAY) or not value.size:
        return False
    if asked is not None and not asked.is_equivalent_to(value.sharding, value.ndim):
        return False
    return _in_order(value.sharding) == devices and is_usual(value.sharding)


def _rows(leaf: Leaf, sharding: Sharding) -> int:
    """How many rows of its shard each of the devices that hold it gives; 0: the whole shard."""
    boxes = device_boxes(sharding, leaf)
    box = next(iter(boxes.values()))
    holders = len(boxes) // len(set(boxes.values()))
    is_small = count(box) * element(leaf).itemsize <= SMALL_BYTES
    if leaf.kind != "array" or holders == 1 or is_small:
        return 0
    height = box[1][0] - box[0][0]
    rows = math.ceil(height / holders)
    return rows if rows < height else 0


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _lanes(plan: Plan, cuts: tuple[_Cut, ...]) -> Lanes | None:
    """The plan's lanes, if the program gets all that is on them."""
    lanes = plan.lanes
    if lanes is None or not {place.leaf for place in lanes.places} <= {cut.leaf for cut in cuts}:
        return None
    return lanes


def _told(cuts: tuple[_Cut, ...], plan: Plan, lanes: Lanes | None, is_abstract: bool) -> list[Any]:
    """What each device is told: int32 of shape (devices, numbers), a row on each device. For each
    mesh, in the order in which leaves have it, the first row of each leaf that is cut; and last, if
    it gives the parity of lanes, what it needs for that."""
    owned = _by_leaf(plan)
    found = []
    for mesh, members in _by_mesh(cuts).items():

        def firsts(device: Device, members: list[_Cut] = members) -> list[int]:
            return [_first_row(cut, owned.get(cut.leaf, []), device, plan) for cut in members]

        found.append(_table(mesh, len(members), None if is_abstract else firsts))
    if lanes is not None:
        found.append(_table(lanes.mesh, lanes.columns, None if is_abstract else lanes.row_of))
    return found


def _table(mesh: Mesh, columns: int, row_of: Callable[[Device], list[int]] | None) -> Any:
    """What stands for a table, where there is no device to have it; else the table."""
    shape = (mesh.devices.size, columns)
    if row_of is None:
        struct: Any = jax.ShapeDtypeStruct
        return struct(shape, np.int32, sharding=_spread(mesh))
    pieces = [
        jax.device_put(np.array([row_of(device)], np.int32), device)
        for device in mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays(shape, _spread(mesh), pieces)


def _first_row(cut: _Cut, owned: list[Owned], device: Device, plan: Plan) -> int:
    """Of those rows that a device gives; all that it owns are among them."""
    mine = next((one for one in owned if one.device == device), None)
    if mine is None:
        return 0
    height = mine.shard[1][0] - mine.shard[0][0]
    return min((mine.rows or (0, 0))[0], height - cut.rows)


def _by_leaf(plan: Plan) -> dict[int, list[Owned]]:
    found: dict[int, list[Owned]] = {}
    for owned in plan.owned:
        found.setdefault(owned.range.leaf, []).append(owned)
    return found


def _by_mesh(cuts: tuple[_Cut, ...]) -> dict[Mesh, list[_Cut]]:
    found: dict[Mesh, list[_Cut]] = {}
    for cut in cuts:
        if cut.rows:
            assert isinstance(cut.sharding, NamedSharding), "others are on one device"
            found.setdefault(cut.sharding.mesh, []).append(cut)  # type: ignore[arg-type]
    return found


def _spread(mesh: Mesh, memory_kind: str | None = None, lead: int = 0) -> NamedSharding:
    """A piece of the first dimension, but `lead` others before it, for each device."""
    spec = PartitionSpec(*[None] * lead, tuple(mesh.axis_names))  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _pinned(cut: _Cut) -> NamedSharding | None:
    """Where the program puts what it gives of a leaf."""
    sharding = cut.sharding
    if isinstance(sharding, SingleDeviceSharding):
        return None
    if cut.rows:
        return _spread(sharding.mesh, "pinned_host", cut.lead)  # type: ignore[arg-type]
    spec = PartitionSpec(*[None] * cut.lead, *sharding.spec)  # type: ignore[no-untyped-call]
    return NamedSharding(sharding.mesh, spec, memory_kind="pinned_host")


# A global or a device's own shape, and a dtype.
_Looks = set[tuple[tuple[int, ...], Any]]


def _looks_of(call: Call, donated: Sequence[int]) -> _Looks:
    """How donated leaves look that what is given of the state could look like. XLA takes the memory
    of such a leaf for an output that looks the same, also for one that is to be in the host's."""
    found: _Looks = set()
    for place in donated:
        leaf = call.leaves[place]
        if isinstance(leaf, _ARRAY) and jnp.issubdtype(leaf.dtype, jnp.unsignedinteger):
            found |= {(leaf.shape, leaf.dtype)}
            found |= {(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)}
    return found


def _apart(cut: _Cut, leaf: Any, taken: _Looks) -> _Cut:
    """The cut, so that what is given looks like none of these."""
    if not taken:
        return cut
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    bits = jax.eval_shape(lambda all: bits_of(jax.random.key_data(all) if is_key else all), leaf)
    shapes = [bits.shape, (*cut.sharding.shard_shape(leaf.shape), *bits.shape[leaf.ndim :])]
    if cut.rows:
        of_all = cut.rows * len(cut.sharding.device_set)
        shapes = [(rows, *shapes[1][1:]) for rows in (of_all, cut.rows)]
    return cut._replace(lead=_lead(shapes, bits.dtype, taken))


def _coded_lead(lanes: Lanes | None, taken: _Looks) -> int:
    """The same for the parity of lanes."""
    if lanes is None:
        return 0
    words = {(piece.stop - piece.start) // 4 for piece in exchange.pieces(lanes.geometry)}
    shapes = [(rows, count) for rows in (1, lanes.mesh.devices.size) for count in words]
    return _lead(shapes, np.dtype(np.uint32), taken)


def _lead(shapes: Sequence[tuple[int, ...]], dtype: Any, taken: _Looks) -> int:
    lead = 0
    while any(((1,) * lead + shape, dtype) in taken for shape in shapes):
        lead += 1
    return lead


def _deeper(array: jax.Array, lead: int) -> jax.Array:
    return array.reshape((1,) * lead + array.shape) if lead else array


def _hold(cuts: tuple[_Cut, ...], values: dict[int, Any], told: Sequence[Any]) -> list[Any]:
    """What is given of the leaves; `values` are these, by number, behind barriers."""
    by_mesh = dict(zip(_by_mesh(cuts), told, strict=False))
    held = []
    for cut in cuts:
        value, sharding = values[cut.leaf], cut.sharding
        if isinstance(sharding, SingleDeviceSharding):
            bits = _deeper(bits_of(value), cut.lead)
            held.append(jax.device_put(bits, jax.memory.Space.Host))
        elif cut.rows:
            mesh: Any = sharding.mesh
            each = jax.shard_map(
                functools.partial(_cut, rows=cut.rows, column=cut.column),
                mesh=mesh,
                in_specs=(sharding.spec, _spread(mesh).spec),
                out_specs=_spread(mesh).spec,
                check_vma=False,
            )
            held.append(_deeper(each(value, by_mesh[mesh]), cut.lead))
        else:
            held.append(_deeper(bits_of(value), cut.lead))
    return held


def _cut(shard: jax.Array, starts: jax.Array, *, rows: int, column: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(bits_of(shard), starts[0, column], rows, 0)


def _commit(lowered: Any, committed: bool) -> None:
    """An output in host memory makes JAX commit all outputs to their devices. If the step's own are
    not, the step would be compiled once more for the twin's. What says so is private to JAX; where
    it is not found, that compilation is all that it costs."""
    told = getattr(getattr(lowered, "_lowering", None), "compile_args", None)
    if isinstance(told, dict) and "committed" in told:
        told["committed"] = committed


class _Wanted(NamedTuple):
    """What is owned of the shard, or of its rows, that a device gave as output `number`."""

    owned: Owned
    number: int
    rows: tuple[int, int] | None
    lead: int


def _wanted(plan: Plan, cuts: tuple[_Cut, ...]) -> list[_Wanted]:
    by_leaf = _by_leaf(plan)
    found = []
    for number, cut in enumerate(cuts):
        for owned in by_leaf.get(cut.leaf, []):
            assert owned.device is not None, "it is an array"
            rows = owned.rows
            if cut.rows:
                first, end = rows or (0, owned.shard[1][0] - owned.shard[0][0])
                start = _first_row(cut, [owned], owned.device, plan)
                rows = (first - start, end - start)
                assert 0 <= rows[0] <= rows[1] <= cut.rows, "the program gives all that is owned"
            found.append(_Wanted(owned, number, rows, cut.lead))
    return found


def _sources(wanted: list[_Wanted], leaves: tuple[Leaf, ...], held: list[jax.Array]) -> list[Held]:
    """What of the part the program's outputs are. The list of these is emptied."""
    places, pieces_of = Places(), way_to_pieces()
    found = []
    for owned, number, rows, lead in wanted:
        array = held[number]
        assert owned.device is not None, "it is an array"
        piece = pieces_of(array)[places.of(array)[owned.device]]
        found.append(Held(owned, leaves, piece, rows, lead))
    held.clear()
    return found


def _coded(lanes: Lanes, start: int, coded: list[jax.Array]) -> list[Coded]:
    """What of the part the parity is that the program gave; it begins at `start`. The list of these
    is emptied."""
    geometry = lanes.geometry
    places = Places().of(coded[0])
    pieces_of = way_to_pieces()
    found = []
    for piece, array in zip(exchange.pieces(geometry), coded, strict=True):
        on = pieces_of(array)
        for number, device in enumerate(lanes.rings.own):
            offset = start + number * geometry.parity_bytes + piece.start
            found.append(Coded(offset, piece.stop - piece.start, on[places[device]]))
    coded.clear()
    return found
