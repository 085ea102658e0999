"""Notebooks as they are stored: valid, without outputs, and all their code is linted."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.colab.notebooks import NOTEBOOKS, code_cells, read


def test_the_notebooks_are_there() -> None:
    assert [path.name for path in NOTEBOOKS] == ["parity.ipynb", "train.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.execution_count is None, cell.id
        assert cell.outputs == [], cell.id
        assert set(cell.metadata) <= {"collapsed"}, cell.id
    assert path.read_text() == nbformat.writes(notebook, indent=1).rstrip("\n") + "\n"
