"""How long a host goes on without the store: one pure decision of its agent, with the reason.

Rules
- Without the store a host trains on for `grace_s`, counted from when its last renewal that
  succeeded was sent; then its ranks are killed. The others wait for longer than that, the killing
  included (`Rules.cut_off_s` in `membership`), before they form a world without any of its hosts.
- And only as long as the SMP of every member answers: without the store nobody else would find that
  a host is lost, and the others' ranks would wait for it in vain.
- A host whose ranks are dead waits for the store as long as it would for other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Absence(NamedTuple):
    """What is to be done about a store that does not answer. The reason is "" while it does."""

    action: Literal["go on", "kill", "give up"]
    reason: str


def mind_absence(
    silent_s: float,
    error: str,
    *,
    running: bool,
    grace_s: float,
    patience_s: float,
    unheard_s: Mapping[str, float],
    peer_s: float,
) -> Absence:
    """Decides what a host does now.

    Args:
        silent_s: since the last renewal that succeeded was sent.
        error: why the store cannot be read at present; "" if it can.
        running: ranks of this host may live.
        grace_s: how long they may live without the store.
        patience_s: how long the store is waited for after that.
        unheard_s: members whose SMP does not answer, and for how long.
        peer_s: how long that may be.
    """
    if running and silent_s > grace_s:
        why = f" ({error})" if error else ""
        return Absence(
            "kill",
            f"the store has not answered for {silent_s:.0f} s: the ranks are killed{why}; it is "
            f"waited for, {patience_s:g} s at most",
        )
    lost = [host for host, seconds in unheard_s.items() if seconds > peer_s]
    if running and error and lost:
        return Absence(
            "kill",
            f"the store does not answer ({error}), and the snapshot processes of "
            f"{', '.join(sorted(lost))} have not for {peer_s:g} s: the ranks are killed; the store "
            f"is waited for, {patience_s:g} s at most",
        )
    if error and not running and silent_s > grace_s + patience_s:
        return Absence("give up", error)
    return Absence("go on", f"the store does not answer: {error}" if error else "")
