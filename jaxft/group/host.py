"""One host's whole core: its keeper and, on a generation's first host, the root.

What the root decides goes into this host's ledger before it is sent to anybody else: a root whose
SMP is killed half-way through telling must find in its ledger what it has told.
"""

from __future__ import annotations

from jaxft.group import events as e
from jaxft.group.keeper import Keeper
from jaxft.group.messages import Directive, Ledger, Status
from jaxft.group.root import Root
from jaxft.group.timing import Timing

TICK_S = 0.25


class HostCore:
    """Events in, effects out. Messages to this host's own address never leave it."""

    def __init__(self, host: str, address: str, ledger: Ledger, timing: Timing) -> None:
        self.host = host
        self.address = address
        self.keeper = Keeper(host, ledger, timing)
        self.root: Root | None = None
        self.timing = timing
        self._ticked_s = self._woken_s = float("-inf")

    def handle(self, event: e.Event, now_s: float) -> list[e.Effect]:
        """Takes one event at monotonic time `now_s`; effects are to be performed in order."""
        self._woken_s = now_s
        if isinstance(event, e.Heard) and isinstance(event.body, Status):
            effects = [] if self.root is None else self.root.heard(event.sender, event.body, now_s)
        else:
            effects = self.keeper.handle(event, now_s)
        self._mind_root(now_s)
        if isinstance(event, e.Ticked):
            self._ticked_s = now_s
            effects += [] if self.root is None else self.root.tick(now_s)
        return self._deliver_own(effects, now_s)

    def due_s(self, now_s: float) -> float:
        """When the next `Ticked` is due, if nothing else happens before. While nothing is under way
        that is when a word has to be said again, or one that does not come is missed."""
        root, timing = self.root, self.timing
        if not self.is_calm(now_s):
            # Silence is counted in ticks, so there have to be several within the shortest.
            return self._ticked_s + min(TICK_S, timing.silence_s / 8)
        due_s = min(self.keeper.due_s, self._woken_s + timing.turn_s)
        return due_s if root is None else min(due_s, root.sent_s + timing.heartbeat_s)

    def is_calm(self, now_s: float) -> bool:
        """Is nothing under way, as far as is known here? What was said before is then said again as
        a sign of life only."""
        return self.keeper.is_calm and (self.root is None or self.root.is_calm(now_s))

    def _mind_root(self, now_s: float) -> None:
        """Makes the root when this host becomes the first of a generation, drops it when not."""
        keeper = self.keeper
        if keeper.generation is None or not keeper.frozen or keeper.index != 0:
            self.root = None
        elif self.root is None or self.root.generation.number != keeper.generation.number:
            self.root = Root(keeper.generation, keeper.ledger, now_s, self.timing)

    def _deliver_own(self, effects: list[e.Effect], now_s: float) -> list[e.Effect]:
        """Feeds what this host says to itself back in, at its place in the order: what follows
        from it comes before what was to come after it."""
        done: list[e.Effect] = []
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            if isinstance(effect, e.Decide):
                queue[:0] = self.keeper.learn(effect.outcome)
            elif isinstance(effect, e.Send) and effect.address == self.address:
                body = effect.body
                if isinstance(body, Status):
                    if self.root is not None:
                        queue[:0] = self.root.heard(self.host, body, now_s)
                elif isinstance(body, Directive):
                    queue[:0] = self.keeper.handle(e.Heard(self.host, body), now_s)
            else:
                done.append(effect)
        return done
