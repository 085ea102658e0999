from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.host.world import Host


class MakeHosts(Protocol):
    def __call__(
        self,
        count: int,
        *options: str,
        first: int = 0,
        faults: str = "",
        command: bool = False,
    ) -> list[Host]: ...


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Starts hosts h0, h1, ... with empty memory; all are gone after the test."""
    made: list[Host] = []

    def make(count: int, *options: str, first: int = 0, **more: Any) -> list[Host]:
        fresh = [Host(f"h{first + i}", tmp_path, *options, **more) for i in range(count)]
        made.extend(fresh)
        for host in fresh:
            host.join()
        return fresh

    yield make
    for host in made:
        host.close()
