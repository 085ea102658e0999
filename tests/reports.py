"""What `jaxft status --json` says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def status(job: str, environ: Mapping[str, str]) -> tuple[int, Any]:
    """Its exit status and its report."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxft", "status", "--job", job, "--json"],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
