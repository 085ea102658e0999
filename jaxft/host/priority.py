"""What of an SMP steps back behind the training.

Coding a snapshot and serving its bytes to peers take processor time that the training could use,
and nobody waits for them by the millisecond. Threads that do it run `step_back` first: then they
get about a quarter of a core that somebody else wants (nice 5, see sched(7)), and as batch work
they do not interrupt whoever runs. The SMP's loop, restoring, and copying out what is being
persisted (which ends a pin) stay at normal priority: a thread that has stepped back cannot come
forward again without privileges, so the process as a whole does not.
"""

from __future__ import annotations

import contextlib
import os
import threading

NICE = 5


def step_back() -> None:
    """For the calling thread and those that it starts; what the system does not allow is left."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
