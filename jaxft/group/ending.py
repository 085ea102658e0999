"""How a job ends: not before what memory has, and storage lacks, is written there.

Memory ends with the agents' run. So before an end is written, whatever it is (all ranks ended well,
a script that fails again and again, too few hosts, all hosts told to end), one more generation is
formed of the hosts that are there, an *export*: its SMPs decide and rebuild as for any other, and
its ranks, one a host, write to storage what it goes on from. The end is remembered meanwhile.

Rules
- There is an export where the newest generation that has settled has a directory for checkpoints,
  and a snapshot newer than the newest checkpoint there.
- While too few hosts are waited on, there is one too, and the wait goes on after it.
- One that fails is not tried again, except after the loss of a host, or while one was silent,
  TRIES_MAX times. A host that was silent only lends its memory to the next ones, as far as it is
  heard then.
- An export that fails changes nothing about the end but its words.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jaxft.group.records import HostRecord, JobEnd, View
from jaxft.group.world import Export

TRIES_MAX = 3
# After these faults of an export another one may do better.
LOSSES = frozenset(
    {"host_lost", "memory_lost", "agent_restarted", "smp_moved", "unreachable", "told_to_end"}
)


def wanted_export(view: View) -> Export | None:
    """Where the newest snapshot is to be written before the job ends; None: nowhere."""
    export = view.newest_progress.unsaved
    if export is None:
        return None
    generation, tries = view.generation, 0
    if generation is not None and generation.export is not None:
        fault = view.fault
        tries = generation.export.tries
        if fault is None or fault.kind not in LOSSES or tries >= TRIES_MAX:
            return None
    return msgspec.structs.replace(export, tries=tries + 1)


def writers(view: View, ready: Mapping[str, HostRecord]) -> dict[str, HostRecord]:
    """Those of the hosts that write an export: whom the tries before it have heard, if anybody."""
    generation = view.generation
    if generation is None or generation.export is None:
        return dict(ready)
    before = generation.number - generation.export.tries
    tries = (fault for number, fault in view.faults.items() if number > before)
    silent = {fault.host for fault in tries if fault.kind == "unreachable"}
    return {host: record for host, record in ready.items() if host not in silent} or dict(ready)


def ending(view: View) -> JobEnd | None:
    """What the job ends with after its export. Void once no agent is left that formed it: a run
    that is started again after all of them were killed goes on."""
    generation = view.generation
    if generation is None or generation.export is None or view.ending is None:
        return None
    agents = {record.agent for record in view.hosts.values()}
    return view.ending if any(member.agent in agents for member in generation.hosts) else None


def in_words(view: View, end: JobEnd) -> JobEnd:
    """The end of a job, with what became of its export, or of what no storage has."""
    generation = view.generation
    if generation is None or generation.export is None:
        # What failures have led to says so itself.
        if end.kind == "finished" or end.failures:
            return end
        return msgspec.structs.replace(end, reason=f"{end.reason}{gone_with_memory(view)}")
    where = f"in {generation.export.directory}"
    if view.fault is not None:
        step = view.newest_progress.step
        what = f"the snapshot of step {step} did not get to storage {where}: {view.fault.detail}"
    else:
        what = f"the snapshot of step {view.newest_progress.step} is on storage, {where}"
    return msgspec.structs.replace(end, reason=f"{end.reason}; {what}")


def gone_with_memory(view: View) -> str:
    """What goes with a job that ends now, as words behind others. What has a place on storage gets
    there, and what an earlier run has left is not in this one's memory."""
    newest = view.newest_progress
    in_memory = newest.snapshot is not None and newest.snapshot.generation > view.number
    if in_memory and newest.export is None:
        return (
            f"; the snapshot of step {newest.step} goes with the run's memory, since there is no "
            "OrbaxFallback"
        )
    return ""


def are_needed(view: View) -> bool:
    """Can the hosts that stay not do yet without the memory of those that were told to end?

    What the newest world holds, it can rebuild without so many of a group as that has parity. One
    that has not settled may still need whatever the last one had."""
    generation = view.generation
    if generation is None or view.newest_progress.snapshot is None:
        return False
    if generation.number not in view.progress:
        return True
    stay = {host for host, record in view.hosts.items() if not record.leaving}
    names = [member.host for member in generation.hosts]
    missing = (sum(names[place] not in stay for place in one.hosts) for one in generation.groups)
    return any(
        count > group.parity for count, group in zip(missing, generation.groups, strict=True)
    )


def is_told(view: View) -> bool:
    """Was every host that is there told to end?"""
    return bool(view.hosts) and all(record.leaving for record in view.hosts.values())
