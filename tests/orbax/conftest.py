"""Managers of both kinds: Orbax's own, and jaxft's on a host whose only rank is this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.multiprocess.lone import Lone


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Orbax logs the traceback of each error that it raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def make(lone: Lone, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a jaxft manager, each in a new generation of the host, as after a crash of the script;
    the one before is left as a crash leaves it, unless it was closed."""
    import jaxft.orbax

    made: list[Any] = []

    def make(
        directory: Path | None = None, *, every: Any = 1, faults: str = "", **options: Any
    ) -> Any:
        for manager in made:
            manager._close(failing=True)
        lone.enter(faults=faults)
        manager = jaxft.orbax.CheckpointManager(
            directory or tmp_path / "run",
            options=jaxft.orbax.CheckpointManagerOptions(**options),
            every=every,
            timeout_s=20,
        )
        made.append(manager)
        return made[-1]

    yield make
    for manager in made:
        manager._close(failing=True)
