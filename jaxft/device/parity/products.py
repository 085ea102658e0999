"""Products over GF(2^8) of words: four elements of the field in a uint32, one in each byte.

Twice a word (x^8 is x^4 + x^3 + x^2 + 1, the low bits 0x1d of the polynomial 0x11d, in a byte
whose highest bit is shifted out):

    double(w) = ((w & 0x7f7f7f7f) << 1) ^ (((w >> 7) & 0x01010101) * 0x1d)

The method is H. P. Anvin's ("The mathematics of RAID-6", 2004). A row of a matrix times fragments
is then a polynomial in 2 whose coefficients are sums of fragments, evaluated by Horner's rule:

    sum over i of c[i] * w[i]  =  s[0] + 2 (s[1] + 2 (s[2] + ... 2 s[7])),
    s[b] = XOR of the w[i] for which bit b of c[i] is set

All fragments share a row's doublings that way: at most 7 for each row, however many fragments
there are. (Doubling the fragments instead takes 7 for each of them: for 6+2, 42 and not 14.)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# A matrix over the field: a row for each output, with a coefficient for each fragment.
Rows = tuple[tuple[int, ...], ...]

# Words in a row: as many as a TPU's registers are wide.
LANES = 128

# NumPy's, not JAX's: a Pallas kernel may not hold arrays that come from outside.
_LOW_BITS = np.uint32(0x7F7F7F7F)
_LOWEST_BITS = np.uint32(0x01010101)
_REDUCED = np.uint32(0x1D)
_ONE = np.uint32(1)
_SEVEN = np.uint32(7)


def multiply(rows: Rows, words: Sequence[jax.Array]) -> list[jax.Array]:
    """The rows times the fragments, element by element; within `jit` or a kernel.

    Args:
        rows: [m][k] coefficients 0 to 255.
        words: k arrays of uint32 of one shape, k >= 1.

    Returns:
        m such arrays.
    """
    return [_product(row, words) for row in rows]


def _product(row: Sequence[int], words: Sequence[jax.Array]) -> jax.Array:
    total: jax.Array | None = None
    for bit in reversed(range(max(row).bit_length())):
        if total is not None:
            total = double(total)
        for coefficient, word in zip(row, words, strict=True):
            if coefficient >> bit & 1:
                total = word if total is None else total ^ word
    return jnp.zeros_like(words[0]) if total is None else total


def double(words: jax.Array) -> jax.Array:
    """Twice each byte of the words."""
    return ((words & _LOW_BITS) << _ONE) ^ (((words >> _SEVEN) & _LOWEST_BITS) * _REDUCED)
