"""The contents page: what `jaxft` offers, and the tree of its errors."""

from __future__ import annotations

import importlib.metadata
import inspect
import re

import pytest

import jaxft
from jaxft import errors

PUBLIC = [
    "Auto",
    "ChunkDamaged",
    "Code",
    "ConfigError",
    "JaxftError",
    "JobInUse",
    "LaunchError",
    "MemoryLimitError",
    "NothingRecoverable",
    "OrbaxFallback",
    "PeerUnreachable",
    "Receipt",
    "RestoreError",
    "RestoreTimeout",
    "Restored",
    "SnapshotAborted",
    "SnapshotError",
    "SnapshotLost",
    "SnapshotSkipped",
    "Snapshotter",
    "StagingError",
    "TreeMismatch",
    "WireError",
    "__version__",
    "initialize",
    "long_phase",
    "make_mesh",
    "wrap",
]


def test_the_public_names() -> None:
    assert jaxft.__all__ == PUBLIC
    assert dir(jaxft) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(jaxft, name)
    assert name == "__version__" or inspect.getdoc(found)


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="module 'jaxft' has no attribute 'snapshoter'"):
        _ = jaxft.snapshoter


def test_the_version_is_the_packages() -> None:
    try:
        installed = importlib.metadata.version("jaxft")
    except importlib.metadata.PackageNotFoundError:
        installed = jaxft.__version__  # run from a checkout
    assert jaxft.__version__ == installed


def drawn_tree() -> dict[str, str]:
    """Child to parent, as the docstring of `errors` draws them."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│ ├└─]*)(\w+)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        above = [*above[:depth], match[2]]
        if depth:
            parents[match[2]] = above[depth - 1]
    return parents


def test_the_tree_drawn_in_errors_is_the_tree_of_the_classes() -> None:
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind is not errors.JaxftError
    }
    assert drawn_tree() == {name: kind.__bases__[0].__name__ for name, kind in classes.items()}
    assert all(issubclass(kind, errors.JaxftError) for kind in classes.values())
