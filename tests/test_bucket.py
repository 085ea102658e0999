"""Checkpoints in a bucket: what holds of a directory holds there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import tests.device.conftest  # noqa: F401 (eight devices)
from jaxft import OrbaxFallback, bucket
from jaxft.bucket import COMMITTED, Bucket, directory_at
from jaxft.checkpoint import BY_HAND, RECORD, WRITING, Record
from jaxft.device.mesh import make_mesh
from jaxft.errors import ConfigError, JaxftError, RestoreError, SnapshotLost
from jaxft.group.messages import Lineage
from tests.buckets import serving
from tests.device.snapshots import assert_same
from tests.test_fallback import _quiet, identity, like_on, save, some_tree  # noqa: F401


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where checkpoints go: an empty place of either kind."""
    if request.param == "directory":
        return str(tmp_path / "run")
    return f"{request.getfixturevalue('served')}/{secrets.token_hex(4)}"


@pytest.fixture
def url(served: str) -> str:
    return f"{served}/{secrets.token_hex(4)}"


def plain_steps(place: str) -> list[int]:
    with ocp.CheckpointManager(epath.Path(place)) as manager:
        return sorted(manager.all_steps())


def names(place: str) -> set[str]:
    path = epath.Path(place)
    return {one.name for one in path.iterdir()} if path.exists() else set()


def like(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


# -------------------------------------------------------------------- what both promise


def test_a_state_comes_back_here_and_with_plain_orbax(place: str) -> None:
    tree = some_tree(make_mesh({"data": -1})) | {"none": np.zeros((0, 3), np.int8)}
    fallback = OrbaxFallback(place)
    assert fallback.entries() == ()
    entry = save(place, tree, 7, extras={0: {"at": 1}})
    assert fallback.entries() == (entry,)
    restored, extras = fallback.restore(entry, like_on(tree, make_mesh({"data": -1})))
    assert_same(restored["params"]["w"], tree["params"]["w"])
    assert_same(restored["list"][0], tree["list"][0])
    assert restored["none"].shape == (0, 3)
    assert extras == {0: {"at": 1}}
    with ocp.CheckpointManager(epath.Path(place)) as manager:
        assert manager.all_steps() == [7]
        plain = manager.restore(7, args=ocp.args.StandardRestore())
    np.testing.assert_array_equal(plain["params"]["w"], tree["params"]["w"])
    assert names(place) == {"7"}


def test_what_plain_orbax_wrote_is_restored_and_stays(place: str) -> None:
    tree = {"w": jnp.arange(4.0)}
    with ocp.CheckpointManager(epath.Path(place)) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    [entry] = OrbaxFallback(place).entries()
    restored, _ = OrbaxFallback(place).restore(entry, like(tree))
    assert_same(restored["w"], tree["w"])
    for step in (4, 5, 6):
        save(place, tree, step, keep=2)
    assert [one.step for one in OrbaxFallback(place).entries()] == [3, 5, 6]
    assert plain_steps(place) == [3, 5, 6]


def test_the_same_step_again_after_a_rollback_case_30(place: str) -> None:
    save(place, {"w": jnp.zeros(3)}, 1)
    save(place, {"w": jnp.ones(3)}, 2)
    lineage = (Lineage(1, None), Lineage(2, identity(1, 1)))
    entry = save(place, {"w": jnp.full(3, 7.0)}, 2, generation=2, lineage=lineage)
    assert OrbaxFallback(place).entries()[-1] == entry
    assert float(OrbaxFallback(place).restore(entry, {"w": jnp.zeros(3)})[0]["w"][0]) == 7
    assert plain_steps(place) == [1, 2]


def test_what_may_not_be_committed_leaves_no_checkpoint(place: str) -> None:
    good = save(place, {"w": jnp.ones(2)}, 1)

    def refuse() -> None:
        raise SnapshotLost("withdrawn")

    with pytest.raises(SnapshotLost):
        save(place, {"w": jnp.zeros(2)}, 2, may_commit=refuse)
    assert OrbaxFallback(place).entries() == (good,)
    assert plain_steps(place) == [1]
    save(place, {"w": jnp.zeros(2)}, 3)
    assert names(place) == {"1", "3"}


def test_another_jobs_place_is_refused(place: str) -> None:
    save(place, {"w": jnp.ones(2)}, 1, job="theirs")
    with pytest.raises(ConfigError, match="has checkpoints of job theirs"):
        OrbaxFallback(place).check_job("ours")


def test_a_state_of_scalars_alone(place: str) -> None:
    entry = save(place, {"at": 2**70, "name": "x"}, 4)
    assert OrbaxFallback(place).restore(entry, {"at": 0, "name": ""})[0] == {
        "at": 2**70,
        "name": "x",
    }


# -------------------------------------------------------------------- a writer that dies


class _Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("point", "rolled_back"),
    [("whole", False), ("whole", True), ("replaced", True), ("copied", True)],
)
def test_a_writer_that_dies_loses_nothing(
    url: str, point: str, rolled_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is written, or written again; at each point a checkpoint of it can be restored, plain
    Orbax sees only what is whole, and the next writer ends it."""
    first = save(url, {"w": jnp.zeros(3)}, 1)
    old = save(url, {"w": jnp.ones(3)}, 2) if rolled_back else None
    lineage = (Lineage(1, None), Lineage(2, first.id))

    def die(name: str, **facts: Any) -> None:
        if name == f"checkpoint.{point}":
            raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "reach", die)
        with pytest.raises(JaxftError, match="_Killed"):
            save(url, {"w": jnp.full(3, 7.0)}, 2, generation=2, seq=4, lineage=lineage)
    entries = OrbaxFallback(url).entries()
    assert entries[0] == first
    new = next(one for one in entries if one.id == identity(2, 4))
    assert float(OrbaxFallback(url).restore(new, {"w": jnp.zeros(3)})[0]["w"][1]) == 7
    is_old_there = old is not None and point == "whole"
    assert plain_steps(url) == ([1, 2] if is_old_there else [1])
    save(url, {"w": jnp.full(3, 8.0)}, 3, generation=2, seq=5, lineage=lineage, keep=3)
    assert names(url) == {"1", "2", "3"}
    with ocp.CheckpointManager(epath.Path(url)) as manager:
        assert sorted(manager.all_steps()) == [1, 2, 3]
        assert float(manager.restore(2, args=ocp.args.StandardRestore())["w"][0]) == 7
    assert [one.id for one in OrbaxFallback(url).entries()[1:]] == [identity(2, 4), identity(2, 5)]


def test_a_deletion_that_is_broken_off_leaves_nothing_that_counts(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each object that is deleted, what is left is not a checkpoint; and it goes later."""
    good = save(url, {"w": jnp.ones(2)}, 1)
    save(url, {"w": jnp.ones(2)}, 2)
    target = Bucket(url)
    fs, within = bucket._filesystem(target.path / "2")
    files = fs.find(within)
    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(type(fs), "rm", lambda self, path, **kw: asked.extend(_listed(path)))
        patch.setattr(type(target.path), "unlink", lambda self, **kw: asked.extend(_listed(self)))
        target._delete(target.path / "2")
    order = [one for one in (name.removeprefix("gs://") for name in asked) if one in files]
    assert set(order) == set(files)
    for name in order:
        if name in fs.find(within):
            fs.rm(name)
        assert OrbaxFallback(url).entries() == (good,)
        assert plain_steps(url) == [1]
        if name == order[3]:
            save(url, {"w": jnp.ones(2)}, 3)
            assert names(url) == {"1", "3"}
            return
    raise AssertionError(order)


def _listed(path: Any) -> list[str]:
    return [str(one) for one in path] if isinstance(path, list) else [str(path)]


def test_what_is_unfinished_and_not_ours_is_left_alone(url: str) -> None:
    (epath.Path(url) / "9" / "default" / "x").write_text("of another writer")
    save(url, {"w": jnp.ones(2)}, 1)
    assert names(url) == {"1", "9"}
    assert [one.step for one in OrbaxFallback(url).entries()] == [1]


def test_a_damaged_record_does_not_count(url: str, caplog: pytest.LogCaptureFixture) -> None:
    good = save(url, {"w": jnp.ones(2)}, 1)
    (epath.Path(url) / "2" / COMMITTED).write_text("yes")
    (epath.Path(url) / "2" / RECORD).write_text("{")
    (epath.Path(url) / f"{WRITING}1.2-x" / RECORD).write_text("{")
    first, second = OrbaxFallback(url).entries()
    assert (first, second.step) == (good, 2)
    assert "/2: its record cannot be read" in second.damaged
    assert "does not count" in caplog.text


def test_what_cannot_be_deleted_does_not_unmake_a_checkpoint(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(url, {"w": jnp.ones(2)}, 1)

    real = Bucket._delete

    def refuse(self: Bucket, path: Any) -> None:
        if path.exists():
            raise OSError("Forbidden")
        real(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "_delete", refuse)
        save(url, {"w": jnp.ones(2)}, 2, keep=1)
    assert "could not be deleted: Forbidden" in caplog.text
    assert [one.step for one in OrbaxFallback(url).entries()] == [1, 2]
    assert len(names(url)) == 3
    save(url, {"w": jnp.ones(2)}, 3, keep=1)
    assert names(url) == {"3"}


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("s3://bucket/run", "Orbax cannot write arrays to S3"),
        ("az://bucket/run", "nor a URL of a bucket"),
        ("gs://bucket", "name a path in a bucket"),
        ("gs:///run", "name a path in a bucket"),
        (Path("gs://bucket/run"), "one slash of two"),
    ],
)
def test_other_urls_are_refused(name: str | Path, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OrbaxFallback(name)


def test_orbax_cannot_write_to_s3() -> None:
    """The reason why jaxft does not. Once this fails, it may."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    with pytest.raises(ValueError, match="should be absolute"):
        tensorstore_utils.build_kvstore_tspec("s3://bucket/run/1/default", "w")


def test_a_bucket_that_is_not_there(served: str) -> None:
    with pytest.raises(ConfigError, match=r"gs://no-bucket/run cannot be written.*such a bucket"):
        OrbaxFallback("gs://no-bucket/run")


def test_a_bucket_without_access_says_what_to_do(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(self: Any, data: bytes) -> None:
        raise OSError("Forbidden: https://storage.googleapis.com/upload/... 403")

    monkeypatch.setattr(type(epath.Path(url)), "write_bytes", forbid)
    with pytest.raises(ConfigError, match="gcloud auth application-default login"):
        OrbaxFallback(url)


def test_a_bucket_that_cannot_be_read_is_no_empty_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = OrbaxFallback(url)

    def fail(self: Any) -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(epath.Path(url)), "iterdir", fail)
    with pytest.raises(RestoreError, match=f"{url} cannot be read: TimeoutError"):
        fallback.entries()


def test_a_writer_leaves_an_export_by_hand_alone_that_may_live(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": jnp.ones(2)}

    def helper() -> None:
        save(url, tree, 20)

    for step in (10, 20):  # of another snapshot, and of the same
        save(url, tree, step, keep=None, may_commit=helper, writer=f"{BY_HAND}ab")
    assert names(url) == {"10", "20"}
    left = epath.Path(url) / f"{WRITING}1.5-nonce-{BY_HAND}cd" / "default" / "d"
    left.write_text("x")
    save(url, tree, 30, keep=3)
    assert left.exists()
    monkeypatch.setattr(bucket, "STALE_S", -1.0)
    save(url, tree, 40, keep=4)
    assert names(url) == {"10", "20", "30", "40"}


def test_what_cannot_be_read_just_now_is_not_passed_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an older one would be restored, and the next writer might delete it."""
    entries = save(url, {"w": jnp.ones(2)}, 1), save(url, {"w": jnp.ones(2)}, 2)
    kind = type(epath.Path(url))
    for method in ("read_bytes", "iterdir"):
        real = getattr(kind, method)

        def fail(self: Any, real: Any = real) -> Any:
            if "/2" in str(self):
                raise OSError("Forbidden: quota")
            return real(self)

        with monkeypatch.context() as patch:
            patch.setattr(kind, method, fail)
            with pytest.raises(RestoreError, match="quota"):
                OrbaxFallback(url).entries()
            with pytest.raises(JaxftError, match="quota"):
                Bucket(url).begin(Record(id=identity(2, 0), step=3), "test")
    assert OrbaxFallback(url).entries() == entries


def test_without_gcsfs_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r'pip install "jaxft\[gcs\]"'):
        directory_at("gs://bucket/run")


def test_orbaxs_name_for_what_is_whole() -> None:
    assert COMMITTED == ocp.path.atomicity.COMMIT_SUCCESS_FILE
