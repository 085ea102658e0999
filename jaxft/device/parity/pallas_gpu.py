"""The kernel for NVIDIA GPUs, in Pallas through Triton.

A program takes 1,024 words of every fragment, four for each of its 256 threads: loads and stores
of 16 bytes a thread, next to each other, k of them under way at once, and each word is read once
for all outputs. The back end is named by its parameters: which one is the default depends on the
version of JAX. (From 0.12 on it warns that Triton will be removed from Pallas one day; the portable
kernel, which is the default, has nothing to do with it.)

Lengths. Any: the words behind the end are masked. There is no padding and no other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxft.device.parity.products import Rows, multiply

# Triton's blocks have powers of two of elements.
BLOCK_WORDS = 1024
WARPS = 8


def combine(
    rows: Rows, fragments: Sequence[jax.Array], *, interpret: bool = False
) -> list[jax.Array]:
    """See `combining.combine`; within `jit`, for at least one word.

    Args:
        interpret: compute it on any backend, operation by operation.
    """
    words = fragments[0].size
    block = pl.BlockSpec((BLOCK_WORDS,), lambda number: (number,))
    outputs = pl.pallas_call(
        _kernel(rows, len(fragments), words),
        out_shape=[jax.ShapeDtypeStruct((words,), jnp.uint32)] * len(rows),  # type: ignore[no-untyped-call]
        grid=(pl.cdiv(words, BLOCK_WORDS),),
        in_specs=[block] * len(fragments),
        out_specs=[block] * len(rows),
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
    )(*[fragment.reshape(-1) for fragment in fragments])
    return [output.reshape(fragments[0].shape) for output in outputs]


def _kernel(rows: Rows, k: int, words: int) -> Any:
    """The kernel of one block: k inputs, then the outputs."""

    def kernel(*refs: Any) -> None:
        mask = None
        if words % BLOCK_WORDS:
            left = np.int32(words % BLOCK_WORDS)
            last = pl.program_id(0) == words // BLOCK_WORDS
            mask = ~last | (jnp.arange(BLOCK_WORDS, dtype=np.int32) < left)
        loaded = [pltriton.load(ref, mask=mask) for ref in refs[:k]]
        for ref, product in zip(refs[k:], multiply(rows, loaded), strict=True):
            pltriton.store(ref, product, mask=mask)

    return kernel
