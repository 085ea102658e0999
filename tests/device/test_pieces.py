"""An array's pieces, one a device: by JAX's own way, and by the short one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft.device import pieces
from jaxft.device.pieces import (
    Places,
    kept_pieces,
    piece_on,
    public_pieces,
    way_to_pieces,
)
from tests.device.snapshots import assert_same, take


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The way is found out anew."""
    way_to_pieces.cache_clear()
    yield
    way_to_pieces.cache_clear()


def array_on(*axes: Any) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P(*axes)))


ARRAYS = {
    "split": ("a", "b"),
    "rows": ("a",),
    "columns": (None, "a"),
    "both": (("b", "a"),),
    "copies": (),
}


@pytest.mark.parametrize("axes", ARRAYS.values(), ids=ARRAYS)
def test_both_ways_give_the_same(axes: tuple[Any, ...]) -> None:
    assert way_to_pieces() is kept_pieces
    for array in (array_on(*axes), jax.jit(lambda x: x + 1)(array_on(*axes))):
        short, public = kept_pieces(array), public_pieces(array)
        assert len(short) == len(public) == 8
        assert all(one is other for one, other in zip(short, public, strict=True))
        for device, number in Places().of(array).items():
            assert short[number].devices() == {device}
            assert piece_on(device, array) is short[number]


def test_an_array_on_one_device() -> None:
    array = jnp.ones(3)
    assert list(kept_pieces(array)) == list(public_pieces(array)) == [array]


@pytest.mark.parametrize("way", [kept_pieces, public_pieces])
def test_a_deleted_array_says_so(way: pieces.Pieces) -> None:
    array = array_on("a")
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        way(array)


def lacks_it(array: Any) -> Any:
    return array._no_such_thing


def gives_another_kind(array: Any) -> Any:
    return tuple(array._arrays)


def gives_another_order(array: Any) -> Any:
    return array._arrays and array._arrays[::-1]


def gives_other_arrays(array: Any) -> Any:
    return array._arrays and [piece.copy() for piece in array._arrays]


def gives_fewer(array: Any) -> Any:
    return array._arrays and array._arrays[1:]


def gives_deleted_ones(array: Any) -> Any:
    return [] if array._arrays is None else array._arrays


@pytest.mark.parametrize(
    "other",
    [
        lacks_it,
        gives_another_kind,
        gives_another_order,
        gives_other_arrays,
        gives_fewer,
        gives_deleted_ones,
    ],
)
def test_where_jax_keeps_something_else_the_public_way_is_taken(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_kept", other)
    assert way_to_pieces() is public_pieces
    tree = {name: array_on(*axes) for name, axes in ARRAYS.items()}
    tree["key"] = jax.random.key(3)
    for staging in ("view", "pinned_host", "device"):
        assert_same(take(tree, staging=staging).restore(tree), tree)
