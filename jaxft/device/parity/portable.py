"""The kernel for every backend, as plain XLA operations: the reference of the other two.

The fragments come and the outputs go apart, never as one stack: XLA makes one fusion of it for TPU
and GPU then, which reads each word once for all outputs and needs no other memory. (For CPU it
makes a loop for each output.) Any length and shape is as good as another.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxft.device.parity.products import Rows, multiply


def combine(rows: Rows, fragments: Sequence[jax.Array]) -> list[jax.Array]:
    """See `combining.combine`; within `jit`."""
    return multiply(rows, fragments)
