"""How a rank lets its agent see whether it goes on, and where it is if it does not.

The calls of `save` are counted in a page that the agent looks at (`host.calls_page`). At SIGNAL the
interpreter writes the stacks of all threads to the rank's log, from C, also while Python code holds
its lock or waits. The signal is a real-time one: SIGUSR1 and SIGUSR2 are what schedulers and
trainers use for words of their own, SIGQUIT and the others mean the end. Where the script has a
handler for it all the same, it stays the script's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxft import config
from jaxft.errors import ConfigError, MemoryLimitError
from jaxft.host.calls_page import CallsPage

_log = logging.getLogger(__name__)
SIGNAL = signal.SIGRTMIN + 9
STANDARD_ERROR = 2


@functools.cache
def calls_page() -> CallsPage:
    """This process's page; one that nobody looks at where no agent does."""
    path = config.calls_page()
    if not path:
        return CallsPage()
    try:
        return CallsPage.open(path)
    except (OSError, ValueError, MemoryLimitError) as error:
        _log.warning("whether this rank hangs is not watched: %s cannot be used: %s", path, error)
        return CallsPage()


def be_watched() -> CallsPage:
    """From now on the agent sees this rank's calls; made for the thread that makes them."""
    page = calls_page()
    number = 0
    if config.calls_page() and _is_free(SIGNAL):
        faulthandler.register(SIGNAL, file=STANDARD_ERROR, all_threads=True)
        number = SIGNAL
    page.arrive(os.getpid(), threading.get_ident(), number)
    return page


@contextlib.contextmanager
def long_phase(name: str, at_most_s: float = 3600.0) -> Iterator[None]:
    """Within it this rank is not taken for one that hangs, nor are others that wait for it.

        with jaxft.long_phase("evaluation"):
            evaluate(state)

    `jaxft run` takes a rank for one that hangs which has not called `save`, or the wrapped step,
    for --hang-s, or ten times its longest pause lately. Phases that take minutes and come seldom
    are to be announced. It costs nothing, and means nothing in a script that nobody launched.

    Args:
        name: what it is, for people.
        at_most_s: after that it counts as silence all the same.

    Raises:
        ConfigError: a time that is none.
    """
    if not at_most_s > 0:
        raise ConfigError(f"at_most_s={at_most_s!r}: expected more than 0 seconds")
    page = calls_page()
    before = page.enter_phase(name, at_most_s)
    try:
        yield
    finally:
        page.leave_phase(before)


def _is_free(number: int) -> bool:
    """Does nobody in this process, Python or not, catch or ignore this signal? (proc(5))"""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigIgn", "SigCgt") and int(mask, 16) >> (number - 1) & 1:
            return False
    return True
