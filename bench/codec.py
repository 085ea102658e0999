"""`encode` and `decode`: the codec on one core, beside ISA-L itself and pyeclib's API.

All three do the same work on the same bytes: make m parity fragments of k data fragments, or make
the first min(m, k) data fragments again from the rest. Rates are bytes of data a second. pyeclib is
given at most PEER_BYTES at once, as it must not have big buffers; its `decode` also joins the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bench.baseline_isal import Isal
from bench.measure import Bytes, Report, in_turn, noise, timed, touched
from bench.rows import Row, at_least, median, row
from bench.sizes import GIB, MIB, Sizes
from jaxft.group.codec import backend, decode_matrix, encode_rows

CODES = ((3, 1), (6, 2), (14, 2))
PEER_BYTES = 64 * MIB
CALLS = 3


def measure(sizes: Sizes, report: Report) -> list[Row]:
    """The rows of all codes and sizes."""
    rows: list[Row] = []
    for total in sizes.codec_bytes:
        source = noise(total)
        room = touched(total)
        for k, m in CODES:
            rows += _code(k, m, source, room, sizes.rounds, report)
    return rows


def _code(
    k: int, m: int, source: Bytes, room: Bytes, rounds: int, report: Report
) -> tuple[Row, Row]:
    nbytes = source.size // k // 64 * 64
    data = [source[i * nbytes : (i + 1) * nbytes] for i in range(k)]
    parity = [room[i * nbytes : (i + 1) * nbytes] for i in range(m)]
    lost = tuple(range(m))
    have = tuple(range(m, k + m))
    rebuilt = [room[(m + i) * nbytes : (m + i + 1) * nbytes] for i in range(m)]
    left = [*data[m:], *parity]
    size = _size(source.size)
    peer = _PyeclibPeer(k, m, source[: k * nbytes])
    encoded = in_turn(
        rounds,
        f"encode {k}+{m}, {size}",
        report,
        {
            "isal": _isal(encode_rows(k, m), data, parity),
            "ours": _ours(encode_rows(k, m), data, parity),
            "pyeclib": peer.encode,
        },
    )
    decoded = in_turn(
        rounds,
        f"decode {k}+{m}, {size}",
        report,
        {
            "isal": _isal(decode_matrix(k, m, have, lost), left, rebuilt),
            "ours": _ours(decode_matrix(k, m, have, lost), left, rebuilt),
            "pyeclib": peer.decode,
        },
    )
    assert all(map(np.array_equal, rebuilt, data)), f"{k}+{m} decodes to other bytes"
    label = f"{k}+{m},{size}"
    return _row(f"encode[{label}]", k * nbytes, encoded), _row(
        f"decode[{label}]", k * nbytes, decoded
    )


def _row(name: str, nbytes: int, taken: dict[str, list[float]]) -> Row:
    rates = {way: nbytes / 1e9 / median(seconds) for way, seconds in taken.items()}
    bounds = (at_least(0.9, "limit"), at_least(6, "peer"))
    return row(name, "GB/s", rates["ours"], *bounds, peer=rates["pyeclib"], limit=rates["isal"])


def _size(nbytes: int) -> str:
    return f"{nbytes // GIB}GiB" if nbytes >= GIB else f"{nbytes // MIB}MiB"


def _ours(matrix: Bytes, sources: Sequence[Bytes], outputs: Sequence[Bytes]) -> Callable[[], float]:
    return _best(lambda: backend().combine(matrix, sources, outputs))


def _isal(matrix: Bytes, sources: Sequence[Bytes], outputs: Sequence[Bytes]) -> Callable[[], float]:
    return _best(Isal().prepare(matrix, sources, outputs))


def _best(call: Callable[[], object]) -> Callable[[], float]:
    """Times the fastest of a few calls: the first finds in the caches what the one before it in the
    round left there, and any may be interrupted."""
    return lambda: min(timed(call) for _ in range(CALLS))


class _PyeclibPeer:
    """pyeclib's own way, with one of the segments that it would be given; a round's figure is
    brought to the size of the whole."""

    def __init__(self, k: int, m: int, source: Bytes) -> None:
        from pyeclib.ec_iface import ECDriver

        driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
        segment = source[:PEER_BYTES].tobytes()
        self._scale = source.size / len(segment)
        left = driver.encode(segment)[m:]
        self._encode = _best(partial(driver.encode, segment))
        self._decode = _best(partial(driver.decode, left))

    def encode(self) -> float:
        return self._scale * self._encode()

    def decode(self) -> float:
        """Of a segment that has lost its first m fragments."""
        return self._scale * self._decode()
