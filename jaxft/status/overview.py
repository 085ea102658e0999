"""What was seen of a job becomes what is said of it. Pure.

Rules
- An SMP's own word beats the store's, which beats nothing: where neither says anything, it is not
  known, and nothing is made up.
- Who does not answer counts as lost, in what could be lost.
- A job is protected if all that it was asked to have is there now: hosts, ranks, parity, a
  snapshot, storage. Everything that is missing is one of its problems, in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from jaxft.group.account import Account
from jaxft.group.exposure import Exposure, expose
from jaxft.group.manifest import SnapshotId
from jaxft.group.membership import is_done
from jaxft.group.messages import Slot
from jaxft.group.placement import crowded_domains
from jaxft.group.records import HostRecord, Progress, View
from jaxft.group.recovery import Holder
from jaxft.group.world import Generation, Member
from jaxft.status import report as r
from jaxft.status.problems import problems

FAILURES_MAX = 10


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a job at `now_s` (seconds since the epoch).

    `accounts` are of the SMPs that answered, by host; `silent` is why the others did not. `view` is
    what the store says, None if there is no store or it did not answer (`store_problem`).
    """

    job: str
    now_s: float
    accounts: Mapping[str, Account] = {}
    silent: Mapping[str, str] = {}
    view: View | None = None
    store: str = ""
    store_problem: str = ""


def overview(survey: Survey) -> r.JobReport:
    """What is said of it."""
    generation = newest_generation(survey.accounts.values(), survey.view)
    exposure = _exposure(survey)
    report = r.JobReport(
        job=survey.job,
        now_s=survey.now_s,
        health=r.PROTECTED,
        problems=(),
        ended=_ended(survey.view),
        store=r.StoreReport(url=survey.store or None, problem=survey.store_problem),
        world=None if generation is None else _world(generation, survey),
        groups=() if generation is None else _groups(generation),
        hosts=tuple(_hosts(generation, survey)),
        newest=_newest(exposure, survey),
        losses=_losses(exposure),
        storage=_storage(generation, survey),
        held=_held(survey.accounts.values()),
        failures=_failures(survey),
    )
    found = problems(report, 0 if generation is None else asked_parity(generation))
    return msgspec.structs.replace(report, problems=found, health=_health(report, found, survey))


def newest_generation(accounts: Iterable[Account], view: View | None) -> Generation | None:
    """The newest that anybody knows of."""
    known = [account.generation for account in accounts]
    known.append(None if view is None else view.generation)
    found = [one for one in known if one is not None]
    return max(found, key=lambda one: one.number, default=None)


def asked_parity(generation: Generation) -> int:
    """How many hosts of a group were to be expendable; a script that nobody launched asks none."""
    return 0 if generation.attached else generation.code.parity


def _health(report: r.JobReport, found: tuple[str, ...], survey: Survey) -> str:
    if report.ended:
        return r.ENDED
    if not survey.accounts:
        return r.UNREACHABLE
    return r.DEGRADED if found else r.PROTECTED


def _ended(view: View | None) -> str:
    end = None if view is None else view.end
    return "" if end is None else f"{end.kind}: {end.reason}"


# ------------------------------------------------------------------------------ who is there


def _world(generation: Generation, survey: Survey) -> r.WorldReport:
    number = generation.number
    inside = [
        account
        for account in survey.accounts.values()
        if account.generation is not None and account.generation.number == number
    ]
    ages = [one.now_s - one.entered_s for one in inside if one.entered_s is not None]
    members = {one.host for one in (*generation.hosts, *generation.holders)}
    registered: Mapping[str, HostRecord] = {} if survey.view is None else survey.view.hosts
    return r.WorldReport(
        generation=number,
        phase=_phase(generation, inside, survey.view),
        age_s=max(ages, default=None),
        reason=generation.reason,
        hosts=tuple(one.host for one in generation.hosts),
        ranks=generation.rank_count,
        holders=tuple(one.host for one in generation.holders),
        spares=tuple(sorted(host for host in registered if host not in members)),
        left_out={host: registered[host].waits for host in registered if registered[host].waits},
        root=generation.hosts[0].host,
        code="1+0" if generation.attached else str(generation.code),
    )


def _phase(generation: Generation, inside: Iterable[Account], view: View | None) -> str:
    if view is not None and view.end is not None:
        return "ended"
    if view is not None and generation.number in view.faults:
        return "failed"
    if generation.export is not None:
        return "exporting"
    has_settled = view is not None and generation.number in view.progress
    settled = has_settled or any(account.settled for account in inside)
    return "running" if settled else "restoring"


def _groups(generation: Generation) -> tuple[r.GroupReport, ...]:
    names = [member.host for member in generation.hosts]
    domains = [member.domain for member in generation.hosts]
    crowded = {(one.group, one.domain) for one in crowded_domains(generation.groups, domains)}
    asked = asked_parity(generation)
    found = []
    for number, group in enumerate(generation.groups):
        together: dict[str, list[str]] = {}
        for place in group.hosts:
            if domains[place]:
                together.setdefault(domains[place], []).append(names[place])
        found.append(
            r.GroupReport(
                group=number,
                hosts=tuple(names[place] for place in group.hosts),
                code=f"{group.data}+{group.parity}",
                less_than_asked=group.parity < asked,
                domains=tuple(
                    r.SharedDomain(
                        domain=domain, hosts=tuple(hosts), fatal=(number, domain) in crowded
                    )
                    for domain, hosts in together.items()
                    if len(hosts) > 1
                ),
            )
        )
    return tuple(found)


def _hosts(generation: Generation | None, survey: Survey) -> Iterable[r.HostReport]:
    """Members in the order of their ranks, then all others."""
    members = {} if generation is None else {one.host: one for one in generation.hosts}
    holders = {} if generation is None else {one.host: one for one in generation.holders}
    records = {} if survey.view is None else dict(survey.view.hosts)
    others = sorted({*records, *survey.accounts, *survey.silent} - {*members, *holders})
    unheard: dict[str, float] = {}
    for account in survey.accounts.values():
        if generation is not None and account.generation == generation:
            unheard |= account.silent
    for host in (*members, *holders, *others):
        role = "member" if host in members else "holder" if host in holders else "left"
        role = "spare" if role == "left" and host in records else role
        member = members.get(host) or holders.get(host)
        yield _host(host, role, member, records.get(host), survey, unheard.get(host))


def _host(
    host: str,
    role: str,
    member: Member | None,
    record: HostRecord | None,
    survey: Survey,
    unheard_s: float | None,
) -> r.HostReport:
    account = survey.accounts.get(host)
    addresses = (one.address for one in (account, record, member) if one is not None)
    # The same order where both say it: what is newest.
    domains = [one.domain for one in (record, member) if one is not None]
    if account is not None and account.agent_pid:
        registers = survey.view is not None and role in ("member", "holder")
        agent = "lapsed" if registers and record is None else "alive"
    elif account is not None:
        agent = "gone"
    elif survey.view is not None:
        agent = "alive" if record is not None else "gone"
    else:
        agent = "unknown"
    return r.HostReport(
        host=host,
        role=role,
        address=next(addresses, None),
        domain=next(iter(domains), ""),
        agent=agent,
        smp="silent" if account is None else "alive",
        why=survey.silent.get(host, "") if account is None else "",
        ranks=None if account is None else len(account.ranks),
        ranks_expected=member.ranks if role == "member" and member is not None else 0,
        hanging=() if survey.view is None else _hanging(host, survey.view),
        is_root=account is not None and account.is_root,
        leaving=record is not None and record.leaving,
        unheard_s=unheard_s,
        generation=None if account is None else account.ledger.generation,
        slots=() if account is None else tuple(_slot(one, account) for one in account.ledger.slots),
    )


def _hanging(host: str, view: View) -> tuple[str, ...]:
    """The ranks of this host that agents take for hanging, as they wrote it down."""
    stands = view.still.get(host)
    return tuple(
        f"rank {one.rank} has not called save for {one.still_s:.0f} s (its last call was number "
        f"{one.calls}, {one.limit_s:.0f} s are allowed)"
        for one in (() if stands is None else stands.ranks)
        if one.is_late
    )


def _slot(slot: Slot, account: Account) -> r.SlotReport:
    ledger, order = account.ledger, account.ledger.persist
    state, pinned = slot.state, ""
    if state == "coded" and slot.id is not None and _is_committed(slot.id, account):
        state = "committed"
    if slot.id is not None and slot.id in account.pinned:
        settled_on = ledger.lineage[-1].base if ledger.lineage else None
        pinned = "newest" if slot.id in (ledger.committed, settled_on) else "reader"
        if order is not None and order.pinned and order.id == slot.id:
            pinned = "storage"
    return r.SlotReport(
        state=state,
        snapshot=None if slot.id is None else str(slot.id),
        step=None if slot.id is None else slot.step,
        size_bytes=slot.length,
        pinned=pinned,
    )


def _is_committed(identity: SnapshotId, account: Account) -> bool:
    """As far as this host knows; of older ones only the last outcomes are remembered."""
    ledger = account.ledger
    if ledger.committed is None or identity > ledger.committed:
        return False
    known = [one for one in (ledger.before, ledger.outcome) if one is not None]
    of_this = identity.generation == ledger.generation
    return not any(of_this and one.seq == identity.seq and not one.ok for one in known)


# ------------------------------------------------------------------------------ what is protected


def _exposure(survey: Survey) -> Exposure:
    newest = Progress() if survey.view is None else survey.view.newest_progress
    if not survey.accounts:  # It is not known to be lost, only not seen.
        return Exposure(newest=newest.snapshot)
    known = [one.ledger.committed for one in survey.accounts.values()]
    expected = newest.snapshot
    if any(_same_generation(one, expected) for one in known):
        expected = None  # Their word is enough, and the store's was read a moment later.
    return expose(
        [
            Holder(host, account.address, account.ledger)
            for host, account in sorted(survey.accounts.items())
        ],
        expected=expected,
        expected_step=newest.step,
    )


def _same_generation(one: SnapshotId | None, other: SnapshotId | None) -> bool:
    return (
        one is not None
        and other is not None
        and (one.generation, one.nonce) == (other.generation, other.nonce)
    )


def _newest(exposure: Exposure, survey: Survey) -> r.SnapshotReport | None:
    """The newest snapshot that is known to be committed."""
    identity = exposure.newest
    if identity is None:
        return None
    accounts = survey.accounts.values()
    steps = [slot.step for one in accounts for slot in one.ledger.slots if slot.id == identity]
    progress = None if survey.view is None else survey.view.newest_progress
    if progress is not None and progress.snapshot == identity:
        steps.append(progress.step)
    ages = [
        one.now_s - one.committed.at_s
        for one in accounts
        if one.committed is not None and one.committed.id == identity
    ]
    return r.SnapshotReport(
        snapshot=str(identity),
        step=next(iter(steps), None),
        age_s=max(ages, default=None),
    )


def _losses(exposure: Exposure) -> r.LossesReport:
    return r.LossesReport(
        snapshot=None if exposure.snapshot is None else str(exposure.snapshot),
        step=None if exposure.snapshot is None else exposure.step,
        groups=tuple(
            r.LossReport(
                group=one.group,
                hosts=one.hosts,
                parity=one.parity,
                missing=one.missing,
                more=one.more,
            )
            for one in exposure.groups
        ),
        fatal_hosts=exposure.fatal,
        lost=None if exposure.lost is None else str(exposure.lost),
        reasons=exposure.reasons,
    )


def _storage(generation: Generation | None, survey: Survey) -> r.StorageReport:
    """As those in the newest generation know it, and the store."""
    number = 0 if generation is None else generation.number
    inside = [one for one in survey.accounts.values() if one.ledger.generation == number]
    progress = Progress() if survey.view is None else survey.view.newest_progress
    step = max([progress.stored, *(one.stored for one in inside)])
    if survey.view is not None and _is_exported(survey.view):
        step = progress.step
    places = [one.directory for one in inside if one.directory]
    if progress.export is not None:
        places.append(progress.export.directory)
    written = [one for one in inside if one.persisted is not None and one.persisted.step == step]
    ages = [one.now_s - one.persisted.at_s for one in written if one.persisted is not None]
    order = next((one.ledger.persist for one in sorted(inside, key=_root_first)), None)
    failed = order.result if order is not None and order.result != "written" else ""
    return r.StorageReport(
        directory=next(iter(places), ""),
        step=step if step >= 0 else None,
        age_s=max(ages, default=None),
        persist=_persist(inside),
        failed=failed,
    )


def _is_exported(view: View) -> bool:
    """Has the newest generation written the newest snapshot to storage, for which it was formed?"""
    generation = view.generation
    exports = generation is not None and generation.export is not None
    return exports and view.fault is None and is_done(view)


def _root_first(account: Account) -> tuple[bool, str]:
    return not account.is_root, account.host


def _persist(inside: Iterable[Account]) -> r.PersistReport | None:
    """What is under way."""
    for account in sorted(inside, key=_root_first):
        order = account.ledger.persist
        if order is None or order.result or not order.wanted:
            continue
        helpers = set(account.helpers.values())
        state = "ready" if helpers == {"ready"} else "starting"
        return r.PersistReport(
            step=order.step,
            state="writing" if order.id is not None else state,
            helpers=dict(sorted(account.helpers.items())),
        )
    return None


def _held(accounts: Iterable[Account]) -> r.HeldReport | None:
    for account in sorted(accounts, key=_root_first):
        if account.held:
            since_s = account.held_s
            age_s = None if since_s is None else account.now_s - since_s
            return r.HeldReport(reason=account.held, age_s=age_s)
    return None


# ------------------------------------------------------------------------------ what went wrong


def _failures(survey: Survey) -> tuple[r.FailureReport, ...]:
    """The last ones, the newest first; what several hosts have noted is told once."""
    found: dict[tuple[str, str], r.FailureReport] = {}
    for fault in () if survey.view is None else survey.view.faults.values():
        found[fault.kind, fault.detail] = r.FailureReport(
            at_s=fault.at_s or None,
            host=fault.host,
            kind=fault.kind,
            detail=fault.detail,
            generation=fault.generation,
        )
    for host, account in sorted(survey.accounts.items()):
        skew_s = survey.now_s - account.now_s
        for note in account.notes:
            if note.kind == "fault" and survey.view is not None:
                continue  # The store has it, and who it was for.
            at_s, known = note.at_s + skew_s, found.get((note.kind, note.detail))
            if known is None:
                found[note.kind, note.detail] = r.FailureReport(
                    at_s=at_s, host=host, kind=note.kind, detail=note.detail, generation=None
                )
            elif known.at_s is not None and at_s < known.at_s:
                # Of the first by name, whoever's clock is ahead: else it would change at each look.
                found[note.kind, note.detail] = msgspec.structs.replace(known, at_s=at_s)
    newest_first = sorted(found.values(), key=lambda one: one.at_s or 0.0, reverse=True)
    return tuple(newest_first[:FAILURES_MAX])
