"""A rank in a container: `python contained.py MIB [FATE]`.

Its state is so many MiB. With FATE "dies" it is killed once, after its first snapshot, and leaves a
process behind that nobody waits for. Says what it finds, one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxft


def main() -> None:
    mib, fate = int(sys.argv[1]), sys.argv[2:]
    jaxft.initialize()
    start = {"w": jnp.arange(mib << 18, dtype=jnp.uint32)}
    train = jax.jit(lambda state: {"w": state["w"] * 3 + 1})
    with jaxft.Snapshotter(every=1) as snapshotter:
        restored = snapshotter.restore(start)
        if restored is None:
            state, step = train(start), 1
            snapshotter.save(step, state).protected.result(60)
            if "dies" in fate:
                subprocess.Popen(["setsid", "--fork", "sleep", "0.1"]).wait()
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            state, step = restored.state, restored.step
        same = bool((state["w"] == train(start)["w"]).all())
    shm = os.statvfs("/dev/shm")
    said = {
        "step": step,
        "source": None if restored is None else restored.source,
        "same": same,
        "shm_total_bytes": shm.f_blocks * shm.f_frsize,
        "shm_used_bytes": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
        "first": Path("/proc/1/cmdline").read_text().replace("\0", " "),
        "zombies": _zombies_of_first(),
        "capabilities": _status("CapEff"),
    }
    print(json.dumps(said), flush=True)


def _zombies_of_first() -> int:
    """Children of the namespace's first process that are dead, and that it has not waited for."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += fields[0] == "Z" and fields[1] == "1"
    return found


def _status(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
