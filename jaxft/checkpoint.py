"""What is in a directory of checkpoints: its names, and what jaxft writes beside the state.

    DIRECTORY/
      100/                     step 100, for `orbax.checkpoint.CheckpointManager(DIRECTORY)`
        default/               the state, as Orbax's StandardSave writes it
        jaxft_bytes/           leaves that Orbax cannot hold, as their bytes
        jaxft.json             the `Record` (a file: Orbax takes directories for items)
        jaxft-sums-0.json ...  checksums of all these files: see `sums`
      jaxft-writing-3.7-1f00-WRITER/   becomes a checkpoint
      jaxft-replaced-100/      what was step 100, while another checkpoint takes its name
      jaxft-removed-100-8c/    is being deleted

The rules:
- A checkpoint is written under a name that no reader looks at, and has its step's name from one
  rename on. What is deleted loses its name first. So whatever has a step's name is whole.
- After a rollback the same steps come again. The old checkpoint of a step steps aside, the new one
  takes its name, then the old one is deleted. One that has stepped aside still counts for jaxft
  until then; plain Orbax sees neither for that moment.
- What plain Orbax wrote is read, and deleted only by a new checkpoint of the same step.
- Each writer has a name of its own. The job's own come one after the other, so what an earlier one
  has left is deleted; `jaxft export` by hand comes at any time, deletes nothing and replaces
  nothing, and what it has left is deleted when nothing was written to it for STALE_S.
- Who finds that the step is there, of the same snapshot, is done. Nobody replaces a newer snapshot,
  or another job's.

Nothing here imports JAX or Orbax: a rank lists the checkpoints each time it starts. A bucket, where
nothing can be renamed, is another kind of `Directory`: see `bucket`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxft.errors import ConfigError, JaxftError, RestoreError
from jaxft.faults import reach
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Lineage, StorageEntry
from jaxft.group.recovery import abandoned
from jaxft.orbax_tree import StoredLeaf
from jaxft.sums import write_sum

_log = logging.getLogger(__name__)

VERSION = 1
TREE, BYTES, RECORD = "default", "jaxft_bytes", "jaxft.json"
STEP = re.compile(r"0|[1-9]\d*")
WRITING, _REPLACED, _REMOVED = "jaxft-writing-", "jaxft-replaced-", "jaxft-removed-"
BY_HAND = "by-hand-"
STALE_S = 3600.0
_TRIES_MAX = 10


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What jaxft must know of a checkpoint that it wrote.

    `number` counts the checkpoints of the directory. `extras` are what each rank saved with it, in
    MessagePack. `job` is the name of the job that it is of.
    """

    version: int = VERSION
    id: SnapshotId
    job: str = ""
    step: int
    lineage: tuple[Lineage, ...] = ()
    number: int = 0
    leaves: tuple[StoredLeaf, ...] = ()
    extras: dict[int, bytes] = {}

    @property
    def entry(self) -> StorageEntry:
        return StorageEntry(self.step, self.id, self.lineage)


@dataclass(frozen=True)
class Found:
    """A checkpoint: where it is and what it is. `record` is None where plain Orbax wrote it, or
    where it cannot be read, as `entry.damaged` says."""

    path: Path
    entry: StorageEntry
    record: Record | None


class Directory:
    """The checkpoints in a local (or mounted) directory.

    Attributes:
        path: the directory. Of a bucket it is an `epath.Path`, which has the methods of a Path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # -------------------------------------------------------------------- reading

    def found(self) -> list[Found]:
        """All checkpoints that are whole, by ascending step; none where there is no directory.

        Raises:
            RestoreError: the directory cannot be read.
        """
        return [one for one in self.all() if not one.entry.damaged]

    def all(self) -> list[Found]:
        """As `found`, and those that are not as jaxft wrote them, which is logged.

        Raises:
            RestoreError: the directory cannot be read.
        """
        try:
            names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        except OSError as error:
            raise RestoreError(f"checkpoint directory {self.path}: {error}") from error
        steps = {name: name for name in names if STEP.fullmatch(name)}
        for name in names:
            step = name.removeprefix(_REPLACED)
            if step != name and STEP.fullmatch(step):
                steps.setdefault(step, name)
        return by_step(self._look(int(step), self.path / name) for step, name in steps.items())

    def check_writable(self) -> None:
        """Refuses a directory that nothing can be written to; makes nothing.

        Raises:
            ConfigError: it is a file, or it, or the directory that it would be made in, cannot be
                written to.
        """
        near = next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))
        why = ""
        if not near.is_dir():
            why = f"{near} is no directory"
        elif not os.access(near, os.R_OK | os.W_OK | os.X_OK):
            why = f"{near} cannot be written to by user {os.geteuid()}, or its disk is read-only"
        if why:
            raise ConfigError(
                f"checkpoints cannot go to {self.path}: {why}; name a directory that is writable, "
                "or can be made"
            )

    def check_job(self, job: str) -> None:
        """Refuses a directory in which another job's checkpoints are.

        Raises:
            ConfigError: there are.
            RestoreError: it cannot be read.
        """
        others = {one.record.job for one in self.found() if one.record is not None} - {job, ""}
        if others:
            raise self._of_another_job(min(others), job)

    def _of_another_job(self, other: str, job: str) -> ConfigError:
        return ConfigError(
            f"{self.path} has checkpoints of job {other}, and this is job {job}: use another "
            f"directory, or go on under that name (`jaxft run --job {other}`, or "
            f'Snapshotter(job="{other}") in a script that nobody launched)'
        )

    def _look(self, step: int, path: Path) -> Found | None:
        return look(step, path, (path / RECORD).exists()) if path.is_dir() else None

    def find(self, entry: StorageEntry) -> Found:
        """The checkpoint that was listed as this entry.

        Raises:
            RestoreError: it is not there any more.
        """
        for found in self.found():
            if (found.entry.step, found.entry.id) == (entry.step, entry.id):
                return found
        what = "plain checkpoint" if entry.id is None else f"checkpoint of snapshot {entry.id}"
        raise RestoreError(f"{self.path} has no {what}, step {entry.step}, any more")

    # -------------------------------------------------------------------- writing

    def begin(self, record: Record, writer: str) -> tuple[Path, int]:
        """A path to write a checkpoint to, and its number. Clears what dead writers left.

        Raises:
            ConfigError: another job's checkpoints are here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if record.job:
            self.check_job(record.job)
        if not writer.startswith(BY_HAND):
            for path in list(self.path.iterdir()):
                if self._is_left(path):
                    self._try_to_remove(path)
        return self.writing(record.id, writer), self.next_number()

    def _is_left(self, path: Path) -> bool:
        """Is this what a dead writer has left?"""
        if path.name.startswith(WRITING):
            return f"-{BY_HAND}" not in path.name or is_stale(path)
        step = path.name.removeprefix(_REPLACED)
        return path.name.startswith(_REMOVED) or (step != path.name and (self.path / step).exists())

    def next_number(self) -> int:
        numbers = [one.record.number for one in self.found() if one.record is not None]
        return 1 + max(numbers, default=0)

    def writing(self, identity: SnapshotId, writer: str) -> Path:
        """Where this writer writes: every process of its JAX world says the same."""
        return self.path / f"{WRITING}{identity}-{identity.nonce}-{writer}"

    def commit(self, written: Path, record: Record, *, replaces: bool) -> None:
        """Makes what was written, and is whole but for its record, the checkpoint of its step.
        Where another writer has done so meanwhile, with the same snapshot, that one stays.

        Args:
            written: the path from `begin`.
            record: what it is.
            replaces: whether it takes the place of an older checkpoint of its step.

        Raises:
            JaxftError: something else has its step, which is not to be replaced.
        """
        step = record.step
        target, aside = self.path / str(step), self.path / f"{_REPLACED}{step}"
        for _ in range(_TRIES_MAX):
            if target.exists() and self._is_done(written, record, replaces):
                return
            write_record(written, record)
            write_sum(written, RECORD)
            _sync(written)
            if target.exists():
                self._remove(aside)
                with contextlib.suppress(FileNotFoundError):  # another writer was faster
                    target.rename(aside)
                reach("checkpoint.replaced", step=step)
            try:
                written.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another writer was faster
            self._try_to_remove(aside)
            return
        raise JaxftError(f"checkpoint {target}: others write it all the time, so it is not written")

    def discard(self, written: Path) -> None:
        """Deletes what was not written whole."""
        with contextlib.suppress(OSError):
            for path in list(self.path.iterdir()):
                if path.name.startswith(written.name):
                    self._try_to_remove(path)

    def _is_done(self, written: Path, record: Record, replaces: bool) -> bool:
        """Has another writer given the step its checkpoint, of the same snapshot?"""
        try:
            is_there = self._is_there(record, replaces)
        except JaxftError:
            self.discard(written)
            raise
        if is_there:
            _log.info("checkpoint %s has been written by another process", self.path / written.name)
            self.discard(written)
        return is_there

    def _is_there(self, record: Record, replaces: bool) -> bool:
        """Is this snapshot's checkpoint there already?

        Raises:
            JaxftError: something else has its step, which is not to be replaced.
        """
        found = next((one for one in self.found() if one.entry.step == record.step), None)
        if found is None:
            return False
        there = found.record
        if there is not None and there.id == record.id:
            return True
        if there is not None and record.job and there.job not in (record.job, ""):
            raise self._of_another_job(there.job, record.job)
        is_newer = (
            there is not None
            and there.id > record.id
            and abandoned(there.id, record.lineage) is None
        )
        if is_newer or not replaces:
            other = "one that jaxft knows nothing of" if there is None else f"snapshot {there.id}"
            raise JaxftError(
                f"{self.path} has step {record.step}, which is {other}, and this is snapshot "
                f"{record.id}: it is not written; name another directory, or move that step away"
            )
        return False

    def retain(self, record: Record, keep: int) -> None:
        """Deletes what is no longer wanted after `record` has been committed.

        What stays, beside it: the `keep` - 1 that were written before it, of those that are not
        abandoned, and all that plain Orbax wrote.
        """
        jobs = (record.job, "")
        ours = [one for one in self.found() if one.record is not None and one.record.job in jobs]
        wanted = [one for one in ours if abandoned(_id(one), record.lineage) is None]
        wanted.sort(key=lambda one: (_id(one) == record.id, _number(one)))
        kept = {one.path for one in wanted[-keep:]}
        for one in ours:
            if one.path not in kept and _id(one) != record.id:
                self._try_to_remove(one.path)

    def _try_to_remove(self, path: Path) -> None:
        """What was committed is, also where that fails; the next commit tries again."""
        try:
            self._remove(path)
        except OSError as error:
            _log.warning("checkpoint %s could not be deleted: %s", path, error)

    def _remove(self, path: Path) -> None:
        """Another writer may be at it as well: what is gone is removed."""
        nameless = path
        with contextlib.suppress(FileNotFoundError):
            if not path.name.startswith((WRITING, _REMOVED)):
                nameless = self.path / f"{_REMOVED}{path.name}-{secrets.token_hex(2)}"
                path.rename(nameless)
            while nameless.exists():
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(nameless)


def _id(found: Found) -> SnapshotId:
    assert found.record is not None
    return found.record.id


def _number(found: Found) -> int:
    assert found.record is not None
    return found.record.number


def look(step: int | None, path: Path, has_record: bool) -> Found | None:
    """What is at `path`, where the checkpoint of this step is (None: of any). Where it is not as
    jaxft wrote it, it is damaged, and a line in the log says so.

    Raises:
        RestoreError: it cannot be read just now, so nobody knows what it is.
    """
    if not has_record and step is not None and not (path / BYTES).exists():
        return Found(path, StorageEntry(step), None)
    try:
        record = read_record(path)
    except RestoreError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise
        return _damaged(path, step, str(error))
    if step is not None and record.step != step:
        return _damaged(path, step, f"checkpoint {path} says that it is step {record.step}")
    return Found(path, record.entry, record)


def _damaged(path: Path, step: int | None, why: str) -> Found | None:
    _log.error("%s; it does not count", why)
    return None if step is None else Found(path, StorageEntry(step, damaged=why), None)


def by_step(found: Iterable[Found | None]) -> list[Found]:
    return sorted((one for one in found if one is not None), key=lambda one: one.entry.step)


def is_stale(path: Path) -> bool:
    """Has nothing been written here for so long that whoever wrote it must be dead?"""
    newest_s = 0.0
    with contextlib.suppress(FileNotFoundError):
        for one in (path, *path.rglob("*")):
            newest_s = max(newest_s, one.stat().st_mtime)
    return time.time() - newest_s > STALE_S


def _sync(written: Path) -> None:
    """What the old checkpoints are deleted for is on the disk. (Orbax syncs what it writes.)"""
    for path in (*written.glob("jaxft*.json"), written, written.parent):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        except OSError:
            if path.is_file():  # not every file system syncs directories
                raise
        finally:
            os.close(number)


def write_record(path: Path, record: Record) -> None:
    (path / RECORD).write_bytes(msgspec.json.encode(record))


def read_record(path: Path) -> Record:
    """Reads the record of the checkpoint at `path`.

    Raises:
        RestoreError: there is none that this jaxft can read.
    """
    try:
        record = msgspec.json.decode((path / RECORD).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise RestoreError(f"checkpoint {path}: its record cannot be read: {error}") from error
    if record.version != VERSION:
        raise RestoreError(
            f"checkpoint {path} has version {record.version}, this jaxft reads version {VERSION}"
        )
    return record
