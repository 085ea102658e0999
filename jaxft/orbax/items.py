"""What a manager is given to save, as a snapshot's state and extras, and back.

    StandardSave(tree), PyTreeSave(tree)         state = tree
    Composite(a=StandardSave(tree), b=JsonSave)  state = {"a": tree}, extras: b's text
    anything else                                is not held in memory: `refusal` says why

The rules:
- What is text on storage is the same text in memory, so it comes back the same from both.
- What else belongs to a step (metrics, custom metadata) is in the extras too.
- A snapshot that a Snapshotter took, without a manager, reads as one unnamed item.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jaxft.extras import decode_extras
from jaxft.group.manifest import Leaf, Manifest, Path

DEFAULT = "default"
_NAMES = {ocp.args.StandardSave: "StandardSave", ocp.args.PyTreeSave: "PyTreeSave"}
_TREES = tuple(_NAMES)
MARK = "jaxft.orbax"


class Held(NamedTuple):
    """What goes into a snapshot: trees by item name, JSON values by item name. `kinds` are the
    names of the arguments that the trees came in."""

    trees: dict[str, Any]
    texts: dict[str, Any]
    is_default: bool
    kinds: dict[str, str]

    @property
    def state(self) -> Any:
        return self.trees[DEFAULT] if self.is_default else self.trees

    def extras(
        self,
        metrics: Any = None,
        custom_metadata: Any = None,
        *,
        name: str = "",
        tracks_best: bool = False,
        is_copy: bool = False,
    ) -> dict[str, Any]:
        """All of it that is no tree, as extras of a snapshot.

        Args:
            name: what the step is called on storage.
            tracks_best: are metrics written there?
            is_copy: it is what a script asked of a step on storage, which may be less than the step
                has, or of other dtypes.
        """
        return {
            MARK: 1,
            "copy": is_copy,
            "name": name,
            "tracks_best": tracks_best,
            "default": self.is_default,
            "trees": {name: self.kinds.get(name, "StandardSave") for name in self.trees},
            "texts": {name: json.dumps(value) for name, value in self.texts.items()},
            "shardings": _shardings(self.state),
            "metrics": json.dumps(metrics, default=_number),
            "custom_metadata": json.dumps(custom_metadata),
        }


def refusal(args: Any) -> str:
    """Why memory cannot hold what these arguments save; "" if it can."""
    for name, one in _items(args).items():
        if type(one) is not ocp.args.JsonSave and type(one) not in _TREES:
            return f'item "{name}" is a {type(one).__name__}'
        if type(one) in _TREES and not jax.tree_util.tree_leaves(one.item):
            return f'item "{name}" has no leaf'
    if not any(type(one) in _TREES for one in _items(args).values()):
        return "there is no tree of arrays in it"
    return ""


def hold(args: Any) -> Held:
    """What a snapshot takes of arguments that have no `refusal`."""
    items = _items(args)
    trees = {name: _arrays(one.item) for name, one in items.items() if type(one) in _TREES}
    texts = {name: one.item for name, one in items.items() if name not in trees}
    kinds = {name: _NAMES[type(items[name])] for name in trees}
    return Held(trees, texts, is_default=not is_composite(args), kinds=kinds)


def is_composite(args: Any) -> bool:
    return isinstance(args, ocp.args.Composite)


def _items(args: Any) -> dict[str, Any]:
    return dict(args.items()) if is_composite(args) else {DEFAULT: args}


def _number(value: Any) -> Any:
    """A metric that is a scalar array. Orbax looks at metrics with `best_fn` only."""
    return value.item() if hasattr(value, "item") else repr(value)


def _arrays(tree: Any) -> Any:
    """Like Orbax, takes whatever offers itself as an array for one."""
    kinds = (jax.Array, np.ndarray, np.generic)

    def as_array(leaf: Any) -> Any:
        is_other = hasattr(leaf, "__array__") and not isinstance(leaf, kinds)
        return np.asarray(leaf) if is_other else leaf

    return jax.tree.map(as_array, tree)


def _shardings(state: Any) -> dict[str, list[int]]:
    """The numbers of the leaves that have a NamedSharding, by what Orbax would write of it."""
    found: dict[Any, list[int]] = {}
    for number, leaf in enumerate(jax.tree_util.tree_leaves(state)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            found.setdefault(sharding, []).append(number)
    describe = ocp.metadata.NamedShardingMetadata.from_jax_sharding
    return {
        describe(sharding).to_serialized_string(): numbers for sharding, numbers in found.items()
    }


@functools.lru_cache(maxsize=256)
def _described(text: str) -> Any:
    return ocp.metadata.NamedShardingMetadata.from_deserialized_dict(json.loads(text))


class Contents(NamedTuple):
    """What a snapshot has: its leaves, in the order of its tables, and what is beside them. `empty`
    are the nodes with nothing in them. With `is_copy`, the step on storage has what was saved."""

    leaves: tuple[Leaf, ...]
    empty: tuple[Leaf, ...]
    is_default: bool
    trees: dict[str, str]
    texts: dict[str, str]
    shardings: dict[int, str]
    metrics: Any
    custom_metadata: Any
    is_copy: bool

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> Contents:
        """Reads the manifests of a snapshot's segments. What is beside the leaves is rank 0's, as
        on storage."""
        ordered = sorted(manifests, key=lambda manifest: manifest.host)
        parts = [part for manifest in ordered for part in manifest.parts]
        extras = decode_extras(min(parts, key=lambda part: part.rank).extras)
        if not (isinstance(extras, dict) and MARK in extras):
            extras = Held({DEFAULT: ()}, {}, is_default=True, kinds={}).extras()
        return cls(
            leaves=tuple(leaf for leaf in ordered[0].leaves if leaf.kind != "empty"),
            empty=tuple(leaf for leaf in ordered[0].leaves if leaf.kind == "empty"),
            is_default=extras["default"],
            trees=extras["trees"],
            texts=extras["texts"],
            shardings={
                number: text for text, numbers in extras["shardings"].items() for number in numbers
            },
            metrics=json.loads(extras["metrics"]),
            custom_metadata=json.loads(extras["custom_metadata"]),
            is_copy=extras.get("copy", False),
        )

    def saved_sharding(self, number: int) -> Any:
        """Orbax's description of the sharding that a leaf had, where that was a NamedSharding."""
        text = self.shardings.get(number)
        return None if text is None else _described(text)

    def save_args(self, restored: Any) -> Any:
        """The arguments that save again what `restored` is of all of it."""
        items = {DEFAULT: restored} if self.is_default else dict(restored.items())
        args = {name: ocp.args.JsonSave(items[name]) for name in self.texts}
        for name, kind in self.trees.items():
            args[name] = getattr(ocp.args, kind)(items[name])
        return args[DEFAULT] if self.is_default else ocp.args.Composite(**args)

    def leaves_of(self, name: str) -> dict[int, Path]:
        """The leaves of an item: their number, and their path within the item."""
        return {
            number: self._within(leaf)
            for number, leaf in enumerate(self.leaves)
            if self._is_of(name, leaf)
        }

    def empty_of(self, name: str) -> list[tuple[Path, Any]]:
        """The empty nodes of an item: their path within the item, and what they are."""
        return [
            (self._within(leaf), empty_node(leaf)) for leaf in self.empty if self._is_of(name, leaf)
        ]

    def _is_of(self, name: str, leaf: Leaf) -> bool:
        return self.is_default or leaf.path[0] == ("k", name)

    def _within(self, leaf: Leaf) -> Path:
        return leaf.path if self.is_default else leaf.path[1:]


def empty_node(leaf: Leaf) -> Any:
    """What a leaf of kind "empty" stands for, as Orbax gives it back."""
    return {"dict": {}, "list": [], "tuple": ()}.get(leaf.dtype)
