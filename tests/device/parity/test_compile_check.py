"""The check that compiles without devices counts what it should, and says what it lacks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_fusions_are_told_apart_by_what_they_compute(check: ModuleType) -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)  # type: ignore[no-untyped-call]

    def found(function: Any) -> Any:
        return check.fusions(jax.jit(function).lower(x).compile().as_text())

    one = found(lambda x: jnp.tanh(x) * 2 + x)
    assert one
    assert one == found(lambda y: jnp.add(2 * jnp.tanh(y), y))
    assert one != found(lambda x: jnp.tanh(x) * 3 + x)
    assert not one - found(lambda x: (jnp.tanh(x) * 2 + x, jnp.sort(x + 1)))


TWO = """
%fused_computation.1 (p.1: f32[8], p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(1)
  %p.1 = f32[8]{0:S(1)} parameter(0), metadata={op_name="a"}
  ROOT %sum = f32[8]{0} add(%p.1, %p.2)
}

%async_collective_fusion.2 (q.1: f32[8], q.2: f32[8], q.3: f32[2]) -> (f32[8], f32[8]) {
  %q.3 = f32[2]{0} parameter(2)
  %gathered = f32[8]{0} all-gather(%q.3), channel_id=26, dimensions={0}
  %q.1 = f32[8]{0} parameter(0)
  %q.2 = f32[8]{0} parameter(1)
  %other = f32[8]{0} add(%q.1, %q.2)
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%other, %gathered)
}

ENTRY %main (x: f32[8], y: f32[2]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[2]{0} parameter(1)
  %first = f32[8]{0} fusion(%x, %x), kind=kLoop, calls=%fused_computation.1
  ROOT %second = (f32[8]{0}, f32[8]{0}) fusion(%x, %x, %y), kind=kCustom, \
calls=%async_collective_fusion.2
}
""".replace("\\\n", "")


def test_the_same_beside_a_collective_is_the_same(check: ModuleType) -> None:
    assert list(check.fusions(TWO).values()) == [2]


def test_all_results_beside_a_collective_count(check: ModuleType) -> None:
    """Of a fusion that has two, none of them the collective's."""
    alone = """  %more = f32[8]{0} multiply(%sum, %p.2)
  ROOT %two = (f32[8]{0}, f32[8]{0}) tuple(%sum, %more)"""
    beside = """  %more = f32[8]{0} multiply(%other, %q.2)
  ROOT %all = (f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[2]{0}) tuple(%other, %more, %gathered, %q.3)"""
    text = TWO.replace(
        "ROOT %sum = f32[8]{0} add(%p.1, %p.2)", f"%sum = f32[8]{{0}} add(%p.1, %p.2)\n{alone}"
    )
    assert list(check.fusions(text).values()) == [1, 1]
    root = next(line for line in TWO.splitlines() if "ROOT %both" in line)
    assert list(check.fusions(text.replace(root, beside)).values()) == [2]
    other = beside.replace("multiply", "subtract")
    assert list(check.fusions(text.replace(root, other)).values()) == [1, 1]


def test_to_begin_a_collective_is_no_computation(check: ModuleType) -> None:
    begun = 'custom-call(%p.1, %p.2), custom_call_target="AsyncCollectiveStart"'
    begun_only = check.fusions(TWO.replace("add(%p.1, %p.2)", begun))
    assert list(begun_only.values()) == [1]
    assert not begun_only - check.fusions(TWO)


def test_channels_are_names(check: ModuleType) -> None:
    reduced = "all-reduce(%p.1), channel_id={}, replica_groups=[1,4]<=[4]"
    one, other = (
        check.fusions(TWO.replace("add(%p.1, %p.2)", reduced.format(number))) for number in (1, 19)
    )
    assert one == other != check.fusions(TWO)


def test_collectives_are_told_apart_by_what_they_are_for(check: ModuleType) -> None:
    text = """
  %a = f32[8]{0} all-gather(%x), channel_id=1, metadata={op_name="jit(step)/dot/mul"}
  %b = (f32[8]{0}, u32[]) collective-permute-start(%x), metadata={op_name="jit(twin)/send"}
  %c = f32[8]{0} collective-permute-done(%b), metadata={op_name="jit(twin)/send"}
  %d = f32[8]{0} all-reduce(%x), to_apply=%sum
  %e = f32[8]{0} fusion(%a), calls=%all-gather.1
"""
    assert check.collectives(text) == {
        ("all-gather", "dot/mul"): 1,
        ("collective-permute", "send"): 1,
        ("all-reduce", ""): 1,
    }


def test_a_step_and_its_twins_are_compared(
    check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """For CPU, whose twins give all that a device owns, and its parity, as well; its host's memory
    is no other, which an accelerator's is."""
    check.LAYERS = 1
    check.loss_of = lambda weights, batch: sum(map(jnp.vdot, *[jax.tree.leaves(weights)] * 2))
    world = check.World(2, 1, check.Code(data=1, parity=1))
    target = check.Target(lambda _: jax.devices()[:2], "pallas_tpu", "")
    checks = check.TwinChecks("cpu", target, True)
    checks.shape = (1, 8, 128)
    checks.compare(world, "sharded", check.P("data"))
    said = capsys.readouterr().out.splitlines()
    where = "cpu, twin, 2 devices, sharded"
    assert [line.partition(": ")[0] for line in said] == [f"{where}, no parity", f"{where}, 1+1"]
    assert "; 0 permutations; " in said[0]
    assert "; 1 permutations; " in said[1]
    gone = [f"{where}, {how}: only 0 bytes are given to the host" for how in ("no parity", "1+1")]
    assert [miss for miss in checks.misses if "host" in miss] == gone
    assert not [miss for miss in checks.misses if "permut" in miss or "collective" in miss]


def test_checks_run_on_what_there_is(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """For CPU, where the portable kernel is one operation for each output."""
    target = check.Target(lambda _: jax.devices(), "xla", "")
    checks = check.Checks("cpu", target, quick=True)
    checks.run()
    assert "cpu xla: 7 programs compiled, " in capsys.readouterr().out
    assert all("encode" in miss or "decode" in miss for miss in checks.misses)
    assert any(miss.startswith("cpu, xla, encode 8+4") for miss in checks.misses)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    )


def test_it_runs_from_end_to_end_on_cpu() -> None:
    done = run("--platform", "cpu", "--quick", "--only", "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("cpu: 9 programs compiled and judged in ")
    assert last.endswith("all that is required holds")


def test_a_package_that_is_missing_is_named() -> None:
    if importlib.util.find_spec("jax_cuda12_plugin"):
        return
    done = run("h200")
    assert done.returncode == 2
    assert "h200: no compiler for it here" in done.stderr
    assert "pip install --no-deps jax-cuda12-plugin" in done.stderr
