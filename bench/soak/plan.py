"""What goes wrong when: drawn from a seed, and from nothing else.

Rules
- An episode is one failure, or two: at once, or the second while the job recovers from the first.
- Kinds come like cards of a deck that is shuffled anew when it is empty, so each comes as often as
  every other one.
- Nothing is drawn that jaxft does not promise to survive: of the failures of an episode that take a
  host's memory away, or out of reach, there are at most as many as a group has parity. The kind
  "too many" is for what is beyond, and comes alone.
- Whom a failure hits is drawn from the world as it is then, by the failure's own seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

AGAIN = 0.35  # how often a second failure follows at once, or soon
AT_ONCE = 0.4  # of these
SOON_S = (0.3, 6.0)
PAUSE_S = (1.0, 6.0)


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One way to fail.

    Args:
        hold_s: how long it lasts, from and to; a host, or an agent, comes back after it.
        memories: of one group that are gone then, or out of reach.
        goes_on: training does not stop for it.
        alone: nothing else happens meanwhile.
        found_s: how long it takes to be found, if that is long.
    """

    hold_s: tuple[float, float] = (0.0, 0.0)
    memories: int = 0
    goes_on: bool = False
    alone: bool = False
    found_s: float = 0.0


# Times fit the options in `soak`: leases of 5 s, 15 s without the store, a silence of 5 s.
KINDS = {
    "rank killed": Kind(),
    "rank exits": Kind(),
    "rank hangs": Kind(found_s=60.0),
    "SMP killed": Kind(goes_on=True),
    "SMP hangs": Kind(goes_on=True, found_s=15.0),
    "agent killed": Kind(hold_s=(0.2, 12.0)),
    "all agents killed": Kind(hold_s=(0.2, 6.0)),
    "memory lost": Kind(hold_s=(0.2, 8.0), memories=1),
    "host lost": Kind(hold_s=(1.0, 25.0), memories=1),
    "hosts lost": Kind(hold_s=(1.0, 10.0), memories=9),
    "too many lost": Kind(hold_s=(1.0, 6.0), memories=9, alone=True),
    "host told to end": Kind(hold_s=(2.0, 20.0), memories=1),
    "host taken": Kind(memories=1),
    "host added": Kind(),
    "host stopped briefly": Kind(hold_s=(0.3, 2.5)),
    "host stopped": Kind(hold_s=(8.0, 20.0), memories=1),
    "byte flipped": Kind(memories=1),
    "ledger damaged": Kind(memories=1),
    "store killed": Kind(hold_s=(0.5, 7.0), goes_on=True),
    "store away": Kind(hold_s=(18.0, 28.0)),
    "SMP's network down": Kind(hold_s=(4.0, 20.0), goes_on=True, alone=True),
    "cable cut briefly": Kind(hold_s=(0.3, 2.5)),
    "cable cut": Kind(hold_s=(8.0, 25.0), memories=1),
    "cable slow": Kind(hold_s=(4.0, 12.0)),
    "cable lossy": Kind(hold_s=(4.0, 12.0)),
}


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One failure: what, for how long, and the seed of whom."""

    kind: str
    hold_s: float
    seed: int


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What happens between two calms: after `pause_s` the first strike, `after_s` later the second
    one, if there is one."""

    number: int
    pause_s: float
    first: Strike
    second: Strike | None = None
    after_s: float = 0.0

    @property
    def strikes(self) -> tuple[Strike, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


class Plan:
    """Episodes without end.

    Args:
        seed: the same one draws the same episodes.
        kinds: what may happen.
        parity: of the job's code.
    """

    def __init__(self, seed: int, kinds: Sequence[str], parity: int) -> None:
        self._chance = Random(seed)
        self._kinds = tuple(kinds)
        self._parity = parity
        self._deck: list[str] = []
        self._number = 0

    def draw(self) -> Episode:
        """The next one."""
        chance = self._chance
        self._number += 1
        pause_s = round(chance.uniform(*PAUSE_S), 2)
        first = self._strike(self._deal())
        second, after_s = None, 0.0
        if chance.random() < AGAIN:
            fitting = [kind for kind in self._kinds if fits(first.kind, kind, self._parity)]
            if fitting:
                second = self._strike(chance.choice(fitting))
                after_s = 0.0 if chance.random() < AT_ONCE else round(chance.uniform(*SOON_S), 2)
        return Episode(
            number=self._number, pause_s=pause_s, first=first, second=second, after_s=after_s
        )

    def _deal(self) -> str:
        if not self._deck:
            self._deck = list(self._kinds)
            self._chance.shuffle(self._deck)
        return self._deck.pop()

    def _strike(self, kind: str) -> Strike:
        hold_s = round(self._chance.uniform(*KINDS[kind].hold_s), 2)
        return Strike(kind=kind, hold_s=hold_s, seed=self._chance.getrandbits(32))


def fits(first: str, second: str, parity: int) -> bool:
    """May both happen in one episode?"""
    one, other = KINDS[first], KINDS[second]
    if one.alone or other.alone:
        return False
    return not (one.memories and other.memories) or one.memories + other.memories <= parity
