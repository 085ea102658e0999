"""A script that nobody launched: its memory outlives it, and goes when it has finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.device.conftest  # noqa: F401 (eight devices)
from jaxft import OrbaxFallback
from jaxft.group.manifest import SnapshotId
from jaxft.host.attach import HOST, default_job
from tests.multiprocess.alone import START, STEPS, train_step
from tests.multiprocess.working import working
from tests.test_fallback import save

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A run directory of its own (short, for the sockets in it)."""
    return {**os.environ, "JAXFT_RUN_DIR": str(tmp_path / "r"), "JAX_PLATFORMS": "cpu"}


def start(environ: dict[str, str], *fates: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.multiprocess.alone", "j", *fates],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(environ: dict[str, str], *fates: str) -> tuple[int, str]:
    process = start(environ, *fates)
    output, _ = process.communicate(timeout=WAIT_S)
    return process.returncode, output


def keepers(environ: dict[str, str]) -> list[int]:
    """Processes that still work below this test's run directory."""
    return working(environ["JAXFT_RUN_DIR"])


def until_gone(environ: dict[str, str]) -> None:
    deadline_s = time.monotonic() + 15.0
    while keepers(environ):
        assert time.monotonic() < deadline_s, f"still there: {keepers(environ)}"
        time.sleep(0.05)


def expected() -> str:
    state = START
    for _ in range(STEPS):
        state = train_step(state)
    return float(state["x"].sum()).hex()


def test_a_killed_script_goes_on_from_memory_and_a_finished_one_leaves_nothing(environ):
    status, output = run(environ, "kill@3")
    assert status == -signal.SIGKILL
    assert "from 0 none" in output
    status, output = run(environ, "kill@5")
    assert status == -signal.SIGKILL
    assert "from 3 own" in output
    status, output = run(environ, "end")
    assert status == 0, output
    assert "from 5 own" in output
    assert f"sum {expected()}" in output
    until_gone(environ)
    assert not (Path(environ["JAXFT_RUN_DIR"]) / "j" / HOST / "smp.sock").exists()


def test_a_finished_script_leaves_its_newest_snapshot_on_storage(environ, tmp_path):
    """One that comes while that is written waits for it, and goes on from there."""
    environ["CHECKPOINTS"] = str(tmp_path / "checkpoints")
    status, output = run(environ, "end")
    assert status == 0, output
    status, output = run(environ, "end")
    assert status == 0, output
    assert f"from {STEPS} orbax" in output
    until_gone(environ)
    [newest] = OrbaxFallback(environ["CHECKPOINTS"]).entries()
    assert newest.step == STEPS
    goes_on_from_what_can_be_read(environ, Path(environ["CHECKPOINTS"]), newest.id)


def goes_on_from_what_can_be_read(
    environ: dict[str, str], directory: Path, newest: SnapshotId
) -> None:
    """An older checkpoint where the newest one is damaged; no new beginning where all are."""
    older = SnapshotId(newest.generation, newest.seq - 1, newest.nonce)
    save(directory, START, 2, is_of=older, lineage=(), job="j", keep=None)
    (directory / str(STEPS) / "default" / "manifest.ocdbt").write_bytes(b"")
    status, output = run(environ, "end")
    assert status == 0, output
    assert "from 2 orbax" in output
    assert f"because checkpoint of step {STEPS} in {directory} cannot be read: " in output
    until_gone(environ)
    for manifest in directory.glob("*/default/manifest.ocdbt"):
        manifest.write_bytes(b"")
    status, output = run(environ, "end")
    assert status == 1, output
    assert "NothingRecoverable: there are checkpoints, and none of them can be read: " in output
    assert "move them away" in output


def test_a_notebook_fails_in_a_cell_and_goes_on_in_the_next(environ):
    status, output = run(environ, "fail@2", "end")
    assert status == 0, output
    assert "failed: the loss is not a number" in output
    assert "from 2 own" in output
    assert f"sum {expected()}" in output
    until_gone(environ)


AGAIN = """
import jax.numpy as jnp
import jaxft
for number in range(6):
    with jaxft.Snapshotter(every=1, job="j") as snapshotter:
        assert snapshotter.restore({"x": jnp.arange(8.0)}) is None
        snapshotter.save(number, {"x": jnp.arange(8.0)}).protected.result(30)
print("all", flush=True)
"""


def test_one_after_the_other_in_a_process_never_meets_a_keeper_that_ends(environ):
    script = subprocess.run(
        [sys.executable, "-c", AGAIN],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert script.stdout == "all\n", script.stderr
    until_gone(environ)


PERSISTS = """
import os, signal, sys, time
import jax.numpy as jnp
import jaxft
fallback = jaxft.OrbaxFallback(sys.argv[1], every=1)
with jaxft.Snapshotter(every=1, job="j", fallback=fallback) as snapshotter:
    restored = snapshotter.restore({"x": jnp.arange(8.0)})
    step = restored.step if restored is not None else 0
    persisted, deadline_s = [], time.monotonic() + 40
    while not persisted and time.monotonic() < deadline_s:
        step += 1
        receipt = snapshotter.save(step, {"x": jnp.arange(8.0)})
        receipt.protected.result(30)
        receipt.persisted.add_done_callback(
            lambda one: one.exception() or persisted.append(one.result())
        )
    print("persisted", persisted, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_every_life_of_a_script_persists(environ, tmp_path):
    for life in range(2):
        script = subprocess.run(
            [sys.executable, "-c", PERSISTS, str(tmp_path / "checkpoints")],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert script.stdout.startswith("persisted ["), f"{life}: {script.stdout}{script.stderr}"
        assert "[]" not in script.stdout, f"life {life}"
    for pid in keepers(environ):
        os.kill(pid, signal.SIGTERM)
    until_gone(environ)


def test_two_scripts_with_one_job_name_do_not_share_it(environ):
    first = start(environ, "wait@1")
    assert first.stdout is not None
    try:
        while "waiting" not in first.stdout.readline():
            assert first.poll() is None
        status, output = run(environ, "end")
        assert status == 3
        assert f"process {first.pid} runs this job already" in output
    finally:
        output, _ = first.communicate("\n", timeout=WAIT_S)
    assert first.returncode == 0, output
    until_gone(environ)


def test_a_script_names_its_job(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/a/b c/train llama.py", "--x"])
    one = default_job()
    monkeypatch.setattr(sys, "argv", ["/a/other/train llama.py"])
    assert one.startswith("train-llama-")
    assert default_job() != one


def test_a_notebook_names_its_job_and_what_it_starts_does_not(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/llama.ipynb")
    monkeypatch.setattr(sys, "argv", ["/env/ipykernel_launcher.py", "-f", "kernel.json"])
    assert default_job().startswith("llama-")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert default_job().startswith("train-")


def test_a_keeper_that_cannot_start_says_why(environ: dict[str, str]) -> None:
    status, output = run({**environ, "JAXFT_MEMORY_MAX_MIB": "much"}, "none")
    assert status == 1
    assert "LaunchError: job j: the keeper of its snapshots ended at once: " in output
    assert "JAXFT_MEMORY_MAX_MIB=much: expected a number of MiB" in output
    until_gone(environ)


def test_a_keeper_that_is_told_to_end_takes_all_away(environ: dict[str, str]) -> None:
    assert run(environ, "kill@2")[0] == -signal.SIGKILL
    (keeper,) = Path(environ["JAXFT_RUN_DIR"]).glob("j/*/lock")
    os.kill(int(keeper.read_text()), signal.SIGTERM)
    until_gone(environ)
    left = [path for path in Path(environ["JAXFT_RUN_DIR"]).rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} == {"logs"}
