"""Persist helpers as an agent starts them, beside real SMPs: what they write, and how they die."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import tests.device.conftest  # noqa: F401 (eight devices)
from jaxft import OrbaxFallback
from jaxft.device.leaves import empty_nodes
from jaxft.group.messages import PersistOrder, RankOptions
from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from tests.buckets import serving
from tests.device.snapshots import take
from tests.multiprocess import jax_world, without_jaxft
from tests.multiprocess.jax_world import WAIT_S, environment, generation_of, seat

HOSTS = 2
Reader = subprocess.Popen[bytes]
READERS = Path(__file__).with_name("readers.py")


def state(number: int) -> Any:
    """A state of step `number`; its parts on two hosts tile every leaf."""
    rows = jax.sharding.NamedSharding(jax.make_mesh((8,), ("a",)), jax.sharding.PartitionSpec("a"))
    whole = jax.sharding.NamedSharding(rows.mesh, jax.sharding.PartitionSpec())
    return {
        "w": jax.device_put(jnp.arange(96, dtype=jnp.float32).reshape(16, 6) + number, rows),
        "e4m3": jax.device_put(jnp.arange(8.0).astype("float8_e4m3"), rows),
        "keys": jax.device_put(jax.random.split(jax.random.key(number), 4), whole),
        "opt": [jax.device_put(jnp.full(5, number, jnp.bfloat16), whole), None],
        "count": jnp.int32(number),
        "host": np.arange(3.0) * number,
        "step": number,
    }


class Host(jax_world.Host):
    def say(self, message: p.ClientMessage) -> None:
        self._channel.send(p.encode(message))


class World:
    """A world whose snapshots go to storage: this process is every agent and every rank."""

    def __init__(self, hosts: list[Host], directory: str | Path) -> None:
        self.hosts = hosts
        self.generation = generation_of(hosts, 1, Code(data=1, parity=1))
        self.helpers: dict[int, subprocess.Popen[bytes]] = {}
        self.seq = 0
        self.order = 0
        for host in hosts:
            host.enter(self.generation)
        options = RankOptions(
            every_steps=1, directory=str(directory), persist_every=1, persist_keep=2, storage=()
        )
        self.ranks = [self._join(rank, host, options) for rank, host in enumerate(hosts)]
        for rank in self.ranks:
            plan = rank.wait(lambda rank=rank: rank.plan, WAIT_S, "the plan").plan
            restored = p.Restored(attempt=plan.attempt, how="verified")
            rank.say(restored, open_as="restored")
        for rank in self.ranks:
            rank.wait(lambda rank=rank: rank.settled, WAIT_S, "settling")

    def _join(self, rank: int, host: Host, options: RankOptions) -> SmpClient:
        hello = greeting(
            "rank", generation=1, nonce=self.generation.nonce, rank=rank, options=options
        )
        return SmpClient(host.directory / "smp.sock", hello)

    def take(self, step: int) -> bool:
        """Snapshots the state of this step; whether it goes to storage."""
        tree = state(step)
        snapshot = take(tree, len(self.hosts))
        leaves = msgspec.msgpack.encode((*snapshot.manifests[0].leaves, *empty_nodes(tree)))
        parts = [manifest.parts[0] for manifest in snapshot.manifests]
        for rank, part in zip(self.ranks, parts, strict=True):
            rank.close_open("staged")
            want = p.WantSlot(seq=self.seq, step=step, plan="plan", nbytes=part.length)
            rank.say(want, open_as="slot")
        for number, (rank, part) in enumerate(zip(self.ranks, parts, strict=True)):
            granted = rank.wait(lambda rank=rank: rank.granted.get(self.seq), WAIT_S, "the grant")
            view = rank.slot(granted.slot, granted.size_bytes).view(granted.base, part.length)
            view[:] = snapshot.segments[number][: part.length]
            extras = msgspec.msgpack.encode({"rank": number, "step": step})
            part = msgspec.structs.replace(part, base=granted.base, extras=extras)
            staged = p.Staged(seq=self.seq, part=part, leaves=leaves)
            rank.say(staged, open_as="staged")
        outcomes = [
            rank.wait(lambda rank=rank: rank.outcomes.get(self.seq), WAIT_S, "the outcome")
            for rank in self.ranks
        ]
        assert outcomes[0].ok, outcomes[0].reason
        assert all(outcome == outcomes[0] for outcome in outcomes)
        self.seq += 1
        return outcomes[0].persist

    # -------------------------------------------------------------------- the agents

    def told(self, host: Host) -> PersistOrder | None:
        orders = [one.order for one in list(host.heard) if isinstance(one, p.PersistTold)]
        return orders[-1] if orders else None

    def mind_helpers(self) -> None:
        """A helper that has died is told to the SMP."""
        for place, helper in list(self.helpers.items()):
            status = helper.poll()
            if status is None:
                continue
            del self.helpers[place]
            if status != 0:
                detail = f"status {status}"
                self.hosts[place].say(
                    p.HelperState(number=self.order, state="failed", detail=detail)
                )

    def until(self, what: str, ready: Any, timeout_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.mind_helpers()
            found = ready()
            if found:
                return found
            time.sleep(0.01)
        logs = [host.directory / "persist.log" for host in self.hosts]
        raise AssertionError(f"{what}: {[log.read_text()[-3000:] for log in logs if log.exists()]}")

    def start(self, faults: dict[int, str] | None = None) -> float:
        """Starts a helper on every host for the order that is open; seconds until all are ready."""

        def wanted() -> bool:
            orders = [self.told(host) for host in self.hosts]
            return all(
                order is not None and order.wanted and order.number > self.order for order in orders
            )

        self.until("an order", wanted)
        order = self.told(self.hosts[0])
        assert order is not None
        self.order = order.number
        ready = [host.directory / f"ready{self.order}" for host in self.hosts]
        began_s = time.monotonic()
        for place, host in enumerate(self.hosts):
            plan = f"persist.ready=touch:{ready[place]};{(faults or {}).get(place, '')}"
            self.helpers[place] = self.start_helper(host, place, plan)
        self.until("helpers", lambda: all(path.exists() for path in ready))
        return time.monotonic() - began_s

    def start_helper(self, host: Host, place: int, faults: str) -> subprocess.Popen[bytes]:
        variables = seat(host, self.generation, place).to_environ()
        variables |= {"JAXFT_PERSIST": str(self.order), "JAXFT_FAULTS": faults}
        with (host.directory / "persist.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jaxft.persist"],
                env=environment(variables),
                stdout=log,
                stderr=log,
            )

    def persist(self, step: int, faults: dict[int, str] | None = None) -> tuple[int, str, float]:
        """One order from its start to its end: the persisted step, its result, seconds it took."""
        self.start(faults)
        while not self.take(step):
            self.mind_helpers()
            if self.result():
                break
            step += 1
        began_s = time.monotonic()
        result = self.until("the end of the order", self.result)
        self.until("the end of the helpers", lambda: not self.helpers)
        return step, result, time.monotonic() - began_s

    def result(self) -> str:
        results = [
            one.order.result
            for one in list(self.hosts[0].heard)
            if isinstance(one, p.PersistTold) and one.order.number == self.order
        ]
        return results[-1] if results else ""

    def announced(self, kind: str) -> list[dict[str, Any]]:
        heard = [one for one in list(self.hosts[0].heard) if isinstance(one, p.Announced)]
        return [one.detail for one in heard if one.kind == kind]

    def close(self) -> None:
        for helper in self.helpers.values():
            helper.kill()
            helper.wait(WAIT_S)
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    made = [Host(f"h{place}", tmp_path) for place in range(HOSTS)]
    yield made
    for host in made:
        host.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Host]:
    host = Host("alone", tmp_path)
    yield host
    host.close()


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


def digest(leaf: Any) -> str:
    array = np.ascontiguousarray(np.asarray(leaf))
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"


def expected(step: int) -> dict[str, str]:
    """What plain Orbax gives of `state(step)`: all but what it cannot hold."""
    tree = state(step)
    return {
        "['w']": digest(tree["w"]),
        "['keys']": digest(jax.random.key_data(tree["keys"])),
        "['opt'][0]": digest(tree["opt"][0]),
        "['count']": digest(tree["count"]),
        "['host']": digest(tree["host"]),
        "['step']": digest(step),
    }


def plainly(directory: str | Path, step: int) -> dict[str, str]:
    """What plain Orbax gives for every leaf that it can hold, in this process."""
    like = {name: leaf for name, leaf in state(step).items() if name != "e4m3"}
    with ocp.CheckpointManager(epath.Path(directory)) as manager:
        tree = manager.restore(step, args=ocp.args.StandardRestore(like))
    tree["keys"] = jax.random.key_data(tree["keys"])
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys): digest(leaf) for keys, leaf in leaves}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Host]]:
    made = [Host(f"h{place}", tmp_path) for place in range(4)]
    yield made
    for host in made:
        host.close()


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
        world.take(1)
        last, result, _ = world.persist(2)
        assert result == "written"
        step = last
        for phase, place in PHASES.items():
            world.take(step + 1)
            step, result, _ = world.persist(step + 2, {place: f"persist.{phase}=kill"})
            assert "status -9" in result, (phase, result)
            steps = [entry.step for entry in fallback.entries()]
            assert last in steps
            assert plainly(directory, last) == expected(last)
            assert steps[-1] == (step if phase == "written" else last)
        assert len(world.announced("persist_failed")) == len(PHASES)
        world.take(step + 1)
        step, result, _ = world.persist(step + 2)
        assert result == "written"
        assert step in [entry.step for entry in fallback.entries()]
        assert plainly(directory, step) == expected(step)
        left = {path.name for path in directory.iterdir()}
        assert left == {str(entry.step) for entry in fallback.entries()}
    finally:
        world.close()


# In this order, as a helper first ends what the one before it has begun: it would copy that.
IN_A_BUCKET = {"persist.writing": 1, "checkpoint.copied": 0, "checkpoint.whole": 0}


def test_a_helper_killed_while_it_writes_to_a_bucket_loses_no_checkpoint(
    hosts: list[Host],
) -> None:
    """Nor does the one that it was about to write get lost, once its record is there."""
    with serving() as url:
        directory = f"{url}/checkpoints"
        fallback = OrbaxFallback(directory)
        world = World(hosts, directory)
        try:
            world.take(1)
            last, result, _ = world.persist(2)
            assert result == "written"
            step = last
            for point, place in IN_A_BUCKET.items():
                world.take(step + 1)
                step, result, _ = world.persist(step + 2, {place: f"{point}=kill"})
                assert "status -9" in result, (point, result)
                steps = [entry.step for entry in fallback.entries()]
                assert steps[-1] == (last if point == "persist.writing" else step), point
                assert plainly(directory, last) == expected(last)
            world.take(step + 1)
            after, result, _ = world.persist(step + 2)
            assert result == "written"
            # The one before was whole, and has got its step's name.
            assert [entry.step for entry in fallback.entries()] == [step, after]
            assert {path.name for path in epath.Path(directory).iterdir()} == {
                str(step),
                str(after),
            }
            for one in (step, after):
                assert plainly(directory, one) == expected(one)
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
