"""Fragments to combine, and what has to come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.device.parity import pallas_gpu, pallas_tpu, portable
from jaxft.device.parity.products import Rows
from jaxft.group.codec import Bytes, backend

CODES = [(k, m) for k in range(1, 9) for m in range(1, 5)]

# All kernels as they run on CPU.
KERNELS: dict[str, Callable[[Rows, Sequence[jax.Array]], list[jax.Array]]] = {
    "xla": portable.combine,
    "pallas_tpu": partial(pallas_tpu.combine, interpret=True),
    "pallas_gpu": partial(pallas_gpu.combine, interpret=True),
}

# Compiling is all that takes time here.
QUICKLY = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


def noise(count: int, words: int, seed: int = 0) -> list[Bytes]:
    """Random bytes of so many words, a row a fragment."""
    rng = np.random.default_rng([seed, count, words])
    return list(rng.integers(0, 256, (count, 4 * words), dtype=np.uint8))


def rows_of(matrix: Bytes) -> Rows:
    return tuple(tuple(row) for row in matrix.tolist())


def by_kernels(matrix: Bytes, fragments: Sequence[Bytes]) -> dict[str, list[Bytes]]:
    """What each kernel makes of the bytes. All are one program, which is compiled sooner."""
    words = [jnp.asarray(fragment.view("<u4")) for fragment in fragments]
    rows = rows_of(matrix)

    def all_of_them(*words: jax.Array) -> dict[str, list[jax.Array]]:
        return {name: combine(rows, words) for name, combine in KERNELS.items()}

    found = jax.jit(all_of_them, compiler_options=QUICKLY)(*words)
    return {
        name: [np.asarray(output).view(np.uint8) for output in outputs]
        for name, outputs in found.items()
    }


def by_hosts(matrix: Bytes, fragments: Sequence[Bytes]) -> list[Bytes]:
    """What the hosts' codec makes of them."""
    outputs = [np.empty_like(fragments[0]) for _ in matrix]
    backend().combine(matrix, fragments, outputs)
    return outputs


def assert_equal(found: Sequence[Bytes], expected: Sequence[Bytes]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_all_make(expected: Sequence[Bytes], matrix: Bytes, fragments: Sequence[Bytes]) -> None:
    """Every kernel makes these bytes of the fragments."""
    for outputs in by_kernels(matrix, fragments).values():
        assert_equal(outputs, expected)
