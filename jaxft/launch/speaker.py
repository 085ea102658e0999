"""What an agent says to a person of the world it is in: each thing once, and waits that last.

Beside the words there is the event of the same, for programs.
"""

from __future__ import annotations

import time

from jaxft.group.causes import LOSSES, is_consequence
from jaxft.group.records import Fault
from jaxft.group.world import Generation
from jaxft.launch.announcements import code_of
from jaxft.launch.console import Console
from jaxft.status.events import EventLog

# What is over before a person wonders is not said.
WONDER_S = 1.0


class Speaker:
    """One agent's words.

    Args:
        host: its host's name.
        lease_s: how long a host is silent before it is lost.
    """

    def __init__(self, console: Console, events: EventLog, host: str, lease_s: float) -> None:
        self._console = console
        self._events = events
        self._host = host
        self._lease_s = lease_s
        self._said = ""
        self._store_said = False
        self._waits = ("", 0.0)
        self._generation = 0
        self._ended: tuple[int, str] = (0, "")

    def once(self, text: str) -> None:
        """Says it, unless it was the last word."""
        if text != self._said:
            self._said = text
            self._console.say(text)

    def store(self, problem: str) -> None:
        """Says that the store is away, and why, when that begins, and when it is over (""). Reasons
        that change meanwhile are no news."""
        if problem and not self._store_said:
            self._console.say(problem)
        elif self._store_said and not problem:
            self._console.say("the store answers again")
        self._store_said = bool(problem)

    def wait(self, reason: str, left_s: float, *, tell: bool) -> None:
        """Says what is waited for, if it takes long enough for a person to wonder."""
        now_s = time.monotonic()
        if reason != self._waits[0]:
            self._waits = (reason, now_s)
        elif reason != self._said and (left_s > 0 or tell) and now_s - self._waits[1] > WONDER_S:
            self._said = reason
            self._console.say(f"{reason} (at most {left_s:.0f} s more)" if left_s > 0 else reason)

    def has_said(self, reason: str) -> bool:
        """Was it the last word?"""
        return reason == self._said

    def formed(self, generation: Generation) -> None:
        """This agent has written a generation down."""
        self._events.emit(
            "generation_formed",
            number=generation.number,
            generation=generation.number,
            hosts=[member.host for member in generation.hosts],
            holders=[member.host for member in generation.holders],
            reason=generation.reason,
        )
        self.generation(generation)

    def generation(self, generation: Generation) -> None:
        """Says who is in a generation, and why, if it has not been said here."""
        if self._generation == generation.number:
            return
        self._generation = generation.number
        names = ", ".join(member.host for member in generation.hosts)
        self._console.say(
            f"generation {generation.number} ({names}; {code_of(generation)}): {generation.reason}"
        )

    def fault(self, fault: Fault, of: Generation | None) -> None:
        """This agent has written down how the generation `of`, in which it is, has ended."""
        self._events.emit(
            "fault",
            generation=fault.generation,
            host=fault.host,
            by=self._host,
            kind=fault.kind,
            detail=fault.detail,
        )
        if fault.kind == "host_lost":
            self._events.emit(
                "host_lost",
                generation=fault.generation,
                host=fault.host,
                silent_s=self._lease_s,
            )
        self.ended(fault, of)

    def ended(self, fault: Fault, of: Generation | None) -> None:
        """Says why the generation `of`, in which this agent is, has ended, if it was not said."""
        known, self._ended = self._ended, (fault.generation, fault.detail)
        if known == self._ended:
            return
        if of is not None and of.export is not None:
            self._console.say(f"the newest snapshot did not get to storage: {fault.detail}")
        elif fault.kind == "grown":
            self._console.say(f"generation {fault.generation} ends: {fault.detail}")
        else:
            self._console.say(
                f"generation {fault.generation} ends: {fault.detail}{_what_follows(fault)}; its "
                "ranks are stopped, and the next generation follows unless the job gives up"
            )


def _what_follows(fault: Fault) -> str:
    """Which errors that ranks have printed are not the cause, in words."""
    if fault.kind in LOSSES and fault.kind != "told_to_end":
        return " (errors that other ranks have printed since then come of that)"
    if is_consequence(fault):
        return " (that looks as if another rank, or host, had gone before it, which is looked for)"
    return ""
