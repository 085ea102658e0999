"""The agent, the snapshot process and the cores never import JAX, whatever imports them."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxft
from jaxft.group.world import Code
from tests.multiprocess.jax_world import Host, environment, generation_of

HEAVY = ("jax", "jaxlib", "orbax", "flax", "optax")
OPTIONAL = ("etcd3gw",)
ROOMS_WITHOUT_JAX = ("group", "host", "launch", "status")


def modules_without_jax() -> list[str]:
    """All modules of the rooms that are to know no JAX, and those beside them."""
    found = ["jaxft", "jaxft.config", "jaxft.errors", "jaxft.faults", "jaxft.__main__"]
    for room in ROOMS_WITHOUT_JAX:
        path = str(Path(jaxft.__file__).parent / room)
        found.append(f"jaxft.{room}")
        found += [f"jaxft.{room}.{one.name}" for one in pkgutil.iter_modules([path])]
    return found


def test_the_rooms_without_jax_import_none() -> None:
    names = modules_without_jax()
    assert {"jaxft.host.smp", "jaxft.launch.agent", "jaxft.group.keeper"} <= set(names)
    script = f"""
import importlib, sys
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {OPTIONAL!r}:
            raise
    heavy = sorted(set({HEAVY!r}) & {{module.partition(".")[0] for module in sys.modules}})
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["jaxft.snapshotter", "jaxft.restorer", "jaxft.fallback"])
def test_orbax_is_not_imported_before_it_is_needed(name: str) -> None:
    script = f"import sys, {name}; assert 'jax' in sys.modules; assert 'orbax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], env=environment({}), timeout=60, check=True)


def test_a_running_snapshot_process_has_no_jax_in_its_memory(tmp_path: Path) -> None:
    host = Host("h0", tmp_path)
    try:
        host.enter(generation_of([host], 1, Code()))
        assert host.inspect()["generation"] in (0, 1)
        maps = Path(f"/proc/{host.process.pid}/maps").read_text()
        assert "libzmq" in maps or "zmq" in maps
        assert not [line for line in maps.splitlines() if "jax" in line and "jaxft" not in line]
    finally:
        host.close()
