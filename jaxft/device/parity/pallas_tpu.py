"""The kernel for TPU, in Pallas (Mosaic).

The words of a fragment lie in rows of 128 lanes. A block of 256 rows of every fragment and output
is in VMEM while the next is on its way: for 8+4 that is 2 * 12 blocks of 128 KiB, 3 MiB of the
16 MiB that every generation has. (With 1,024 rows it was refused.) Within a block, STEP_ROWS rows
are taken at a time, so that k inputs and an accumulator stay in the 64 vector registers: four
registers each.

Lengths. The last block may be short: Pallas reads nothing behind the end that counts and writes
nothing there. A length that is no multiple of 128 words is padded with zeros first, which takes
memory for k + m more fragments; `combining.kernel_for` takes the portable kernel for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxft.device.parity.products import LANES, Rows, multiply
from jaxft.group.manifest import align

BLOCK_ROWS = 256
STEP_ROWS = 32


def combine(
    rows: Rows, fragments: Sequence[jax.Array], *, interpret: bool = False
) -> list[jax.Array]:
    """See `combining.combine`; within `jit`, for at least one word.

    Args:
        interpret: compute it on any backend, operation by operation.
    """
    words = fragments[0].size
    padded = align(words, LANES)
    tall = [_rows_of_lanes(fragment, padded - words) for fragment in fragments]
    shape = tall[0].shape
    block_rows = min(BLOCK_ROWS, align(shape[0], STEP_ROWS))
    block = pl.BlockSpec((block_rows, LANES), lambda number: (number, 0))
    outputs = pl.pallas_call(
        _kernel(rows, len(fragments), block_rows),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.uint32)] * len(rows),  # type: ignore[no-untyped-call]
        grid=(pl.cdiv(shape[0], block_rows),),
        in_specs=[block] * len(fragments),
        out_specs=[block] * len(rows),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(*tall)
    return [output.reshape(-1)[:words].reshape(fragments[0].shape) for output in outputs]


def _rows_of_lanes(fragment: jax.Array, missing: int) -> jax.Array:
    flat = fragment.reshape(-1)
    return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(-1, LANES)


def _kernel(rows: Rows, k: int, block_rows: int) -> Any:
    """The kernel of one block: k inputs, then the outputs."""

    def kernel(*refs: Any) -> None:
        sources, outputs = refs[:k], refs[k:]

        def step(number: Any, carry: None) -> None:
            here = pl.ds(pl.multiple_of(number * STEP_ROWS, STEP_ROWS), STEP_ROWS)
            products = multiply(rows, [source[here, :] for source in sources])
            for output, product in zip(outputs, products, strict=True):
                output[here, :] = product

        jax.lax.fori_loop(0, block_rows // STEP_ROWS, step, None)

    return kernel
