"""Runs of `jaxft run` whose ranks train, see `trainer.py`: what they say, and how they end."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.launch.local_runs import WAIT_S, Run, run

TRAINER = str(Path(__file__).with_name("trainer.py"))


class Training:
    """What its ranks say, in the directory `base`."""

    def __init__(self, world: Run, base: Path | None = None) -> None:
        self.world = world
        self.base = base or world.base

    def said(self, rank: int) -> list[dict[str, Any]]:
        path = self.base / f"rank-{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def newest(self, rank: int, what: str) -> int:
        found = [one[what] for one in self.said(rank) if one.get(what) is not None]
        return int(found[-1]) if found else -1

    def until(self, what: str, least: int) -> None:
        """Every rank has come so far."""
        self.world.until(
            lambda: all(self.newest(rank, what) >= least for rank in (0, 1)),
            f"{what} of {least}",
        )

    def end(self, timeout_s: float = WAIT_S) -> int:
        """Has the ranks end at a step that is before them all."""
        self._order("last")
        return self.world.ended(timeout_s)

    def hold(self, every: int) -> int:
        """Has the ranks stay at a step that is before them all. The newest snapshot, committed."""
        step = self._order("hold")
        newest = step - (step - 1) % every  # the first step is taken
        self.until("step", step)
        self.world.wait("committed", step=newest)
        return newest

    def _order(self, what: str) -> int:
        step = max(self.newest(rank, "step") for rank in (0, 1)) + 50
        (self.base / "order").write_text(str(step))
        (self.base / "order").rename(self.base / what)
        return step


@contextlib.contextmanager
def train(every: int, *options: str, persist: int = 0, **env: str) -> Iterator[Training]:
    """Two hosts that take a snapshot every so many steps, and persist one every `persist` steps."""
    command = (sys.executable, TRAINER, "BASE", str(every))
    command += (str(persist),) if persist else ()
    with run("--local-hosts", "2", "--settle-s", "1", *options, command=command, **env) as world:
        yield Training(world)
