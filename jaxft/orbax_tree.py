"""How a tree lies in an Orbax checkpoint: which leaves Orbax holds, and what it calls them.

Nothing here imports JAX or Orbax.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from jaxft.group.manifest import Leaf
from jaxft.group.manifest import Path as LeafPath

# What Orbax gives back bit for bit (0.12.8, tried one by one).
_ORBAX_DTYPES = frozenset(
    (
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "bfloat16"),
        *("complex64", "complex128", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)
_ORBAX_SCALARS = frozenset({"bool", "int", "float"})
_INT_BYTES_MAX = 8


class StoredLeaf(msgspec.Struct, frozen=True):
    """`where` is "tree" (in `default`, at its own path), "bytes" (in `jaxft_bytes`, by number) or
    "record" (nowhere else: it has no bytes, or is a scalar, whose value is in `leaf` anyway)."""

    leaf: Leaf
    where: str


def names(path: LeafPath) -> tuple[str, ...]:
    """What Orbax calls the nodes on the way to a leaf."""
    return tuple(
        str(tuple(json.loads(str(key)))) if kind == "t" else str(key) for kind, key in path
    )


def place(leaves: Sequence[Leaf]) -> tuple[StoredLeaf, ...]:
    """Decides where each leaf is stored: in Orbax's tree if it comes back from there the same.

    What Orbax cannot hold: arrays without elements, some dtypes, most scalars, two leaves of the
    same name (it joins names by dots, so that `{"a.b": x}` and `{"a": {"b": y}}` are one to it).
    """
    tree = _Names()
    return tuple(StoredLeaf(leaf, _where(leaf, tree)) for leaf in leaves)


def _where(leaf: Leaf, tree: _Names) -> str:
    if leaf.kind == "literal":
        is_held = leaf.dtype in _ORBAX_SCALARS and len(leaf.literal) <= _INT_BYTES_MAX
        return "tree" if is_held and tree.take(leaf.path) else "record"
    if 0 in leaf.shape:
        return "record"
    return "tree" if leaf.dtype in _ORBAX_DTYPES and tree.take(leaf.path) else "bytes"


class _Names:
    """The names that are taken in a tree of Orbax's."""

    def __init__(self) -> None:
        self._joined: set[str] = set()
        self._leaves: set[tuple[str, ...]] = set()
        self._nodes: dict[tuple[str, ...], bool] = {}

    def take(self, path: LeafPath) -> bool:
        """Takes the name of this leaf, unless it is taken, or Orbax has no name for it."""
        name = names(path)
        nodes = {name[:depth]: _is_index(path[depth][0]) for depth in range(len(path))}
        if (
            not path
            or ".".join(name) in self._joined
            or name in self._nodes
            or any(node in self._leaves for node in nodes)
            or any(self._nodes.get(node, is_list) != is_list for node, is_list in nodes.items())
        ):
            return False
        self._joined.add(".".join(name))
        self._leaves.add(name)
        self._nodes.update(nodes)
        return True


def _is_index(kind: str) -> bool:
    return kind in ("i", "f")


def nest(pairs: Iterable[tuple[LeafPath, Any]]) -> Any:
    """The tree of dicts and lists that Orbax makes of a tree with these leaves.

    Sequences become lists, in which None stands for what has no leaf; all else becomes dicts.
    """
    children: dict[str, list[tuple[LeafPath, Any]]] = {}
    is_list = False
    for path, value in pairs:
        if not path:
            return value
        is_list = _is_index(path[0][0])
        children.setdefault(names(path[:1])[0], []).append((path[1:], value))
    if not is_list:
        return {name: nest(below) for name, below in children.items()}
    numbers = {int(name): below for name, below in children.items()}
    return [nest(numbers[i]) if i in numbers else None for i in range(1 + max(numbers))]
