"""What could be lost at this moment and still be rebuilt: `recovery`'s rules, asked ahead.

Rules
- It is about the newest snapshot that a restore would go on from if more were lost just now. One
  that is still being coded is passed over then, so it counts only where there is nothing else.
- Hosts are not seen at one moment. What anybody knows to be committed is coded on every host that
  holds it: one that seems not to have finished was seen before it had.
- Who does not answer counts as lost. An SMP that hangs is started again on its memory, and then
  counts again.
- A group can lose as many more as it has parity, less the shares that are missing. Where coding
  is still to be finished in it, the shares without parity count as missing once one is lost, for a
  snapshot that a generation has gone on from; for any other one, one loss is too many.
- A host is *fatal* if its loss alone leaves nothing as new as this snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Ledger, Plan, Slot
from jaxft.group.recovery import Holder, choose, in_force


class GroupExposure(msgspec.Struct, frozen=True, kw_only=True):
    """One group of the world that made the snapshot: any `more` of its hosts may still be lost,
    after those that are `missing`."""

    group: int
    hosts: tuple[str, ...]
    parity: int
    missing: tuple[str, ...]
    more: int


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore would give back now, and what of that hangs on whom.

    `snapshot` is None if memory gives back nothing. `lost` is the newest snapshot known to be
    committed where that cannot be had any more, and `reasons` why not.
    """

    snapshot: SnapshotId | None = None
    step: int = -1
    groups: tuple[GroupExposure, ...] = ()
    fatal: tuple[str, ...] = ()
    newest: SnapshotId | None = None
    lost: SnapshotId | None = None
    reasons: tuple[str, ...] = ()


def expose(
    holders: Sequence[Holder], *, expected: SnapshotId | None = None, expected_step: int = -1
) -> Exposure:
    """What could be lost now.

    Args:
        holders: every SMP that answers, as for `recovery.choose`.
        expected, expected_step: the newest committed snapshot that the store knows of; its step.
    """
    holders = _caught_up(holders)
    plan = _standing(holders, expected, expected_step)
    newest, chosen = plan.newest_known, plan.chosen
    lost = newest if newest is not None and (chosen is None or chosen < newest) else None
    reasons = plan.reasons if lost is not None else ()
    if chosen is None:
        return Exposure(newest=newest, lost=lost, reasons=reasons)
    return Exposure(
        snapshot=chosen,
        step=plan.step,
        groups=_groups(plan, holders),
        fatal=_fatal(chosen, holders),
        newest=newest,
        lost=lost,
        reasons=reasons,
    )


def _caught_up(holders: Sequence[Holder]) -> list[Holder]:
    """As they are since the newest snapshot that one of them knows of was committed."""
    known = [one.ledger.committed for one in holders if one.ledger.committed is not None]
    newest = max(known, default=None)
    if newest in _bases(holders):  # It was settled on long ago.
        return list(holders)

    def later(slot: Slot) -> Slot:
        behind = slot.id is not None and slot.id == newest and slot.state == "staged"
        return msgspec.structs.replace(slot, state="coded") if behind else slot

    found = []
    for one in holders:
        first, second = map(later, one.ledger.slots)
        ledger = msgspec.structs.replace(one.ledger, slots=(first, second))
        found.append(one._replace(ledger=ledger))
    return found


def _standing(holders: Sequence[Holder], expected: SnapshotId | None, expected_step: int) -> Plan:
    """The plan for what is there, less what is still being coded."""
    plan = choose(holders, attempt=0, expected=expected, expected_step=expected_step)
    if not plan.finish or plan.chosen in _bases(holders):
        return plan
    before = [one._replace(ledger=_without(one.ledger, plan.chosen)) for one in holders]
    older = choose(before, attempt=0, expected=expected, expected_step=expected_step)
    return plan if older.chosen is None else older


def _without(ledger: Ledger, identity: SnapshotId | None) -> Ledger:
    first, second = (Slot() if slot.id == identity else slot for slot in ledger.slots)
    return msgspec.structs.replace(ledger, slots=(first, second))


def _bases(holders: Sequence[Holder]) -> set[SnapshotId | None]:
    """What generations have gone on from."""
    lineages = in_force([record for holder in holders for record in holder.ledger.lineage])
    return {record.base for record in lineages}


def _groups(plan: Plan, holders: Sequence[Holder]) -> tuple[GroupExposure, ...]:
    world, there = plan.world, {place for place, _ in plan.shares}
    uncoded = {
        slot.host
        for holder in holders
        for slot in holder.ledger.slots
        if slot.id == plan.chosen and slot.state == "staged"
    }
    is_base = plan.chosen in _bases(holders)
    found = []
    for number, group in enumerate(world.groups):
        missing = [place for place in group.hosts if place not in there]
        more = group.parity - len(missing)
        half = len(uncoded.intersection(group.hosts))
        if half and not missing:
            more = max(0, group.parity - half) if is_base else 0
        found.append(
            GroupExposure(
                group=number,
                hosts=tuple(world.hosts[place] for place in group.hosts),
                parity=group.parity,
                missing=tuple(world.hosts[place] for place in missing),
                more=more,
            )
        )
    return tuple(found)


def _fatal(snapshot: SnapshotId, holders: Sequence[Holder]) -> tuple[str, ...]:
    fatal = []
    for lost in holders:
        if not any(slot.id == snapshot for slot in lost.ledger.slots):
            continue
        left = choose([one for one in holders if one is not lost], attempt=0).chosen
        if left is None or left < snapshot:
            fatal.append(lost.name)
    return tuple(fatal)
