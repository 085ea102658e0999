"""The notebook that counts what codes cost and survive."""

from __future__ import annotations

import json
import math
from pathlib import Path

import nbformat
import pytest

from jaxft.group.world import Code
from tests.colab import notebooks

CODES = ["1+1", "3+1", "2+2", "6+2", "14+2"]
FOUND = """
import json
print(json.dumps({
    "survived": survived,
    "rates": rates,
    "crossing": crossing,
    "loss": {str(code): [job_loss(code, p) for p in (1e-4, 0.02)] for code in CODES},
    "dice": {str(code): float(simulated_loss(code, 0.02)) for code in CODES},
}))
"""


def loss(code: Code, p: float, hosts: int) -> float:
    """By counting which hosts of a group are there, one after the other."""
    counts = [1.0]
    for _ in range(code.hosts):
        counts = [
            (counts[f] if f < len(counts) else 0.0) * (1 - p) + (counts[f - 1] * p if f else 0.0)
            for f in range(len(counts) + 1)
        ]
    whole = math.fsum(counts[: code.parity + 1])
    return 1 - whole ** (hosts // code.hosts)


def test_codes_survive_what_they_should_and_the_probabilities_are_right(folder: Path) -> None:
    notebook = notebooks.read(notebooks.ROOT / "colab" / "parity.ipynb")
    notebook.cells.append(nbformat.v4.new_code_cell(FOUND, id="found"))
    assert notebooks.execute(notebook, folder) == []
    assert notebooks.complaints(notebook) == []
    found = json.loads(notebooks.printed(notebook, "found"))
    assert list(found["survived"]) == CODES
    for name, ways in found["survived"].items():
        code = Code.parse(name)
        assert ways == math.comb(code.hosts, code.parity)
        assert found["rates"][name] > 0
        rare, often = found["loss"][name]
        first_term = 64 / code.hosts * math.comb(code.hosts, code.parity + 1)
        assert rare == pytest.approx(first_term * 1e-4 ** (code.parity + 1), rel=0.01)
        assert often == pytest.approx(loss(code, 0.02, 64), rel=1e-9)
        spread = math.sqrt(often * (1 - often) / 100_000)
        assert abs(found["dice"][name] - often) < 5 * spread
    for name, p in found["crossing"].items():
        code, copies = Code.parse(name), Code.parse("1+1")
        if p:  # below it the code is safer, above it copies are
            assert loss(code, p / 2, 64) < loss(copies, p / 2, 64)
            assert p > 0.9 or loss(code, p * 1.1, 64) > loss(copies, p * 1.1, 64)
    assert found["crossing"]["3+1"] == 0 < found["crossing"]["14+2"] < found["crossing"]["6+2"]
    assert "6+2        8            2              107 GB" in notebooks.printed(notebook, "cost")
    assert notebooks.pictures(notebook) == ["cost-plot", "risk-plot"]
    notebooks.wait_until_gone(folder)
