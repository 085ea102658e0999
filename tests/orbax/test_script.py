"""A script written for Orbax, with one changed line, is killed and goes on from memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as plain
import pytest

from jaxft.orbax.storage import JOB
from tests.launch.local_runs import run
from tests.multiprocess.working import working

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train.py")
WAIT_S = 60.0


def changed() -> str:
    """The script with another import."""
    text = SCRIPT.read_text()
    assert text.count("import orbax.checkpoint as ocp") == 1
    return text.replace("import orbax.checkpoint as ocp", "import jaxft.orbax as ocp")


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A run directory of its own, where nobody works any more when all scripts have ended."""
    run_dir = str(tmp_path / "r")
    yield {
        **os.environ,
        "JAXFT_RUN_DIR": run_dir,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    deadline_s = time.monotonic() + WAIT_S
    while working(run_dir):
        assert time.monotonic() < deadline_s, working(run_dir)
        time.sleep(0.05)


def train(script: Path, directory: Path, environ: dict[str, str], *, until: str = "") -> str:
    """What it prints, to the end, or until it is killed because it has printed that."""
    process = subprocess.Popen(
        [sys.executable, str(script), str(directory)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if until and line.strip() == until:
                process.kill()
        text = "".join(printed)
        assert process.wait(WAIT_S) == (0 if not until else -9), text
    return text


def start_of(printed: str) -> tuple[int, str]:
    found = re.search(r"^from (\d+) on storage (.*)$", printed, re.MULTILINE)
    assert found is not None, printed
    return int(found[1]), found[2]


def end_of(printed: str) -> str:
    return printed.splitlines()[-1]


def test_a_script_with_one_changed_line_goes_on_from_memory(
    environ: dict[str, str], tmp_path: Path
) -> None:
    ours = tmp_path / "ours.py"
    ours.write_text(changed())
    expected = end_of(train(SCRIPT, tmp_path / "plain", environ))
    assert expected.startswith("loss ")
    # Killed: the step on storage is the first one; memory has had every tenth, as long as the
    # budget is not measured: four snapshots long.
    printed = train(ours, tmp_path / "run", environ, until="step 60")
    assert start_of(printed) == (0, "[]"), printed
    printed = train(ours, tmp_path / "run", environ)
    step, stored = start_of(printed)
    assert step >= 31, printed
    assert stored in ("[1]", "[]")  # Orbax may still have been writing it
    assert end_of(printed) == expected
    # The unchanged script finds what it would have written itself.
    printed = train(SCRIPT, tmp_path / "run", environ)
    assert start_of(printed) == (160, "[100, 160]")


HELPED = """
import sys, time
import jax.numpy as jnp
import jaxft.orbax as ocp

options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=1)
with ocp.CheckpointManager(sys.argv[1], options=options, every=1, helpers=True) as manager:
    step, deadline_s = 0, time.monotonic() + 60
    while not ocp.utils.checkpoint_steps(sys.argv[1]) and time.monotonic() < deadline_s:
        step += 1
        assert manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(4, step)}))
        time.sleep(0.02)
    stored = ocp.utils.checkpoint_steps(sys.argv[1])
    print("stored", stored, flush=True)
    restored = manager.restore(stored[0], args=ocp.args.StandardRestore({"w": jnp.zeros(4, int)}))
    assert restored["w"][0] == stored[0]
    assert manager.latest_step() == step
    assert stored[0] in manager.all_steps()
print("at the end", ocp.utils.checkpoint_steps(sys.argv[1]), "of", step, flush=True)

# A notebook's cell is run again, and again.
for again in range(2):
    manager = ocp.CheckpointManager(sys.argv[1], every=1)
    last = manager.latest_step()
    assert last == step + again, (last, step, again)
    manager.restore(last, args=ocp.args.StandardRestore({"w": jnp.zeros(4, int)}))
    manager.save(last + 1, args=ocp.args.StandardSave({"w": jnp.full(4, last + 1)}))
    manager.wait_until_finished()
manager.close()
"""


def test_helpers_write_storage(environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "helped.py"
    script.write_text(HELPED)
    printed = train(script, tmp_path / "run", environ)
    assert re.search(r"^stored \[\d+\]$", printed, re.MULTILINE), printed
    found = re.search(r"^at the end (.*) of (\d+)$", printed, re.MULTILINE)
    assert found is not None, printed
    assert int(found[2]) in json.loads(found[1]), printed


DISTRIBUTED = """
import os, signal, sys
import jax, jaxft
import jax.numpy as jnp
import jaxft.orbax as ocp
from jax.sharding import NamedSharding, PartitionSpec as P

jaxft.initialize()
mesh = jaxft.make_mesh({"data": -1})
rows = NamedSharding(mesh, P("data"))
whole = NamedSharding(mesh, P())
state = {"w": jax.device_put(jnp.arange(8.0), rows), "n": jax.device_put(jnp.int32(0), whole)}
options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=2)
train_step = jax.jit(lambda state: {"w": state["w"] * 1.5 + state["n"], "n": state["n"] + 1})
with ocp.CheckpointManager(sys.argv[1], options=options, every=2) as manager:
    latest = manager.latest_step()
    if latest is not None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        state = manager.restore(latest, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), note=ocp.args.JsonRestore())).state
    first = jax.process_index() == 0
    if first:
        print("from", latest, flush=True)
    for step in range(1 if latest is None else latest + 1, 13):
        state = train_step(state)
        manager.save(step, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), note=ocp.args.JsonSave({"step": step})))
        if step == 9 and latest is None:
            manager.wait_until_finished()
            if not first:
                os.kill(os.getpid(), signal.SIGKILL)
    manager.wait_until_finished()
    note = manager.restore(12, args=ocp.args.Composite(note=ocp.args.JsonRestore())).note
    total = float(jax.jit(jnp.sum, out_shardings=whole)(state["w"]))
    if first:
        print("steps", manager.all_steps(), note, "sum", total, flush=True)
if first:
    print("stored", sorted(ocp.utils.checkpoint_steps(sys.argv[1])), flush=True)
"""


def test_ranks_of_a_job_go_on_from_memory(tmp_path: Path) -> None:
    expected = [float(x) for x in range(8)]
    for n in range(12):
        expected = [x * 1.5 + n for x in expected]
    command = (sys.executable, "-c", DISTRIBUTED, str(tmp_path / "run"))
    options = ("--local-hosts", "2", "--code", "1+1")
    with run(*options, command=command, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1") as job:
        assert job.ended(WAIT_S) == 0, job.text()
        printed = job.printed()
        assert "from None" in printed
        assert "from 9" in printed, job.text()
        assert f"steps [5, 10, 12] {{'step': 12}} sum {sum(expected)}" in printed, job.text()
        assert "stored [10, 12]" in printed, job.text()


TOLD_TO_END = """
import sys, time
import jax, jaxft
import jax.numpy as jnp
import jaxft.orbax as ocp
from jax.sharding import NamedSharding, PartitionSpec as P

jaxft.initialize()
rows = NamedSharding(jaxft.make_mesh({"data": -1}), P("data"))
options = ocp.CheckpointManagerOptions(save_interval_steps=10**6)
manager = ocp.CheckpointManager(sys.argv[1], options=options, every=10**6)
step = manager.latest_step() or 0
print("from", step, flush=True)
while True:
    state = {"w": jax.device_put(jnp.full(8, step), rows)}
    manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), note=ocp.args.JsonSave({"step": step})))
    if step == 20:
        print("step 20", flush=True)
    step += 1
    time.sleep(0.01)
"""


def test_a_job_that_is_told_to_end_has_its_last_step_on_storage(tmp_path: Path) -> None:
    command = (sys.executable, "-c", TOLD_TO_END, str(tmp_path / "run"))
    options = ("--local-hosts", "2", "--code", "1+1", "--grace-s", "50")
    with run(*options, command=command, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1") as job:
        job.until(lambda: "step 20" in job.printed(), "step 20")
        # Orbax writes step 0 meanwhile; what it is still writing when the ranks end is not whole.
        job.until(lambda: (tmp_path / "run" / "0").is_dir(), "step 0 on storage")
        job.process.terminate()
        assert job.ended(WAIT_S) == 128 + signal.SIGTERM, job.text()
        told = job.text()
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        steps = unchanged.all_steps()
        assert len(steps) == 2, told
        first, last = steps
        assert first == 0
        assert last >= 20
        note = unchanged.restore(last, args=plain.args.Composite(note=plain.args.JsonRestore()))
        assert note.note == {"step": last}


NAMED = """
import sys
import jax.numpy as jnp
import jaxft.orbax as ocp

options = ocp.CheckpointManagerOptions(save_interval_steps=5)
manager = ocp.CheckpointManager(sys.argv[1], options=options, every=1)
for step in range(8):
    manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave({"w": jnp.full(4, step)}), note=ocp.args.JsonSave([step])))
    manager.wait_until_finished()
print("saved", flush=True)
input()
"""


def export(job: str, directory: Path, environ: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "jaxft", "export", "--job", job, str(directory)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT_S)
    return done.returncode, done.stdout + done.stderr


def test_a_managers_snapshot_is_exported_as_the_manager_would_write_it(
    environ: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", NAMED, str(tmp_path / "run")]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "saved" in process.stdout.readline()
        process.kill()
    job = (tmp_path / "run" / JOB).read_text().strip()
    other = tmp_path / "other"
    other.mkdir()
    (other / JOB).write_text("another-1")
    status, said = export(job, other, environ)
    assert (status, "is job another-1's" in said) == (2, True), said
    (other / JOB).unlink()
    with plain.CheckpointManager(other) as manager:
        manager.save(7, args=plain.args.StandardSave({"mine": np.ones(2)}))
    status, said = export(job, other, environ)
    assert (status, "one that jaxft knows nothing of" in said) == (2, True), said
    for _ in range(2):  # the second time it is there
        status, said = export(job, tmp_path / "run", environ)
        assert (status, said) == (0, f"step 7 of job {job} is in {tmp_path / 'run'}\n")
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert unchanged.all_steps() == [0, 5, 7]
        found = unchanged.restore(
            7,
            args=plain.args.Composite(
                state=plain.args.StandardRestore(), note=plain.args.JsonRestore()
            ),
        )
        assert (list(found.state["w"]), found.note) == ([7, 7, 7, 7], [7])
    keeper = working(environ["JAXFT_RUN_DIR"])
    for pid in keeper:
        os.kill(pid, signal.SIGKILL)


ENDS = """
import os, sys
import jax.numpy as jnp
import jaxft.orbax as ocp

options = ocp.CheckpointManagerOptions(save_interval_steps=100)
manager = ocp.CheckpointManager(sys.argv[1], options=options, every=1)
for step in range(3):
    manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(4, step)}))
    if step == 1 and os.fork() == 0:
        sys.exit()
os.wait()
sys.exit(3)
"""


def test_a_script_that_ends_without_close_has_its_last_step_on_storage(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """A fork of it that ends, as a loader's, ends nothing of its."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDS, str(tmp_path / "run")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    with plain.CheckpointManager(tmp_path / "run") as unchanged:
        assert unchanged.all_steps() == [0, 2]
    for pid in working(environ["JAXFT_RUN_DIR"]):
        os.kill(pid, signal.SIGKILL)
