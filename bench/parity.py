"""`parity_xla`: the portable kernel of device parity beside ISA-L, both on one core.

Both multiply the same matrix with the same fragments. The row `xor` is a matrix of zeros and ones,
for which the kernel reads and writes as much and doubles nothing: what the code's own row takes
beyond it is arithmetic. On CPU the kernel is a loop for each output, which reads the fragments
again; on a device it is one for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from bench.baseline_isal import Isal
from bench.measure import Bytes, Report, in_turn, noise, timed, touched
from bench.rows import Row, median, row
from bench.sizes import Sizes
from jaxft.group.codec import encode_rows

K, M = 6, 2
CALLS = 3


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The rows, for the smallest of the sizes that the codec is measured with."""
    # Before JAX is there: it starts a thread for each core that it may use.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    total = min(sizes.codec_bytes)
    nbytes = total // K // 64 * 64
    source, room = noise(total), touched(M * nbytes)
    data = [source[i * nbytes : (i + 1) * nbytes] for i in range(K)]
    parity = [room[i * nbytes : (i + 1) * nbytes] for i in range(M)]
    matrix = encode_rows(K, M)
    xor = np.ones((M, K), np.uint8)
    xor[1, -1] = 0
    isal = Isal().prepare(matrix, data, parity)
    isal()
    taken = in_turn(
        sizes.rounds,
        f"parity_xla {K}+{M}",
        report,
        {
            "isal": lambda: min(timed(isal) for _ in range(CALLS)),
            "xla": _xla(matrix, data, parity),
            "xor": _xla(xor, data, None),
        },
    )
    rates = {way: K * nbytes / 1e9 / median(seconds) for way, seconds in taken.items()}
    return [
        row(f"parity_xla[{K}+{M}]", "GB/s", rates["xla"], limit=rates["isal"]),
        row(f"parity_xla[{K}+{M},xor]", "GB/s", rates["xor"], limit=rates["isal"]),
    ]


def _xla(
    matrix: Bytes, data: Sequence[Bytes], expected: Sequence[Bytes] | None
) -> Callable[[], float]:
    """Times the kernel on fragments that are JAX's, after a look at what it makes of them."""
    import jax
    import jax.numpy as jnp

    from jaxft.device.parity import combine

    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    words = [jnp.array(one.view(np.uint32)) for one in data]

    def call() -> None:
        for output in combine(matrix, words, kernel="xla"):
            output.block_until_ready()

    if expected is not None:
        found = [np.asarray(one).view(np.uint8) for one in combine(matrix, words, kernel="xla")]
        assert all(map(np.array_equal, found, expected)), "the kernel makes other bytes"
    return lambda: min(timed(call) for _ in range(CALLS))
