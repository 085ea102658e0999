"""An agent that was told to end: how it divides the time there is, and how long it stays.

    told ──── a last snapshot, protected ────┬──── ranks end ────┬── the newest on storage ──┬ gone
    0 s                          SNAPSHOT_SHARE          RANKS_SHARE                   `grace_s`

Rules
- Each part begins as soon as the one before it is done; these are the latest moments.
- Its host's record says so at once. The hosts that stay go on without it, and it does not wait for
  them, unless more are told than a group may lose: then they need its memory until they have
  restored. Where every host was told, they write an export together (`group.ending`).
- Signals do not come at the same moment everywhere: it looks OTHERS_S for others that are told, and
  then goes. Once all are, it stays until its time is over, counted from its own signal.
"""

from __future__ import annotations

import time

from jaxft.group.ending import are_needed, is_told
from jaxft.group.records import View
from jaxft.launch.options import RunOptions

SNAPSHOT_SHARE = 0.3
RANKS_SHARE = 0.4
OTHERS_S = 1.0
# After Ctrl-C nothing is to be saved: so long ranks may take to end.
INTERRUPT_S = 5.0


class Leaving:
    """From the signal on.

    Args:
        options: of the run.
    """

    def __init__(self, options: RunOptions) -> None:
        told_s = time.monotonic()
        self.snapshot_until_s = told_s + SNAPSHOT_SHARE * options.grace_s
        self.ranks_until_s = told_s + RANKS_SHARE * options.grace_s
        self._until_s = told_s + options.grace_s
        self._alone_s: float | None = None

    def reason_to_go(self, view: View | None) -> str:
        """Why it stays no longer; "" while it does. Ask once this host's ranks are dead."""
        now_s = time.monotonic()
        all_told = view is not None and is_told(view)
        if now_s > self._until_s:
            others = "for the newest snapshot to get to storage"
            if not all_told:
                others = "for other hosts to restore with its memory"
            return f"there was no more time {others}"
        if all_told:
            self._alone_s = None
            return ""
        self._alone_s = self._alone_s or now_s
        if now_s - self._alone_s <= OTHERS_S or (view is not None and are_needed(view)):
            return ""
        return "other hosts go on"
