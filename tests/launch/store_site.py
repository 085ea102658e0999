"""What the tests of the stores share: a store that can be opened many times, and waits that end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import pytest

from jaxft.errors import StoreError
from jaxft.launch.store import Store
from jaxft.launch.stores import open_store

WAIT_S = 15.0


class Site:
    """One store and one job in it, to be opened any number of times."""

    def __init__(self, url: str, ttl_s: float) -> None:
        self.url = url
        self.job = uuid.uuid4().hex
        self.ttl_s = ttl_s
        self._opened: list[Store] = []

    def open(self, job: str = "") -> Store:
        store = open_store(self.url, job=job or self.job)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()


def takes_at_most(limit_s: float, act: Callable[[], object], match: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(StoreError, match=match):
        act()
    assert time.monotonic() - began_s < limit_s


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}"
        time.sleep(0.02)


def values(store: Store, prefix: str = "") -> dict[str, bytes]:
    return {key: entry.value for key, entry in store.read(prefix).items()}
