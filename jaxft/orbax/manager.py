"""`CheckpointManager`: Orbax's, with the hosts' memory above the directory.

    save      memory, when the interval there or Orbax's policy says so; storage, when the policy
              does, written by Orbax's own manager in this process, at exactly the steps it names
    restore   the newest of both by identity; any other step from storage

The rules:
- What is on storage is what Orbax would have put there, and the unchanged script reads it.
- A step on storage is in memory too, and is protected there before or soon after.
- What memory cannot hold goes to Orbax alone, and a warning says so once.
- Whatever is asked for that memory cannot give (another step, a transformation) Orbax reads.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import sys
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxft.config import RankEnv
from jaxft.device.transfer import Staging
from jaxft.errors import ConfigError, JobInUse
from jaxft.group.world import Code
from jaxft.orbax.descriptions import step_metadata
from jaxft.orbax.ending import closed, keep_newest, open_at, opened
from jaxft.orbax.items import DEFAULT, Contents, Held, hold, is_composite, refusal
from jaxft.orbax.memory import Memory, Newest
from jaxft.orbax.request import Request
from jaxft.orbax.storage import KEY, Storage, job_of, marked
from jaxft.orbax.targets import Unsupported
from jaxft.overhead import Auto
from jaxft.snapshotter import Snapshotter
from jaxft.startup import leaves_by

_log = logging.getLogger(__name__)
_seats: set[RankEnv | None] = set()


class CheckpointManager(ocp.AbstractCheckpointManager):  # type: ignore[misc]
    """Orbax's `CheckpointManager`, with snapshots in memory above it.

    Args:
        directory, checkpointers, options, metadata, item_names, item_handlers, logger,
            handler_registry: as for Orbax's. They say what storage gets, and when.
        every: how often memory takes a snapshot beside: as for `jaxft.Snapshotter`. Each step that
            goes to storage is one, whatever this says.
        helpers: have helper processes write storage from the snapshots' memory, so that `save` does
            not block for it. Steps on storage are then at least `save_interval_steps` from each
            other, but not exactly; only that and `max_to_keep` are heeded; and what is saved is one
            item without a name.
        staging, store, code, timeout_s: as for `jaxft.Snapshotter`.

    All of Orbax's methods are there; docs/orbax.md has a table of what each does. A manager that is
    `read_only`, or is made of `checkpointers` (Orbax's older interface), is Orbax's alone, and so
    is a process's second one under `jaxft run` or with a store.

    Raises:
        ConfigError: an option that cannot work.
        LaunchError: the snapshot process could not be started.
    """

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: Any = None,
        metadata: Any = None,
        item_names: Any = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        every: int | str | Auto | None = None,
        helpers: bool = False,
        staging: Staging | None = None,
        store: str = "",
        code: Code | str = "",
        timeout_s: float = 600.0,
    ) -> None:
        self._options = options or ocp.CheckpointManagerOptions()
        self._orbax = ocp.CheckpointManager(
            directory,
            checkpointers,
            self._options,
            metadata,
            item_names,
            item_handlers,
            logger,
            handler_registry,
        )
        self._helpers = helpers
        self._storage = Storage(self._orbax, self._options, helpers=helpers)
        self._memory: Memory | None = None
        self._in_use: JobInUse | None = None
        self._is_default = _configured_default(item_names, item_handlers)
        self._is_beyond = False  # did a step go to storage alone?
        self._hidden_step: int | None = None  # see `_hidden`
        self._looked_for_deleted = False
        self._went_back_to: int | None = None  # the step that was restored, where newer ones are
        self._warned: set[str] = set()
        self._closed = False
        why = self._why_not_in_memory(checkpointers)
        if why:
            self._warn(f"nothing of it is kept in memory: {why}")
            return
        if every is None:
            every = Auto()
        self._open_memory(every, staging, store, code, timeout_s)

    def _why_not_in_memory(self, checkpointers: Any) -> str:
        if self._options.read_only:
            return "it is read_only"
        if checkpointers is not None:
            return "it is made of checkpointers, Orbax's older interface"
        if RankEnv.from_environ() in _seats:
            return "this process has had a manager, or has one, and memory keeps one state"
        return ""

    def _open_memory(
        self,
        every: int | str | Auto,
        staging: Staging | None,
        store: str,
        code: Code | str,
        timeout_s: float,
    ) -> None:
        seat = RankEnv.from_environ()
        job = None
        if seat is None:
            job = job_of(self._storage.root)
            if job is None:
                self._warn("nothing of it is kept in memory: the directory cannot be written to")
                return
            self._replace()
        try:
            snapshotter = Snapshotter(
                every=every,
                staging=staging,
                fallback=self._storage,
                job=job,
                store=store,
                code=code,
                timeout_s=timeout_s,
            )
        except JobInUse as error:
            who = str(error).partition(":")[0]
            self._in_use = JobInUse(
                f"{who}, which is {self._storage.root}'s: wait for it to end, stop it, or use "
                "another directory"
            )
            self._warn(f"it can read storage, and cannot save: {self._in_use}")
            return
        self._memory = Memory(snapshotter, self._storage)
        opened(self)
        if seat is not None or store:
            _seats.add(seat)

    def _replace(self) -> None:
        """A notebook's cell that makes a manager is run again: the one before ends, and its memory
        stays."""
        for other in open_at(self.directory):
            self._warn("another one of this process has it, and is closed")
            other.leave(keeps=False)

    @property
    def _hidden(self) -> int | None:
        """The step of the newest snapshot where that was deleted: here, or by a manager of before
        this process, and none has been taken since."""
        if not self._looked_for_deleted and self._memory is not None:
            newest = self._memory.newest()
            if newest is not None and newest.is_first and self._storage.was_deleted(newest.id):
                self._hidden_step = newest.step
            self._looked_for_deleted = True
        return self._hidden_step

    def _warn(self, text: str) -> None:
        """Once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("CheckpointManager(%s): %s", self._storage.root, text)

    # -------------------------------------------------------------------- what there is

    @property
    def directory(self) -> Any:
        """The directory on storage, an epath."""
        return self._orbax.directory

    def all_steps(self, read: bool = False) -> list[int]:
        """All steps that can be restored, in ascending order: those on storage, and the newest
        snapshot's."""
        if read:
            self.reload()
        steps = self._storage.steps()
        newest = self._memory.step if self._memory is not None else None
        if newest is not None and newest != self._hidden:
            steps.add(newest)
        return sorted(steps)

    def latest_step(self) -> int | None:
        """The newest step: what `restore(None)` gives. It is not of a future that was left, on
        whatever number that ended."""
        memory = self._memory
        if memory is not None and not (memory.begun or self._is_beyond or self._hidden is not None):
            return memory.first_step
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The best step on storage, as `options.best_fn` says; without one, the latest."""
        if self._options.best_fn is None:
            return self.latest_step()
        found: int | None = self._orbax.best_step()
        return found

    def reload(self) -> None:
        """Looks again what is on storage."""
        self._orbax.reload()

    def reached_preemption(self, step: int) -> bool:
        """As Orbax says. `jaxft run` takes a last snapshot by itself when it is told to end."""
        return bool(self._orbax.reached_preemption(step))

    def should_save(self, step: int) -> bool:
        """Would `save` take this step, to memory or to storage?"""
        in_memory = self._memory is not None and self._memory.snapshotter.is_due(step)
        return in_memory or (not self._helpers and bool(self._orbax.should_save(step)))

    def is_saving_in_progress(self) -> bool:
        """Is a snapshot or a step on its way?"""
        receipt = self._memory.receipt if self._memory is not None else None
        is_open = receipt is not None and not receipt.protected.done()
        return is_open or bool(self._orbax.is_saving_in_progress())

    # -------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves a step, if it is due in memory or on storage, or `force` says that it goes to both.
        The state may be donated as soon as this returns.

        Returns:
            Whether it goes to storage, as Orbax says it; with `helpers`, whether it was taken.

        Raises:
            StepAlreadyExistsError: `force`, and the step is on storage (not where it was left by
                restoring an older one).
            ConfigError: the step is no integer from 0.
            JaxftError: the first snapshot does not fit into memory, another process saves here, an
                array has been donated before, or helpers cannot write it.
        """
        step = _checked(step)
        given = {"save_kwargs": save_kwargs, "metrics": metrics, "args": args}
        given["custom_metadata"] = custom_metadata
        if self._in_use is not None:
            raise self._in_use
        memory = self._memory
        if items is None and args is None:
            return bool(self._orbax.save(step))  # which says that this is wrong
        why = "items= is Orbax's older interface" if items is not None else refusal(args)
        if memory is None or why:
            if memory is not None:
                self._warn(f"what is saved is not kept in memory, and goes to storage: {why}")
                self._is_beyond = True
                given["custom_metadata"] = marked(custom_metadata, *memory.identity(None))
            return bool(self._orbax.save(step, items, force=force, **given))
        if self._helpers and (is_composite(args) or metrics or custom_metadata):
            raise ConfigError(
                "helpers=True: helpers write one item without a name, and neither metrics nor "
                "custom metadata: leave these out, or helpers=True"
            )
        self._check_kind(args)
        goes_back = self._went_back_to is not None
        if self._went_back_to is not None and step <= max(self._storage.steps(), default=step - 1):
            self._storage.leave_behind(self._went_back_to)
        self._went_back_to = None
        to_storage = bool(force) or (not self._helpers and bool(self._orbax.should_save(step)))
        if to_storage and step in self._orbax.all_steps():
            return bool(self._orbax.save(step, force=force, **given))  # which says what is wrong
        forced = to_storage or goes_back
        if not forced and memory.snapshotter.skip(step) is not None:
            return False
        held = hold(args)
        extras = held.extras(
            metrics,
            custom_metadata,
            name=self._storage.name(step),
            tracks_best=self._options.best_fn is not None,
        )
        try:
            receipt = memory.save(step, held, extras, force=forced)
        except ConfigError as error:
            self._warn(f"what is saved is not kept in memory, and goes to storage: {error}")
            self._is_beyond = True
            given["custom_metadata"] = marked(custom_metadata, *memory.identity(None))
            return bool(self._orbax.save(step, force=force, **given))
        if receipt.id is not None:
            self._hidden_step, self._looked_for_deleted = None, True
        if to_storage:
            self._storage.save(step, *memory.identity(receipt), given)
        elif (refused := memory.refused()) is not None:
            raise refused
        elif self._helpers:
            return receipt.id is not None
        elif (ahead := max(self._storage.steps(), default=step - 1)) >= step:
            self._warn(
                f"storage has step {ahead}, and Orbax writes none up to it: what is saved is in "
                "memory only. Restore an older step to go back to it, or use another directory"
            )
        return to_storage

    def _check_kind(self, args: Any) -> None:
        """A manager has one item without a name, or items with names, from its first save on. Orbax
        looks at that too, but only at what goes to storage."""
        is_default = not is_composite(args)
        if self._is_default is None:
            self._is_default = is_default
        if self._is_default != is_default:
            raise ValueError(
                "args must be a Composite, as this manager's items have names"
                if is_default
                else "args must not be a Composite, as what this manager saves has no name"
            )

    def wait_until_finished(self) -> None:
        """Until the last step is protected in memory, and is on storage if it goes there.

        Raises:
            SnapshotError: it is neither.
        """
        if self._memory is not None:
            self._memory.wait()
            self._memory.wait_for_helpers()
        self._storage.finish()
        self._raise_failure(self._memory)

    def check_for_errors(self) -> None:
        """Raises what went wrong with a save since it was last asked."""
        self._orbax.check_for_errors()
        self._raise_failure(self._memory)

    def _raise_failure(self, memory: Memory | None) -> None:
        """A snapshot that failed is an error, unless its step is on storage."""
        if memory is None or memory.receipt is None:
            return
        error = memory.failure()
        if error is not None and memory.receipt.step not in self._orbax.all_steps():
            raise error

    # -------------------------------------------------------------------- restore

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: Any = None,
    ) -> Any:
        """Restores a step, the latest if it is None: the newest from memory, if it is there, any
        other from storage. All processes call it alike.

        Raises:
            FileNotFoundError: there is no such step.
            TreeMismatch: the target has not the leaves, or the shapes, that were saved.
            ConfigError: the step is in memory only, which cannot give what is asked for.
            RestoreError: the step was found damaged.
        """
        memory = self._memory
        older = items is not None or restore_kwargs is not None or directory is not None
        if memory is None or older:
            return self._orbax.restore(step, items, restore_kwargs, directory, args)
        latest = self.latest_step()
        step = latest if step is None else step
        if step is None:
            raise FileNotFoundError(f"no step in memory, and none in {self.directory}")
        newest = memory.newest()
        on_storage = step in self._storage.steps()
        if newest is not None and newest.step == step != self._hidden:
            restored = self._from_memory(memory, newest, args, on_storage)
        elif on_storage:
            restored = self._from_storage(memory, step, args)
        else:
            raise FileNotFoundError(
                f"step {step} is neither in memory nor in {self.directory}; these are: "
                f"{self.all_steps()}"
            )
        is_older = latest is not None and step < latest
        self._went_back_to = step if is_older or self._hidden is not None else None
        return restored

    def _from_memory(self, memory: Memory, newest: Newest, args: Any, on_storage: bool) -> Any:
        contents = memory.contents(newest)
        if contents.is_copy and on_storage:
            return self._from_storage(memory, newest.step, args)
        try:
            request = Request(contents, args)
        except Unsupported as why:
            if on_storage:
                _log.info("step %d is read from storage: %s", newest.step, why)
                return self._from_storage(memory, newest.step, args)
            raise ConfigError(
                f"step {newest.step} is in memory only, which cannot give {why}; ask for less, or "
                f"for a step on storage: {sorted(self._storage.steps())}"
            ) from None
        self._is_default = contents.is_default
        return request.build(memory.restore(newest, contents, request.wants))

    def _from_storage(self, memory: Memory, step: int, args: Any) -> Any:
        restored = self._orbax.restore(step, args=args)
        self._is_default = not is_composite(restored)
        plan = memory.plan
        if not memory.begun and plan.step == step:
            if plan.storage is not None:
                self._adopt(memory, step, restored)
            elif plan.chosen is not None:
                memory.settle()
        return restored

    def _adopt(self, memory: Memory, step: int, restored: Any) -> None:
        """What training goes on from is the first snapshot."""
        items = dict(restored.items()) if is_composite(restored) else {DEFAULT: restored}
        items = {name: _without_placeholders(item) for name, item in items.items()}
        kinds = {name: self._storage.kind(step, name) for name in items}
        held = Held(
            {name: items[name] for name, kind in kinds.items() if kind == "tree"},
            {name: items[name] for name, kind in kinds.items() if kind == "text"},
            is_default=not is_composite(restored),
            kinds={},
        )
        if held.trees:
            extras = held.extras(
                self._orbax.metrics(step), name=self._storage.name(step), is_copy=True
            )
            memory.adopt(held, extras)

    # -------------------------------------------------------------------- what a step has

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's `StepMetadata` of a step, or the `RootMetadata` of all (None)."""
        contents = None if step is None else self._in_memory_only(step)
        if contents is not None:
            return step_metadata(contents)
        found = self._orbax.metadata(step)
        if step is not None and found.custom_metadata:
            found.custom_metadata.pop(KEY, None)
        if step is not None and found.item_metadata is None:
            return self._with_items(step, found)
        return found

    def _with_items(self, step: int, found: Any) -> Any:
        """Orbax knows of an item without a name what it is once it has saved or restored one: it is
        told so here where memory gave it."""
        newest = self._memory.newest() if self._memory is not None else None
        if newest is None or self._memory is None or newest.step != step:
            return found
        contents = self._memory.contents(newest)
        if contents.is_copy:
            return found
        return dataclasses.replace(found, item_metadata=step_metadata(contents).item_metadata)

    def item_metadata(self, step: int) -> Any:
        """What the items of a step have: shapes, dtypes, on storage also shardings."""
        if step is None:
            raise ValueError("item_metadata needs a step; metadata() tells of all")
        return self.metadata(step).item_metadata

    def metrics(self, step: int) -> Any:
        """The metrics that were saved with a step, or None."""
        contents = self._in_memory_only(step)
        return self._orbax.metrics(step) if contents is None else contents.metrics

    def _in_memory_only(self, step: int) -> Contents | None:
        if self._memory is None or step in self._orbax.all_steps():
            return None
        newest = self._memory.newest()
        if newest is None or newest.step != step or step == self._hidden:
            return None
        return self._memory.contents(newest)

    def delete(self, step: int) -> None:
        """Deletes a step on storage. The newest snapshot cannot be deleted: it counts no more, here
        and when the script is started again, and the next one takes its place.

        Raises:
            FileNotFoundError: there is no such step.
        """
        newest = None
        if self._memory is not None:
            self._memory.wait_for_first()
            newest = self._memory.newest()
        if newest is None or newest.step != step or step == self._hidden:
            self._orbax.delete(step)
            return
        if step in self._orbax.all_steps():
            self._orbax.delete(step)
        self._storage.note_deleted(newest.id)
        self._hidden_step = step

    # -------------------------------------------------------------------- the end

    def close(self) -> None:
        """Waits for what is on its way, writes the newest step to storage if it is in memory only,
        and ends. The memory of a script that nobody launched goes then. While an exception is on
        its way through the caller, that stays, and nothing more is written.

        Raises:
            SnapshotError: the last snapshot failed, and its step is not on storage.
        """
        self._close(failing=sys.exc_info()[0] is not None)

    def leave(self, *, keeps: bool) -> None:
        """At the end of a script that has not closed it."""
        if self._memory is not None and keeps:
            keep_newest(self._memory, self._storage, self._hidden)
        self._close(failing=True)

    def _close(self, *, failing: bool) -> None:
        if self._closed:
            return
        self._closed = True
        closed(self)
        try:
            if self._memory is not None and not failing:
                keep_newest(self._memory, self._storage, self._hidden)
            self._storage.finish()
            self._orbax.close()
        except BaseException:
            failing = True  # what could not be written is still in memory
            raise
        finally:
            memory, self._memory = self._memory, None  # what is asked for from now on is storage's
            if memory is not None:
                memory.close(failing=failing)
        if not failing:
            self._raise_failure(memory)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit):
            leaves_by(error)
        self._close(failing=kind is not None)


def _checked(step: Any) -> int:
    """Orbax writes any step, finds none below 0 again, and none at all after one that is text."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"step={step!r}: a step is an integer from 0")
    return number


def _without_placeholders(item: Any) -> Any:
    """What was left out of a restored item has no leaf."""
    return jax.tree.map(lambda leaf: None if leaf is ocp.PLACEHOLDER else leaf, item)


def _configured_default(item_names: Any, item_handlers: Any) -> bool | None:
    """Whether what is saved has no name, where Orbax is told so."""
    if item_names is None and item_handlers is None:
        return None
    return isinstance(item_handlers, ocp.CheckpointHandler)
