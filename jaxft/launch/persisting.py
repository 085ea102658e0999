"""Persisting, as a host's agent takes part in it: a helper process for each order of the root."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxft.group.messages import PersistOrder
from jaxft.group.world import Generation
from jaxft.host import protocol
from jaxft.launch.child import Child, kill_all
from jaxft.launch.console import last_lines
from jaxft.launch.options import KILL_S, RunOptions
from jaxft.launch.ranks import PERSIST, STORE, rank_environment
from jaxft.launch.smp_process import SnapshotProcess

HELPER = ("-m", "jaxft.persist")


class Persisting:
    """At most one helper, of the newest order.

    Args:
        options: of the run.
        smp: this host's; it is told of a helper that fails.
    """

    def __init__(self, options: RunOptions, smp: SnapshotProcess) -> None:
        self._options = options
        self._smp = smp
        self._helper: PersistHelper | None = None
        self._number = 0

    def ordered(self, order: PersistOrder, generation: Generation | None) -> None:
        """The root has said how the persist stands in the generation that was entered."""
        known, self._number = self._number, order.number
        index = generation.index_of(self._options.host) if generation is not None else None
        if order.result or not order.wanted:
            self.kill()
        elif order.number > known and generation is not None and index is not None:
            self.kill()
            self._helper = PersistHelper(
                self._options, generation, index, self._smp.socket, order.number
            )

    def fds(self) -> list[int]:
        """Readable when the helper ends."""
        return self._helper.fds() if self._helper is not None else []

    def poll(self) -> str:
        """What is wrong with a helper that has just ended; "" if nothing is."""
        failure = self._helper.failure() if self._helper is not None else None
        if self._helper is None or failure is None:
            return ""
        if failure:
            state = protocol.HelperState(number=self._helper.number, state="failed", detail=failure)
            self._smp.send(state)
        self._helper = None
        return failure

    def leave(self) -> None:
        """The generation is left: its orders are void."""
        self.kill()
        self._number = 0

    def kill(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()


class PersistHelper:
    """The process that writes this host's part of persist number `number` to storage.

    Helpers form a world of their own with one process a host, so in its variables JAXFT_RANK is
    the host's index and JAXFT_RANKS the number of hosts.
    """

    def __init__(
        self, options: RunOptions, generation: Generation, index: int, smp: Path, number: int
    ) -> None:
        self.number = number
        self.log = options.logs() / f"gen{generation.number}-persist{number}.log"
        env = rank_environment(generation, options.host, index, smp)
        env |= {"JAXFT_RANKS": str(len(generation.hosts)), PERSIST: str(number)}
        env |= {STORE: options.store, **options.store_access().to_environ()}
        self._child = Child([sys.executable, *HELPER], env=env, log=self.log)

    def fds(self) -> list[int]:
        return [self._child.pidfd] if self._child.pidfd >= 0 else []

    def failure(self) -> str | None:
        """None while it runs, "" once it has ended well, else what is wrong."""
        status = self._child.status()
        if status is None or status == 0:
            return None if status is None else ""
        how = f"status {status}" if status > 0 else f"signal {-status}"
        return f"the persist helper ended with {how}: {last_lines(self.log, lines=1)}"

    def kill(self) -> None:
        kill_all([self._child], KILL_S)
