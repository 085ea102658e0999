"""A rank for tests: a process of its own that saves and restores plain bytes, on command."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxft.errors import JaxftError
from jaxft.group.manifest import Leaf, Part, Range
from jaxft.group.messages import Outcome, Plan
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient
from jaxft.host.layout import checksums

WAIT_S = 30.0
_spawn = multiprocessing.get_context("spawn")


class Refusal(AssertionError):
    """What the rank's process answered instead of a result."""


class Rank:
    """The test's end of a rank process."""

    def __init__(self, path: Path, hello: p.Hello) -> None:
        self.number = hello.rank
        self._pipe, other = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(other, path, hello), daemon=True)
        self.process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

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

    def do(self, what: str, *args: Any) -> Any:
        self.ask(what, *args)
        return self.answer()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.join(WAIT_S)
        self._pipe.close()


class _Rank:
    """The process's end."""

    def __init__(self, path: Path, hello: p.Hello) -> None:
        self.client = SmpClient(path, hello, connect_s=WAIT_S)
        self.fetches = 0

    def plan(self, after: int) -> Plan:
        def newer() -> p.PlanTold | None:
            told = self.client.plan
            return told if told is not None and told.plan.attempt > after else None

        return self.client.wait(newer, WAIT_S, "the plan").plan

    def restored(self, attempt: int, how: str) -> None:
        self.client.say(p.Restored(attempt=attempt, how=how), open_as="restored")

    def failed(self, attempt: int, damaged: tuple[Any, ...]) -> None:
        self.client.say(p.RestoreFailed(attempt=attempt, reason="test", damaged=damaged))

    def settled(self) -> None:
        self.client.wait(lambda: self.client.settled, WAIT_S, "settling")

    def want(self, seq: int, step: int, nbytes: int, plan: str = "plan") -> None:
        self.client.close_open("staged")
        want = p.WantSlot(seq=seq, step=step, plan=plan, nbytes=nbytes)
        self.client.say(want, open_as="slot")

    def put(self, seq: int, data: bytes) -> None:
        granted = self.client.wait(lambda: self.client.granted.get(seq), WAIT_S, "the grant")
        slot = self.client.slot(granted.slot, granted.size_bytes)
        view = slot.view(granted.base, len(data))
        view[:] = np.frombuffer(data, np.uint8)
        whole = (Range(0, (0,), (len(data),), 0, len(data)),)
        rank = self.client.hello.rank
        part = Part(rank, granted.base, len(data), whole, checksums(view))
        leaf = Leaf((("k", "x"),), "numpy", (len(data),), "uint8")
        leaves = msgspec.msgpack.encode((leaf,))
        self.client.say(p.Staged(seq=seq, part=part, leaves=leaves), open_as="staged")

    def staging_failed(self, seq: int, reason: str) -> None:
        self.client.say(p.StagingFailed(seq=seq, reason=reason))

    def staged(self, seq: int) -> None:
        self.client.wait(lambda: self.client.staged_seq >= seq or None, WAIT_S, "staging")

    def outcome(self, seq: int) -> Outcome:
        return self.client.wait(lambda: self.client.outcomes.get(seq), WAIT_S, f"outcome {seq}")

    def read(self, place: int, start: int, stop: int) -> bytes | tuple[Any, ...]:
        """Bytes of the planned snapshot's segment of `place`, or what is damaged."""
        client = self.client
        self.fetches += 1
        number = self.fetches
        assert client.plan is not None
        assert client.plan.plan.chosen is not None
        extent = p.Extent(place, start, stop)
        client.say(p.Fetch(number=number, id=client.plan.plan.chosen, extents=(extent,)))
        told, arena = client.wait(lambda: client.fetched.get(number), WAIT_S, "bytes")
        if told.damaged:
            return told.damaged
        if told.error or arena is None:
            raise AssertionError(told.error)
        data = bytes(arena.view(told.offsets[0], stop - start))
        arena.close()
        client.say(p.Release(number=number))
        return data


def _serve(pipe: Connection, path: Path, hello: p.Hello) -> None:
    rank: _Rank | None = None
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        try:
            if rank is None:
                rank = _Rank(path, hello)
            pipe.send((True, getattr(rank, what)(*args)))
        except (JaxftError, AssertionError, OSError, ValueError) as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
