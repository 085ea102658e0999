"""Persist helpers as an agent starts them, beside real SMPs: what they write, and how they die."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tests.device.conftest  # noqa: F401 (eight devices)
from jaxft import OrbaxFallback
from jaxft.group.world import Code
from tests.multiprocess import without_jaxft
from tests.multiprocess.jax_world import WAIT_S, environment, generation_of
from tests.multiprocess.persisting import Host, World, digest, expected, hosts_in, plainly, state

Reader = subprocess.Popen[bytes]
READERS = Path(__file__).with_name("readers.py")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts_in(tmp_path, "h0", "h1") as made:
        yield made


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Host]:
    with hosts_in(tmp_path, "alone") as made:
        yield made[0]


def start_readers(role: str, directory: Path, step: int, count: int, python: str) -> list[Reader]:
    """A world of so many processes that read a checkpoint."""
    port = free_port()
    env = environment({} if python == sys.executable else {"PYTHONPATH": ""})
    return [
        subprocess.Popen(
            [
                python,
                str(READERS),
                role,
                str(directory),
                str(step),
                str(port),
                str(index),
                str(count),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=directory,
        )
        for index in range(count)
    ]


def finish(reader: subprocess.Popen[bytes]) -> Any:
    out, error = reader.communicate(timeout=WAIT_S)
    assert reader.returncode == 0, error.decode()[-3000:]
    return json.loads(out.splitlines()[-1])  # Gloo writes to the standard output, too


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts_in(tmp_path, "h0", "h1", "h2", "h3") as made:
        yield made


def test_what_four_hosts_persist_is_read_by_others_and_without_jaxft(
    four: list[Host], tmp_path: Path
) -> None:
    """By one, two and three processes of plain Orbax, where jaxft is not installed; and with it."""
    directory = tmp_path / "checkpoints"
    world = World(four, directory)
    try:
        assert not world.take(1)
        step, result, _ = world.persist(2)
        assert result == "written"
        told = {"generation": 1, "step": step, "result": "written"}
        assert world.announced("persisted") == [told]
    finally:
        world.close()
    python = str(without_jaxft.make(tmp_path / "without"))
    plain = [start_readers("plain", directory, step, count, python) for count in (1, 2, 3)]
    ranks = start_readers("rank", directory, step, 2, sys.executable)
    for readers in plain:
        check([finish(one) for one in readers], step)
    answers = [finish(one) for one in ranks]
    check(answers, step, "e4m3")
    extras = {str(rank): {"rank": rank, "step": step} for rank in range(4)}
    assert all(answer["extras"] == extras for answer in answers)
    (entry,) = OrbaxFallback(directory).entries()
    assert entry.step == step
    assert entry.id is not None
    assert (entry.id.generation, entry.id.nonce) == (1, world.generation.nonce)
    assert [record.generation for record in entry.lineage] == [1]


def check(answers: list[Any], step: int, *more: str) -> None:
    """All shards that the processes of a world have got, and what they all have."""
    tree = state(step)
    tree["keys"] = jax.random.key_data(tree["keys"])
    rest = ("count", "host", "step")
    for answer in answers:
        want = {name: digest(tree[name]) for name in rest} | {"opt": digest(tree["opt"][0])}
        assert answer["rest"] == want
    for name in ("w", "keys", *more):
        whole = np.asarray(tree[name])
        shards = [shard for answer in answers for shard in answer["shards"][name]]
        assert len(shards) == 2 * len(answers)
        for index, found in shards:
            cut = eval(index, {"slice": slice})  # what numpy's own repr of slices says
            assert found == digest(whole[cut])


PHASES = {"ready": 1, "decided": 0, "copied": 1, "writing": 1, "committing": 0, "written": 0}


def test_a_helper_killed_at_any_phase_loses_no_checkpoint(
    hosts: list[Host], tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    fallback = OrbaxFallback(directory)
    world = World(hosts, directory)
    try:
        step = last = world.written(1)
        for phase, place in PHASES.items():
            step = world.struck(step + 1, f"persist.{phase}", place)
            steps = [entry.step for entry in fallback.entries()]
            assert last in steps
            assert plainly(directory, last) == expected(last)
            assert steps[-1] == (step if phase == "written" else last)
        assert len(world.announced("persist_failed")) == len(PHASES)
        step = world.written(step + 1)
        assert step in [entry.step for entry in fallback.entries()]
        assert plainly(directory, step) == expected(step)
        left = {path.name for path in directory.iterdir()}
        assert left == {str(entry.step) for entry in fallback.entries()}
    finally:
        world.close()


def mount(directory: Path, *options: str) -> None:
    """A disk of memory; that needs root, as a full disk that is real does."""
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(directory)]
    subprocess.run(command, check=True, timeout=WAIT_S)


def test_what_goes_wrong_is_said_and_the_next_order_works(alone: Host, tmp_path: Path) -> None:
    """A file in the way, a full disk, a disk that cannot be written to: snapshots go on."""
    directory = tmp_path / "checkpoints"
    directory.write_text("a file")
    world = World([alone], directory)
    step = 0

    def persist() -> str:
        nonlocal step
        world.take(step + 1)
        step, result, _ = world.persist(step + 2)
        return result

    try:
        said = persist()
        assert said.startswith("alone: FileExistsError")
        assert str(directory) in said
        directory.unlink()
        directory.mkdir()
        mount(directory, "size=20k")
        assert "No space left" in persist() or "RESOURCE_EXHAUSTED" in world.result()
        assert OrbaxFallback(directory).entries() == ()
        mount(directory, "remount", "size=64m")
        assert persist() == "written"
        good = step
        mount(directory, "remount", "ro")
        assert "Read-only file system" in persist()
        assert plainly(directory, good) == expected(good)
        mount(directory, "remount", "rw")
        assert persist() == "written"
        assert [entry.step for entry in OrbaxFallback(directory).entries()] == [good, step]
    finally:
        world.close()
        subprocess.run(["umount", str(directory)], check=False, capture_output=True)


def test_a_helper_ends_with_its_generation(alone: Host, tmp_path: Path) -> None:
    world = World([alone], tmp_path / "checkpoints")
    try:
        world.take(1)
        world.start()
        for rank in world.ranks:
            rank.close()
        alone.enter(generation_of([alone], 2, Code(data=1, parity=1)))
        assert world.helpers[0].wait(WAIT_S) == 1
        assert "belongs to generation 1" in (alone.directory / "persist.log").read_text()
    finally:
        world.close()
