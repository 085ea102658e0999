"""A cell that is interrupted, and a cell that is run twice: what a process does that goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.colab.notebooks import environment, wait_until_gone

# The first interrupt comes when the keeper has given this process its place, which it does not know
# yet; the exception, with all that its traceback holds, is kept, as a notebook keeps the last one.
CELLS = """
import os, signal
import jax.numpy as jnp
import jaxft
from jaxft.host.local import LocalChannel

STATE, kept = {"x": jnp.arange(8.0)}, []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
receive = LocalChannel.receive

def interrupted(channel, timeout_s):
    receive(channel, timeout_s)
    LocalChannel.receive = receive
    signal.raise_signal(signal.SIGINT)

def cell(stop):
    with jaxft.Snapshotter(every=1, job="j") as snapshotter:
        restored = snapshotter.restore(STATE)
        print("from", restored and (restored.step, restored.source))
        for step in range(restored.step if restored else 0, 5):
            snapshotter.save(step + 1, STATE).protected.result(30)
            if step + 1 == stop:
                signal.raise_signal(signal.SIGINT)

LocalChannel.receive = interrupted
for stop in (0, 2, 4, 6):
    try:
        cell(stop)
    except KeyboardInterrupt as error:
        kept.append(error)
        print("interrupted")

first = jaxft.Snapshotter(job="j")
try:
    jaxft.Snapshotter(job="j")
except jaxft.JobInUse as error:
    print(error)
first.close()
"""

SHOWN = """\
interrupted
from None
interrupted
from (2, 'own')
interrupted
from (4, 'own')
this process has a Snapshotter of job j: use that one, or end it first. Its close() ends the \
job and lets its memory go, close(failing=True) keeps it
"""


def test_interrupted_cells_go_on_from_memory_and_a_second_snapshotter_is_told_of_the_first(
    folder: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELLS],
        cwd=folder,
        env=environment(folder) | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert (done.stdout, done.returncode) == (SHOWN, 0), done.stderr
    wait_until_gone(folder)
