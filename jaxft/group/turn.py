"""A snapshot out of turn: agreed on by all ranks, though none is due by the interval.

    a host wishes one -> the root asks -> every rank answers with the number of its last call of
    `save`, and waits in the next -> the root names the call after the last of them all
    -> every rank takes a snapshot at that call

No rank is past the call that is named, because each waits in the call after the one it has answered
with until it knows the name. The answers come from the ranks' background threads, so a rank that
computes, or waits in `save`, answers as well.

A turn that is asked for ends without an answer after a while; then waiting calls go on. One that is
named ends with the outcome of the snapshot that was begun at its call, whatever that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from jaxft.group.messages import Ledger, Outcome, Report, Status, Turn


def advance(
    turn: Turn | None,
    statuses: Mapping[str, Status],
    hosts: Sequence[str],
    *,
    open_s: float,
    answer_s: float,
    held: str,
) -> Turn | None:
    """What the root makes of the turn now; None: nothing new.

    Args:
        turn: the newest one.
        statuses: of the hosts, by name.
        hosts: of the world.
        open_s: how long the turn has been open.
        answer_s: how long the ranks may take to answer.
        held: why no snapshot can be decided, "" if it can.
    """
    if turn is None or turn.result:
        return _wished(0 if turn is None else turn.number, statuses)
    if turn.call:
        return None
    if held:
        return msgspec.structs.replace(turn, result=f"snapshots are held: {held}")
    answers = {host: status.answer for host, status in statuses.items()}
    calls = [
        answer.call
        for host in hosts
        if (answer := answers.get(host)) is not None and answer.number == turn.number
    ]
    if len(calls) == len(hosts):
        return msgspec.structs.replace(turn, call=max(calls) + 1)
    if open_s > answer_s:
        missing = ", ".join(
            host
            for host in hosts
            if (answer := answers.get(host)) is None or answer.number != turn.number
        )
        reason = f"the ranks of {missing} have not answered within {answer_s:g} s"
        return msgspec.structs.replace(turn, result=reason)
    return None


def _wished(last: int, statuses: Mapping[str, Status]) -> Turn | None:
    """The next turn, if a host wishes one that is newer than `last`."""
    wishes = [status.wish for status in statuses.values() if status.wish is not None]
    reasons = sorted({wish.reason for wish in wishes if wish.number > last})
    return Turn(number=last + 1, reason="; ".join(reasons)) if reasons else None


def is_taken(turn: Turn | None, reports: Iterable[Report]) -> bool:
    """Was the snapshot of these reports begun at the turn's call (or missed there)?"""
    if turn is None or turn.result or not turn.call:
        return False
    return any(report.call >= turn.call for report in reports)


def ended(turn: Turn, outcome: Outcome) -> Turn:
    """The turn, once its snapshot has an outcome."""
    result = "protected" if outcome.ok else outcome.reason
    return msgspec.structs.replace(turn, result=result, step=outcome.step)


def turn_of(ledger: Ledger) -> Turn | None:
    """The newest turn, as a root finds it that was started again. The outcome of its snapshot is
    written before the turn's end."""
    turn, outcome = ledger.turn, ledger.outcome
    if turn is None or turn.result or outcome is None or outcome.turn != turn.number:
        return turn
    return ended(turn, outcome)
