"""How long hosts wait for each other, and how often those that have nothing to say show that they
live.

While nothing is under way, the root speaks every `heartbeat_s`, and the others answer. So that one
word that comes late is no silence, two fit into one. Whoever hears nothing wakes up within
`turn_s`, and takes a longer time between two of its own turns (`pause_s`) for a pause of its own
process, for which it blames nobody.
"""

from __future__ import annotations

import msgspec

RESEND_S = 0.25


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """`silence_s`: a host not heard for so long is silent, and nobody waits for one that has not
    learned an outcome for so long. `rejoin_s`: how long to wait for hosts that may bring back a
    newer committed snapshot before going back further. `persist_s`: how long a persist may take."""

    silence_s: float = 5.0
    rejoin_s: float = 5.0
    persist_s: float = 600.0

    @property
    def resend_s(self) -> float:
        """How often the root speaks while something is under way: three times within a silence at
        least."""
        return min(RESEND_S, 0.3 * self.silence_s)

    @property
    def heartbeat_s(self) -> float:
        """How long a calm root says nothing."""
        return 0.45 * self.silence_s

    @property
    def turn_s(self) -> float:
        """How long a calm host waits at most, asleep. Longer than `heartbeat_s`, so that what it
        says answers the root and needs no time of its own."""
        return 0.5 * self.silence_s

    @property
    def pause_s(self) -> float:
        """A longer time between two turns was a pause."""
        return 0.6 * self.silence_s
