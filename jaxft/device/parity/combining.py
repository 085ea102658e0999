"""Combining fragments: the one operation of the code, and the choice of the kernel that does it.

Parity is `combine(encode_rows(k, m), data)`, and what was lost is `combine(decode_matrix(...),
left)`: the same kernels do both, since the matrix is all that differs. It is part of the compiled
program.

Which kernel. The portable one, which is one fusion on TPU and GPU, until another is measured to be
faster on a platform: `FASTEST` is where to say so for all jobs, JAXFT_PARITY_KERNEL for one.
`gpu/check.py` measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxft import config
from jaxft.device.parity import portable
from jaxft.device.parity.products import LANES, Rows
from jaxft.errors import CodecError, ConfigError

Kernel = Literal["xla", "pallas_tpu", "pallas_gpu"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)

# What was measured to be faster than the portable kernel, by platform (`jax.Device.platform`).
FASTEST: dict[str, Kernel] = {}


def kernel_for(platform: str, words: int) -> Kernel:
    """The kernel for fragments of so many words on a platform ("cpu", "gpu", "tpu").

    It is one that needs no memory beside the outputs: on TPU, rows that are not whole are left to
    the portable kernel.

    Raises:
        ConfigError: JAXFT_PARITY_KERNEL names none.
    """
    asked = config.parity_kernel()
    if asked and asked not in KERNELS:
        raise ConfigError(f"JAXFT_PARITY_KERNEL={asked}: expected one of {', '.join(KERNELS)}")
    found = [kernel for kernel in KERNELS if kernel == asked]
    kernel = found[0] if found else FASTEST.get(platform, "xla")
    return "xla" if kernel == "pallas_tpu" and words % LANES else kernel


def combine(
    matrix: NDArray[np.uint8],
    fragments: Sequence[jax.Array],
    *,
    kernel: Kernel | None = None,
) -> list[jax.Array]:
    """outputs[r] = XOR over c of matrix[r, c] * fragments[c], over GF(2^8) in each byte.

    May be called within `jit` and `shard_map` (with `check_vma=False`).

    Args:
        matrix: [m, k] of uint8, k >= 1, as `encode_rows` and `decode_matrix` of
            `jaxft.group.codec` give. It is compiled into the program.
        fragments: k arrays of uint32 of one shape, any length, also none: the bytes in
            little-endian order.
        kernel: which one; None takes `kernel_for` of the default backend. Whoever compiles for
            other devices has to say it.

    Returns:
        m arrays of uint32 of the same shape.

    Raises:
        CodecError: shapes or dtypes do not fit, or there is no such kernel.
    """
    rows = _rows_of(matrix, fragments)
    if kernel is None:
        kernel = kernel_for(jax.default_backend(), fragments[0].size)
    if kernel not in KERNELS:
        raise CodecError(f"kernel={kernel!r}: expected one of {', '.join(KERNELS)}")
    outputs: list[jax.Array] = _combined(rows, kernel, *fragments)
    return outputs


@functools.partial(jax.jit, static_argnums=(0, 1))
def _combined(rows: Rows, kernel: Kernel, *fragments: jax.Array) -> list[jax.Array]:
    if not fragments[0].size:
        return [jnp.zeros_like(fragments[0]) for _ in rows]
    return _kernel(kernel)(rows, fragments) if rows else []


def _kernel(kernel: Kernel) -> Callable[[Rows, Sequence[jax.Array]], list[jax.Array]]:
    """The kernel of this name. What is in Pallas is imported where it is wanted: it takes a while,
    and JAX means to do without Triton one day."""
    if kernel == "pallas_tpu":
        from jaxft.device.parity import pallas_tpu

        return pallas_tpu.combine
    if kernel == "pallas_gpu":
        from jaxft.device.parity import pallas_gpu

        return pallas_gpu.combine
    return portable.combine


def _rows_of(matrix: NDArray[np.uint8], fragments: Sequence[jax.Array]) -> Rows:
    if not fragments:
        raise CodecError("there are no fragments to combine")
    if matrix.dtype != np.uint8 or matrix.ndim != 2 or matrix.shape[1] != len(fragments):
        raise CodecError(
            f"{len(fragments)} fragments need a uint8 matrix of as many columns, found "
            f"{matrix.dtype} of shape {matrix.shape}"
        )
    kinds = {(str(fragment.dtype), fragment.shape) for fragment in fragments}
    if len(kinds) > 1 or fragments[0].dtype != jnp.uint32:
        found = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
        raise CodecError(f"fragments must be uint32 of one shape, found {found}")
    return tuple(tuple(row) for row in matrix.tolist())
