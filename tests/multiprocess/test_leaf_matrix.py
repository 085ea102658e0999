"""Every kind of leaf goes through memory to storage, and comes back: with jaxft to where it
was, and without it from what lies in the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxft import OrbaxFallback
from jaxft.export import copy, write
from jaxft.restorer import SnapshotReader
from tests.device.snapshots import assert_same, raw
from tests.multiprocess.jax_world import WAIT_S
from tests.multiprocess.lone import Lone
from tests.multiprocess.test_one_rank import a_tree_with_everything


def persist(lone: Lone, tree: Any, directory: Path) -> None:
    """Takes a snapshot and writes it as a persist helper does."""
    with lone.open(every=1) as snapshotter:
        assert snapshotter.restore(tree) is None
        receipt = snapshotter.save(1, tree, {"at": b"\x00\xff"})
        receipt.protected.result(WAIT_S)
        assert receipt.id is not None
        own = (snapshotter.client.granted[receipt.id.seq].slot, 0)
        reader = SnapshotReader(snapshotter.client, receipt.id, own, attempt=None, timeout_s=WAIT_S)
        with jax.enable_x64(True):
            mesh = Mesh(np.array(jax.devices()[:1]), ("host",))
            copied = copy(receipt.id, "test", (), reader.manifests, reader.assemble, mesh)
            write(directory, *copied, keep=1, may_commit=lambda: None, writer="test")


def test_every_leaf_goes_to_storage_and_back_case_9_10_11_12_13_14_15_16_18(
    lone: Lone, tmp_path: Path
) -> None:
    tree = a_tree_with_everything()
    persist(lone, tree, tmp_path)
    (entry,) = OrbaxFallback(tmp_path).entries()
    restored, extras = OrbaxFallback(tmp_path).restore(entry, tree)
    assert_same(restored, tree)
    assert extras == {0: {"at": b"\x00\xff"}}
    for have, want in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert getattr(have, "weak_type", None) == getattr(want, "weak_type", None)
    places = by_hand(tmp_path / "1", jax.tree.leaves(tree))
    assert min(places[where] for where in ("tree", "bytes", "record")) > 3, places


def by_hand(checkpoint: Path, leaves: list[Any]) -> dict[str, int]:
    """Reads each leaf from where the checkpoint says that it lies, with nothing of jaxft; how many
    lie where."""
    record = json.loads((checkpoint / "jaxft.json").read_text())
    with ocp.StandardCheckpointer() as checkpointer, jax.enable_x64(True):
        tree = checkpointer.restore(checkpoint / "default")
        beside = checkpointer.restore(checkpoint / "jaxft_bytes")
    places = dict.fromkeys(("tree", "bytes", "record"), 0)
    assert len(record["leaves"]) == len(leaves)
    for number, (stored, want) in enumerate(zip(record["leaves"], leaves, strict=True)):
        where, leaf = stored["where"], stored["leaf"]
        places[where] += 1
        if where == "record":
            assert not hasattr(want, "shape") or want.size == 0 or want.shape == (), leaf
            continue
        if where == "bytes":
            data = np.asarray(beside[str(number)])
            found = data.view(np.asarray(_data(want)).dtype).reshape(data.shape[:-1])
            assert raw(found) == raw(_data(want)), leaf
        else:
            assert raw(_at(tree, leaf)) == raw(want), leaf
    return places


def _data(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _at(tree: Any, leaf: Any) -> Any:
    path = leaf["path"] if isinstance(leaf, dict) else leaf[0]
    for _, name in path:
        tree = tree[int(name)] if isinstance(tree, list) else tree[str(name)]
    return tree
