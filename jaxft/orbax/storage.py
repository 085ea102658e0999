"""The directory of a manager: whose steps are in it, as a Snapshotter's fallback.

    DIRECTORY/
      100/ ...                  a step, as Orbax's own manager writes it; in its custom metadata:
                                "jaxft": {"id": [generation, seq, nonce], "base": [...] or null}
      jaxft-job                 the name of the job of a script that nobody launched
      jaxft-deleted             the identity of a snapshot in memory that the script has deleted
      jaxft-left-120-1f00/      step 120 of a future that the script has left

The rules:
- Orbax's manager writes the steps, and no helper process does (`every` is 0), unless the manager is
  told to have `helpers`. Then these write steps as an `OrbaxFallback`'s, and see its options alone.
- A step carries the identity of the snapshot that was taken with it, so that newest of memory and
  storage is known, whatever the steps' numbers are.
- After a rollback the steps above lose their names, and are deleted when the steps that come again
  have passed them. Whatever the script has not left itself is never deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import secrets
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

from jaxft.bucket import COMMITTED, SCHEME, create
from jaxft.checkpoint import RECORD, read_record
from jaxft.errors import ConfigError, RestoreError
from jaxft.fallback import OrbaxFallback
from jaxft.group.identity import SnapshotId
from jaxft.group.messages import Lineage, StorageEntry

_log = logging.getLogger(__name__)

KEY = "jaxft"
JOB, DELETED = "jaxft-job", "jaxft-deleted"
_LEFT = "jaxft-left-"
_METADATA = "_CHECKPOINT_METADATA"
_STEM_MAX = 32
_HELPERS_HEED = ("save_interval_steps", "max_to_keep")
KEEP_ALL = 2**31 - 1


class Storage(OrbaxFallback):
    """The steps that Orbax's manager has, and what the plan of a restore may name of them.

    Args:
        manager: Orbax's.
        options: its options.
        helpers: whether helper processes write steps.

    Raises:
        ConfigError: helpers cannot write what the options say.
    """

    _names: Any
    _manager: Any
    _primary: int | None
    _has_left: bool
    _offered: tuple[Any, dict[int, Any]] | None
    _wrote: Callable[[int], None]
    _writing: int | None

    def __init__(self, manager: Any, options: Any, *, helpers: bool = False) -> None:
        # The fields of a fallback, of which nothing is written before the job ends.
        fields = {"directory": os.fspath(manager.directory), "every": 0, "keep": 0}
        if helpers:
            fields = _for_helpers(manager.directory, options)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        given = options.step_name_format or ocp.path.step.standard_name_format(
            step_prefix=options.step_prefix,
            step_format_fixed_length=options.step_format_fixed_length,
        )
        object.__setattr__(self, "_names", given)
        object.__setattr__(self, "_manager", manager)
        object.__setattr__(self, "_primary", options.multiprocessing_options.primary_host)
        object.__setattr__(self, "_offered", None)
        object.__setattr__(self, "_wrote", lambda step: None)
        object.__setattr__(self, "_writing", None)
        object.__setattr__(self, "_has_left", any(manager.directory.glob(f"{_LEFT}*")))

    @property
    def root(self) -> Any:
        """The manager's directory, an epath."""
        return self._manager.directory

    # -------------------------------------------------------------------- a Snapshotter's fallback

    def entries(self) -> tuple[StorageEntry, ...]:
        """The steps. Where plain Orbax has gone on above those of managers, only the numbers say
        what is newest: what a script leaves by going back has no name any more."""
        found = [self._entry(step) for step in sorted(self._manager.all_steps())]
        if found and found[-1].id is None:
            found = [StorageEntry(one.step, lineage=one.lineage) for one in found]
        return tuple(found)

    def check_job(self, job: str) -> None:
        """The directory is the job's: see `job_of`. Under `jaxft run` any may use it."""

    def offer(self, state: Any, extras: Any) -> None:
        """What `restore` gives: it has been read already."""
        object.__setattr__(self, "_offered", (state, {0: extras}))

    def restore(
        self, entry: StorageEntry, like: Any, *, strict: bool = True
    ) -> tuple[Any, dict[int, Any]]:
        if self._offered is None:
            raise RestoreError(f"step {entry.step} has not been read from {self.root}")
        offered = self._offered
        object.__setattr__(self, "_offered", None)
        return offered

    def _entry(self, step: int) -> StorageEntry:
        try:
            return entry_at(step, self.path(step))
        except ValueError:  # it was deleted meanwhile
            return StorageEntry(step)

    # -------------------------------------------------------------------- steps

    def steps(self) -> set[int]:
        """The steps that are there, and one that is being written by this process."""
        if self.every:  # helpers write as well
            self._manager.reload()
        return set(self._manager.all_steps())

    def save(
        self, step: int, identity: SnapshotId, base: SnapshotId | None, given: dict[str, Any]
    ) -> None:
        """Has Orbax write a step, once it has written the one before.

        Args:
            step: not there yet.
            identity, base: of its snapshot, and what that one's generation went on from.
            given: Orbax's arguments.
        """
        before = max(self.steps(), default=None)
        custom_metadata = marked(given["custom_metadata"], identity, base)
        self._manager.save(step, force=True, **{**given, "custom_metadata": custom_metadata})
        self._say_written(step)
        self._drop_left(before)

    def finish(self) -> None:
        """Waits for what Orbax writes."""
        self._manager.wait_until_finished()
        self._say_written(None)
        self._drop_left(max(self.steps(), default=None))

    def tell(self, wrote: Callable[[int], None]) -> None:
        """Who is to hear of each step that is on storage, written by this process."""
        object.__setattr__(self, "_wrote", wrote)

    def _say_written(self, writing: int | None) -> None:
        """The one before is on storage: Orbax writes one at a time, and raises what went wrong."""
        written = self._writing
        object.__setattr__(self, "_writing", writing)
        if written is not None and self._is_first():
            self._wrote(written)

    def name(self, step: int) -> str:
        """What a step is called."""
        return str(self._names.build_name(step))

    def path(self, step: int) -> Any:
        return self._names.find_step(self.root, step).path

    def kind(self, step: int, item: str) -> str:
        """What an item of a step is: "tree", "text" or, if neither, ""."""
        path = self.path(step) / item
        if (path / "_METADATA").exists():
            return "tree"
        return "text" if (path / "metadata").exists() else ""

    # -------------------------------------------------------------------- what was deleted

    def note_deleted(self, identity: SnapshotId) -> None:
        """The snapshot with this identity, which memory keeps, is not to be restored again."""
        if self._is_first():
            (self.root / DELETED).write_text(json.dumps(_fields(identity)))

    def was_deleted(self, identity: SnapshotId) -> bool:
        return deleted(self.root) == identity

    # -------------------------------------------------------------------- what was left

    def leave_behind(self, above: int) -> None:
        """Takes the names of the steps above this one away; all processes call it."""
        steps = sorted(step for step in self.steps() if step > above)
        if not steps:
            return
        self._manager.wait_until_finished()
        if self._is_first():
            self._set_aside(steps)
        ocp.multihost.sync_global_processes(f"jaxft:left:{above}")
        self._manager.reload()
        object.__setattr__(self, "_has_left", True)
        object.__setattr__(self, "_writing", max(self.steps(), default=-1))
        self._say_written(None)

    def _is_first(self) -> bool:
        return bool(ocp.multihost.is_primary_host(self._primary))

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps:
            target = self.root / f"{_LEFT}{step}-{secrets.token_hex(2)}"
            _set_aside(self.path(step), target)
            _log.warning(
                "%s: step %d was left for an older one, and is now %s until the steps that come "
                "have passed it",
                self.root,
                step,
                target.name,
            )

    def _drop_left(self, newest: int | None) -> None:
        """Deletes what was set aside of steps up to `newest`, which is on storage."""
        if newest is None or not (self._has_left and self._is_first()):
            return
        for path in self.root.glob(f"{_LEFT}*"):
            found = re.fullmatch(rf"{_LEFT}(\d+)-\w+", path.name)
            if found and int(found[1]) <= newest:
                path.rmtree()


def _for_helpers(directory: Any, options: Any) -> dict[str, Any]:
    """The fields of a fallback that writes what the options say.

    Raises:
        ConfigError: they say more than how far steps are apart and how many stay.
    """
    plain = ocp.CheckpointManagerOptions()
    others = [
        field.name
        for field in dataclasses.fields(plain)
        if field.name not in _HELPERS_HEED
        and getattr(options, field.name) != getattr(plain, field.name)
    ]
    if others:
        raise ConfigError(
            f"CheckpointManager(helpers=True): helpers heed {' and '.join(_HELPERS_HEED)}, and "
            f"not {', '.join(others)}: leave these out, or helpers=True"
        )
    fallback = OrbaxFallback(
        directory,
        every=max(1, options.save_interval_steps),
        keep=KEEP_ALL if options.max_to_keep is None else max(1, options.max_to_keep),
    )
    return {name: getattr(fallback, name) for name in ("directory", "every", "keep")}


def entry_at(step: int, path: Any) -> StorageEntry:
    """The step at this path, with the identity of its snapshot if it has one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads((path / _METADATA).read_text())["custom_metadata"][KEY]
        base = None if told["base"] is None else SnapshotId(*told["base"])
        identity = SnapshotId(*told["id"])
        lineage = () if base is None else (Lineage(identity.generation, base),)
        return StorageEntry(step, identity, lineage)
    if (path / RECORD).exists():
        with contextlib.suppress(RestoreError):
            return read_record(path).entry
    return StorageEntry(step)


def marked(custom_metadata: Any, identity: SnapshotId, base: SnapshotId | None) -> dict[str, Any]:
    """A step's custom metadata, with the identity of its snapshot."""
    told = {"id": list(_fields(identity)), "base": None if base is None else list(_fields(base))}
    return {**(custom_metadata or {}), KEY: told}


def deleted(root: Any) -> SnapshotId | None:
    """The snapshot that a script has deleted, and memory may still have."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return SnapshotId(*json.loads((root / DELETED).read_text()))
    return None


def _fields(identity: SnapshotId) -> tuple[int, int, str]:
    return identity.generation, identity.seq, identity.nonce


def _set_aside(path: Any, target: Any) -> None:
    """Renames a step. In a bucket its files move one by one: it is unmade first."""
    is_bucket = str(path).startswith(SCHEME)
    said = (path / COMMITTED).read_text() if is_bucket else ""
    if is_bucket:
        (path / COMMITTED).unlink()
    path.rename(target)
    if is_bucket:
        (target / COMMITTED).write_text(said)


def job_of(root: Any) -> str | None:
    """The job of a script that nobody launched goes by its directory: another directory, or the
    same one deleted and made anew, is another job.

    Returns:
        None where the directory cannot be written to.
    """
    path = root / JOB
    if job := _told(path):
        return job
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", root.name).lstrip("._-")[:_STEM_MAX] or "run"
    job = f"{stem}-{secrets.token_hex(4)}"
    if str(root).startswith(SCHEME):
        return job if create(path, f"{job}\n") else _told(path) or None
    written = root / f"{JOB}.{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        written.write_text(f"{job}\n")
        job = _name(written, path) or job
    except OSError as error:
        _log.warning("%s: %s", path, error)
        job = ""
    with contextlib.suppress(OSError):
        written.unlink(missing_ok=True)
    return job or None


def _name(written: Any, path: Any) -> str:
    """Gives a file its name; if another script that begins at this moment was first, what that one
    has written. A file without a word is what a full disk has left."""
    with contextlib.suppress(OSError, ValueError):
        os.link(written, path)
        return ""
    if not (other := _told(path)):  # or there are no links in this file system
        written.replace(path)
    return other


def _told(path: Any) -> str:
    with contextlib.suppress(OSError):
        return str(path.read_text()).strip()
    return ""
