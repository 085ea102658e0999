"""How managers end: what is in memory only is put on storage, since memory goes with its manager.

A script may end without `close`, and what it saved is on storage all the same. It may have failed,
so its memory stays for the next one for a while.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import Any, Protocol

import orbax.checkpoint as ocp

from jaxft.orbax.memory import Memory
from jaxft.orbax.request import Request
from jaxft.orbax.storage import Storage

_log = logging.getLogger(__name__)


class Ending(Protocol):
    """What is told that the script ends."""

    @property
    def directory(self) -> Any:
        """Where its steps are."""

    def leave(self, *, keeps: bool) -> None:
        """Writes what is in memory only, if it `keeps` that, and leaves the memory."""


_open: list[tuple[Ending, int]] = []


def opened(manager: Ending) -> None:
    """It is this process's from now on. (A fork of it has managers that are not its own.)"""
    _open.append((manager, os.getpid()))


def closed(manager: Ending) -> None:
    _open[:] = [one for one in _open if one[0] is not manager]


def open_at(directory: Any) -> list[Ending]:
    """Those of this directory that are not closed."""
    return [manager for manager, _ in _open if manager.directory == directory]


def keep_newest(memory: Memory, storage: Storage, hidden_step: int | None) -> None:
    """Puts the newest snapshot on storage, if it is newer than all that is there."""
    newest = memory.newest()
    memory.wait_for_helpers()
    ahead = max(storage.steps(), default=None)
    if newest is None or newest.step == hidden_step:
        return
    if ahead is not None and ahead >= newest.step:
        return
    contents = memory.contents(newest)
    request = Request(contents, None, in_host_memory=True)
    restored = request.build(memory.restore(newest, contents, request.wants))
    given = {
        "args": contents.save_args(restored),
        "metrics": contents.metrics,
        "custom_metadata": contents.custom_metadata,
    }
    storage.save(newest.step, newest.id, memory.base, given)


def _leave_all() -> None:
    has_failed = getattr(sys, "last_value", None) is not None
    for manager in [one for one, pid in _open if pid == os.getpid()]:
        try:
            manager.leave(keeps=not has_failed and ocp.multihost.process_count() == 1)
        except Exception:  # noqa: BLE001 - others are to end as well
            _log.exception("CheckpointManager(%s): at the script's end", manager.directory)


# Before Python ends its pools of threads, without which Orbax writes nothing: `atexit` is later.
getattr(threading, "_register_atexit", atexit.register)(_leave_all)
