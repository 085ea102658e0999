"""Batches are a pure function of seed and step."""

from __future__ import annotations

import numpy as np

from jaxft.demo import data


def test_the_text_is_python_and_always_the_same() -> None:
    text = data.load_text(200_000)
    assert len(text) == 200_000
    assert b"import" in text.tobytes()
    assert np.array_equal(text, data.load_text()[:200_000])


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    text = data.load_text(100_000)

    def batch(seed: int, step: int) -> bytes:
        return data.batch(text, seed=seed, step=step, rows=6, length=16).tobytes()

    assert batch(0, 5) == batch(0, 5)
    assert batch(0, 5) != batch(0, 6)
    assert batch(0, 5) != batch(1, 5)


def test_rows_are_pieces_of_the_text() -> None:
    text = data.load_text(5_000)
    tokens = data.batch(text, seed=3, step=4, rows=6, length=16)
    assert tokens.shape == (6, 17)
    assert tokens.dtype == np.int32
    for row in tokens:
        assert row.astype(np.uint8).tobytes() in text.tobytes()
