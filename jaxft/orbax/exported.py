"""A manager's snapshot, written to its directory by other processes: exporters, or `jaxft export`.

It is written as the manager would have written it, under the name that the manager gives its step,
so that it, and plain Orbax, find it. What Orbax cannot hold of it is a checkpoint as any
`OrbaxFallback`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxft.checkpoint import Record
from jaxft.errors import ConfigError
from jaxft.export import Copied, on_one_device, orbax_tree, write
from jaxft.extras import decode_extras
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import StorageEntry
from jaxft.orbax.items import MARK
from jaxft.orbax.storage import deleted, entry_at, marked

_NAME = re.compile(r"(?:(.*)_)?(\d+)")


def stored(directory: str) -> tuple[StorageEntry, ...]:
    """The steps that are whole in a manager's directory, whatever goes before their numbers."""
    found = [
        entry_at(ocp.path.step.step_from_checkpoint_name(path.name), path)
        for path in ocp.path.step.checkpoint_steps_paths(directory)
    ]
    return tuple(sorted(found, key=lambda entry: entry.step))


def is_deleted(directory: str, identity: SnapshotId) -> bool:
    """Has the script deleted this snapshot?"""
    return deleted(epath.Path(directory)) == identity


def write_as_saved(
    directory: str,
    copied: Copied,
    *,
    may_commit: Callable[[], None] = lambda: None,
    writer: str,
) -> None:
    """Writes a snapshot as who took it would; every process of the JAX world calls it, each with
    its share.

    Args:
        directory: a manager's, or that of any checkpoints.
        copied: the snapshot.
        may_commit: called in process 0 before the step can be seen; raises if it is not to be.
        writer: a name that no other writer has, the same in every process.

    Raises:
        ConfigError: the manager has names of its own for steps.
    """
    extras = decode_extras(copied.record.extras[min(copied.record.extras)])
    is_managers = isinstance(extras, dict) and MARK in extras
    if is_managers and all(one.where == "tree" for one in copied.record.leaves):
        _write_items(directory, copied, extras, may_commit)
    else:
        write(directory, *copied, keep=None, may_commit=may_commit, writer=writer)


def _write_items(
    directory: str, copied: Copied, extras: dict[str, Any], may_commit: Callable[[], None]
) -> None:
    record = copied.record
    tree = orbax_tree(record, copied.values, copied.empty)
    custom_metadata = json.loads(extras["custom_metadata"])
    with ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            step_name_format=_name_format(record.step, extras["name"]),
            best_fn=(lambda metrics: 0.0) if extras["tracks_best"] else None,
            temporary_path_class=_fenced(directory, may_commit),
        ),
    ) as manager:
        manager.save(
            record.step,
            args=_args(tree, extras),
            metrics=json.loads(extras["metrics"]),
            custom_metadata=marked(custom_metadata, record.id, _base(record)),
            force=True,
        )


def _args(tree: Any, extras: dict[str, Any]) -> Any:
    trees, texts = extras["trees"], extras["texts"]
    if extras["default"]:
        [kind] = trees.values()
        return getattr(ocp.args, kind)(tree)
    items = {name: getattr(ocp.args, kind)(tree[name]) for name, kind in trees.items()}
    items |= {name: ocp.args.JsonSave(json.loads(text)) for name, text in texts.items()}
    return ocp.args.Composite(**items)


def _name_format(step: int, name: str) -> Any:
    """Gives this step this name, and finds others that are named so."""
    named = _NAME.fullmatch(name)
    if named is None or int(named[2]) != step:
        raise ConfigError(
            f'step {step} is called "{name}" by its manager, whose step_name_format only its '
            "script has: start that again, and close the manager"
        )
    return ocp.path.step.standard_name_format(
        step_prefix=named[1],
        step_format_fixed_length=len(named[2]) if named[2] != str(step) else None,
    )


def _fenced(directory: str, may_commit: Callable[[], None]) -> Any:
    """How Orbax makes a step whole there, behind a last look whether it is to be."""
    root = epath.Path(directory)
    usual: Any = ocp.path.atomicity_defaults.get_default_temporary_path_class(root)

    class Fenced(usual):  # type: ignore[misc]
        async def finalize(self) -> None:
            if jax.process_index() == 0:
                for file in self.get().glob("*/_sharding"):
                    on_one_device(file.parent)
                may_commit()
            await super().finalize()

    return Fenced


def _base(record: Record) -> SnapshotId | None:
    """What the snapshot's generation went on from."""
    bases = [one.base for one in record.lineage if one.generation == record.id.generation]
    return bases[0] if bases else None
