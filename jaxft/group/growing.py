"""When a world takes in hosts that wait beside it.

Rules
- A world of fewer hosts than it may have grows once the hosts that wait have been the same for
  `settle_s`: who comes and goes costs nothing.
- It ends at a snapshot boundary. A snapshot is asked for out of turn, and the larger world goes on
  from the first one that is committed from then on, that one or one that was due anyway. Without
  one the world stays as it is: snapshots that are held, ranks that call no `save`.
- A world that has not settled, that is ending, or that only writes to storage does not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Literal, NamedTuple

from jaxft.group.formation import natural
from jaxft.group.manifest import SnapshotId
from jaxft.group.records import Fault, HostRecord, View

# A wish may be lost with a snapshot process, or come to nothing.
ASK_AGAIN_S = 30.0


def newcomers(view: View, hosts_max: int, waiting: Container[str] = ()) -> list[HostRecord]:
    """The hosts that the running world has room for, by name; those told to end aside, and those
    that have to wait since they were lost again and again (`flapping`)."""
    generation = view.generation
    if generation is None:
        return []
    members = {member.host for member in generation.hosts}
    new = [one for one in view.hosts.values() if one.host not in members and not one.leaving]
    new = sorted((one for one in new if one.host not in waiting), key=lambda one: natural(one.host))
    return new[: max(0, hosts_max - len(members))]


class Step(NamedTuple):
    """What is to be done about them. `left_s`: for how long nothing is; 0: nobody knows."""

    action: Literal["wait", "ask", "grow"]
    reason: str
    left_s: float


class Growth:
    """What one agent remembers of a world that is to grow.

    Args:
        held_s: says for how long something has had a value, under this agent's eyes.
    """

    def __init__(self, held_s: Callable[[str, object], float]) -> None:
        self._held_s = held_s
        self._for: object = None
        self._before: SnapshotId | None = None
        self._asked = 0

    def decide(self, view: View, new: Iterable[HostRecord], settle_s: float) -> Step | None:
        """The next step of the running world toward a larger one; None: it does not grow.

        Args:
            new: see `newcomers`.
            settle_s: how long they must have been there.
        """
        generation = view.generation
        names = ", ".join(record.host for record in new)
        if generation is None or not names:
            return None
        number = generation.number
        if number not in view.progress or view.done or generation.export is not None:
            return None
        who = (number, frozenset((record.host, record.agent) for record in new))
        left_s = settle_s - self._held_s("newcomers", who)
        there = f"{names} can join generation {number}"
        if left_s > 0:
            return Step("wait", f"{there}; waits whether others come, or it goes", left_s)
        newest = view.progress[number].snapshot
        if who != self._for:
            self._for, self._before, self._asked = who, newest, 0
        if newest != self._before:
            return Step("grow", there, 0.0)
        asked_s = self._held_s("asked", (who, self._asked))
        if self._asked == 0 or asked_s > ASK_AGAIN_S:
            self._asked += 1
            return Step("ask", f"{there}, after a snapshot", 0.0)
        return Step("wait", f"{there}, after a snapshot", 0.0)


def grown(view: View, new: Iterable[HostRecord]) -> Fault:
    """What ends a world that is to be larger."""
    generation = view.generation
    assert generation is not None
    hosts = [record.host for record in new]
    count = len(generation.hosts)
    step = view.progress[generation.number].step
    return Fault(
        generation=generation.number,
        host=hosts[0],
        kind="grown",
        detail=(
            f"{', '.join(hosts)} {'is' if len(hosts) == 1 else 'are'} there, so the world grows "
            f"from {count} to {count + len(hosts)} hosts, after the snapshot of step {step}"
        ),
    )
