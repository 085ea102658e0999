"""The demo's text: the source of Python's own standard library, as bytes.

A batch is a pure function of (seed, step): whichever world runs a step, and however often, it sees
the same bytes. So the data's position is the step, and nothing else needs to be saved of it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TEXT_BYTES = 1 << 20
VOCABULARY = 256


def load_text(size_bytes: int = TEXT_BYTES) -> NDArray[np.uint8]:
    """The first `size_bytes` of the library's top-level modules, in the order of their names.

    Packages are passed over, the library's own tests among them.
    """
    pieces: list[bytes] = []
    missing = size_bytes
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(path.read_bytes()[:missing])
        missing -= len(pieces[-1])
        if missing <= 0:
            break
    return np.frombuffer(b"".join(pieces), np.uint8)


def batch(
    text: NDArray[np.uint8], *, seed: int, step: int, rows: int, length: int
) -> NDArray[np.int32]:
    """The whole world's batch of `step`: `rows` pieces of the text, (rows, length + 1) tokens.

    Tokens 0 to length - 1 of a row are the input, 1 to length what is to be predicted.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - length, rows)
    tokens: NDArray[np.int32] = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return tokens
