"""The folder that a notebook runs in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.colab.notebooks import kill_all


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty; Jupyter's own files are in it too. What was started from it is ended with the test."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    yield tmp_path
    kill_all(tmp_path)
