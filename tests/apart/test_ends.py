"""How jobs end whose hosts are on several machines: told to, and by themselves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.apart.world import Host, World, apart
from tests.apart.seen import SOON

SCRIPT = str(Path(__file__).with_name("phases.py"))


@pytest.fixture(scope="module")
def world(module_base: Path) -> Iterator[World]:
    with apart(module_base, "a", "b", "c") as made:
        yield made


def start(host: Host, phase: str, *options: str, **env: str) -> Path:
    """A job of this name; where its ranks write."""
    base = host.base / phase
    base.mkdir()
    ranks = (sys.executable, SCRIPT, str(base), phase)
    host.start("--job", phase, *SOON, *options, ranks=ranks, **env)
    return base


def test_sigterm_while_it_compiles_evaluates_and_trains_case_38(world: World) -> None:
    """Three jobs at once. What is protected gets to storage, within the time that there is; where
    a snapshot can still be taken, that is the last step."""
    phases = {"a": "compile", "b": "evaluate", "c": "train"}
    grace = ("--hosts", "1", "--grace-s", "35")
    bases = {name: start(world[name], phase, *grace) for name, phase in phases.items()}
    world.until(lambda: all((base / "there").exists() for base in bases.values()), "all are there")
    began_s = time.monotonic()
    for name in phases:
        os.kill(world[name].pid, signal.SIGTERM)
    statuses = {name: world[name].ended() for name in phases}
    assert time.monotonic() - began_s < 5 + 30
    assert set(statuses.values()) == {128 + signal.SIGTERM}, world.text()
    for name, base in bases.items():
        [exported] = world[name].events("exported")
        assert (base / "checkpoints" / str(exported["step"])).is_dir()
        protected = max(one["step"] for one in world[name].events("committed"))
        assert exported["step"] == protected
    assert [world[name].events("exported")[0]["step"] for name in "ab"] == [5, 5]
    [last] = world["c"].events("last_snapshot")
    assert last["result"] == "protected"
    assert 5 < last["step"] <= protected  # of c: steps go on until its rank is told to end


def test_a_crash_at_the_same_step_and_slots_that_do_not_fit_case_37_41(world: World) -> None:
    """Two jobs at once, which end with what a person has to know."""
    a, b, c = world.hosts.values()
    for host in (a, b):
        start(host, "crash", "--hosts", "2")
    start(c, "small", "--hosts", "1", JAXFT_MEMORY_MAX_MIB="1")
    assert [a.ended(), b.ended(), c.ended()] == [1, 1, 1], world.text()
    assert "ValueError: the data of step 6 cannot be read" in a.text()
    assert "no snapshot newer than step 5" in a.text()
    assert len({one["generation"] for one in a.events("rank_started")}) <= 5
    assert "MiB left" in c.text()
    assert "more hosts" in c.text()
    assert not c.events("committed", job="small")
