"""The digest of a tree depends on its content, and on nothing else."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxft.demo import model
from jaxft.demo.digest import ReplicasDiffer, combine, shard_digests

_SHAPES = [(4, 2), (2, 4), (1, 8), (3, 2), (1, 1)]


def _mesh(data: int, split: int) -> Mesh:
    devices = np.array(jax.devices()[: data * split]).reshape(data, split)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _content() -> model.State:
    """A state with random bytes, NaNs and negative zeros among them."""
    rng = np.random.default_rng(5)

    def leaf(shape: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
        values = rng.integers(0, 256, (*shape.shape, shape.dtype.itemsize), dtype=np.uint8)
        return values.view(shape.dtype).reshape(shape.shape)

    return jax.tree.map(leaf, model.abstract(_mesh(1, 1)))


def _on(mesh: Mesh, content: model.State) -> model.State:
    return jax.tree.map(
        lambda values, to: jax.make_array_from_callback(values.shape, to, values.__getitem__),
        content,
        model.shardings(mesh, content),
    )


def test_the_digest_does_not_depend_on_the_mesh() -> None:
    content = _content()
    digests = {combine([shard_digests(_on(_mesh(*shape), content))]) for shape in _SHAPES}
    assert len(digests) == 1


def test_processes_contribute_what_they_see() -> None:
    whole = shard_digests(_on(_mesh(4, 2), _content()))
    names = sorted(whole)
    halves = [{name: whole[name] for name in names[start::2]} for start in (0, 1)]
    assert combine(halves) == combine([whole]) == combine([whole, halves[0]])
    assert combine(halves[:1]) != combine([whole])


@pytest.mark.parametrize("change", ["bit", "swap", "path", "dtype", "negative zero"])
def test_every_change_is_seen(change: str) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tree: dict[str, Any] = {"a": values.copy()}
    if change == "bit":
        tree["a"].view(np.uint32)[1, 2] ^= 1
    elif change == "swap":
        tree["a"][[0, 1]] = tree["a"][[1, 0]]
    elif change == "path":
        tree = {"b": values}
    elif change == "dtype":
        tree = {"a": values.view(np.int32)}
    else:
        tree["a"][0, 0] = -0.0
    sharding = NamedSharding(_mesh(1, 1), PartitionSpec())

    def digest(of: Any) -> str:
        return combine([shard_digests(jax.device_put(of, sharding))])

    assert digest(tree) != digest({"a": values})


def test_replicas_that_differ_are_an_error() -> None:
    part = {"['a'][0:2]": "0" * 32}
    with pytest.raises(ReplicasDiffer, match="'a'"):
        combine([part, {"['a'][0:2]": "1" * 32}])


def test_scalars_and_empty_arrays_have_digests() -> None:
    tree = {"scalar": np.float32(1.5), "empty": np.zeros((0, 3), np.float32), "flag": np.True_}
    sharding = NamedSharding(_mesh(2, 1), PartitionSpec())
    found = shard_digests(jax.device_put(tree, sharding))
    assert sorted(found) == ["['empty'][0:0,0:3]", "['flag'][]", "['scalar'][]"]
