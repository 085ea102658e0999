"""What an earlier run of a job has left in the store, as the next run finds it."""

from __future__ import annotations

import time

from jaxft.group.records import END, HOST, JOB_KEY, NUMBER, PROGRESS, read_view
from jaxft.group.world import encode
from jaxft.launch.store import Store

POLL_S = 0.2


def clear_ended_run(store: Store) -> None:
    """Takes away what an earlier run of the job left behind, if that has ended and nobody of it is
    there any more. Generations go on being counted from where they were. A run that failed let its
    memory go: what it had protected stays on record, so that the next one does not silently begin
    anew.

    Hosts that are still on record though all were told to end are waited for: whoever is started
    after such an end is to go on, and not to end with them.

    Args:
        store: of the job.

    Raises:
        StoreError: the store does not answer.
    """
    began_s = time.monotonic()
    while True:
        entries = store.read()
        view = read_view(entries)
        if view.end is None:
            return
        if view.hosts:
            patience_s = max(one.lapse_s for one in view.hosts.values())
            if view.end.kind != "told" or time.monotonic() > began_s + patience_s:
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
