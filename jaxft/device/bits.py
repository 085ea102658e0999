"""Bits: the elements of an array as unsigned integers, which XLA moves without looking at them.

It changes the payload of some floats' NaNs in slices and concatenates otherwise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxft.device.leaves import SUB_BYTE_BITS


def bits_of(array: jax.Array) -> jax.Array:
    """The elements as unsigned integers of the same bytes (a complex one as two). Within `jit`."""
    dtype = array.dtype
    if dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    if dtype.name in SUB_BYTE_BITS:
        unsigned = jnp.dtype(f"uint{SUB_BYTE_BITS[dtype.name]}")
        return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([bits_of(jax.lax.real(array)), bits_of(jax.lax.imag(array))], axis=-1)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * dtype.itemsize}"))


def changes_when_joined(dtype: jnp.dtype) -> bool:
    """Whether XLA may change elements of this dtype where it puts arrays together: it takes small
    floats through wider ones, and a NaN's payload does not come through that."""
    return dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
