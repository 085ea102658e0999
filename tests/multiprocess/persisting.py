"""A world whose snapshots go to storage, for tests of helpers: these and SMPs are real."""

from __future__ import annotations

import contextlib
import hashlib
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
from etils import epath

import tests.device.conftest  # noqa: F401 (eight devices)
from jaxft.device.leaves import empty_nodes
from jaxft.group.messages import PersistOrder, RankOptions
from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from tests.device.snapshots import take
from tests.multiprocess import jax_world
from tests.multiprocess.jax_world import WAIT_S, environment, generation_of, seat


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

    def written(self, step: int) -> int:
        """Takes this step, and has the one after it written. Which step that is."""
        self.take(step)
        last, result, _ = self.persist(step + 1)
        assert result == "written"
        return last

    def struck(self, step: int, point: str, place: int) -> int:
        """The same, with the helper at this place killed at this point."""
        self.take(step)
        last, result, _ = self.persist(step + 1, {place: f"{point}=kill"})
        assert "status -9" in result, (point, result)
        return last

    def announced(self, kind: str) -> list[dict[str, Any]]:
        heard = [one for one in list(self.hosts[0].heard) if isinstance(one, p.Announced)]
        return [one.detail for one in heard if one.kind == kind]

    def close(self) -> None:
        for helper in self.helpers.values():
            helper.kill()
            helper.wait(WAIT_S)
        for rank in self.ranks:
            rank.close()


@contextlib.contextmanager
def hosts_in(directory: Path, *names: str) -> Iterator[list[Host]]:
    made = [Host(name, directory) for name in names]
    try:
        yield made
    finally:
        for host in made:
            host.close()


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
