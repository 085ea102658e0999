"""Which snapshot a new generation goes on from, and where its bytes are: one pure decision.

Rules
- A snapshot is a candidate if in every group either (a) at most `parity` shares are missing and
  every other member holds its whole share, or (b) no segment is missing: then its coding is
  finished in its old group before anything else. "Recoverable somehow" is not enough: a half coded
  group that has lost a host tolerates no further loss.
- A snapshot that was aborted is not a candidate: the host that knows it may have given its share's
  slot away already, and then what is left tolerates less than the last committed snapshot does.
- Nor is one whose shares are of different steps or plans.
- A snapshot that a generation has gone on from replaced all older ones, so it is judged by what can
  be rebuilt at all: a share that was away when its coding was finished counts as missing.
- A snapshot of an older generation that is newer than the base of any lineage record found is
  abandoned: its branch was left. A record of a generation that was itself left (a later one went on
  from something older than it) no longer counts: its root may have been the only one to write it.
- The newest by (generation, seq) wins, in memory or on storage. Steps decide only among checkpoints
  that carry no identity.
- A fragment that failed its check is missing, and so is a share whose manifest did.
- The reason for every snapshot that was not chosen is kept.
- A checkpoint that cannot be read is passed over. Where nothing else is left the plan says so: a
  job that has checkpoints does not begin anew unasked.
- What any host, or the store, knows to be committed is missed when it cannot be had, unless it was
  abandoned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Damage, Ledger, Lineage, Plan, Segment, Slot, StorageEntry
from jaxft.group.world import Group, World


class Holder(NamedTuple):
    """An SMP that answered: its host's name, its address, what it remembers, and whether it is a
    host of the new world (and so may rebuild)."""

    name: str
    address: str
    ledger: Ledger
    member: bool = True


class Verdict(NamedTuple):
    """Can this snapshot be restored from memory, and if not, why not?"""

    ok: bool
    reason: str
    finish: bool = False


def abandoned(identity: SnapshotId, lineages: Iterable[Lineage]) -> Lineage | None:
    """The record that says that this snapshot's branch was left, if there is one."""
    for record in lineages:
        if identity.generation < record.generation and (
            record.base is None or identity > record.base
        ):
            return record
    return None


def in_force(lineages: Sequence[Lineage]) -> list[Lineage]:
    """The records of generations that a later one has not left."""
    return [
        record
        for record in lineages
        if not any(
            record.generation < later.generation
            and (later.base is None or later.base.generation < record.generation)
            for later in lineages
        )
    ]


def choose(
    holders: Sequence[Holder],
    *,
    attempt: int,
    storage: Sequence[StorageEntry] = (),
    damages: Mapping[SnapshotId, frozenset[Damage]] | None = None,
    fresh: bool = False,
    expected: SnapshotId | None = None,
    expected_step: int = -1,
) -> Plan:
    """The plan for all ranks, with the reasons for what it passes over.

    Args:
        holders: everyone that answered, hosts of the new world first and in its order.
        attempt: number of the plan.
        storage: checkpoints that the fallback's directory holds.
        damages: what earlier attempts found unusable.
        fresh: the job starts anew; nothing is a candidate.
        expected, expected_step: the newest committed snapshot that the store knows of; its step.
    """
    if fresh:
        return Plan(attempt=attempt, reasons=("the job was started fresh",))
    lineages = in_force(
        [record for holder in holders for record in holder.ledger.lineage]
        + [record for entry in storage for record in entry.lineage]
    )
    known = _newest_known(holders, lineages, expected)
    reasons: list[str] = []
    bad = [entry for entry in storage if entry.damaged]
    unreadable = [one for one in bad if one.id is None or abandoned(one.id, lineages) is None]
    reasons += [entry.damaged for entry in unreadable]
    storage = [entry for entry in storage if not entry.damaged]
    stored = {entry.id: entry for entry in storage if entry.id is not None}
    found = {slot.id for holder in holders for slot in holder.ledger.slots if slot.id is not None}
    missed = {known} if known is not None else set()
    for identity in sorted(found | stored.keys() | missed, reverse=True):
        record = abandoned(identity, lineages)
        if record is not None:
            base = "nothing" if record.base is None else f"snapshot {record.base}"
            reasons.append(
                f"snapshot {identity}: abandoned, generation {record.generation} "
                f"went on from {base}"
            )
            continue
        bases = {record.base for record in lineages}
        if identity not in bases and any(h.ledger.knows_aborted(identity) for h in holders):
            reasons.append(f"snapshot {identity}: aborted")
            if identity in stored:  # whoever wrote that did not need the memory
                return _from_storage(stored[identity], attempt, reasons, known)
            continue
        damaged = (damages or {}).get(identity, frozenset())
        shares, world = _shares(identity, holders, damaged)
        if identity in bases:
            shares = _without_half_coded(shares, world, damaged)
        verdict = _judge(shares, world, damaged)
        if verdict.ok:
            return _from_memory(
                identity, shares, world, damaged, holders, attempt, verdict, reasons, known
            )
        step = f" of step {expected_step}" if identity == expected and expected_step >= 0 else ""
        reasons.append(f"snapshot {identity}{step}: {verdict.reason}")
        if identity in stored:
            return _from_storage(stored[identity], attempt, reasons, known)
    plain = [entry for entry in storage if entry.id is None]
    if plain:
        return _from_storage(max(plain, key=lambda entry: entry.step), attempt, reasons, known)
    return Plan(
        attempt=attempt,
        reasons=tuple(reasons),
        newest_known=known,
        unreadable=bool(unreadable),
    )


def _newest_known(
    holders: Sequence[Holder], lineages: Sequence[Lineage], expected: SnapshotId | None
) -> SnapshotId | None:
    known = [expected, *(holder.ledger.committed for holder in holders)]
    return max(
        (one for one in known if one is not None and abandoned(one, lineages) is None),
        default=None,
    )


def _shares(
    identity: SnapshotId, holders: Sequence[Holder], damaged: frozenset[Damage]
) -> tuple[dict[int, tuple[str, Slot]], World]:
    """Who holds which share: place in the snapshot's world -> (address, slot)."""
    shares: dict[int, tuple[str, Slot]] = {}
    world = World((), ())
    for holder in holders:
        for slot in holder.ledger.slots:
            if slot.id == identity and slot.readable:
                world = slot.world
                if Damage(slot.host) not in damaged:
                    shares.setdefault(slot.host, (holder.address, slot))
    return shares, world


def _without_half_coded(
    shares: Mapping[int, tuple[str, Slot]], world: World, damaged: frozenset[Damage]
) -> dict[int, tuple[str, Slot]]:
    """In groups where something is missing, without those that have no parity: nobody can finish
    them, and the others were finished without them."""
    hurt = {damage.host for damage in damaged}
    short = [
        group
        for group in world.groups
        if any(host not in shares or host in hurt for host in group.hosts)
    ]
    members = {host for group in short for host in group.hosts}
    return {
        host: (address, slot)
        for host, (address, slot) in shares.items()
        if host not in members or slot.state == "coded"
    }


def _judge(
    shares: Mapping[int, tuple[str, Slot]], world: World, damaged: frozenset[Damage]
) -> Verdict:
    if not world.groups:
        return Verdict(False, "no host holds its segment whole")
    kinds = {(slot.step, slot.plan) for _, slot in shares.values()}
    if len(kinds) > 1:
        steps = ", ".join(str(step) for step, _ in sorted(kinds))
        return Verdict(False, f"its shares do not belong together (steps {steps}, or other trees)")
    finish = False
    for number, group in enumerate(world.groups):
        verdict = _judge_group(group, shares, world, damaged)
        if not verdict.ok:
            return Verdict(False, f"group {number}: {verdict.reason}")
        finish = finish or verdict.finish
    return Verdict(True, "", finish)


def _judge_group(
    group: Group,
    shares: Mapping[int, tuple[str, Slot]],
    world: World,
    damaged: frozenset[Damage],
) -> Verdict:
    missing = [host for host in group.hosts if host not in shares]
    uncoded = [host for host in group.hosts if host in shares and shares[host][1].state != "coded"]
    names = ", ".join(world.hosts[host] for host in missing)
    if len(missing) > group.parity:
        return Verdict(
            False, f"{len(missing)} shares are missing ({names}), its parity is {group.parity}"
        )
    fragments: dict[tuple[int, int], int] = {}
    for damage in damaged:
        if damage.host in group.hosts and damage.host not in missing:
            key = (damage.lane, damage.stripe)
            fragments[key] = fragments.get(key, 0) + 1
    if uncoded and (missing or fragments):
        half = ", ".join(world.hosts[host] for host in uncoded)
        what = f"missing ({names})" if missing else "damaged"
        return Verdict(False, f"{half} had not finished its parity and shares are {what}")
    worst = max(fragments.values(), default=0)
    if worst + len(missing) > group.parity:
        return Verdict(
            False,
            f"{worst} fragments of a stripe are damaged and {len(missing)} shares are missing, "
            f"its parity is {group.parity}",
        )
    return Verdict(True, "", bool(uncoded))


def _from_memory(
    identity: SnapshotId,
    shares: Mapping[int, tuple[str, Slot]],
    world: World,
    damaged: frozenset[Damage],
    holders: Sequence[Holder],
    attempt: int,
    verdict: Verdict,
    reasons: Sequence[str],
    known: SnapshotId | None,
) -> Plan:
    segments = _segments(shares, world, damaged, holders)
    step = next(slot.step for _, slot in shares.values())
    return Plan(
        attempt=attempt,
        chosen=identity,
        step=step,
        world=world,
        segments=segments,
        shares=tuple(sorted((host, address) for host, (address, _) in shares.items())),
        damaged=tuple(sorted(damaged)),
        finish=verdict.finish,
        source=_source(segments, holders),
        reasons=tuple(reasons),
        newest_known=known,
    )


def _segments(
    shares: Mapping[int, tuple[str, Slot]],
    world: World,
    damaged: frozenset[Damage],
    holders: Sequence[Holder],
) -> tuple[Segment, ...]:
    """Each segment where it lies, or where it is to be rebuilt: on the host of the same name, else
    on hosts that hold no share, else in turn."""
    members = [holder for holder in holders if holder.member]
    by_name = {holder.name: holder.address for holder in members}
    holding = {address for address, _ in shares.values()}
    spare = [holder.address for holder in members if holder.address not in holding]
    pool = spare or [holder.address for holder in members]
    hurt = {damage.host for damage in damaged}
    segments = []
    for host, name in enumerate(world.hosts):
        if host in shares and host not in hurt:
            segments.append(Segment(host, shares[host][0]))
        else:
            address = by_name.get(name) or pool[host % len(pool)]
            segments.append(Segment(host, address, rebuilt=True))
    return tuple(segments)


def _source(segments: Sequence[Segment], holders: Sequence[Holder]) -> str:
    if any(segment.rebuilt for segment in segments):
        return "rebuilt"
    members = {holder.address for holder in holders if holder.member}
    return "own" if members == {segment.address for segment in segments} else "peer"


def _from_storage(
    entry: StorageEntry, attempt: int, reasons: Sequence[str], known: SnapshotId | None
) -> Plan:
    return Plan(
        attempt=attempt,
        step=entry.step,
        storage=entry,
        source="orbax",
        reasons=tuple(reasons),
        newest_known=known,
    )
