"""The examples run as they stand, without a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 120.0


@pytest.mark.parametrize("name", ["train_nnx.py", "train_linen.py", "train_optax.py"])
def test_an_example_runs_alone(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("x")  # a Unix socket's path is short
    inherited = {key: value for key, value in os.environ.items() if "JAXFT_" not in key}
    environment = inherited | {
        "JAX_PLATFORMS": "cpu",
        "JAXFT_RUN_DIR": str(tmp_path / "run"),
        "PYTHONPATH": str(_ROOT),
    }
    done = subprocess.run(
        [sys.executable, str(_ROOT / "examples" / name), "--steps", "10", "--every", "4"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 10: loss" in done.stdout
