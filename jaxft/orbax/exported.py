"""A manager's snapshot, written to a directory by another process (`jaxft export`).

What has items with names is written as the manager would have written it, so that it, and plain
Orbax, find these items. All else is a checkpoint as any `OrbaxFallback`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxft.checkpoint import Record
from jaxft.export import Copied, orbax_tree
from jaxft.extras import decode_extras
from jaxft.group.manifest import SnapshotId
from jaxft.orbax.items import MARK
from jaxft.orbax.storage import marked


def write_items(directory: Path, copied: Copied) -> bool:
    """Writes a snapshot whose items have names; all of it is this process's.

    Returns:
        False: nothing is written, as it is no such snapshot, or Orbax cannot hold some leaf of it.
    """
    record = copied.record
    extras = decode_extras(record.extras[min(record.extras)])
    is_named = isinstance(extras, dict) and MARK in extras and not extras["default"]
    if not is_named or any(one.where != "tree" for one in record.leaves):
        return False
    tree = orbax_tree(record, copied.values, copied.empty)
    items: dict[str, Any] = {
        name: getattr(ocp.args, kind)(tree[name]) for name, kind in extras["trees"].items()
    }
    items |= {name: ocp.args.JsonSave(json.loads(text)) for name, text in extras["texts"].items()}
    custom_metadata = json.loads(extras["custom_metadata"])
    with ocp.CheckpointManager(directory) as manager:
        manager.save(
            record.step,
            args=ocp.args.Composite(**items),
            custom_metadata=marked(custom_metadata, record.id, _base(record)),
            force=True,
        )
    return True


def _base(record: Record) -> SnapshotId | None:
    """What the snapshot's generation went on from."""
    bases = [one.base for one in record.lineage if one.generation == record.id.generation]
    return bases[0] if bases else None
