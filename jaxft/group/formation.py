"""The next world: which hosts, in which order, and who else has memory.

Rules
- Hosts with memory come first, then those of the last generation, then by name.
- Everybody keeps the place of the last generation, and so their ranks keep their numbers; newcomers
  take the places of the lost.
- A host with memory that is left out lends it: a spare, one that was told to end, and one whose
  agent is dead, or cut off from the store, but whose SMP may still answer.
- The world is told which snapshot the store knows of: one that all memory has lost is missed then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from jaxft.group.placement import form_groups
from jaxft.group.records import HostRecord, Progress, View
from jaxft.group.world import Code, Export, Generation, Member


def next_generation(
    view: View,
    ready: Mapping[str, HostRecord],
    silent: Iterable[Member],
    *,
    job: str,
    code: Code,
    hosts_max: int,
    nonce: str,
    reason: str,
    export: Export | None = None,
    lent: Mapping[str, HostRecord] = {},
) -> Generation:
    """The generation after the newest one.

    Args:
        view: what is in the store.
        ready: the hosts that can take part, by name.
        silent: members of the last generation without an agent, whose SMP may still answer.
        job, code, hosts_max: what the job asks for.
        nonce: random.
        reason: for people.
        export: its ranks write what it goes on from there, one on each host.
        lent: hosts that are there and take no part, by name.
    """
    hosts = in_order(choose(view, ready, hosts_max), view.generation)
    names = {record.host for record in hosts}
    spares = [record for host, record in sorted(ready.items()) if host not in names]
    spares += [record for _, record in sorted(lent.items())]
    lenders = [record.member() for record in spares if has_memory(view, record)]
    fresh = _fresh(view, hosts)
    protected = Progress() if fresh else view.newest_progress
    members = [record.member() for record in hosts]
    if export is not None:
        members = [msgspec.structs.replace(member, ranks=1) for member in members]
    return Generation(
        job=job,
        number=view.next_number,
        nonce=nonce,
        hosts=tuple(members),
        groups=form_groups(len(hosts), code, [record.domain for record in hosts]),
        code=code,
        coordinator=hosts[0].coordinator,
        holders=tuple(msgspec.structs.replace(one, ranks=0) for one in (*lenders, *silent)),
        fresh=fresh,
        expected=protected.snapshot,
        expected_step=protected.step,
        export=export,
        reason=reason,
    )


def choose(view: View, ready: Mapping[str, HostRecord], hosts_max: int) -> list[HostRecord]:
    """At most `hosts_max` hosts: those with memory first, then those of the last generation."""
    known = {member.host for member in view.generation.hosts} if view.generation else set()
    ranked = sorted(
        ready.values(),
        key=lambda r: (not has_memory(view, r), r.host not in known, natural(r.host)),
    )
    return ranked[:hosts_max]


def in_order(chosen: list[HostRecord], last: Generation | None) -> list[HostRecord]:
    """Everybody keeps their place; newcomers take those of the lost, in order of their names. Where
    somebody else has numbered the ranks, the places are theirs."""
    if all(record.place >= 0 for record in chosen):
        return sorted(chosen, key=lambda record: record.place)
    by_name = {record.host: record for record in chosen}
    known = [member.host for member in last.hosts] if last is not None else []
    new = sorted((r for r in chosen if r.host not in known), key=lambda r: natural(r.host))
    placed = []
    for host in known:
        if host in by_name:
            placed.append(by_name[host])
        elif new:
            placed.append(new.pop(0))
    return placed + new


def of_one_run(ready: Mapping[str, HostRecord], host: str) -> dict[str, HostRecord]:
    """Those whose ranks were started together with the ranks of `host`: an earlier start of the
    same script, or a host that is left of it, may still be there."""
    run = ready[host].run if host in ready else ""
    return {name: record for name, record in ready.items() if record.run == run}


def has_memory(view: View, record: HostRecord) -> bool:
    """Does this host hold a snapshot? Members of a generation that has settled do, and who lent
    theirs to one that has not."""
    last = view.generation
    if record.snapshot is not None or last is None:
        return record.snapshot is not None
    holding = last.hosts if last.number in view.progress else last.holders
    return any(record.arena == member.arena for member in holding)


def _fresh(view: View, hosts: list[HostRecord]) -> bool:
    """Is earlier memory to be ignored? Only until a generation that did so has settled."""
    last = view.generation
    if last is not None and last.fresh and last.number not in view.progress:
        return True
    return all(record.fresh and record.left == 0 for record in hosts)


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts host2 before host10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
