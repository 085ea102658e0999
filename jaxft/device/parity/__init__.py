"""Parity on devices: the code of `jaxft.group.codec`, computed where the state is.

`packing` makes words of a tree's leaves and leaves of words, `combining` multiplies a matrix with
fragments of words by one of three kernels (`portable`, `pallas_tpu`, `pallas_gpu`), and `products`
is the arithmetic that these share. The bytes are the same whichever kernel it is, and the same as
the hosts': what devices have coded, hosts can decode, and the other way round.
"""

from __future__ import annotations

from jaxft.device.parity.combining import KERNELS, Kernel, combine, kernel_for
from jaxft.device.parity.packing import Packing, lay_out, pack, unpack

__all__ = ["KERNELS", "Kernel", "Packing", "combine", "kernel_for", "lay_out", "pack", "unpack"]
