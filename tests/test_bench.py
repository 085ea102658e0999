"""The measuring program runs, and what it writes is whole. How fast anything is, is not asked."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.rows import at_least, at_most, percentile, row
from bench.subjects import NAMES, SUBJECTS, in_full, measurement, subjects_of

ROOT = Path(__file__).parents[1]
KEYS = {"name", "figure", "unit", "peer", "limit", "ratio", "target", "holds"}
LIMIT_S = 120


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def quick(tmp_path: Path, *names: str) -> dict[str, dict[str, Any]]:
    """The rows of a tiny run, by name, after a look at everything that all rows have."""
    done = run(*names, "--quick", "--json", str(tmp_path / "bench.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report.keys() == {"rows", "machine"}
    assert {"processor", "cores", "memory_gib", "python", "jax"} <= report["machine"].keys()
    for one in report["rows"]:
        assert one.keys() == KEYS
        assert one["name"].partition("[")[0] in names
        numbers = [one[key] for key in ("figure", "peer", "limit", "ratio")]
        assert all(math.isfinite(number) for number in numbers if number is not None)
        assert isinstance(one["holds"], bool)
        assert one["name"] in done.stdout
    return {one["name"]: one for one in report["rows"]}


def test_a_row_of_one_process(tmp_path: Path) -> None:
    rows = quick(tmp_path, "encode")
    assert rows.keys() == {f"encode[{code},1MiB]" for code in ("3+1", "6+2", "14+2")}
    for one in rows.values():
        assert one["unit"] == "GB/s"
        assert one["target"] == ">= 0.9 x limit, >= 6 x peer"
        assert one["ratio"] == pytest.approx(one["figure"] / one["limit"])
        assert all(0.001 < one[key] < 1000 for key in ("figure", "peer", "limit"))


def test_a_row_of_a_device(tmp_path: Path) -> None:
    rows = quick(tmp_path, "parity_xla")
    assert rows.keys() == {"parity_xla[6+2]", "parity_xla[6+2,xor]"}
    for one in rows.values():
        assert (one["unit"], one["peer"], one["target"]) == ("GB/s", None, "stated")
        assert one["ratio"] == pytest.approx(one["figure"] / one["limit"])


def test_rows_of_a_wrapped_step(tmp_path: Path) -> None:
    rows = quick(tmp_path, "wrapped_step")
    ways = ("", "device parity, ")
    assert rows.keys() == {
        f"wrapped_step[{way}{what}]" for way in ways for what in ("stall", "cpu")
    }
    assert {one["target"] for one in rows.values()} == {"stated"}
    assert rows["wrapped_step[stall]"]["unit"] == "ms"
    cpu = rows["wrapped_step[cpu]"]
    assert cpu["unit"] == "s"
    assert all(0 < cpu[key] < 100 for key in ("figure", "peer", "limit"))


def test_rows_of_compiling_a_twin(tmp_path: Path) -> None:
    rows = quick(tmp_path, "twin_compile")
    assert rows.keys() == {"twin_compile[13]", "twin_compile[kept]"}
    for one in rows.values():
        assert (one["unit"], one["target"]) == ("s", "stated")
        assert 0 < one["figure"] < 100
    assert rows["twin_compile[13]"]["limit"] > 0
    assert rows["twin_compile[kept]"]["peer"] == rows["twin_compile[13]"]["figure"]


def test_a_row_of_many_processes(tmp_path: Path) -> None:
    rows = quick(tmp_path, "hosts")
    assert rows.keys() == {"hosts[2]"}
    assert 0 < rows["hosts[2]"]["figure"] < 1000
    assert rows["hosts[2]"]["limit"] == rows["hosts[2]"]["figure"]


def test_rows_of_a_recovery(tmp_path: Path) -> None:
    rows = quick(tmp_path, "recovery")
    stages = ("detection", "killed", "started", "begun", "imported", "met", "built", "restored")
    assert rows.keys() == {
        *("recovery[rank]", "recovery[smp]", "recovery[smp,protected]"),
        *(f"recovery[rank,{stage}]" for stage in (*stages, "step")),
    }
    whole = rows["recovery[rank]"]
    assert whole["target"] == "<= 1.3 x limit"
    assert whole["figure"] == pytest.approx(
        sum(one["figure"] for name, one in rows.items() if name.startswith("recovery[rank,"))
    )
    assert all(0 < whole[key] < 100 for key in ("figure", "peer", "limit"))
    assert rows["recovery[rank,detection]"]["target"] == "<= 0.2 s"
    assert rows["recovery[rank,imported]"]["limit"] > 0
    assert 0 < rows["recovery[smp]"]["figure"] < 100


def test_a_name_that_is_not_known() -> None:
    done = run("encod")
    assert done.returncode == 2
    assert "encod: expected some of encode, decode" in " ".join(done.stderr.split())


def test_every_name_has_a_subject() -> None:
    assert subjects_of(NAMES) == list(SUBJECTS)
    assert subjects_of(["staged"]) == ["save"]
    of_devices = ["parity", "wrapped", "twin"]
    assert subjects_of(in_full(["device", "encode"])) == ["codec", *of_devices]
    assert callable(measurement("codec"))


def test_what_holds() -> None:
    one = row("x", "s", 1.2, at_most(1.3, "limit"), at_most(1 / 5, "peer"), limit=1.0, peer=6.5)
    assert (one.ratio, one.holds) == (1.2, True)
    assert one.target == "<= 1.3 x limit, <= 1/5 x peer"
    assert not row("x", "s", 1.2, at_most(1.3, "limit"), at_most(0.1, "itself"), limit=1.0).holds
    assert not row("x", "GB/s", 5.0, at_least(6, "peer"), peer=1.0).holds
    stated = row("x", "%", 7.0, peer=14.0)
    assert (stated.ratio, stated.target, stated.holds) == (0.5, "stated", True)


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2
    assert percentile(range(1, 51), 99) == 50
    assert percentile(range(1, 101), 99) == 99
