"""Garbage: when Python may look for it.

A plan or a snapshot of many leaves is a burst of new objects, none of which is garbage. Python
takes such a burst as the sign to look through all objects of the process, several times over, which
in a training process takes longer than the burst itself.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def not_collected() -> Iterator[None]:
    """Looks for no garbage meanwhile, in all threads of the process."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
