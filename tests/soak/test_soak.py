"""A short soak: the command, its log, what it finds out, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ("rank killed", "SMP killed", "memory lost")
LIMIT_S = 150


def test_a_short_soak_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="jx-") as place:
        command = [sys.executable, "-m", "bench", "soak", "--seed", "1", "--minutes", "0.2"]
        command += ["--hosts", "2:2", "--kinds", ",".join(KINDS)]
        command += ["--json", str(tmp_path / "soak.json")]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": place},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not list(Path(place).iterdir())
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["seed"], report["wrong"], report["status"]) == (1, "", 0)
    assert report["episodes"]
    assert all(row["count"] == row["recovered"] for row in report["kinds"].values())
    assert report["lines_checked"] > 100
    for kind in report["kinds"]:
        assert kind in KINDS
        assert kind in done.stdout
    assert "recovered: stood still for" in done.stdout
    assert "all is well" in done.stdout


def test_a_soak_that_is_stopped_says_how_far_it_came_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="jx-") as place:
        soak = subprocess.Popen(
            [sys.executable, "-m", "bench", "soak", "--hosts", "2:2", "--kinds", "rank killed"],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": place},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert soak.stdout is not None
        for line in soak.stdout:
            if "generation 1 of a, b" in line:
                break
        soak.send_signal(signal.SIGINT)
        said, _ = soak.communicate(timeout=LIMIT_S)
        assert soak.returncode == 130
        assert "stopped" in said
        assert "failure" in said
        assert not list(Path(place).iterdir())
