"""What came first: the error in a rank's last words, and which of several faults is the cause.

When one rank fails, the others fail after it: their collectives break, or the coordination service
of `jax.distributed` ends them. They may say so first, since whoever is dead says nothing.

Rules
- The loss of a host is the cause of what its ranks' peers did; so is a rank that failed by itself
  of those that failed for want of it.
- Of faults of one rank the first one written stays.
"""

from __future__ import annotations

import re
import signal

from jaxft.group.records import Fault

# Failures that a restart may or may not mend; the others are losses, after which it does.
FAILURES = frozenset(
    {"rank_exited", "rank_killed", "left_behind", "smp_report", "unreachable", "hung"}
)
LOSSES = frozenset({"host_lost", "memory_lost", "agent_restarted", "told_to_end"})

ERROR_CHARS_MAX = 300
SHORT_CHARS_MAX = 100

_FRAME = re.compile(r"\s+\S|\s*\^+\s*$")
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z_a-z]\w*(?::\s|$)")
# What Gloo, NCCL and JAX's coordination service say of somebody else who is gone.
_OF_OTHERS = re.compile(
    r"gloo|nccl|coordination[ _]?(service|agent)|distributed service|heartbeat|pollforerror|"
    r"connection (closed|reset|refused)|barrier timed out|socket closed",
    re.IGNORECASE,
)
_GREETING = re.compile(r"\[Gloo\] Rank \d+ is connected")


def error_in(text: str) -> str:
    """The error of the last Python traceback in a rank's output, or else its last line, Gloo's
    greeting apart.

    An error is the line after the indented ones of a traceback: `ValueError: no such data`.
    """
    found, last, before = "", "", ""
    for line in text.splitlines():
        if _FRAME.match(before) and _ERROR.match(line):
            found = line
        last = line if line.strip() and not _GREETING.match(line) else last
        before = line
    return (found or last).strip()[:ERROR_CHARS_MAX]


def in_short(detail: str) -> str:
    """The beginning of what was said of a fault."""
    return detail if len(detail) <= SHORT_CHARS_MAX else f"{detail[: SHORT_CHARS_MAX - 3]}..."


def ended(code: int) -> str:
    """How a process ended, in words; `code` is negative for a signal."""
    if code >= 0:
        return f"status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def is_consequence(fault: Fault) -> bool:
    """Does this failure look as if another rank's, or host's, had come before it?

    An exception says so itself. What aborts says it somewhere in its last lines.
    """
    if fault.kind == "rank_exited":
        said = fault.error
    else:
        said = fault.tail if fault.code == -signal.SIGABRT else ""
    return any(_OF_OTHERS.search(line) for line in said.splitlines() if not _GREETING.match(line))


def outranks(found: Fault, known: Fault) -> bool:
    """Is what was found the cause of what is known?"""
    if known.kind not in FAILURES:
        return False
    of_a_rank = found.kind in ("rank_exited", "rank_killed") and not is_consequence(found)
    return found.kind in LOSSES or (of_a_rank and is_consequence(known))
