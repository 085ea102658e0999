"""Several ranks a host, for one process a GPU: they share its memory, and are lost with it."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.launch.local_runs import run
from tests.recipes.places import TRAINER


def test_ranks_that_share_a_host_go_on_when_it_is_lost():
    command = (sys.executable, TRAINER, "BASE")
    options = ("--local-hosts", "2", "--ranks-per-host", "2", "--code", "1+1", "--settle-s", "1")
    with run(*options, command=command) as world:

        def said(rank: int, what: str) -> list[Any]:
            path = world.base / f"rank-{rank}"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            return [each[what] for each in map(json.loads, lines) if what in each]

        def newest(what: str) -> int:
            found = (said(rank, what) or [None] for rank in range(4))
            return min(-1 if each[-1] is None else each[-1] for each in found)

        world.until(lambda: newest("latest") >= 6, "snapshots")
        world.kill("host1", "smp", "agent")
        world.until(lambda: newest("restored") >= 6, "restored ranks")
        assert {tuple(said(rank, "source")) for rank in range(4)} == {("rebuilt",)}
        assert all(all(said(rank, "right")) for rank in range(4))
        (world.base / "order").write_text(str(newest("step") + 50))
        (world.base / "order").rename(world.base / "last")
        assert world.ended() == 0
