"""What an earlier run of a job has left in the store, as the next run finds it."""

from __future__ import annotations

import time

from jaxft.group.records import END, HOST, JOB_KEY, NUMBER, PROGRESS, read_view
from jaxft.group.world import encode
from jaxft.launch.store import Store

POLL_S = 0.2


def clear_ended_run(store: Store, patience_s: float = 0.0) -> None:
    """Takes away what an earlier run of the job left behind, if that has ended and nobody of it is
    there any more. Generations go on being counted from where they were. A run that failed let its
    memory go: what it had protected stays on record, so that the next one does not silently begin
    anew.

    Args:
        store: of the job.
        patience_s: for hosts that are still there though all were told to end: whoever is started
            after such an end is to go on, and not to end with them.

    Raises:
        StoreError: the store does not answer.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        entries = store.read()
        view = read_view(entries)
        if view.end is None:
            return
        if view.hosts:
            if view.end.kind != "told" or time.monotonic() > deadline_s:
                return
            store.changed(POLL_S)
            continue
        kept = {NUMBER, JOB_KEY}
        if not view.end.ok and view.newest_progress.snapshot is not None:
            kept.add(f"{PROGRESS}{max(view.progress)}")
        old = [key for key in entries if key not in kept and not key.startswith(HOST)]
        put = {NUMBER: encode(view.next_number - 1)}
        if store.commit({END: view.revisions[END]}, put, old):
            return
