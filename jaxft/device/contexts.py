"""Contexts: what our own programs are traced and run in, whatever the caller has set.

JAX has these for each thread. A caller may be within `jax.set_mesh`, whose devices are not those of
our programs; and without `enable_x64`, which one may have set only where the state was made, JAX
would make 32 of the 64 bits that a leaf has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

_NO_MESH = Mesh(np.empty((), dtype=object), ())


@contextlib.contextmanager
def own_contexts() -> Iterator[None]:
    """Every dtype as it is, and no mesh but what a program itself names."""
    with jax.set_mesh(_NO_MESH), jax.enable_x64(True):
        yield
