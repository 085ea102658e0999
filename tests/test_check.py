"""The check for accelerators runs from end to end where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_check_runs_on_cpu_and_what_it_requires_holds(tmp_path: Path) -> None:
    assert (ROOT / "tpu" / "check.py").samefile(ROOT / "gpu" / "check.py")
    out = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "gpu" / "check.py", "--platform", "cpu", "--gib", "0.02"]
    flags = "--xla_force_host_platform_device_count=2"
    run = subprocess.run(
        [*command, "--json", out],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    required = {name for name, row in rows.items() if row["holds"] is not None}
    stagings = ("pinned_host", "device", "view")
    assert required == {
        "bytes[xla]",
        "twin[bits]",
        "twin[calls]",
        *(f"donation[{way}]" for way in (*stagings, "wrapped")),
    }
    measured = {f"{what}[{staging}]" for what in ("save", "staged") for staging in stagings}
    assert measured | {"kernel[xla,6+2]", "wrapped_step"} <= set(rows)
    assert all(row["figure"] > 0 for name, row in rows.items() if name not in required)
