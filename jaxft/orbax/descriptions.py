"""What Orbax's `metadata` says of a step, for one that is in memory only."""

from __future__ import annotations

from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxft.device.leaves import element
from jaxft.group.manifest import Leaf
from jaxft.orbax.items import DEFAULT, Contents
from jaxft.orbax_tree import nest


class Tree(dict[str, Any]):
    """An item's tree of `ArrayMetadata`; `tree` is the same, as with Orbax's `TreeMetadata`."""

    @property
    def tree(self) -> dict[str, Any]:
        return self


def step_metadata(contents: Contents) -> Any:
    """A `StepMetadata`. Of timestamps and handlers, which are storage's, it says nothing."""
    items: dict[str, Any] = dict.fromkeys(contents.texts)
    items |= {name: _tree(contents, name) for name in contents.trees}
    return ocp.metadata.StepMetadata(
        item_metadata=items[DEFAULT] if contents.is_default else ocp.args.Composite(**items),
        metrics=contents.metrics or {},
        custom_metadata=contents.custom_metadata or {},
    )


def _tree(contents: Contents, name: str) -> Any:
    leaves = contents.leaves_of(name).items()
    values = [
        (path, _value(contents.leaves[number], contents.saved_sharding(number)))
        for number, path in leaves
    ]
    tree = nest([*values, *contents.empty_of(name)])
    return Tree(tree) if isinstance(tree, dict) else tree


def _value(leaf: Leaf, sharding: Any) -> Any:
    dtype = element(leaf) if leaf.kind != "literal" else _SCALARS.get(leaf.dtype)
    kind = ocp.metadata.ScalarMetadata if leaf.kind == "literal" else ocp.metadata.ArrayMetadata
    return kind(name="", directory=None, shape=leaf.shape, sharding=sharding, dtype=dtype)


_SCALARS = {"int": np.dtype(np.int64), "float": np.dtype(np.float64), "bool": np.dtype(np.bool_)}
