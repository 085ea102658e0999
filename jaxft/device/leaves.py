"""Leaves: the one canonical form that every leaf of a tree is saved in.

The rules:
- A leaf is found by its structured path, never by a joined string: `{"a.b": x}` and
  `{"a": {"b": x}}` have different paths, and so have the keys 1 and "1".
- Arrays are bytes, in C order, exactly as the dtype lays them out; nothing is ever cast. Elements
  of less than a byte take one byte each, with the high bits zero.
- Scalars that are no arrays (Python's and NumPy's, str, bytes) are encoded by type, without pickle.
- What cannot come back the same is refused, by path, before anything is saved.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jaxft.errors import ConfigError
from jaxft.group.manifest import Leaf, Path, PathKey

# Significant bits of the dtypes that take one byte an element on the host but less on a device.
SUB_BYTE_BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}

# XLA crashes on these, or cannot lower them (jax 0.10 and 0.12).
_REFUSED_DTYPES = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")


def flatten(tree: Any) -> tuple[list[tuple[Path, Any]], jax.tree_util.PyTreeDef]:
    """Takes a tree apart into (path, leaf) pairs, in JAX's own order of leaves.

    Raises:
        ConfigError: a key of the tree that has no reversible form, for example a dict keyed by
            objects.
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree)
    found: list[tuple[Path, Any]] = []
    above: tuple[Any, ...] = ()
    path_above: Path = ()
    for keys, leaf in with_path:
        # Leaves that follow each other mostly are in the same node, and have the same keys above
        # them then. Equal ones will not do: DictKey(1) == DictKey(True), which is refused.
        if len(keys) != len(above) + 1 or not all(map(is_, keys, above)):
            above = keys[:-1]
            path_above = tuple([_structured_key(key, keys) for key in above])
        last = tuple([_structured_key(key, keys) for key in keys[-1:]])
        found.append((path_above + last, leaf))
    return found, treedef


def _structured(keys: tuple[Any, ...]) -> Path:
    return tuple([_structured_key(key, keys) for key in keys])


def _structured_key(key: Any, keys: tuple[Any, ...]) -> PathKey:
    # Trees with many leaves have lists or dicts of them: these two do without the matching.
    if type(key) is SequenceKey:
        return "i", key.idx
    if type(key) is DictKey and type(key.key) is str and key.key.isascii():
        return "k", key.key
    match key:
        case SequenceKey(idx=index):
            return "i", index
        case GetAttrKey(name=name):
            return "a", name
        case FlattenedIndexKey(key=index):
            return "f", index
        case DictKey(key=name) if _is_plain(name):
            return "k", name
        case DictKey(key=tuple() as names) if all(map(_is_plain, names)):
            return "t", json.dumps(names)
    raise ConfigError(
        f"leaf {jax.tree_util.keystr(keys)}: cannot save a tree with the key {key!r} "
        f"({type(getattr(key, 'key', key)).__name__}); use str, int or tuples of them as keys"
    )


def _is_plain(name: object) -> bool:
    """Whether a dict key is one that MessagePack and JSON give back as it was."""
    if type(name) is int:
        return -(2**63) <= name < 2**63
    return type(name) is str and not any("\ud800" <= letter <= "\udfff" for letter in name)


def show(path: Path) -> str:
    """The path as Python code would reach the leaf, for messages: `['params'][0].count`."""
    if not path:
        return "(the tree itself)"
    return "".join(_show_key(kind, key) for kind, key in path)


def _show_key(kind: str, key: str | int) -> str:
    match kind:
        case "a":
            return f".{key}"
        case "f":
            return f"<child {key}>"
        case "t":
            return f"[{tuple(json.loads(str(key)))!r}]"
    return f"[{key!r}]"


def describe(path: Path, leaf: Any) -> Leaf:
    """What a leaf is, without its value: a `ShapeDtypeStruct` and the array it stands for agree.

    A literal's value changes from step to step, so it is added later, by `with_literals`.

    Raises:
        ConfigError: a leaf that could not come back the same.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise ConfigError(f"leaf {show(path)} is a tracer: call save outside of jit")
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return _describe_array(path, leaf)
    if type(leaf) is np.ndarray:
        name = _dtype_name(path, leaf.dtype)
        return Leaf(path=path, kind="numpy", shape=leaf.shape, dtype=name)
    if isinstance(leaf, np.generic):
        dtype = "numpy." + _dtype_name(path, leaf.dtype)
        return Leaf(path=path, kind="literal", shape=(), dtype=dtype)
    if type(leaf) in _LITERALS:
        return Leaf(path=path, kind="literal", shape=(), dtype=type(leaf).__name__)
    raise ConfigError(
        f"leaf {show(path)} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which cannot "
        "be saved: leaves are jax.Array, numpy.ndarray, NumPy scalars, int, float, bool, complex, "
        "str, bytes or None; take it out of the tree, or pass it as extras"
    )


def _describe_array(path: Path, leaf: jax.Array | jax.ShapeDtypeStruct) -> Leaf:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = _key_impl(leaf)
        if not isinstance(impl, str):
            raise ConfigError(
                f"leaf {show(path)}: a PRNG key of the unregistered implementation {impl!r} cannot "
                "be saved; use one that has a name, for example threefry2x32"
            )
        return Leaf(path=path, kind="key", shape=leaf.shape, dtype="uint32", impl=impl)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ConfigError(f"leaf {show(path)}: arrays of {leaf.dtype} cannot be saved")
    return Leaf(
        path=path,
        kind="array",
        shape=tuple(leaf.shape),
        dtype=_dtype_name(path, np.dtype(leaf.dtype)),
        weak_type=bool(getattr(leaf, "weak_type", False)),
    )


def _key_impl(leaf: jax.Array | jax.ShapeDtypeStruct) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_impl(leaf)
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


@functools.lru_cache
def _key_words(impl: str) -> tuple[int, ...]:
    """The dimensions that the key data of one key of this implementation has."""
    return tuple(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape)


def stored(leaf: Leaf, value: jax.Array) -> jax.Array:
    """The array of a leaf's elements as they are stored: of a key, its key data."""
    return jax.random.key_data(value) if leaf.kind == "key" else value


def stored_shape(leaf: Leaf) -> tuple[int, ...]:
    """The shape of the leaf's elements as they are stored: a key's has its key data's as well."""
    return leaf.shape + _key_words(leaf.impl) if leaf.kind == "key" else leaf.shape


def element(leaf: Leaf) -> np.dtype[Any]:
    """The dtype of the leaf's stored elements."""
    return np.dtype(leaf.dtype)


def _dtype_name(path: Path, dtype: np.dtype[Any]) -> str:
    """A name for which `np.dtype(name) == dtype`."""
    if dtype.name in _REFUSED_DTYPES:
        raise ConfigError(f"leaf {show(path)}: XLA cannot take apart {dtype.name}; cast it first")
    if dtype.kind in "SUmM" or not dtype.isnative:
        return dtype.str
    if dtype.kind in "biufc":
        # C's long long is a type of its own that shares its name with int64.
        return dtype.name if np.dtype(dtype.name).char == dtype.char else dtype.char
    if hasattr(ml_dtypes, dtype.name):
        return dtype.name
    raise ConfigError(
        f"leaf {show(path)}: arrays of dtype {dtype} cannot be saved; use numbers, or take the "
        "leaf out of the tree"
    )


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


# How a literal of each type becomes bytes, and how bytes become the literal again.
_LITERALS: dict[type, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    type(None): (lambda value: b"", lambda data: None),
    bool: (lambda value: bytes([value]), lambda data: data == b"\x01"),
    int: (_int_bytes, lambda data: int.from_bytes(data, "little", signed=True)),
    float: (lambda value: struct.pack("<d", value), lambda data: struct.unpack("<d", data)[0]),
    complex: (
        lambda value: struct.pack("<dd", value.real, value.imag),
        lambda data: complex(*struct.unpack("<dd", data)),
    ),
    str: (
        lambda value: value.encode("utf-8", "surrogatepass"),
        lambda data: data.decode("utf-8", "surrogatepass"),
    ),
    bytes: (lambda value: value, lambda data: data),
}
_DECODERS = {kind.__name__: decode for kind, (_, decode) in _LITERALS.items()}


def empty_nodes(tree: Any) -> tuple[Leaf, ...]:
    """The nodes of a tree with nothing in them, as leaves of kind "empty".

    No restore needs them: they are in the target. Orbax wants to see them in a checkpoint. `dtype`
    is "dict", "list" or "tuple", or "none" for None and for named tuples without fields.
    """
    taken_apart = jax.tree_util.tree_leaves
    if len(taken_apart(tree, is_leaf=_is_empty)) == len(taken_apart(tree)):
        return ()  # to see this costs less than to go through all paths
    with_path, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
    return tuple(
        Leaf(path=_structured(keys), kind="empty", shape=(), dtype=_EMPTY.get(type(node), "none"))
        for keys, node in with_path
        if _is_empty(node)
    )


_EMPTY: dict[type, str] = {dict: "dict", list: "list", tuple: "tuple"}


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, (dict, list, tuple)) and not node)


def encode_literal(value: Any) -> bytes:
    """The bytes of a scalar; `decode_literal` with the `dtype` of its Leaf gives the value back."""
    if isinstance(value, np.generic):
        return value.tobytes()
    encode, _ = _LITERALS[type(value)]
    return encode(value)


def decode_literal(leaf: Leaf) -> Any:
    """The scalar that a leaf of kind "literal" holds, of the same type as it was."""
    if not leaf.dtype.startswith("numpy."):
        return _DECODERS[leaf.dtype](leaf.literal)
    dtype = np.dtype(leaf.dtype.removeprefix("numpy."))
    return np.frombuffer(leaf.literal, dtype)[0] if dtype.itemsize else dtype.type()


def literals_of(described: tuple[Leaf, ...]) -> tuple[int, ...]:
    """The numbers of the literals among these leaves."""
    return tuple([number for number, leaf in enumerate(described) if leaf.kind == "literal"])


def with_literals(
    described: tuple[Leaf, ...], values: list[Any], literals: tuple[int, ...]
) -> tuple[Leaf, ...]:
    """The same leaves, with the values that the literals among them have now."""
    if not literals:
        return described
    leaves = list(described)
    for number in literals:
        leaf = described[number]
        leaves[number] = Leaf(
            path=leaf.path,
            kind=leaf.kind,
            shape=leaf.shape,
            dtype=leaf.dtype,
            literal=encode_literal(values[number]),
        )
    return tuple(leaves)
