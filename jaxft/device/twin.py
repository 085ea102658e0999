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
- What is given of which leaf, and as what, `cuts` says.
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
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device
from jax.sharding import NamedSharding, Sharding

from jaxft.device.calls import Call, Traced
from jaxft.device.cuts import (
    ARRAY,
    Cut,
    Looks,
    apart,
    cuts_of,
    deeper,
    hold,
    in_order,
    lead_of,
    looks_of,
    pinned,
    sources_of,
    spread,
    told_of,
    wanted_of,
)
from jaxft.device.lanes import Lanes
from jaxft.device.leaves import stored, with_literals
from jaxft.device.parity import exchange
from jaxft.device.pieces import Places, way_to_pieces
from jaxft.device.shards import Plan
from jaxft.device.sources import Coded
from jaxft.device.transfer import StagedLeaves, Staging, Taken, hold_some
from jaxft.group.manifest import Leaf


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


class NotTaken(Exception):
    """Arguments that look like those a program was compiled for, and JAX finds a difference: in the
    layout of sub-byte elements, for example."""


class Beside(NamedTuple):
    """All leaves, with the values of literals, and what was held of those that do not go through
    the program."""

    leaves: tuple[Leaf, ...]
    taken: list[Taken]


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
        cuts = cuts_of(call, traced, plan, values, self.devices)
        if not cuts:
            raise ValueError("no array of the state is an argument of the step's program")
        taken = looks_of(call, traced.donated)
        cuts = tuple([apart(cut, call.leaves[cut.place], taken) for cut in cuts])
        self._cuts = cuts
        self._plan = plan
        self._outputs = outputs
        self.lanes = _lanes(plan, cuts)
        self._coded_lead = _coded_lead(self.lanes, taken)
        self._told = told_of(cuts, plan, self.lanes, any(map(_is_abstract, call.leaves)))
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
        found = [pinned(cut) for cut in self._cuts]
        if self.lanes is not None:
            place = spread(self.lanes.mesh, "pinned_host", self._coded_lead)
            found += [place] * len(list(exchange.pieces(self.lanes.geometry)))
        return found

    def _hold(self, leaves: Sequence[Any], told: Sequence[Any]) -> list[Any]:
        """What is taken of the leaves, and the parity of lanes. Within `jit`."""
        values = {}
        for cut in self._cuts:
            value = stored(self._plan.leaves[cut.leaf], leaves[cut.place])
            values[cut.leaf] = jax.lax.optimization_barrier(value)  # type: ignore[no-untyped-call]
        held = hold(self._cuts, values, told)
        if self.lanes is not None:
            cuts = {cut.leaf: cut for cut in self._cuts}
            on_lanes = [cuts[place.leaf] for place in self.lanes.places]
            specs: list[Any] = [getattr(cut.sharding, "spec", None) for cut in on_lanes]
            coded = exchange.code(
                self.lanes, specs, [values[cut.leaf] for cut in on_lanes], told[-1]
            )
            held += [deeper(one, self._coded_lead) for one in coded]
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
        has_run: whether JAX has taken a call's arguments for it.
    """

    def __init__(self, lowered: LoweredTwin, compiled: jax.stages.Compiled) -> None:
        self.compiled = compiled
        self.devices = lowered.devices
        self.lanes = lowered.lanes
        self.has_run = False
        plan, cuts = lowered._plan, lowered._cuts
        self._plan = plan
        self._told = lowered._told
        self._out_tree = lowered._out_tree
        self._count = len(cuts)
        self._held_beside = frozenset(range(len(plan.leaves))) - {cut.leaf for cut in cuts}
        self._wanted = wanted_of(plan, cuts)

    def hold(self, values: list[Any], staging: Staging) -> Beside:
        """Holds what does not go through the program.

        Args:
            values: the state's leaves.
            staging: how they are held.

        Raises:
            StagingError, ConfigError: a leaf could not be taken.
        """
        plan = self._plan
        leaves = with_literals(plan.leaves, values, plan.literals)
        return Beside(leaves, hold_some(plan, leaves, values, staging, self._held_beside))

    def run(self, call: Call, beside: Beside) -> tuple[StagedLeaves, Any]:
        """Runs it in place of the step.

        Args:
            call: the call; what it donates is donated.
            beside: what `hold` gave for it.

        Returns:
            The state's bytes, as they were before the step, and the step's outputs.

        Raises:
            NotTaken: JAX does not take these arguments for the program. Nothing was run.
            ValueError, RuntimeError: an argument was donated before, or the program failed.
        """
        plan, (leaves, taken) = self._plan, beside
        try:
            given, held = self.compiled(*call.leaves, *self._told)
        except (TypeError, ValueError) as error:
            if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in call.leaves):
                raise  # as of the step itself
            raise NotTaken(f"{type(error).__name__}: {error}") from error
        self.has_run = True
        parity_bytes = 0
        if self.lanes is not None:
            parity_bytes = self.lanes.parity_bytes
            held, coded = held[: self._count], held[self._count :]
            taken.append(functools.partial(_coded, self.lanes, plan.length, coded))
        taken.append(functools.partial(sources_of, self._wanted, leaves, held))
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
        if isinstance(leaf, ARRAY):
            looks = (leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
            if free[looks] > 0:
                free[looks] -= 1
                kept.append(place)
    return tuple(kept)


def _devices_of(
    leaves: Sequence[Any], in_shardings: Sequence[Sharding | None]
) -> tuple[Device, ...]:
    """The devices of a program with these arguments: several, if any argument is on several, or is
    put there by it. An argument that is not committed to its one device comes to where the others
    are; where none is committed that is JAX's default device."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, ARRAY)]
    shardings = [one.sharding for one in arrays if getattr(one, "committed", True)]
    shardings += [one.sharding for one in arrays if len(one.sharding.device_set) > 1]
    shardings += filter(None, in_shardings)
    if not shardings and arrays:
        return tuple(jnp.zeros(()).devices())
    return max(map(in_order, shardings), key=len, default=())


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _lanes(plan: Plan, cuts: tuple[Cut, ...]) -> Lanes | None:
    """The plan's lanes, if the program gets all that is on them."""
    lanes = plan.lanes
    if lanes is None or not {place.leaf for place in lanes.places} <= {cut.leaf for cut in cuts}:
        return None
    return lanes


def _coded_lead(lanes: Lanes | None, taken: Looks) -> int:
    """The same for the parity of lanes."""
    if lanes is None:
        return 0
    words = {(piece.stop - piece.start) // 4 for piece in exchange.pieces(lanes.geometry)}
    shapes = [(rows, count) for rows in (1, lanes.mesh.devices.size) for count in words]
    return lead_of(shapes, np.dtype(np.uint32), taken)


def _commit(lowered: Any, committed: bool) -> None:
    """An output in host memory makes JAX commit all outputs to their devices. If the step's own are
    not, the step would be compiled once more for the twin's. What says so is private to JAX; where
    it is not found, that compilation is all that it costs."""
    told = getattr(getattr(lowered, "_lowering", None), "compile_args", None)
    if isinstance(told, dict) and "committed" in told:
        told["committed"] = committed


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
