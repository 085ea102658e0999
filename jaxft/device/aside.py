"""Aside: work on many leaves, in threads of their own for which the training thread waits.

A step lets go of the arrays before it: of thousands of small blocks, where the state has many
leaves. glibc keeps them unsorted in the arena of the thread that they were allocated in, and sorts
up to ten thousand of them each time that this thread wants a larger block (`MAX_ITERS` in its
malloc.c), until all are sorted. For ten thousand leaves that takes longer than to reach all of
them. A new thread has an arena without them, see malloc(3).

Such a thread has JAX's contexts as they are by default (`jax.enable_x64`, `jax.set_mesh`): what is
traced in it must not depend on them, or have its own (`contexts`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

# From so many leaves on a thread gains more than its start takes.
LEAVES_MIN = 2000


def aside(work: Callable[[], Result], leaves: int) -> Result:
    """Does the work on so many leaves, in a thread of its own if they are many, and gives what it
    gives, or raises."""
    return begin_aside(work)() if leaves >= LEAVES_MIN else work()


def begin_aside(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begins the work in a thread of its own.

    Returns:
        What waits for the work, and gives what it gave, or raises what it raised. Called once.
    """
    given: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            given.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True, name="jaxft-aside")
    thread.start()

    def wait() -> Result:
        thread.join()
        if failures:
            raise failures.pop()  # no longer in a frame that its traceback keeps, with the state
        return given.pop()

    return wait
