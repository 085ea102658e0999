from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def _made() -> Iterator[Path]:
    # Short, for the limit of Unix sockets.
    path = Path(tempfile.mkdtemp(prefix="jx-"))
    yield path
    shutil.rmtree(path)


base = pytest.fixture(_made, name="base")
# For a world that all tests of a module share.
module_base = pytest.fixture(_made, scope="module", name="module_base")
