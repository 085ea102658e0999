"""`twin_compile`: how long the twin of a step takes to compile, and to load.

One process with four devices, a step of Adam for as many leaves as the name says. A third of them
is small, a third spread over all devices, and a third replicated over two of them, so that rows are
cut of it. Counted are lowering and compiling, of the twin and of the step itself, once each, since
JAX keeps what it has compiled. `twin_compile[kept]` is the first of these twins again, from disk,
in the way that a restart goes: lowered, found by its text, loaded. For more than
1,000 leaves `wrap` makes no twin: the row of 3,000 is why.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.measure import Report, timed
from bench.rows import Row, median, row
from bench.sizes import Sizes
from bench.states import State, four_devices, ready
from jaxft.device.calls import Call
from jaxft.device.executables import Executables, key_of
from jaxft.device.shards import Plan, make_plan
from jaxft.device.twin import LoweredTwin, Outputs

# A leaf of rows that is replicated is larger than what is taken as a whole.
ROWS, COLUMNS = 160, 128
PARTS = ("weights", "mean", "square")


class Twin:
    """A step with a state of so many leaves, and what its twin is made of."""

    def __init__(self, mesh: Mesh, leaves: int) -> None:
        step, state = _step(), _state(mesh, leaves)
        began_s = time.perf_counter()
        compiled = step.lower(state).compile()
        self.step_s = time.perf_counter() - began_s
        self._outputs = Outputs.of(compiled(state))
        self._state = _state(mesh, leaves)
        self._step = step
        self._plan: Plan = make_plan(self._state)

    def lower(self) -> LoweredTwin:
        call = Call(self._step, (self._state,), {})
        return LoweredTwin(call, self._outputs, self._plan, jax.tree.leaves(self._state))


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """A row for each state, beside the step's own compilation, and one for the file."""
    mesh = four_devices()
    Twin(mesh, 6).lower().compile()  # the compiler's own beginning
    rows = []
    for number, leaves in enumerate(sizes.twin_leaves):
        twin = Twin(mesh, leaves)
        began_s = time.perf_counter()
        compiled = twin.lower().compile()
        seconds = time.perf_counter() - began_s
        rows.append(row(f"twin_compile[{leaves}]", "s", seconds, limit=twin.step_s))
        if number == 0:
            kept = row("twin_compile[kept]", "s", _load_s(twin, compiled, sizes), peer=seconds)
        report(number + 1, len(sizes.twin_leaves), f"twin of {leaves} leaves")
    return [*rows, kept]


def _load_s(twin: Twin, compiled: jax.stages.Compiled, sizes: Sizes) -> float:
    with tempfile.TemporaryDirectory(prefix="jaxft-bench-") as directory:
        kept = Executables(Path(directory) / "executables")
        lowered = twin.lower()
        kept.keep(key_of(lowered.text, lowered.devices), compiled)

        def load() -> None:
            lowered = twin.lower()
            key = key_of(lowered.text, lowered.devices)
            assert kept.load(key, lowered.in_tree, lowered.out_tree, lowered.devices)

        return median([timed(load) for _ in range(sizes.slow_rounds)])


def _state(mesh: Mesh, leaves: int) -> State:
    """Weights and both of their moments; and counters, so that it is so many leaves."""

    def placed(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]

    kinds = [
        ((COLUMNS,), placed()),
        ((ROWS, COLUMNS), placed(("data", "model"))),
        ((ROWS, COLUMNS), placed("model")),
    ]

    def numbers() -> list[jax.Array]:
        chosen = [kinds[number % len(kinds)] for number in range(leaves // 3)]
        return [jnp.full(shape, 0.5, jnp.float32, device=place) for shape, place in chosen]

    counters = [jnp.zeros((), jnp.int32, device=placed()) for _ in range(leaves % 3)]
    return ready({"counters": counters, **{name: numbers() for name in PARTS}})


def _step() -> Any:
    """Adam, of a loss in which every weight is."""

    def loss_of(weights: list[jax.Array]) -> jax.Array:
        return sum((jnp.mean(jnp.tanh(one)) for one in weights), start=jnp.float32(0))

    def update(state: State) -> tuple[State, jax.Array]:
        loss, slopes = jax.value_and_grad(loss_of)(state["weights"])
        mean = [0.9 * m + 0.1 * g for m, g in zip(state["mean"], slopes, strict=True)]
        square = [0.99 * v + 0.01 * g * g for v, g in zip(state["square"], slopes, strict=True)]
        weights = [
            w - 1e-3 * m / (jnp.sqrt(v) + 1e-8)
            for w, m, v in zip(state["weights"], mean, square, strict=True)
        ]
        counters = [counter + 1 for counter in state["counters"]]
        state = {"counters": counters, "weights": weights, "mean": mean, "square": square}
        return state, loss

    return jax.jit(update, donate_argnums=0)
