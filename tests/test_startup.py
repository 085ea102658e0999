"""How a rank comes in, and that one that has failed ends, whatever JAX waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxft
from jaxft.errors import ConfigError
from tests.multiprocess.lone import Lone

# JAX waits at exit for the other ranks: here is what stands for that.
RANK = """
import atexit, sys, time
from jaxft import startup
atexit.register(time.sleep, {wait_s})
atexit.register(startup._leave_if_failed)
print("working")
try:
    {does}
except SystemExit as error:
    startup.leaves_by(error)
    raise
"""


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    lone = Lone(tmp_path)
    yield lone
    lone.close()


@pytest.mark.parametrize(
    ("does", "wait_s", "status"),
    [
        ("raise ValueError('bad batch')", 60.0, 1),
        ("sys.exit(7)", 60.0, 7),
        ("sys.exit('bad batch')", 60.0, 1),
        ("sys.exit(0)", 3.0, 0),
        ("pass", 3.0, 0),
    ],
)
def test_a_rank_that_has_failed_does_not_wait_for_the_others(
    does: str, wait_s: float, status: int
) -> None:
    began_s = time.monotonic()
    code = RANK.format(does=does, wait_s=wait_s)
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=50.0,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "working\n"
    assert ("bad batch" in ended.stderr) == ("bad batch" in does)
    assert status or time.monotonic() - began_s > wait_s


def test_a_process_has_one_snapshotter_in_a_generation(lone: Lone) -> None:
    lone.open()
    with pytest.raises(jaxft.ConfigError, match="rank 0 of generation 1 has had its Snapshotter"):
        jaxft.Snapshotter()
    lone.leave()
    lone.open()


def test_ranks_that_jax_knows_nothing_of_are_refused(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone.open()
    monkeypatch.setenv("JAXFT_RANKS", "2")
    with pytest.raises(jaxft.ConfigError, match=r"rank 0 of 2, .* process 0 of 1: call jaxft.init"):
        jaxft.Snapshotter()


def test_processes_that_nobody_launched_as_one_world_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JAXFT_SMP", raising=False)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(jaxft.ConfigError, match="process 0 of 2, and nobody launched it"):
        jaxft.Snapshotter(job="never-started")


def test_variables_of_a_run_that_is_over_are_named(lone: Lone) -> None:
    lone.open()
    over = f"{os.path.dirname(lone.host.directory)}/over/smp.sock"
    lone._environ.setenv("JAXFT_SMP", over)
    with pytest.raises(jaxft.ConfigError, match=f"JAXFT_SMP={over} is left of a run that is over"):
        jaxft.Snapshotter()
    assert not Path(over).parent.exists()


def test_a_code_needs_other_hosts() -> None:
    with pytest.raises(ConfigError, match=r'code="3\+1".*Snapshotter\(store=...\)'):
        jaxft.Snapshotter(code=jaxft.Code(data=3, parity=1))
    with pytest.raises(ConfigError, match="not of the form K\\+M"):
        jaxft.Snapshotter(code="three", store="s")
