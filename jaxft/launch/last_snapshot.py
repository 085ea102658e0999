"""The last snapshot of a host that is told to go: asked for out of turn, and what became of it."""

from __future__ import annotations

from jaxft.group.messages import Turn
from jaxft.host import protocol
from jaxft.launch.smp_process import SnapshotProcess


def last_words(turn: Turn) -> str:
    """What became of it, for a person."""
    if turn.result == "protected":
        return (
            f"a last snapshot, of step {turn.step}, is protected in the memory of the job's hosts, "
            "which goes when all of them end"
        )
    return f"no last snapshot: {turn.result}"


class LastSnapshot:
    """Asks the root through this host's SMP.

    Args:
        host: this host.
        smp: its SMP; when it is started again, ask again.
    """

    def __init__(self, host: str, smp: SnapshotProcess) -> None:
        self._host = host
        self._smp = smp
        self._over = 0
        self._asked = False
        self.answer: Turn | None = None

    def enter(self) -> None:
        """Another generation counts its turns from the start."""
        self._over = 0

    def ask(self) -> None:
        self._asked = True
        self.ask_again()

    def ask_again(self) -> None:
        """The SMP may not have heard it, if it was asked."""
        if self._asked:
            reason = f"host {self._host} is told to end"
            self._smp.send(protocol.SnapshotNow(reason=reason))

    def told(self, turn: Turn) -> None:
        """Only the end of one that was not over when this agent asked is an answer to it."""
        if not turn.result:
            return
        if self._asked and (turn.number > self._over or turn.number == 0):
            self.answer = self.answer or turn
        self._over = max(self._over, turn.number)
