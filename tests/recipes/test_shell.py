"""The recipes' shell scripts have no fault that shellcheck knows of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.recipes.places import SCRIPTS


def test_shellcheck_finds_nothing():
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [program, *SCRIPTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def test_scripts_can_be_run_as_they_are():
    for script in SCRIPTS:
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
        assert script.stat().st_mode & 0o100, script
