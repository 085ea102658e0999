"""A run's events in words short enough to be read."""

from __future__ import annotations

from jaxft.group import events as e
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import (
    Directive,
    Ledger,
    ManifestAck,
    ManifestNotice,
    Outcome,
    PersistOrder,
    Plan,
    Slot,
    Status,
)


def brief(what: object) -> str:
    """One line for an event, an effect or a note."""
    match what:
        case e.Heard(sender, body):
            return f"hears {sender}: {_body(body)}"
        case e.WriteLedger(ledger):
            return f"  writes {_ledger(ledger)}"
        case e.EnterWanted(generation):
            return f"is told to enter {generation.number}"
        case e.SlotWanted(rank, seq, step):
            return f"rank {rank} wants a slot for {seq} (step {step})"
        case e.PartStaged(rank, seq):
            return f"rank {rank} has staged {seq}"
        case e.Grant(identity, slot):
            return f"  grants slot {slot} to {identity}"
        case e.Seal(identity, slot):
            return f"  seals {identity} in slot {slot}"
        case e.Code(identity, slot):
            return f"  codes {identity} in slot {slot}"
        case e.TellPlan(plan) | e.Rebuild(plan):
            return f"  {type(what).__name__} {_plan(plan)}"
        case e.TellSettled(directive):
            return f"  tells its ranks: settled on {directive.base}"
        case e.TellOutcome(outcome):
            return f"  tells its ranks: {_outcome(outcome)}"
        case e.TellPersist(order):
            return f"  {_order(order)}"
        case e.RankJoined(rank):
            return f"rank {rank} joins"
        case e.SegmentSealed(identity) | e.CodingDone(identity):
            return f"{type(what).__name__} {identity}"
        case str():
            return what
        case _:
            text = str(what)
            return text if isinstance(what, e.Event) else f"  {text}"


def _body(body: object) -> str:
    match body:
        case Status():
            report = body.report
            words = [f"status v{body.version & 0xFFFFFFFF}", "frozen" if body.frozen else "thawed"]
            if body.ledger is not None:
                words.append(_ledger(body.ledger))
            if body.attempt:
                words.append(f"plan {body.attempt} {body.restored or 'not restored'}")
            if body.failure or body.damaged:
                words.append(f"failure {body.failure} {body.damaged}")
            if report is not None:
                what = "coded" if report.coded else "staged" if report.staged else "begun"
                words.append(f"{report.seq} {what} {report.failure}")
            words.append(f"knows outcome {body.outcome_seq}")
            return ", ".join(words)
        case Directive():
            words = [f"directive v{body.version & 0xFFFFFFFF}"]
            if body.settled:
                words.append(f"settled on {body.base}")
            elif body.plan is not None:
                words.append(_plan(body.plan))
            if body.outcome is not None:
                words.append(_outcome(body.outcome))
            if body.persist is not None:
                words.append(_order(body.persist))
            return ", ".join(words)
        case ManifestNotice(manifest=manifest, wanted=wanted):
            return f"manifest of {manifest.id}{', wants mine' if wanted else ''}"
        case ManifestAck(id=identity):
            return f"has my manifest of {identity}"
        case _:
            return str(body)


def _plan(plan: Plan) -> str:
    where = [f"{one.host}{'!' if one.rebuilt else ''}@{one.address}" for one in plan.segments]
    finish = " to be finished" if plan.finish else ""
    return f"plan {plan.attempt}: {plan.base} from {plan.source}{finish} [{' '.join(where)}]"


def _outcome(outcome: Outcome) -> str:
    how = "committed" if outcome.ok else f"aborted ({outcome.reason})"
    return f"outcome {outcome.seq} {how}, newest {outcome.committed}"


def _order(order: PersistOrder) -> str:
    pinned = " pinned" if order.pinned else ""
    return f"persist {order.number}: {order.id}{pinned} {order.result or 'open'}"


def _slot(slot: Slot) -> str:
    return "empty" if slot.id is None else f"{slot.state} {slot.id}"


def _ledger(ledger: Ledger) -> str:
    slots = " | ".join(_slot(slot) for slot in ledger.slots)
    known: SnapshotId | str = ledger.committed if ledger.committed is not None else "nothing"
    base = f", base {ledger.lineage[-1].base}" if ledger.settled else ""
    outcome = "none" if ledger.outcome is None else ledger.outcome.seq
    return f"gen {ledger.generation} [{slots}] outcome {outcome}, committed {known}{base}"
