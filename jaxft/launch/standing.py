"""Whether a generation is still the job's newest, for whoever is about to make its work visible."""

from __future__ import annotations

from jaxft.errors import SnapshotLost
from jaxft.group.records import read_view
from jaxft.launch.stores import open_store


def check_current(url: str, job: str, number: int, nonce: str) -> None:
    """Asks the store, once.

    Args:
        url: of the store; "": there is none, and so no other world.
        job: its name.
        number, nonce: the generation.

    Raises:
        SnapshotLost: it has ended, or another one has taken its place.
        StoreError: the store does not answer, so that cannot be known.
    """
    if not url:
        return
    store = open_store(url, job=job)
    try:
        view = read_view(store.read())
    finally:
        store.close()
    newest = view.generation
    if newest is None or (newest.number, newest.nonce) != (number, nonce):
        other = "none" if newest is None else f"generation {newest.number}"
        raise SnapshotLost(f"generation {number} is not the job's any more, the store has {other}")
    if view.fault is not None:
        raise SnapshotLost(f"generation {number} has ended: {view.fault.detail}")
