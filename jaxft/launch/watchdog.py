"""The watchdog: this host's part in finding a rank that hangs (`group.hanging` decides).

Rules
- `look` is called whenever a thread of the agent is awake anyway, by any of them, and wakes nobody
  while no rank is late.
- While a rank is late, here or elsewhere, this host's record says how its ranks stand, with their
  stacks, which are in their logs before the record is there: whoever has read all records may
  declare the hang, and the ranks are killed. The record goes when the suspicion does.
- What is learned of pauses outlives a generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from jaxft.group.hanging import STOPPED, Watch, is_suspected
from jaxft.group.records import STILL, Fault, HostStill, RankStill, View
from jaxft.group.restarts import hangs_in_vain
from jaxft.group.world import encode
from jaxft.launch.child import state_of
from jaxft.launch.options import RunOptions
from jaxft.launch.ranks import Ranks, Watched
from jaxft.launch.stacks import Stacks
from jaxft.launch.store import Store

WRITE_EVERY_S = 1.0
ADVICE = (
    'if it does not hang, announce what takes so long: with jaxft.long_phase("..."); or let ranks '
    "be silent for longer, with --hang-s (before their third call of save: --start-s)"
)


class Watchdog:
    """Looks at the ranks of this host.

    Args:
        options: of the run.
        ranks: of this host.
        look_s: how often `look` is called, about.
        say: tells a person.
    """

    def __init__(
        self, options: RunOptions, ranks: Ranks, look_s: float, say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._restarts = options.rules().restarts
        self._ranks = ranks
        self._look_s = look_s
        self._say = say
        self._lock = threading.Lock()  # guards the next two
        self._watch = Watch(options.hang_s, look_s, start_s=options.start_s)
        self._watched: tuple[Watched, ...] = ()
        self._stacks: Stacks | None = None
        self._found: dict[int, str] = {}
        self._dumped_at: dict[int, int] | None = None
        self._written_s = 0.0
        self.suspects = False

    def look(self) -> bool:
        """Takes note of how the ranks stand; whether one is late. By any thread."""
        watched = self._ranks.watched
        if not watched:
            return False
        with self._lock:
            if watched is not self._watched:
                self._watched = watched
                longest_s, patience = self._watch.longest_s, self._watch.patience
                self._watch = Watch(
                    self._options.hang_s,
                    self._look_s,
                    start_s=self._options.start_s,
                    longest_s=longest_s,
                )
                self._watch.patience = patience
            readings = {one.rank: one.page.read() for one in watched}
            return self._watch.look(readings, time.monotonic())

    def tell(self, store: Store, view: View) -> None:
        """Writes or takes away this host's record, as the view has it. Raises StoreError."""
        number, host = self._ranks.running, self._options.host
        generation = view.generation
        if generation is None or generation.number != number or view.fault is not None:
            self._calm_down()
            return
        self._watch.patience = 2.0 ** hangs_in_vain(view, self._restarts)
        late = self.look()
        others = {name: one for name, one in view.still.items() if name != host}
        if any(rank.phase for one in others.values() for rank in one.ranks):
            with self._lock:
                self._watch.forgive()
            late = False
        mine = view.still.get(host)
        self.suspects = late or is_suspected(others)
        key = f"{STILL}{number}/{host}"
        if not self.suspects:
            self._calm_down()
            if mine is not None:
                store.commit({}, {}, [key])
            return
        record = self._record()
        if record is None or time.monotonic() - self._written_s < WRITE_EVERY_S:
            return
        if mine is None or _essence(mine) != _essence(record):
            store.commit({}, {key: encode(record)})
            self._written_s = time.monotonic()

    def tell_fault(self, fault: Fault) -> None:
        """Shows a person where the rank that hangs is."""
        for line in fault.tail.splitlines():
            self._say(f"  | {line}")
        self._say(f"  the stacks of all ranks are in their logs, {self._options.logs()}; {ADVICE}")

    def _record(self) -> HostStill | None:
        """How the ranks stand; None while their stacks are waited for."""
        with self._lock:
            ranks = self._watch.ranks()
        ended = {gone.rank for gone in self._ranks.exits}
        ranks = tuple(rank for rank in ranks if rank.rank not in ended)
        if self._stacks is None and self._is_news(ranks):
            self._dumped_at = {rank.rank: rank.calls for rank in ranks}
            self._say_late(ranks)
            self._stacks = Stacks(self._ranks.watched)
        if self._stacks is not None:
            found = self._stacks.poll()
            if found is None:
                return None
            self._stacks, self._found = None, found
        states = {one.rank: state_of(one.page.pid) for one in self._ranks.watched}
        told = tuple(
            msgspec.structs.replace(
                rank,
                state=states[rank.rank] if states.get(rank.rank) in STOPPED else "",
                stack=self._found.get(rank.rank, ""),
            )
            for rank in ranks
        )
        return HostStill(host=self._options.host, ranks=told)

    def _is_news(self, ranks: tuple[RankStill, ...]) -> bool:
        """Is a rank late that was not where it is now when the stacks were written?"""
        at = self._dumped_at
        return at is None or any(one.is_late and at.get(one.rank) != one.calls for one in ranks)

    def _say_late(self, ranks: tuple[RankStill, ...]) -> None:
        late = [rank for rank in ranks if rank.is_late]
        if late:
            self._say(
                f"rank {late[0].rank} has not called save for {late[0].still_s:.0f} s (it may for "
                f"{late[0].limit_s:.0f} s): all hosts look where their ranks are"
            )

    def _calm_down(self) -> None:
        if self._stacks is not None:
            self._stacks.close()
        self._stacks, self._found, self._dumped_at = None, {}, None
        self.suspects = False


def _essence(record: HostStill) -> list[tuple[int, int, bool, str, str]]:
    """What is worth to be told."""
    return [(one.rank, one.calls, one.is_late, one.phase, one.state) for one in record.ranks]
