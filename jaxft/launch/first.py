"""A container's first process, which has duties that no other process has.

Whoever loses its parent is given to it, and has to be waited for by it; a signal without a handler
does not end it; with it everything ends. So where `jaxft` is process 1 it becomes two: the second
one is what was asked for, and the first one passes signals on to it, waits for the dead, and ends
as the second one did. Nothing else: it holds no memory and starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

FIRST = 1
# What a process brings about itself, what stops terminals' readers, and what nobody can catch.
_ITS_OWN = frozenset(
    getattr(signal, name)
    for name in (
        *("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGTTIN", "SIGTTOU"),
        *("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"),
    )
)
_LOOK_S = 60.0


def be_two_if_first() -> None:
    """Returns in the process that is to do the work; the first one, if this is it, ends here."""
    if os.getpid() != FIRST:
        return
    passed = signal.valid_signals() - _ITS_OWN
    # Before there is a second one: none is lost on the way.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    sys.stdout.flush()
    os._exit(serve(worker, passed))


def serve(worker: int, passed: set[signal.Signals]) -> int:
    """Passes blocked signals on to the process `worker`, and waits for all children; returns the
    worker's status, 128 + n if signal n has ended it."""
    while True:
        info = signal.sigtimedwait(passed | {signal.SIGCHLD}, _LOOK_S)
        if info is not None and info.si_signo != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, info.si_signo)
        status = _reap(worker)
        if status is not None:
            return status


def _reap(worker: int) -> int | None:
    """Waits for all who are dead; the worker's status, if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
                found = code if code >= 0 else 128 - code
    return found
