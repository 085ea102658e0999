"""A rank for tests: a process of its own that saves and restores plain bytes, on command."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from jaxft.errors import JaxftError
from jaxft.group.manifest import CHUNK, Leaf, Manifest, Part, Range
from jaxft.group.messages import Damage, Outcome, Plan
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient
from jaxft.host.layout import GroupLayout, checksums, decode_manifest, segment_check
from jaxft.host.memory import Arena, Bytes
from tests.host.forks import context

WAIT_S = 20.0


def digest(data: bytes | Bytes) -> str:
    """What stands for bytes in an answer."""
    return xxhash.xxh3_128_hexdigest(np.frombuffer(data, np.uint8).data)


class Refusal(AssertionError):
    """What the rank's process answered instead of a result."""


class Rank:
    """The test's end of a rank process."""

    def __init__(self, path: Path, hello: p.Hello) -> None:
        self.number = hello.rank
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, path, hello), daemon=True)
        self.process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def ask(self, what: str, *args: Any) -> None:
        """Has the process begin to do something."""
        self._pipe.send((what, args))

    def answer(self, timeout_s: float = WAIT_S) -> Any:
        """What came of it. Raises Refusal with the process's error."""
        if not self._pipe.poll(timeout_s):
            raise Refusal(f"rank {self.number} did not answer within {timeout_s:g} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise Refusal(value)
        return value

    def answered(self, timeout_s: float) -> bool:
        """Has it answered by then?"""
        return bool(self._pipe.poll(timeout_s))

    def do(self, what: str, *args: Any) -> Any:
        self.ask(what, *args)
        return self.answer()

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.join(WAIT_S)
        self._pipe.close()


class _Replanned(Exception):
    """The root has made another plan meanwhile."""


class _Rank:
    """The process's end."""

    def __init__(self, path: Path, hello: p.Hello) -> None:
        self.client = SmpClient(path, hello, connect_s=WAIT_S)
        self.fetches = 0

    def hello(self) -> int:
        """It was let in; the process of the SMP."""
        return self.client.welcome.pid

    # -------------------------------------------------------------------- restoring

    def plan(self, after: int) -> Plan:
        def newer() -> p.PlanTold | None:
            told = self.client.plan
            return told if told is not None and told.plan.attempt > after else None

        return self.client.wait(newer, WAIT_S, "the plan").plan

    def restored(self, attempt: int, how: str) -> None:
        self.client.say(p.Restored(attempt=attempt, how=how), open_as="restored")

    def failed(self, attempt: int, damaged: tuple[Any, ...], reason: str = "test") -> None:
        self.client.say(p.RestoreFailed(attempt=attempt, reason=reason, damaged=damaged))

    def settled(self) -> None:
        self.client.wait(lambda: self.client.settled, WAIT_S, "settling")

    def restore(self) -> tuple[Plan, dict[int, str]]:
        """All segments of the snapshot that the root chose, by place, once everybody has them."""
        attempt = 0
        while True:
            plan = self.plan(attempt)
            attempt = plan.attempt
            try:
                found = self._follow(plan)
            except _Replanned:
                continue
            self.restored(attempt, "verified")
            if self._settled(attempt):
                return plan, found

    def _follow(self, plan: Plan) -> dict[int, str]:
        if plan.chosen is None:
            return {}
        manifests = self._manifests(plan)
        found: dict[int, str] = {}
        damaged: list[Damage] = []
        told = self.client.plan
        assert told is not None
        for place, manifest in manifests.items():
            if told.own is not None and told.own[1] == place:
                got = self._own(told.own[0], manifest, manifests)
            else:
                got = self._fetch(plan, manifest)
            if isinstance(got, str):
                found[place] = got
            else:
                damaged += got
        if damaged:
            self._give_up(plan, damaged)
        return found

    def _manifests(self, plan: Plan) -> dict[int, Manifest]:
        key = str(plan.chosen)
        assert plan.chosen is not None
        self.client.manifests.pop(key, None)
        self.client.say(p.WantManifests(id=plan.chosen), open_as="manifests")
        told = self._wait(plan, lambda: self.client.manifests.get(key), "the manifests")
        self.client.close_open("manifests")
        if told.damaged:
            self._give_up(plan, told.damaged)
        if told.error:
            raise AssertionError(told.error)
        decoded = [decode_manifest(one) for one in told.manifests]
        return {manifest.host: manifest for manifest in decoded}

    def _own(
        self, slot: int, manifest: Manifest, manifests: dict[int, Manifest]
    ) -> str | list[Damage]:
        """This host's own memory, mapped and checked here as the restorer does."""
        view = self.client.slot(slot, manifest.length).view(0, manifest.length)
        bad = segment_check(manifest).bad_chunks(0, view)
        if not bad:
            return _parts(manifest, view)
        layout = GroupLayout(manifest.world.group_of(manifest.host), manifests)
        return sorted({layout.damage_at(manifest.host, at) for at in bad})

    def _fetch(self, plan: Plan, manifest: Manifest) -> str | list[Damage]:
        assert plan.chosen is not None
        arrivals = self.client.arrivals
        self.fetches += 1
        number = self.fetches
        extent = p.Extent(manifest.host, 0, manifest.length)
        fetch = p.Fetch(number=number, id=plan.chosen, extents=(extent,))
        self.client.say(fetch, open_as="fetch")
        told, arena = self._wait(plan, lambda: self.client.fetched.pop(number, None), "bytes")
        self.client.close_open("fetch")
        if told.damaged:
            return list(told.damaged)
        if told.error or arena is None:
            raise AssertionError(told.error)
        view = arena.view(told.offsets[0], manifest.length)
        if not self._is_made(plan, manifest, arena, told.made_at, arrivals):
            return self._fetch(plan, manifest)
        found = _parts(manifest, view)
        del view
        arena.close()
        self.client.say(p.Release(number=number))
        return found

    def _is_made(
        self, plan: Plan, manifest: Manifest, arena: Arena, made_at: int | None, arrivals: int
    ) -> bool:
        """Waits until a segment is there that was still being made; False if its SMP died."""
        if made_at is None:
            return True
        made = arena.view(made_at, -(-manifest.length // CHUNK))
        deadline = time.monotonic() + WAIT_S
        while not made.all():
            assert time.monotonic() < deadline, "the segment was never made"
            told = self.client.plan
            if told is not None and told.plan.attempt > plan.attempt:
                raise _Replanned
            if self.client.arrivals != arrivals:
                return False
            time.sleep(0.001)
        assert not segment_check(manifest).bad_chunks(0, arena.view(0, manifest.length))
        return True

    def _give_up(self, plan: Plan, damaged: Sequence[Damage]) -> None:
        failed = p.RestoreFailed(attempt=plan.attempt, reason="damage", damaged=tuple(damaged))
        self.client.say(failed, open_as="restored")
        raise _Replanned

    def _wait(self, plan: Plan, ready: Any, what: str) -> Any:
        def unless_replanned() -> Any:
            found = ready()
            told = self.client.plan
            if found is None and told is not None and told.plan.attempt > plan.attempt:
                raise _Replanned
            return found

        return self.client.wait(unless_replanned, WAIT_S, what)

    def _settled(self, attempt: int) -> bool:
        def known() -> bool | None:
            if self.client.settled is not None:
                return True
            told = self.client.plan
            return False if told is not None and told.plan.attempt > attempt else None

        return self.client.wait(known, WAIT_S, "the word that every rank has restored")

    # -------------------------------------------------------------------- saving

    def want(self, seq: int, step: int, nbytes: int, plan: str = "plan") -> None:
        self.client.close_open("staged")
        want = p.WantSlot(seq=seq, step=step, plan=plan, nbytes=nbytes)
        self.client.say(want, open_as="slot")

    def reserve(self, nbytes: int) -> None:
        """Says how much it will save."""
        self.client.say(p.Reserve(nbytes=nbytes))
        told = self.client.wait(lambda: self.client.reserved, WAIT_S, "room")
        assert not told.error, told.error

    def granted(self, seq: int) -> Any:
        """The grant, or the outcome of a snapshot that comes to nothing without one."""

        def known() -> Any:
            return self.client.granted.get(seq) or self.client.outcomes.get(seq)

        return self.client.wait(known, WAIT_S, "the grant")

    def write(self, seq: int, data: bytes) -> Part:
        """Writes into the slot, and says nothing."""
        granted = self.granted(seq)
        assert seq not in self.client.outcomes, "aborted"
        view = self.client.slot(granted.slot, granted.size_bytes).view(granted.base, len(data))
        view[:] = np.frombuffer(data, np.uint8)
        whole = (Range(0, (0,), (len(data),), 0, len(data)),)
        return Part(self.client.hello.rank, granted.base, len(data), whole, checksums(view))

    def half(self, seq: int, data: bytes) -> None:
        """Writes the first half of what it will have to write."""
        self.write(seq, data[: len(data) // 2])

    def put(self, seq: int, data: bytes) -> None:
        part = self.write(seq, data)
        leaf = Leaf((("k", "x"),), "numpy", (len(data),), "uint8")
        leaves = msgspec.msgpack.encode((leaf,))
        self.client.say(p.Staged(seq=seq, part=part, leaves=leaves), open_as="staged")

    def reconnect(self) -> None:
        """The connection breaks, and nobody died."""
        self.client._channel.close()
        self.client.wait(lambda: not self.client._channel.ended or None, WAIT_S, "reconnecting")

    def staging_failed(self, seq: int, reason: str) -> None:
        self.client.say(p.StagingFailed(seq=seq, reason=reason), open_as="staged")

    def missed(self, seq: int, step: int, reason: str) -> None:
        self.client.say(p.Missed(seq=seq, step=step, reason=reason), open_as="missed")

    def held(self) -> str:
        return self.client.wait(
            lambda: self.client.held or None, WAIT_S, "the word that it is held"
        )

    def not_held(self) -> None:
        self.client.wait(lambda: not self.client.held or None, WAIT_S, "the word that it is over")

    def staged(self, seq: int) -> None:
        self.client.wait(lambda: self.client.staged_seq >= seq or None, WAIT_S, "staging")

    def outcome(self, seq: int) -> Outcome:
        return self.client.wait(lambda: self.client.outcomes.get(seq), WAIT_S, f"outcome {seq}")

    def save_many(self, first: int, count: int, data: bytes) -> list[float]:
        """Snapshots one after the other; how long each took, in seconds."""
        times = []
        for seq in range(first, first + count):
            began_s = time.monotonic()
            self.want(seq, seq, len(data))
            self.put(seq, data)
            outcome = self.outcome(seq)
            times.append(time.monotonic() - began_s)
            assert outcome.ok, outcome.reason
        return times


def _parts(manifest: Manifest, view: Bytes) -> str:
    """What its ranks put into a segment; what lies between means nothing."""
    parts = (view[part.base : part.base + part.length] for part in manifest.parts)
    return digest(np.concatenate(list(parts)))


def _serve(pipe: Connection, path: Path, hello: p.Hello) -> None:
    rank: _Rank | None = None
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        try:
            if rank is None:
                rank = _Rank(path, msgspec.structs.replace(hello, pid=os.getpid()))
            pipe.send((True, getattr(rank, what)(*args)))
        except (JaxftError, AssertionError, OSError, ValueError) as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
