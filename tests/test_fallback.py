"""Checkpoints on storage: what is written comes back the same, here and with plain Orbax."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tests.device.conftest  # noqa: F401 (eight devices)
from jaxft import OrbaxFallback, faults
from jaxft.checkpoint import BY_HAND, Directory, Record
from jaxft.device.leaves import empty_nodes
from jaxft.device.mesh import make_mesh
from jaxft.device.placing import assemble
from jaxft.errors import ConfigError, JaxftError, RestoreError, SnapshotLost, TreeMismatch
from jaxft.export import copies, write
from jaxft.group.manifest import Leaf, SnapshotId
from jaxft.group.messages import Lineage, StorageEntry
from jaxft.orbax_tree import nest, place
from jaxft.sums import SUMS, check_sums
from tests.device.snapshots import assert_same, raw, take


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Orbax logs the traceback of each error that it raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
    faults.arm("")


def identity(generation: int, seq: int) -> SnapshotId:
    return SnapshotId(generation, seq, "nonce")


def save(
    directory: Path,
    tree: Any,
    step: int,
    *,
    generation: int = 1,
    seq: int | None = None,
    is_of: SnapshotId | None = None,
    lineage: tuple[Lineage, ...] = (Lineage(1, None),),
    extras: dict[int, Any] | None = None,
    keep: int | None = 2,
    may_commit: Any = lambda: None,
    job: str = "",
    writer: str = "test",
) -> StorageEntry:
    """Writes a snapshot of the tree, taken by two hosts, as a world of one helper would."""
    snapshot = take(tree, 2)
    stored = place(snapshot.manifests[0].leaves)
    record = Record(
        id=is_of or identity(generation, step if seq is None else seq),
        job=job,
        step=step,
        lineage=lineage,
        leaves=stored,
        extras={rank: msgspec.msgpack.encode(one) for rank, one in (extras or {}).items()},
    )
    mesh = Mesh(np.array(jax.devices()[:1]), ("host",))

    def read(host: int, offset: int, nbytes: int) -> np.ndarray:
        return snapshot.segments[host][offset : offset + nbytes]

    with jax.enable_x64(True):
        arrays = assemble(copies(snapshot.manifests, stored, mesh), read)
        values = {int(name): array for name, array in arrays.items()}
        write(
            directory,
            record,
            values,
            empty_nodes(tree),
            keep=keep,
            may_commit=may_commit,
            writer=writer,
        )
    return record.entry


class Pair(NamedTuple):
    one: Any
    two: Any


def some_tree(mesh: Mesh) -> Any:
    """A training state as people have it, sharded and replicated."""
    params = {
        "w": jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh, P("data"))),
        "b": {"c": jax.device_put(jnp.arange(6, dtype=jnp.bfloat16), NamedSharding(mesh, P()))},
    }
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.scale(1.0))
    opt = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), tx.init(params))
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), NamedSharding(mesh, P("data")))
    return {
        "params": params,
        "opt": opt,
        "keys": keys,
        "rbg": jax.device_put(jax.random.key(4, impl="rbg"), NamedSharding(mesh, P())),
        "list": [np.arange(5), None, {}, (), Pair(jnp.ones((2, 2)), [])],
        "step": 17,
        "layers": {1: jnp.ones(3), 10: jnp.ones(2)},
    }


def like_on(tree: Any, mesh: Mesh) -> Any:
    """The same state as the target on another mesh."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.committed:
            spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        return leaf

    return jax.tree.map(move, tree)


def test_a_state_comes_back_on_another_mesh_case_19(tmp_path: Path) -> None:
    tree = some_tree(make_mesh({"data": -1}))
    fallback = OrbaxFallback(tmp_path / "new" / "there")
    assert fallback.entries() == ()
    entry = save(tmp_path / "new" / "there", tree, 7, extras={0: {"at": 1}, 1: b"two", 2: None})
    assert fallback.entries() == (entry,)
    mesh = make_mesh({"model": 2, "data": -1})
    restored, extras = fallback.restore(entry, like_on(tree, mesh))
    expected = jax.tree.map(
        lambda leaf, like: (
            jax.device_put(leaf, like.sharding) if isinstance(like, jax.ShapeDtypeStruct) else leaf
        ),
        tree,
        like_on(tree, mesh),
    )
    assert_same(restored, expected)
    assert extras == {0: {"at": 1}, 1: b"two", 2: None}


def test_plain_orbax_restores_it_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = some_tree(make_mesh({"data": -1}))
    save(tmp_path, tree, 7)
    caplog.set_level(logging.WARNING, "absl")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 7
        restored = manager.restore(7, args=ocp.args.StandardRestore(tree))
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        arrays = [leaf for leaf in jax.tree.leaves(tree) if leaf is not tree["step"]]
        found = [leaf for leaf in jax.tree.leaves(restored) if leaf is not restored["step"]]
        assert list(map(raw, found)) == list(map(raw, arrays))
        assert restored["step"] == 17
        without_target = manager.restore(7, args=ocp.args.StandardRestore())
        assert without_target["opt"][1][0]["mu"]["w"].shape == (16, 4)
        assert without_target["list"][1:4] == [None, {}, ()]
        assert manager.metadata(7).item_metadata is not None
    assert not [one for one in caplog.messages if "jaxft" in one]
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.save(8, args=ocp.args.StandardSave(tree))


def test_what_plain_orbax_wrote_is_restored(tmp_path: Path) -> None:
    tree = some_tree(make_mesh({"data": -1}))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))
    fallback = OrbaxFallback(tmp_path)
    (entry,) = fallback.entries()
    assert entry == StorageEntry(5)
    like = like_on(tree, make_mesh({"model": 4, "data": -1}))
    restored, extras = fallback.restore(entry, like)
    assert extras == {}
    assert restored["params"]["w"].sharding == like["params"]["w"].sharding
    assert_same(fallback.restore(entry, tree)[0], tree)


def test_a_plain_item_of_another_name_is_found(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(3)}
    with ocp.CheckpointManager(tmp_path) as manager:
        state, meta = ocp.args.StandardSave(tree), ocp.args.JsonSave({"a": 1})
        manager.save(5, args=ocp.args.Composite(train_state=state, meta=meta))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "6", tree)
    with ocp.CheckpointManager(tmp_path) as manager:
        both = ocp.args.Composite(one=ocp.args.StandardSave(tree), two=ocp.args.StandardSave(tree))
        manager.save(8, args=both)
    fallback = OrbaxFallback(tmp_path)
    five, six, eight = fallback.entries()
    assert_same(fallback.restore(five, tree)[0], tree)
    assert_same(fallback.restore(six, tree)[0], tree)
    with pytest.raises(RestoreError, match="2 items with a tree"):
        fallback.restore(eight, tree)


ODD = {
    "empty": jnp.zeros((0, 3)),
    "numpy_empty": np.zeros((2, 0), np.int16),
    "no_keys": jax.random.split(jax.random.key(0), 4)[:0],
    "text": "text",
    "bytes": b"\xff\x00",
    "big": 2**70,
    "complex": 1j,
    "nan": float("nan"),
    "flag": True,
    "half": np.float16(0.1),
    "e4m3": jnp.arange(6, dtype=jnp.float32).astype("float8_e4m3").reshape(2, 3),
    "uint4": jnp.arange(5, dtype="uint4"),
    "int4": jnp.arange(5, dtype="int4"),
    "long": np.arange(3, dtype=np.longlong),
    "names": np.array(["a", "bcd"]),
    "times": np.array(["2026-01-01"], "M8[D]"),
    "turned": np.arange(3, dtype=">f4"),
    "weak": jnp.asarray(2.5),
    "scalar": jnp.int32(3),
    "minus_zero": jnp.array([-0.0, jnp.inf]),
    "a.b": jnp.ones(2),
    "a": {"b": jnp.zeros(2)},
    "": jnp.ones(1),
}


def odd_tree() -> Any:
    return [*ODD.values(), {("t", 1): jax.random.key(9)}]


def test_what_orbax_cannot_hold_comes_back_case_9_11_12_14(tmp_path: Path) -> None:
    tree = {"odd": odd_tree(), "a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    mesh = make_mesh({"data": -1})
    rows = NamedSharding(mesh, P("data"))
    tree["spread"] = jax.device_put(jnp.arange(16.0).astype("float8_e4m3"), rows)
    tree["keys.x"] = jax.device_put(jax.random.split(jax.random.key(0), 8), rows)
    tree["keys"] = {"x": jax.device_put(jax.random.split(jax.random.key(1), 8), rows)}
    entry = save(tmp_path, tree, 3)
    restored, _ = OrbaxFallback(tmp_path).restore(entry, tree)
    assert_same(restored, tree)
    odd = restored["odd"]
    plain = {key: found for key, found in zip(ODD, odd, strict=False) if key in PYTHON}
    assert {key: (type(value), repr(value)) for key, value in plain.items()} == {
        key: (type(ODD[key]), repr(ODD[key])) for key in PYTHON
    }
    assert odd[list(ODD).index("weak")].weak_type


PYTHON = ("text", "bytes", "big", "complex", "nan", "flag", "half")


def test_colliding_names_do_not_lose_a_leaf(tmp_path: Path) -> None:
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    entry = save(tmp_path, tree, 1)
    assert_same(OrbaxFallback(tmp_path).restore(entry, tree)[0], tree)
    paths = [
        (("k", "a"), ("k", 1)),
        (("k", "a"), ("k", "1")),
        (("k", "a"), ("i", 2)),
        (("k", "a"), ("k", 1), ("k", "x")),
        (("k", "a"),),
        (),
    ]
    stored = place([Leaf(path, "array", (1,), "float32") for path in paths])
    assert [one.where for one in stored] == ["tree"] + 5 * ["bytes"]


def test_a_single_array_and_a_state_of_scalars(tmp_path: Path) -> None:
    for step, tree in enumerate((jnp.arange(4), [np.arange(3), "only", 7], {"x": jnp.zeros(0)})):
        if step == 2:
            tree = {**tree, "y": np.float32(1), "z": jnp.ones(1)}
        entry = save(tmp_path, tree, step)
        assert_same(OrbaxFallback(tmp_path).restore(entry, tree)[0], tree)


def test_numpy_in_the_target_takes_what_a_step_made_of_it(tmp_path: Path) -> None:
    first = {
        "w": np.ones((4, 2)),
        "n": np.int32(0),
        "none": np.zeros((0, 3)),
        "eighth": np.ones(3, "float8_e4m3"),
    }
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf) + jnp.asarray(leaf), first)
    entry = save(tmp_path, tree, 1)
    assert_same(OrbaxFallback(tmp_path).restore(entry, first)[0], tree)


@pytest.mark.parametrize("wrote", ["jaxft", "orbax"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"w": jnp.zeros((4, 3))}, r"\['w'\].*\[4, 3\].*\[4, 2\]"),
        ({"w": jnp.zeros((4, 2), jnp.bfloat16)}, r"\['w'\].*bfloat16.*float32"),
        ({"more": jnp.zeros(1)}, r"lacks.*\['more'\]"),
        ({"n": 2.5}, r"\['n'\].*float"),
    ],
)
def test_another_target_is_refused_by_path_case_17(tmp_path, wrote, change, says):
    tree = {"w": jnp.zeros((4, 2)), "n": 5}
    if wrote == "jaxft":
        save(tmp_path, tree, 1)
    else:
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(1, args=ocp.args.StandardSave(tree))
    fallback = OrbaxFallback(tmp_path)
    (entry,) = fallback.entries()
    with pytest.raises(TreeMismatch, match=says):
        fallback.restore(entry, {**tree, **change})
    smaller = {"w": tree["w"]}
    with pytest.raises(TreeMismatch, match="target lacks"):
        fallback.restore(entry, smaller)
    assert_same(fallback.restore(entry, smaller, strict=False)[0], smaller)


def test_the_same_step_again_after_a_rollback_case_30(tmp_path: Path) -> None:
    trees = [{"w": jnp.full(3, number)} for number in range(4)]
    fallback = OrbaxFallback(tmp_path)
    save(tmp_path, trees[0], 10)
    base = save(tmp_path, trees[1], 20).id
    save(tmp_path, trees[2], 30)
    lineage = (Lineage(1, None), Lineage(2, base))
    again = save(tmp_path, trees[3], 30, generation=2, seq=1, lineage=lineage)
    assert [entry.step for entry in fallback.entries()] == [20, 30]
    assert fallback.entries()[1] == again
    assert_same(fallback.restore(again, trees[3])[0], trees[3])
    lower = save(tmp_path, trees[2], 20, generation=3, seq=0, lineage=(*lineage, Lineage(3, None)))
    assert fallback.entries() == (lower,)
    with pytest.raises(RestoreError, match="any more"):
        fallback.restore(again, trees[3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["20"]


def test_a_writer_that_dies_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    trees = [{"w": jnp.full(3, number)} for number in range(3)]
    fallback = OrbaxFallback(tmp_path)
    old = save(tmp_path, trees[0], 10)
    faults.arm("checkpoint.replaced=raise")
    with pytest.raises(RuntimeError, match="fault on purpose"):
        save(tmp_path, trees[1], 10, seq=11)
    assert fallback.entries() == (old,)
    assert_same(fallback.restore(old, trees[0])[0], trees[0])
    new = save(tmp_path, trees[2], 10, seq=12)
    assert fallback.entries() == (new,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10"]


def test_what_may_not_be_committed_leaves_no_checkpoint(tmp_path: Path) -> None:
    old = save(tmp_path, {"w": jnp.ones(1)}, 10)

    def refuse() -> None:
        raise SnapshotLost("the order was withdrawn")

    with pytest.raises(SnapshotLost):
        save(tmp_path, {"w": jnp.zeros(1)}, 20, may_commit=refuse)
    assert OrbaxFallback(tmp_path).entries() == (old,)
    assert [path.name for path in tmp_path.iterdir()] == ["10"]  # a full disk does not stay so
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [10]


def test_plain_checkpoints_stay_and_ours_are_kept_to_a_number(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(1)}))
    for step in (2, 3, 4):
        save(tmp_path, {"w": jnp.ones(1)}, step, keep=1)
    assert [entry.step for entry in OrbaxFallback(tmp_path).entries()] == [1, 4]


def test_another_jobs_newer_identities_never_delete_the_one_just_written(tmp_path: Path) -> None:
    save(tmp_path, {"w": jnp.ones(1)}, 100, generation=9)
    new = save(tmp_path, {"w": jnp.ones(1)}, 5, generation=1, keep=1)
    assert OrbaxFallback(tmp_path).entries() == (new,)


def test_a_damaged_record_does_not_count(tmp_path: Path) -> None:
    good = save(tmp_path, {"w": jnp.ones(1)}, 1)
    save(tmp_path, {"w": jnp.ones(1)}, 2)
    (tmp_path / "2" / "jaxft.json").write_text("{")
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "4").write_text("a file")
    first, second = OrbaxFallback(tmp_path).entries()
    assert (first, second.step, second.id) == (good, 2, None)
    assert f"{tmp_path / '2'}: its record cannot be read" in second.damaged
    assert [found.entry for found in Directory(tmp_path).found()] == [good]


def test_what_has_lost_its_record_is_not_taken_for_plain_orbaxs(tmp_path: Path) -> None:
    """Leaves are missing in it, or it is of a future that was left."""
    save(tmp_path, {"w": jnp.zeros(3, "float8_e4m3")}, 2)
    (tmp_path / "2" / "jaxft.json").unlink()
    [entry] = OrbaxFallback(tmp_path).entries()
    assert "its record cannot be read" in entry.damaged


def test_what_cannot_be_deleted_does_not_unmake_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, {"w": jnp.ones(1)}, 1)

    def refuse(self: Directory, path: Path) -> None:
        raise PermissionError(f"no deleting of {path}")

    monkeypatch.setattr(Directory, "_remove", refuse)
    with caplog.at_level(logging.WARNING, "jaxft.checkpoint"):
        save(tmp_path, {"w": jnp.ones(1)}, 2, keep=1)
    assert [entry.step for entry in OrbaxFallback(tmp_path).entries()] == [1, 2]
    assert "could not be deleted" in caplog.text


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="checkpoints cannot go to"):
            OrbaxFallback(wrong)
    OrbaxFallback(tmp_path / "not" / "yet")
    assert not (tmp_path / "not").exists()


def test_another_jobs_directory_is_refused_and_its_own_is_not(tmp_path: Path) -> None:
    save(tmp_path, {"w": jnp.ones(1)}, 1, job="one")
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(2, args=ocp.args.StandardSave({"w": jnp.ones(1)}))
    OrbaxFallback(tmp_path).check_job("one")
    with pytest.raises(ConfigError, match="checkpoints of job one, and this is job two: use anoth"):
        OrbaxFallback(tmp_path).check_job("two")


def test_two_writers_of_one_directory_do_each_other_no_harm(tmp_path: Path) -> None:
    """As a helper of the job and `jaxft export` by hand: each begins while the other writes."""
    tree = {"w": jnp.arange(3.0)}
    fallback = OrbaxFallback(tmp_path)
    seen = []

    def by_hand() -> None:
        """Begins, writes and commits while the first has written all and has no name yet."""
        seen.append({path.name for path in tmp_path.iterdir()})
        save(tmp_path, tree, 10, keep=None, writer=f"{BY_HAND}ab")
        seen.append({path.name for path in tmp_path.iterdir()})

    entry = save(tmp_path, tree, 10, may_commit=by_hand, writer="persist7")
    assert len(seen[0]) == 1
    assert seen[1] == {*seen[0], "10"}
    assert fallback.entries() == (entry,)
    assert_same(fallback.restore(entry, tree)[0], tree)
    assert [path.name for path in tmp_path.iterdir()] == ["10"]

    def helper() -> None:
        save(tmp_path, tree, 20, writer="persist8")

    entry = save(tmp_path, tree, 20, keep=None, may_commit=helper, writer=f"{BY_HAND}cd")
    assert [one.step for one in fallback.entries()] == [10, 20]
    assert_same(fallback.restore(entry, tree)[0], tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]


def test_who_writes_by_hand_replaces_nothing_and_nobody_replaces_what_is_newer(
    tmp_path: Path,
) -> None:
    """The job went back and came to the same step again while an export of before was written."""
    old, new = {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
    lineage = (Lineage(1, None), Lineage(2, identity(1, 5)))

    def again() -> None:
        save(tmp_path, new, 10, generation=2, seq=1, lineage=lineage, writer="persist7")

    for keep, writer in ((None, f"{BY_HAND}ab"), (2, "persist3")):
        with pytest.raises(JaxftError, match=r"step 10.*snapshot 2\.1, and this is snapshot 1\.10"):
            save(tmp_path, old, 10, keep=keep, may_commit=again, writer=writer)
        [entry] = OrbaxFallback(tmp_path).entries()
        assert entry.id == identity(2, 1)
        assert_same(OrbaxFallback(tmp_path).restore(entry, new)[0], new)


def test_what_a_dead_export_has_left_goes_when_it_is_old(tmp_path: Path) -> None:
    """Of one that lives nobody knows but by the age of what it wrote last."""
    left = tmp_path / f"jaxft-writing-1.10-nonce-{BY_HAND}ab"
    (left / "default").mkdir(parents=True)
    save(tmp_path, {"w": jnp.ones(1)}, 20)
    assert left.exists()
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, 0))
    save(tmp_path, {"w": jnp.ones(1)}, 30)
    assert not left.exists()


def test_two_jobs_that_began_in_one_directory_keep_their_own(tmp_path: Path) -> None:
    """None had a checkpoint there when the other one looked."""
    tree = {"w": jnp.ones(1)}
    one = save(tmp_path, tree, 10, job="one", keep=1)
    for step in (10, 20):
        with pytest.raises(ConfigError, match="checkpoints of job one, and this is job two"):
            save(tmp_path, tree, step, generation=2, job="two", keep=1)

    def first() -> None:
        save(tmp_path / "at_once", tree, 10, job="one")

    with pytest.raises(ConfigError, match="checkpoints of job one, and this is job two"):
        save(tmp_path / "at_once", tree, 10, generation=2, job="two", may_commit=first)
    for directory in (tmp_path, tmp_path / "at_once"):
        [entry] = OrbaxFallback(directory).entries()
        assert entry.id == one.id


def test_leftovers_that_cannot_be_deleted_are_no_reason_not_to_persist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "jaxft-writing-1.1-a").mkdir()
    (tmp_path / "jaxft-removed-5").mkdir()

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise PermissionError(f"no deleting of {path}")

    monkeypatch.setattr("jaxft.checkpoint.shutil.rmtree", refuse)
    with caplog.at_level(logging.WARNING, "jaxft.checkpoint"):
        entry = save(tmp_path, {"w": jnp.ones(1)}, 2)
    assert OrbaxFallback(tmp_path).entries() == (entry,)
    assert "jaxft-removed-5 could not be deleted" in caplog.text


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_of_an_array_is_found(tmp_path: Path) -> None:
    """Orbax gives back what it finds."""
    tree = {
        "w": jnp.asarray(np.random.default_rng(0).standard_normal(5000)),
        "e4m3": jnp.arange(8.0).astype("float8_e4m3"),
    }
    entry = save(tmp_path, tree, 7)
    fallback = OrbaxFallback(tmp_path)
    assert_same(fallback.restore(entry, tree)[0], tree)
    files = [path for path in (tmp_path / "7" / "default").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    good = largest.read_bytes()
    for damage in (flip, lambda path: path.write_bytes(good[:-1]), Path.unlink):
        damage(largest)
        with pytest.raises(RestoreError, match=rf"{tmp_path / '7'}.*{largest.name}"):
            fallback.restore(entry, tree)
        largest.write_bytes(good)
    assert_same(fallback.restore(entry, tree)[0], tree)
    # Every file is looked at by one of those who restore together.
    for path in (tmp_path / "7").rglob("*"):
        if path.is_file() and not path.name.startswith(SUMS):
            data = path.read_bytes()
            flip(path)
            assert sum(is_refused(tmp_path / "7", process) for process in range(3)) == 1, path
            path.write_bytes(data)


def is_refused(checkpoint: Path, process: int) -> bool:
    try:
        check_sums(checkpoint, process, 3)
    except RestoreError:
        return True
    return False


def test_a_checkpoint_without_sums_is_taken_as_it_is(tmp_path: Path) -> None:
    """An older jaxft wrote it."""
    tree = {"w": jnp.arange(3.0)}
    entry = save(tmp_path, tree, 7)
    for path in (tmp_path / "7").glob(f"{SUMS}*"):
        path.unlink()
    assert_same(OrbaxFallback(tmp_path).restore(entry, tree)[0], tree)


def test_options_are_checked(tmp_path: Path) -> None:
    assert OrbaxFallback("some/where").directory == str(Path.cwd() / "some" / "where")
    for wrong in ("", "s3://bucket/there"):
        with pytest.raises(ConfigError, match="directory"):
            OrbaxFallback(wrong)
    with pytest.raises(ConfigError, match="every"):
        OrbaxFallback(tmp_path, every=0)
    with pytest.raises(ConfigError, match="keep"):
        OrbaxFallback(tmp_path, keep=0)


def test_a_nest_has_orbaxs_structure() -> None:
    assert nest([((("k", "a"), ("i", 2)), 1), ((("k", "b"), ("a", "x")), 2)]) == {
        "a": [None, None, 1],
        "b": {"x": 2},
    }
