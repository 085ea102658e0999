"""Every kind of leaf and of tree comes back as it was."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

from jaxft.device.leaves import describe, flatten, show, stored_shape
from jaxft.device.transfer import Staging
from jaxft.errors import ConfigError
from tests.device.snapshots import assert_same, raw, take

STAGINGS: list[Staging] = ["view", "pinned_host", "device"]

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("bfloat16", "float16", "float32", "complex64"),
]


def mesh_of(*shape: int) -> Mesh:
    names = ("a", "b", "c")[: len(shape)]
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def every_pattern(name: str) -> np.ndarray:
    """Elements with all bit patterns up to 16 bits, NaNs with payloads, -0.0 and random bits."""
    dtype = np.dtype(name)
    bits = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4, "bool": 1}
    width = bits.get(name, 8 * dtype.itemsize)
    if width <= 8:
        data = np.tile(np.arange(2**width, dtype=np.uint8), 512 >> width)
    elif width == 16:
        data = np.arange(2**16, dtype=np.uint16)
    else:
        data = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
        data[:6] = [0x7F800001, 0xFFC12345, 0x7FA00000, 0x80000000, 0xFF800000, 0x7FFFFFFF]
    return data.view(dtype)


@pytest.mark.parametrize("staging", STAGINGS)
def test_every_dtype_keeps_its_bits_case_9(staging: Staging) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))  # each more would compile all of it again
    tree = {}
    for name in DTYPES:
        host = every_pattern(name)
        tree[name] = {
            "rows": jax.device_put(host.reshape(16, -1), NamedSharding(mesh, P(None, "a"))),
            "copies": jax.device_put(np.tile(host, 4), NamedSharding(mesh, P())),
            "alone": jax.device_put(host),
        }
        assert raw(tree[name]["alone"]) == raw(host)
    assert_same(take(tree, staging=staging).restore(tree), tree)


@pytest.mark.parametrize("staging", STAGINGS)
def test_wide_dtypes_case_9(staging: Staging) -> None:
    with jax.enable_x64(True):
        noise = np.random.default_rng(1).integers(0, 2**63, 4096, dtype=np.uint64)
        tree = {
            name: jax.device_put(noise.view(name).reshape(-1, 2), NamedSharding(mesh_of(8), P("a")))
            for name in ("int64", "uint64", "float64", "complex128")
        }
        snapshot = take(tree, staging=staging)
        assert_same(snapshot.restore(tree), tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        snapshot.restore(like)


@pytest.mark.parametrize("name", ["int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"])
def test_dtypes_that_xla_cannot_take_apart_are_refused(name: str) -> None:
    leaf = jax.ShapeDtypeStruct((3,), np.dtype(getattr(ml_dtypes, name)))
    with pytest.raises(ConfigError, match=rf"leaf \['w'\].*{name}"):
        describe((("k", "w"),), leaf)


@pytest.mark.parametrize("staging", STAGINGS)
def test_prng_keys_case_10(staging: Staging) -> None:
    mesh = mesh_of(8)

    def init() -> dict[str, Any]:
        return {
            "one": jax.random.key(3),
            "rbg": jax.random.key(4, impl="rbg"),
            "batch": jax.random.split(jax.random.key(5), (16, 3)),
        }

    tree = init()
    tree["batch"] = jax.device_put(tree["batch"], NamedSharding(mesh, P("a")))
    snapshot = take(tree, staging=staging)
    assert_same(snapshot.restore(tree), tree)
    restored = snapshot.restore(jax.eval_shape(init))
    assert jax.random.key_impl(restored["rbg"]) == "rbg"
    assert raw(jax.random.bits(restored["rbg"], (9,))) == raw(jax.random.bits(tree["rbg"], (9,)))
    assert raw(restored["batch"]) == raw(tree["batch"])


@pytest.mark.parametrize("staging", STAGINGS)
def test_empty_and_scalar_arrays_case_11(staging: Staging) -> None:
    sharding = NamedSharding(mesh_of(8), P())
    tree = {
        "empty": jnp.zeros((0,)),
        "no rows": jax.device_put(jnp.zeros((0, 5), jnp.bfloat16), sharding),
        "no columns": jax.device_put(jnp.zeros((5, 0)), sharding),
        "scalar": jnp.float32(3.5),
        "global scalar": jax.device_put(jnp.int8(-1), sharding),
        "one": jnp.ones((1, 1)),
        "numpy": np.zeros((3, 0)),
        "numpy scalar array": np.array(2.5),
    }
    assert_same(take(tree, 4, staging).restore(tree), tree)


def test_odd_keys_are_kept_apart_case_12() -> None:
    tree = {
        "a.b": jnp.ones(3),
        "a": {"b": jnp.zeros(3)},
        "a/b": jnp.full(3, 2.0),
        "": jnp.full(3, 3.0),
        "['a']": jnp.full(3, 4.0),
    }
    numbers = {1: jnp.ones(2), -7: jnp.zeros(2)}
    texts = {"1": jnp.full(2, 2.0)}
    tuples = {("a", 1): jnp.ones(2), ("a", 2): jnp.zeros(2)}
    whole = [tree, numbers, texts, tuples]
    paths = [path for path, _ in flatten(whole)[0]]
    assert len(set(paths)) == len({show(path) for path in paths}) == len(paths)
    assert_same(take(whole).restore(whole), whole)


def test_paths_of_leaves_at_every_depth() -> None:
    tree = {"a": [1, (2,), 3], "b": 4, "c": {"a": [5], "b": {"a": [6, 7]}}, "ä": {"ö": 8}}
    paths = [show(path) for path, _ in flatten(tree)[0]]
    assert paths == [
        "['a'][0]",
        "['a'][1][0]",
        "['a'][2]",
        "['b']",
        "['c']['a'][0]",
        "['c']['b']['a'][0]",
        "['c']['b']['a'][1]",
        "['ä']['ö']",
    ]
    assert [leaf for _, leaf in flatten(tree)[0]] == list(range(1, 9))
    assert flatten(5)[0] == [((), 5)]


def test_keys_without_a_reversible_form_are_refused() -> None:
    class Odd:
        def __lt__(self, other: object) -> bool:
            return False

    for key in (Odd(), 1.5, True, ("a", 1.5), 2**70):
        with pytest.raises(ConfigError, match="use str, int or tuples"):
            flatten({"outer": {key: 1}})


class Empty(NamedTuple):
    pass


class Pair(NamedTuple):
    left: Any
    right: Any


@flax.struct.dataclass
class State:
    params: Any
    name: str = flax.struct.field(pytree_node=False)


class Net(eqx.Module):
    weight: jax.Array
    width: int = eqx.field(static=True)


def test_containers_come_back_as_their_classes_case_13() -> None:
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
    masked = optax.masked(optax.adam(1e-3), {"w": True, "b": False})
    steps = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=2)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tree = {
        "none": None,
        "empty": ({}, (), [], Empty()),
        "pair": Pair([jnp.ones(2), None], (3, "x")),
        "masked": masked.init(params),
        "steps": steps.init(params),
        "flax": State(params, "net"),
        "nnx": nnx.state(model),
        "equinox": Net(jnp.ones(4), 4),
    }
    restored = take(tree).restore(tree)
    assert_same(restored, tree)
    assert type(restored["equinox"]) is Net
    assert type(restored["empty"][3]) is Empty
    assert type(restored["steps"]) is type(tree["steps"])
    shapes = jax.eval_shape(lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1))))
    only_nnx = take(nnx.state(model)).restore(shapes)
    assert raw(jax.tree.leaves(only_nnx)[0]) == raw(jax.tree.leaves(tree["nnx"])[0])


LITERALS = [
    *(0, 1, -1, 127, 128, -128, -129, 2**63, 2**70, -(2**70), True, False),
    *(1.5, -0.0, float("inf"), struct.unpack("<d", b"\x01\x00\x00\x00\x12\x00\xf8\xff")[0]),
    *(complex(-0.0, 2.5), "", "text", "\ud800 ü", b"", b"\x00\xff"),
    *(np.float32(1.25), np.float64(-0.0), np.int8(-3), np.uint64(2**63), np.bool_(True)),
    *(np.complex64(1 + 2j), np.float16(np.nan), np.longlong(3), np.str_("x"), np.str_("")),
    *(np.bytes_(b"ab"), np.datetime64("2024-02-29"), ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3)),
    np.array([0x7FA12345], np.uint32).view(np.float32)[0],
]


@pytest.mark.parametrize("value", LITERALS, ids=repr)
def test_literals_keep_type_and_value_case_14(value: Any) -> None:
    restored = take([value]).restore([value])[0]
    assert type(restored) is type(value)
    if isinstance(value, np.generic):
        assert restored.dtype == value.dtype
        assert restored.tobytes() == value.tobytes()
    elif isinstance(value, float):
        assert struct.pack("<d", restored) == struct.pack("<d", value)
    else:
        assert repr(restored) == repr(value)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["ab", "c"]),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        np.array(["2024-02-29", "NaT"], "datetime64[ns]"),
        np.arange(-8, 8).astype(ml_dtypes.int4),
        np.arange(3, dtype=np.longdouble),
    ],
    ids=lambda array: array.dtype.str,
)
def test_numpy_arrays_of_any_dtype_case_9(array: np.ndarray) -> None:
    tree = {"x": array}
    restored = take(tree, 2).restore(tree)
    assert_same(restored, tree)
    assert (restored["x"] == array)[~np.isnat(array)].all() if array.dtype.kind == "M" else True


def test_one_array_twice_case_15() -> None:
    one = jnp.arange(5.0)
    tree = {"a": one, "b": one, "c": np.ones(2)}
    restored = take(tree).restore(tree)
    assert_same(restored, tree)
    assert restored["a"].unsafe_buffer_pointer() != restored["b"].unsafe_buffer_pointer()


def test_weak_types_and_committed_ness_case_16() -> None:
    sharding = NamedSharding(mesh_of(8), P())
    weak = jax.jit(lambda x: x * 2.0)(1.25)
    tree = {
        "weak": weak,
        "weak int": jnp.asarray(7),
        "weak committed": jax.device_put(weak, jax.devices()[2]),
        "weak global": jax.device_put(weak, sharding),
        "strong": jnp.float32(2.5),
        "committed": jax.device_put(jnp.ones(3), jax.devices()[1]),
        "free": jnp.ones(3),
    }
    restored = take(tree).restore(tree)
    assert_same(restored, tree)
    for name, leaf in tree.items():
        assert restored[name].weak_type == leaf.weak_type, name
    array = {"w": jnp.full((3,), 2.0)}
    assert array["w"].weak_type
    assert not take(array).restore(array)["w"].weak_type  # as documented: JAX cannot make it


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (object(), "builtins.object"),
        (np.ma.masked_array([1, 2], [0, 1]), "MaskedArray"),
        (np.array([object()]), "object"),
        (np.zeros(2, [("x", "i4")]), "cannot be saved"),
        (lambda: None, "function"),
    ],
)
def test_other_leaves_are_refused_by_path(leaf: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"leaf \['outer'\]\[1\].*{what}"):
        take({"outer": [1, leaf]})


def test_tracers_are_refused() -> None:
    with pytest.raises(ConfigError, match="outside of jit"):
        jax.jit(lambda x: describe((), x))(jnp.ones(2))


def test_structs_and_arrays_are_described_alike() -> None:
    for leaf in (jnp.ones((2, 3), jnp.bfloat16), jax.random.key(1, impl="rbg"), jnp.asarray(2.0)):
        assert describe((), leaf) == describe((), jax.eval_shape(lambda x=leaf: x))
    assert stored_shape(describe((), jax.random.key(1, impl="rbg"))) == (4,)


def test_keys_that_are_equal_and_of_other_types_are_told_apart() -> None:
    """A node of one's own can have both: a dict cannot."""

    class Node:
        def __init__(self, *pairs: tuple[DictKey, Any]) -> None:
            self.pairs = pairs

    jax.tree_util.register_pytree_with_keys(
        Node, lambda n: (n.pairs, tuple(k for k, _ in n.pairs)), lambda _, values: values
    )
    x = jnp.zeros(3)
    with pytest.raises(ConfigError, match=r"leaf \[True\]\['b'\].*\(bool\)"):
        flatten(Node((DictKey(1), {"a": x}), (DictKey(True), {"b": x})))
