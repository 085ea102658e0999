"""From what a restore asks for to the target of a snapshot's restore, and from its leaves to what
was asked for.

Orbax finds a leaf by the names on the way to it (a named tuple's field, a dict's key and a
dataclass's attribute of one name are the same to it), casts to the dtype that is asked for, and
makes arrays, NumPy arrays or scalars of a leaf. A Snapshotter's restore does none of that. So every
leaf is restored as it was saved, where it is wanted, and is made what it is to be afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jaxft.device.assembly import check_same
from jaxft.device.leaves import decode_literal, element, flatten, show
from jaxft.errors import TreeMismatch
from jaxft.group.manifest import Leaf, Path
from jaxft.orbax.items import Contents
from jaxft.orbax_tree import names, nest


class Unsupported(Exception):
    """Memory cannot give what is asked for; storage may."""


class Want(NamedTuple):
    """What one leaf is to become: an array on `sharding` (None: where JAX puts it), or a `kind` of
    its own ("numpy", or a type of scalars); of `dtype`, if not of its own."""

    sharding: Sharding | None = None
    kind: Any = "array"
    dtype: Any = None


class Asked(NamedTuple):
    """One item that is asked for: the wish for each of its leaves, by number, and how the item is
    put together. `places` are the numbers in the order of the tree's leaves; None stands for a
    placeholder. Without a `treedef`, it becomes dicts and lists, the `empty` ones among them."""

    wants: dict[int, Want]
    places: tuple[int | None, ...]
    treedef: jax.tree_util.PyTreeDef | None
    paths: dict[int, Path]
    empty: list[tuple[Path, Any]]

    def build(self, leaves: Sequence[Leaf], values: Mapping[int, Any]) -> Any:
        """The item, from its leaves' values by number."""
        made = {
            number: _finish(leaves[number], want, values[number])
            for number, want in self.wants.items()
        }
        if self.treedef is None:
            return nest([*((self.paths[number], made[number]) for number in made), *self.empty])
        flat = [ocp.PLACEHOLDER if number is None else made[number] for number in self.places]
        return jax.tree_util.tree_unflatten(self.treedef, flat)


def ask(args: Any, contents: Contents, name: str) -> Asked:
    """What these arguments (or None) ask of the item of this name.

    Raises:
        Unsupported: only Orbax's own reading can give it.
        TreeMismatch: the item has not the leaves, or not the shapes, that are asked for.
    """
    paths, empty = contents.leaves_of(name), contents.empty_of(name)
    item, per_leaf = _tree_and_args(args)
    if item is None and per_leaf is not None:
        raise Unsupported("restore_args without an item")
    if item is None:
        wants = {number: _as_saved(contents, number) for number in paths}
        return Asked(wants, tuple(paths), None, paths, empty)
    with_path, treedef = flatten(item)
    by_name = {names(path): number for number, path in paths.items()}
    _check_names([path for path, _ in with_path], by_name)
    wants = {}
    places: list[int | None] = []
    for (path, target), one in zip(with_path, per_leaf or [None] * len(with_path), strict=True):
        number = by_name[names(path)]
        skipped = target is ocp.PLACEHOLDER
        places.append(None if skipped else number)
        if not skipped:
            wants[number] = _want(path, contents, number, target, one)
    return Asked(wants, tuple(places), treedef, paths, empty)


def _tree_and_args(args: Any) -> tuple[Any, list[Any] | None]:
    """The target tree and the RestoreArgs of its leaves, where there are any."""
    if args is None:
        return None, None
    if type(args) is ocp.args.StandardRestore:
        if not args.strict or args.support_layout:
            raise Unsupported("strict=False or support_layout=True")
        return args.item, None
    if type(args) is ocp.args.PyTreeRestore:
        if args.transforms or args.legacy_transform_fn or args.partial_restore:
            raise Unsupported("transforms or partial_restore")
        if args.restore_args is None:
            return args.item, None
        of_args = jax.tree_util.tree_leaves(args.restore_args, is_leaf=_is_restore_args)
        if args.item is not None and len(of_args) != len(jax.tree_util.tree_leaves(args.item)):
            raise Unsupported("restore_args of another structure than the item")
        return args.item, of_args
    raise Unsupported(f"a {type(args).__name__}")


def _is_restore_args(value: Any) -> bool:
    return isinstance(value, ocp.RestoreArgs)


def _check_names(wanted: Iterable[Path], by_name: Mapping[tuple[str, ...], int]) -> None:
    wanted = list(wanted)
    missing = [show(path) for path in wanted if names(path) not in by_name]
    extra = [".".join(name) for name in by_name.keys() - {names(path) for path in wanted}]
    check_same(sorted(missing), sorted(extra), "the snapshot")


# -------------------------------------------------------------------- one leaf


def _as_saved(contents: Contents, number: int) -> Want:
    leaf = contents.leaves[number]
    if leaf.kind in ("array", "key"):
        return Want(sharding=_saved_sharding(contents, number))
    return Want(kind="numpy" if leaf.kind == "numpy" else "saved")


def _saved_sharding(contents: Contents, number: int) -> Sharding | None:
    """The sharding that the leaf had when it was saved."""
    saved = contents.saved_sharding(number)
    name = show(contents.leaves[number].path)
    if saved is None:
        if jax.process_count() > 1:
            raise Unsupported(f"leaf {name} without a sharding in the target")
        return None
    try:
        sharding: Sharding = saved.to_jax_sharding()
    except ValueError as error:
        raise ValueError(
            f"leaf {name} was saved on other devices than there are now ({error}): give a target "
            "with the shardings of now"
        ) from error
    return sharding


def _want(path: Path, contents: Contents, number: int, target: Any, args: Any) -> Want:
    leaf = contents.leaves[number]
    restore_type = getattr(args, "restore_type", None)
    if isinstance(target, (bool, int, float, complex, str, bytes)):
        return Want(kind=type(target))
    shape = getattr(args, "global_shape", None) or getattr(target, "shape", None)
    if shape is not None and leaf.kind != "literal" and tuple(shape) != leaf.shape:
        if getattr(args, "strict", True) is False:
            raise Unsupported("strict=False")
        raise TreeMismatch(
            f"leaf {show(path)}: the target expects the shape {tuple(shape)}, the snapshot has "
            f"{leaf.shape}. Nothing is cut or padded"
        )
    dtype = getattr(args, "dtype", None) or getattr(target, "dtype", None)
    is_host = isinstance(target, (np.ndarray, np.generic)) or restore_type is np.ndarray
    if is_host or (leaf.kind == "numpy" and getattr(target, "sharding", None) is None):
        return Want(kind="numpy", dtype=dtype)
    if leaf.kind == "literal" and not hasattr(target, "dtype"):
        return Want(kind="saved")
    sharding = _sharding(target, args)
    if sharding is None and not isinstance(target, jax.Array):
        sharding = _saved_sharding(contents, number)
    return Want(sharding=sharding, dtype=dtype)


def _sharding(target: Any, args: Any) -> Sharding | None:
    found = getattr(args, "sharding", None)
    if found is None and getattr(args, "mesh", None) is not None:
        found = NamedSharding(args.mesh, args.mesh_axes)
    if found is None and getattr(target, "committed", True):
        found = getattr(target, "sharding", None)
    if isinstance(found, ocp.metadata.ShardingMetadata):
        found = found.to_jax_sharding()
    if found is not None and not isinstance(found, Sharding):
        raise Unsupported(f"a {type(found).__name__} for a sharding")
    return found


def like(leaf: Leaf, want: Want | None) -> Any:
    """The target of a Snapshotter's restore for this leaf. One that nobody wants goes to the CPU:
    it has to stay in the snapshots."""
    if leaf.kind == "literal":
        return decode_literal(leaf)
    if leaf.kind == "numpy":
        return np.empty(leaf.shape, element(leaf))
    sharding = _aside() if want is None else want.sharding
    dtype = element(leaf)
    if leaf.kind == "key":
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.impl)).dtype
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        leaf.shape, dtype, sharding=sharding, weak_type=leaf.weak_type
    )


def _aside() -> Sharding:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        device = jax.local_devices()[0]
    return SingleDeviceSharding(device)


def _finish(leaf: Leaf, want: Want, value: Any) -> Any:
    """What was restored as it was saved, as what is wanted."""
    if want.kind == "saved":
        return value
    if isinstance(want.kind, type):
        made = np.asarray(value).item() if hasattr(value, "dtype") else value
        return want.kind(made)
    if want.kind == "numpy":
        return np.asarray(value, dtype=want.dtype)
    if not isinstance(value, jax.Array):
        value = jax.device_put(np.asarray(value, dtype=want.dtype), want.sharding)
    if want.dtype is None or want.dtype == value.dtype or leaf.kind == "key":
        return value
    if want.sharding is None:
        return value.astype(want.dtype)
    return jax.jit(lambda array: array.astype(want.dtype), out_shardings=want.sharding)(value)


# -------------------------------------------------------------------- trees of given paths


class _Node:
    """A node of a tree whose leaves have given paths, whatever kinds of nodes these name."""

    def __init__(self, keys: tuple[Any, ...], children: Sequence[Any]) -> None:
        self.keys = keys
        self.children = children


jax.tree_util.register_pytree_with_keys(
    _Node,
    lambda node: (tuple(zip(node.keys, node.children, strict=True)), node.keys),
    lambda keys, children: _Node(keys, tuple(children)),
    lambda node: (node.children, node.keys),
)


def tree_of(pairs: Iterable[tuple[Path, Any]]) -> Any:
    """A tree that has these leaves at these paths, and no others."""
    below: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in pairs:
        if not path:
            return value
        below.setdefault(path[0], []).append((path[1:], value))
    keys = tuple(_key(*key) for key in below)
    return _Node(keys, [tree_of(children) for children in below.values()])


def _key(kind: str, key: str | int) -> Any:
    match kind:
        case "i":
            return SequenceKey(int(key))
        case "a":
            return GetAttrKey(str(key))
        case "f":
            return FlattenedIndexKey(int(key))
        case "t":
            return DictKey(tuple(json.loads(str(key))))
    return DictKey(key)
