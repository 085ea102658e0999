"""The check that compiles without devices counts what it should, and says what it lacks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

SCRIPT = Path(__file__).parents[3] / "tpu" / "compile_check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("compile_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compile_check", module)
    spec.loader.exec_module(module)
    return module


def test_operations_are_counted(check: ModuleType) -> None:
    words = jax.ShapeDtypeStruct((1000,), jnp.uint32)  # type: ignore[no-untyped-call]
    one = check.compiled(lambda a, b: a ^ (b << 1), [words, words])
    two = check.compiled(lambda a, b: (jnp.sort(a), jnp.sort(b) + 1), [words, words])
    assert len(one.operations) == 1
    assert len(two.operations) > 1


def test_checks_run_on_what_there_is(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """For CPU, where the portable kernel is one operation for each output."""
    topology = SimpleNamespace(devices=jax.devices())
    checks = check.Checks("cpu", check.Target(lambda: topology, "xla", ""), quick=True)
    checks.run()
    assert "cpu xla: 7 programs compiled, " in capsys.readouterr().out
    assert all("encode" in miss or "decode" in miss for miss in checks.misses)
    assert any(miss.startswith("cpu, xla, encode 8+4") for miss in checks.misses)


def test_a_package_that_is_missing_is_named() -> None:
    if importlib.util.find_spec("jax_cuda12_plugin"):
        return
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "h200"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    )
    assert done.returncode == 2
    assert "h200: no compiler for it here" in done.stderr
    assert "pip install --no-deps jax-cuda12-plugin" in done.stderr
