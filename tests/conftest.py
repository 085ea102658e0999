"""The host that the tests of a file share, with one rank: the process of the tests itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.multiprocess.lone import Lone


@pytest.fixture(scope="module")
def lone_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lone]:
    """One snapshot process for all tests of a file."""
    from tests.multiprocess.lone import Lone  # which needs JAX; most tests do not

    lone = Lone(tmp_path_factory.mktemp("lone"))
    yield lone
    lone.close()


@pytest.fixture
def lone(lone_host: Lone) -> Iterator[Lone]:
    """The file's host; what the tests before left in its memory does not count."""
    lone_host.begin_anew()
    yield lone_host
    lone_host.leave()
