"""Checkpoints in a bucket (gs://), where nothing can be renamed.

    gs://BUCKET/RUN/
      100/                            step 100, for Orbax: whole once `commit_success.txt` is in it
        commit_success.txt
        default/, jaxft_bytes/, jaxft.json      as in a directory: see `checkpoint`
      jaxft-writing-3.7-1f00/         becomes step 100; whole for jaxft once `jaxft.json` is in it

The rules:
- One object makes a checkpoint whole: it is written last, and deleted first. For Orbax that is its
  `commit_success.txt`, for jaxft also the record of a checkpoint that has no step's name yet.
- A checkpoint is written under a name of its own, so a writer that was cut off and wakes up writes
  over nobody's files. Then its record commits it; then the old checkpoint of its step is deleted
  and it is copied to its step's name, within the bucket, not by way of this machine.
- Whoever dies in between leaves a checkpoint that jaxft restores; the next writer ends the copying.
- `jaxft.json` is the first of a step to be copied there and the last to be deleted, so that what is
  not whole is known for jaxft's own. What plain Orbax has begun is left alone.

Orbax reaches buckets by epath and TensorStore; here epath and fsspec do, imported when needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from jaxft.checkpoint import (
    BY_HAND,
    RECORD,
    STALE_S,
    STEP,
    WRITING,
    Directory,
    Found,
    Record,
    by_step,
    look,
    write_record,
)
from jaxft.errors import ConfigError, JaxftError, RestoreError
from jaxft.faults import reach

_log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

COMMITTED = "commit_success.txt"  # Orbax's name for it
SCHEME = "gs://"
_THREADS_MAX = 16


def directory_at(name: str | os.PathLike[str]) -> Directory:
    """The checkpoints at a path of this machine, or at a URL.

    Raises:
        ConfigError: a URL that Orbax cannot write to, or lacks what it needs for that.
    """
    text = os.fspath(name)
    return Bucket(text) if _is_url(text) else Directory(Path(os.path.abspath(text)))


def whole_name(name: str | os.PathLike[str]) -> str:
    """The same place, whatever the working directory is."""
    text = os.fspath(name)
    return text.rstrip("/") if _is_url(text) else os.path.abspath(text)


def _is_url(text: str) -> bool:
    if text.startswith(("gs:/", "s3:/")) and "://" not in text:
        raise ConfigError(
            f'checkpoints cannot go to "{text}": a pathlib.Path makes one slash of two; name the '
            "bucket in a string, or an epath.Path"
        )
    return "://" in text


class Bucket(Directory):
    """The checkpoints below gs://BUCKET/PATH.

    Raises:
        ConfigError: another kind of URL, or gcsfs is not installed.
    """

    def __init__(self, url: str) -> None:
        _check_scheme(url)
        bucket, _, below = url.removeprefix(SCHEME).strip("/").partition("/")
        if not bucket or not below:
            raise ConfigError(
                f'checkpoints cannot go to "{url}": name a path in a bucket, gs://BUCKET/PATH'
            )
        self.path: Any = _epath(f"{SCHEME}{bucket}/{below}")

    # -------------------------------------------------------------------- reading

    def all(self) -> list[Found]:
        with self._explained(RestoreError, "read"):
            return by_step(_each(self._look_at, self._names()))

    def _names(self) -> list[str]:
        return sorted(_inside(self.path))

    def _look_at(self, name: str) -> Found | None:
        path = self.path / name
        if STEP.fullmatch(name):
            inside = _inside(path)
            return look(int(name), path, RECORD in inside) if COMMITTED in inside else None
        return self._unnamed(path) if name.startswith(WRITING) else None

    def _unnamed(self, path: Any) -> Found | None:
        """A checkpoint that is whole, and is newer than what has its step's name. (That of plain
        Orbax is older than any.)"""
        found = look(None, path, True) if RECORD in _inside(path) else None
        if found is None or found.record is None:
            return None
        named = self._look_at(str(found.record.step))
        if named is not None and named.record is not None and named.record.id >= found.record.id:
            return None
        return found

    def check_writable(self) -> None:
        """Refuses a bucket that nothing can be written to, by writing an empty object to it and
        deleting that.

        Raises:
            ConfigError: it cannot be, and why.
        """
        probe = self.path / f"jaxft-probe-{secrets.token_hex(4)}"
        with self._explained(ConfigError, "written"):
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self, kind: type[JaxftError], done: str) -> Iterator[None]:
        """Whatever gcsfs, google-auth or aiohttp raise, as an error that says what to do."""
        try:
            yield
        except JaxftError:
            raise
        except Exception as error:
            raise kind(
                f"{self.path} cannot be {done}: {type(error).__name__}: {error}. {_advice(error)}"
            ) from error

    # -------------------------------------------------------------------- writing

    def begin(self, record: Record, writer: str) -> tuple[Path, int]:
        with self._explained(JaxftError, "written"):
            if record.job:
                self.check_job(record.job)
            if not writer.startswith(BY_HAND):
                # First, as that may write to a step of which another one has left a part.
                for name in self._names():
                    if name.startswith(WRITING):
                        self._end_writing(self.path / name)
                _each(self._clear, [name for name in self._names() if STEP.fullmatch(name)])
            return self.writing(record.id, writer), self.next_number()

    def _end_writing(self, path: Any) -> None:
        """Ends what a dead writer has begun: what is whole gets its step's name."""
        if f"-{BY_HAND}" in path.name and not _is_stale(path):
            return
        found = self._unnamed(path)
        if found is None or found.record is None:
            self._delete(path)
        else:
            self._name(path, found.record)

    def _clear(self, name: str) -> None:
        """Deletes what is left of a step of jaxft's."""
        inside = _inside(self.path / name)
        if COMMITTED not in inside and RECORD in inside:
            self._delete(self.path / name)

    def commit(self, written: Any, record: Record, *, replaces: bool) -> None:
        with self._explained(JaxftError, "written"):
            if self._is_done(written, record, replaces):
                return
            write_record(written, record)
            reach("checkpoint.whole", step=record.step)
            self._name(written, record)

    def _name(self, written: Any, record: Record) -> None:
        """Copies a checkpoint that is whole to its step's name, instead of what is there."""
        target = self.path / str(record.step)
        self._delete(target)
        reach("checkpoint.replaced", step=record.step)
        fs, source = _filesystem(written)
        within = [PurePosixPath(one).relative_to(source) for one in fs.find(source)]
        whole = sorted(one for one in within if str(one) not in (RECORD, COMMITTED))
        for part in ([PurePosixPath(RECORD)], whole):
            fs.copy([f"{written}/{one}" for one in part], [f"{target}/{one}" for one in part])
        reach("checkpoint.copied", step=record.step)
        (target / COMMITTED).write_text(f"Checkpoint commit was successful to {target}")
        self._try_to_delete(written)

    def _try_to_remove(self, path: Any) -> None:
        self._try_to_delete(path)

    def _try_to_delete(self, path: Any) -> None:
        """What was committed is, also where that fails; the next writer tries again."""
        try:
            self._delete(path)
        except Exception as error:  # noqa: BLE001 (of gcsfs, google-auth or aiohttp)
            _log.warning("checkpoint %s could not be deleted: %s", path, error)

    def _delete(self, path: Any) -> None:
        fs, within = _filesystem(path)
        there = fs.find(within)
        if not there:
            return
        mark = COMMITTED if STEP.fullmatch(path.name) else RECORD
        (path / mark).unlink(missing_ok=True)
        record = f"{within}/{RECORD}"
        rest = [one for one in there if one not in (f"{within}/{mark}", record)]
        if rest:
            # A request whose answer is lost is made again, and finds nothing then.
            with contextlib.suppress(FileNotFoundError):
                fs.rm(rest)
        (path / RECORD).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # folders, where the bucket has any
            fs.rm(within, recursive=True)


def create(path: Any, text: str) -> bool:
    """Writes an object of a bucket, if there is none of that name yet.

    Returns:
        False: there is one, or it cannot be written (a line in the log says why).
    """
    fs, within = _filesystem(path)
    try:
        fs.pipe_file(within, text.encode(), mode="create")
    except FileExistsError:
        return False
    except Exception as error:  # noqa: BLE001 (of gcsfs, google-auth or aiohttp)
        _log.warning("%s: %s: %s", path, type(error).__name__, error)
        return False
    return True


def _inside(path: Any) -> set[str]:
    """The names directly below a path, which is there when something is in it. (`exists` may say
    no because there was no answer.)"""
    try:
        return {one.name for one in path.iterdir()}
    except FileNotFoundError:
        return set()


def _is_stale(path: Any) -> bool:
    """Has nothing been written here for so long that whoever wrote it must be dead?"""
    fs, within = _filesystem(path)
    there = fs.find(within, detail=True)
    newest_s = max((fs.modified(name).timestamp() for name in there), default=0.0)
    return time.time() - newest_s > STALE_S


def _each(do: Callable[[T], U], names: Sequence[T]) -> list[U]:
    """Requests take long, and go on beside each other."""
    with ThreadPoolExecutor(min(_THREADS_MAX, len(names)) or 1) as pool:
        return list(pool.map(do, names))


def _check_scheme(url: str) -> None:
    if url.startswith(SCHEME):
        return
    why = "it is not a path, nor a URL of a bucket"
    if url.startswith("s3://"):
        why = (
            "Orbax cannot write arrays to S3 (it reaches storage through TensorStore's drivers for "
            "files and for gs://)"
        )
    raise ConfigError(
        f'checkpoints cannot go to "{url}": {why}. Name a directory, also of a mounted file '
        "system in which a directory can be renamed, or gs://BUCKET/PATH"
    )


def _epath(url: str) -> Any:
    try:
        import fsspec
        import gcsfs  # noqa: F401
        from etils import epath
    except ImportError as error:
        raise ConfigError(
            f"checkpoints cannot go to {url}: {error.name} is not installed; "
            'pip install "jaxft[gcs]"'
        ) from error
    # A listing that is kept does not have what other processes have written since.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return epath.Path(url)


def _filesystem(path: Any) -> tuple[Any, str]:
    """fsspec's file system of a bucket, and its name for a path."""
    import fsspec

    fs, within = fsspec.core.url_to_fs(str(path))
    return fs, str(within)


def _advice(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError):
        return "Is there such a bucket, and is its name right?"
    words = ("401", "403", "Forbidden", "Credentials", "RefreshError", "anonymous", "Anonymous")
    if any(word in text for word in words):
        return (
            "The account may have no access: log in (`gcloud auth application-default login`, or "
            "GOOGLE_APPLICATION_CREDENTIALS), with the role Storage Object User in that bucket, "
            "and the permission storage.buckets.get for Orbax's manager"
        )
    return "Is the network there? Try `gcloud storage ls` with that URL"
