"""The root's side: it collects what every host says, and decides alone.

Theory of operation. A generation goes through two phases:

    recovering   every host has said what it holds -> a plan -> every rank has restored it
                 (a failed check makes a new plan) -> settled
    running      snapshot by snapshot: one outcome, known everywhere before the next is decided

In the running phase the silence of an SMP never ends the generation, for the ranks may well go on
training: snapshots are *held* until every host knows the last outcome. An SMP that hangs is found
by its own agent.

What is decided is a `Directive` with a growing version, sent until each host's status shows it, and
then only as a sign of life, which every host answers.
A root whose SMP is started again within the generation reads the last outcome in its ledger and
asks nobody: the hosts send their status all the time.
"""

from __future__ import annotations

import msgspec

from jaxft.group import events as e
from jaxft.group.commit import decide
from jaxft.group.interval import first_interval, interval_steps
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import (
    Damage,
    Directive,
    Invite,
    Ledger,
    Outcome,
    PersistOrder,
    Plan,
    RankOptions,
    Status,
    StorageEntry,
)
from jaxft.group.recovery import Holder, choose
from jaxft.group.timing import Timing
from jaxft.group.turn import advance, ended, is_taken, turn_of
from jaxft.group.world import Generation, Member

ATTEMPTS_MAX = 8
ANSWER_S = 10.0
# How long persist helpers take to start, until that has been seen; and when a persist that failed
# is tried again, if that is sooner than the next one is due: twice as late after each failure.
LEAD_S = 15.0
LEAD_MARGIN = 1.5
PERSIST_RETRY_S = 60.0


class Root:
    """The decisions of one generation, taken by the SMP of its first host."""

    def __init__(
        self, generation: Generation, ledger: Ledger, now_s: float, timing: Timing
    ) -> None:
        self.generation = generation
        self.timing = timing
        self.statuses: dict[str, Status] = {}
        self.heard_s: dict[str, float] = {}
        self.damages: dict[SnapshotId, frozenset[Damage]] = {}
        self.bad_storage: dict[StorageEntry, str] = {}
        self._boots = ledger.boots
        self._attempt = ledger.boots * 1000
        self._started_s = now_s
        self._awake_s = now_s
        self._complete_s: float | None = None
        self._decided_s = now_s
        self._asked_s = now_s
        self._faulted = False
        self._announced = ""
        self.sent_s = float("-inf")
        self._persist_number = ledger.boots * 1000
        self._persist_started_s = now_s
        self._step_s = 0.0
        self._persist_lead_s = LEAD_S
        self._persist_ready = False
        self._persist_failures = 0
        self._persist_failed_s = now_s
        self._persist_from_step = None if ledger.persist is None else ledger.persist.step
        settled = ledger.settled
        self.directive = Directive(
            version=ledger.boots << 32,
            settled=settled,
            base=ledger.lineage[-1].base if settled else None,
            interval=ledger.interval,
            outcome=ledger.outcome,
            persist=_order_of(ledger),
            turn=turn_of(ledger),
        )

    # -------------------------------------------------------------------- what happens

    def heard(self, sender: str, status: Status, now_s: float) -> list[e.Effect]:
        """A status arrived; older ones than the newest change nothing."""
        self._wake(now_s)
        before_s = self.heard_s.get(sender, now_s)
        back = now_s - before_s > self.timing.silence_s
        known = self.statuses.get(sender)
        again = known is not None and status.version == known.version
        # What was said before may have come soon after this root spoke, and been found just now.
        self.heard_s[sender] = max(before_s, self.sent_s) if again else now_s
        if known is not None and status.version < known.version:
            return []
        self.statuses[sender] = status
        effects = [] if again else self.advance(now_s)
        # One that was silent has not heard this root either, as far as is known.
        if (back or status.heard < self.directive.version) and not effects:
            effects = self._tell(self._member(sender))
        return effects

    def tick(self, now_s: float) -> list[e.Effect]:
        self._wake(now_s)
        effects = self.advance(now_s)
        pause_s = self.timing.heartbeat_s if self.is_calm(now_s) else self.timing.resend_s
        if now_s >= self.sent_s + pause_s:
            effects += self._tell_all(now_s) + self._invite()
        return effects

    def is_calm(self, now_s: float) -> bool:
        """Is nothing under way, and everything known to all? One that is silent is not waited for:
        it says what it does not know when it is back."""
        directive = self.directive
        everyone = (*self.generation.hosts, *self.generation.holders)
        silent = self._silent(everyone, now_s)
        order, turn = directive.persist, directive.turn
        return (
            directive.settled
            and not directive.held
            and (turn is None or bool(turn.result))
            and (order is None or bool(order.result))
            and all(
                self._is_up_to_date(member.host) for member in everyone if member.host not in silent
            )
        )

    def _is_up_to_date(self, host: str) -> bool:
        """Does this host know all that is decided, and has nothing to be decided?"""
        status = self.statuses.get(host)
        return status is not None and (
            status.heard == self.directive.version and status.report is None
        )

    def _invite(self) -> list[e.Effect]:
        """Holders that have not been heard are asked in."""
        return [
            e.Send(member.address, Invite(generation=self.generation))
            for member in self.generation.holders
            if member.host not in self.statuses and not self.directive.settled
        ]

    def advance(self, now_s: float) -> list[e.Effect]:
        """Decides what can be decided."""
        if self._faulted:
            return []
        if not self.directive.settled:
            return self._recover(now_s)
        return self._commit(now_s) + self._persist(now_s) + self._take_turn(now_s)

    def _member(self, host: str) -> tuple[Member, ...]:
        everyone = (*self.generation.hosts, *self.generation.holders)
        return tuple(member for member in everyone if member.host == host)

    def _tell(self, members: tuple[Member, ...]) -> list[e.Effect]:
        return [e.Send(member.address, self.directive) for member in members]

    def _tell_all(self, now_s: float) -> list[e.Effect]:
        self.sent_s = now_s
        return self._tell((*self.generation.hosts, *self.generation.holders))

    def _direct(self, now_s: float, **changes: object) -> list[e.Effect]:
        self.directive = msgspec.structs.replace(
            self.directive, version=self.directive.version + 1, **changes
        )
        return self._tell_all(now_s)

    def _silent(self, members: tuple[Member, ...], now_s: float) -> dict[str, float]:
        ages = {
            member.host: now_s - self.heard_s.get(member.host, self._started_s)
            for member in members
        }
        return {host: age for host, age in ages.items() if age > self.timing.silence_s}

    def silent(self, now_s: float) -> dict[str, float]:
        """Hosts that are not heard, and for how long."""
        return self._silent((*self.generation.hosts, *self.generation.holders), now_s)

    def _wake(self, now_s: float) -> None:
        """A root that was stopped itself for a while blames nobody for that time."""
        gap_s, self._awake_s = now_s - self._awake_s, now_s
        if gap_s > self.timing.pause_s:
            self._started_s += gap_s
            self._decided_s += gap_s
            self.heard_s = {host: heard_s + gap_s for host, heard_s in self.heard_s.items()}

    def _fault(self, host: str, reason: str, kind: str = "smp_report") -> list[e.Effect]:
        self._faulted = True
        return [e.DeclareFault(host, reason, kind)]

    def _unreachable(self, silent: dict[str, float]) -> list[e.Effect]:
        """These hosts are silent; where all others are, this one is more likely to be cut off."""
        own, *others = (member.host for member in self.generation.hosts)
        host, silence_s = next(iter(silent.items()))
        if len(others) > 1 and all(other in silent for other in others):
            reason = f"its SMP, the root, has heard none of the others for {silence_s:.1f} s"
            return self._fault(own, reason, "unreachable")
        return self._fault(host, f"its SMP has not answered for {silence_s:.1f} s", "unreachable")

    # -------------------------------------------------------------------- recovering

    def _recover(self, now_s: float) -> list[e.Effect]:
        silent = self._silent(self.generation.hosts, now_s)
        if silent:
            return self._unreachable(silent)
        plan = self.directive.plan
        if plan is None:
            return self._plan(now_s)
        needed = {address for _, address in plan.shares}
        holders = tuple(m for m in self.generation.holders if m.address in needed)
        for host, silence_s in self._silent(holders, now_s).items():
            reason = f"it holds what is restored and is silent for {silence_s:.1f} s"
            return self._fault(host, reason, "unreachable")
        return self._judge(plan, now_s)

    def _plan(self, now_s: float) -> list[e.Effect]:
        waiting = self._still_asked(now_s)
        first = self.statuses.get(self.generation.hosts[0].host)
        if waiting or first is None or first.options is None:
            return []
        floor = first.options.newest_generation
        if floor >= self.generation.number:
            return self._refuse_number(floor)
        if self._complete_s is None:
            self._complete_s = now_s
        plan = self._choose(self._attempt + 1)
        older = plan.newest_known is not None and (
            plan.base is None or plan.base < plan.newest_known
        )
        if older and now_s - self._complete_s < self.timing.rejoin_s:
            if self._announced == "waiting":
                return []
            self._announced = "waiting"
            detail: dict[str, str | int | float] = {
                "newest": str(plan.newest_known),
                "rejoin_s": self.timing.rejoin_s,
            }
            return [e.Announce("waiting_for_memory", detail)]
        self._attempt = plan.attempt
        return self._announce_plan(plan) + self._direct(
            now_s, plan=plan, interval=first_interval(first.options)
        )

    def _refuse_number(self, floor: int) -> list[e.Effect]:
        """Storage knows a generation as new as this one: the store and all memory were lost since.
        Snapshots of this generation would seem older than that checkpoint for ever."""
        host = self.generation.hosts[0].host
        reason = (
            f"storage holds a checkpoint of generation {floor}: this world must have a larger "
            f"number than {self.generation.number}"
        )
        return [e.Announce("generation_floor", {"number": floor}), *self._fault(host, reason)]

    def _still_asked(self, now_s: float) -> list[str]:
        """Hosts whose answer is needed and not there. A holder that stays silent is left out."""
        waiting = [
            member.host for member in self.generation.hosts if not self._answered(member.host)
        ]
        silent = self._silent(self.generation.holders, now_s)
        waiting += [
            member.host
            for member in self.generation.holders
            if member.host not in silent and not self._answered(member.host)
        ]
        return waiting

    def _answered(self, host: str) -> bool:
        status = self.statuses.get(host)
        return status is not None and status.frozen and status.ledger is not None

    def _choose(self, attempt: int) -> Plan:
        holders = []
        for member in (*self.generation.hosts, *self.generation.holders):
            status = self.statuses.get(member.host)
            if status is not None and status.ledger is not None:
                inside = self.generation.index_of(member.host) is not None
                holders.append(Holder(member.host, member.address, status.ledger, inside))
        first = self.statuses[self.generation.hosts[0].host]
        listed = (first.options.storage if first.options is not None else None) or ()
        return choose(
            holders,
            attempt=attempt,
            storage=[
                msgspec.structs.replace(entry, damaged=self.bad_storage.get(entry, entry.damaged))
                for entry in listed
            ],
            damages=self.damages,
            fresh=self.generation.fresh,
            expected=self.generation.expected,
            expected_step=self.generation.expected_step,
        )

    def _announce_plan(self, plan: Plan) -> list[e.Effect]:
        detail: dict[str, str | int | float] = {
            "source": plan.source,
            "step": plan.step,
            "snapshot": str(plan.base) if plan.base is not None else "",
            "rebuilt": ", ".join(
                plan.world.hosts[segment.host] for segment in plan.segments if segment.rebuilt
            ),
            "finish": int(plan.finish),
            "reasons": "; ".join(plan.reasons),
        }
        return [e.Announce("chosen", detail)]

    def _judge(self, plan: Plan, now_s: float) -> list[e.Effect]:
        """Settles once everybody has restored; plans again after damage."""
        hosts = [member.host for member in self.generation.hosts]
        current = {
            host: status
            for host, status in self.statuses.items()
            if status.attempt == plan.attempt and status.frozen
        }
        damaged = frozenset(item for status in current.values() for item in status.damaged)
        if damaged and plan.chosen is not None:
            known = self.damages.get(plan.chosen, frozenset())
            self.damages[plan.chosen] = known | damaged
            reasons = sorted({status.failure for status in current.values() if status.failure})
            why = f"{len(damaged)} damaged fragments ({'; '.join(reasons)})"
            return self._plan_again(plan, why, now_s)
        for host, status in current.items():
            if status.failure:
                if plan.storage is not None:
                    self.bad_storage[plan.storage] = status.failure
                    return self._plan_again(plan, f"{host}: {status.failure}", now_s)
                return self._fault(host, status.failure)
        if any(host not in current or not current[host].restored for host in hosts):
            return []
        if plan.finish and not self._all_finished(plan, current):
            return []
        hows = {current[host].restored for host in hosts}
        # "mixed": ranks of one host.
        if len(hows) > 1 or "mixed" in hows:
            return self._fault(hosts[0], "some ranks called restore and others did not")
        base = plan.base if hows == {"verified"} else None
        detail: dict[str, str | int | float] = {
            "generation": self.generation.number,
            "base": str(base) if base is not None else "",
            "nonce": base.nonce if base is not None else "",
            "step": plan.step if hows == {"verified"} else 0,
            **self._storage(base),
        }
        return [e.Announce("settled", detail), *self._direct(now_s, settled=True, base=base)]

    def _storage(self, base: SnapshotId | None) -> dict[str, str | int]:
        """Where checkpoints go, and the step of the newest one that is not newer than `base`."""
        first = self.statuses[self.generation.hosts[0].host].options or RankOptions()
        stored = stored_step(first, base)
        return {
            "directory": first.directory,
            "keep": first.persist_keep,
            "stored": -1 if stored is None else stored,
        }

    def _all_finished(self, plan: Plan, current: dict[str, Status]) -> bool:
        holding = {address for _, address in plan.shares}
        everyone = (*self.generation.hosts, *self.generation.holders)
        return all(
            member.host in current and current[member.host].finished
            for member in everyone
            if member.address in holding
        )

    def _plan_again(self, plan: Plan, why: str, now_s: float) -> list[e.Effect]:
        if self._attempt - self._boots * 1000 >= ATTEMPTS_MAX:
            return self._fault(self.generation.hosts[0].host, f"{ATTEMPTS_MAX} plans failed: {why}")
        again = self._choose(self._attempt + 1)
        self._attempt = again.attempt
        detail = {"snapshot": str(plan.base), "reason": why}
        return [
            e.Announce("plan_failed", detail),
            *self._announce_plan(again),
            *self._direct(now_s, plan=again),
        ]

    # -------------------------------------------------------------------- running

    def _commit(self, now_s: float) -> list[e.Effect]:
        last = self.directive.outcome
        seq = 0 if last is None else last.seq + 1
        hosts = [member.host for member in self.generation.hosts]
        silent = self._silent(self.generation.hosts, now_s)
        behind = [
            host
            for host in hosts
            if host not in self.statuses or self.statuses[host].outcome_seq < seq - 1
        ]
        if behind:
            return self._hold(seq, behind, silent, now_s)
        effects = self._direct(now_s, held="") if self.directive.held else []
        reports = {host: self.statuses[host].report for host in hosts}
        decision = decide(seq, reports, silent)
        if decision.ok is None:
            return effects
        self._decided_s = now_s
        identity = SnapshotId(self.generation.number, seq, self.generation.nonce)
        committed = identity if decision.ok else (last.committed if last is not None else None)
        options = self.statuses[hosts[0]].options
        before = last.interval if last is not None else self.directive.interval
        turn = self.directive.turn
        taken = is_taken(turn, [one for one in reports.values() if one and one.seq == seq])
        persist = decision.ok and self._persist_armed(decision.step)
        outcome = Outcome(
            seq=seq,
            step=decision.step,
            ok=decision.ok,
            reason=decision.reason,
            committed=committed,
            # After a restart the root may have no rank yet to say what it wants.
            interval=(
                before
                if options is None
                else interval_steps(options, reports, seq=seq, before=before)
            ),
            persist=persist,
            turn=turn.number if turn is not None and taken else 0,
        )
        if turn is not None and taken:
            turn = ended(turn, outcome)
        order = self.directive.persist
        if persist and order is not None:
            self._persist_started_s = now_s
            order = msgspec.structs.replace(order, id=identity, step=decision.step, pinned=True)
        kind = "committed" if decision.ok else "aborted"
        detail: dict[str, str | int | float] = {
            "generation": self.generation.number,
            "seq": seq,
            "step": decision.step,
            "reason": decision.reason,
        }
        return [
            *effects,
            e.Decide(outcome),
            e.Announce(kind, detail),
            *self._direct(now_s, outcome=outcome, persist=order, turn=turn),
        ]

    def _hold(
        self, seq: int, behind: list[str], silent: dict[str, float], now_s: float
    ) -> list[e.Effect]:
        """Snapshot `seq` cannot be decided before these hosts know the last outcome. While one of
        them cannot be told, nobody is to wait for it."""
        late = now_s - self._decided_s > self.timing.silence_s
        cut_off = [host for host in behind if late or host in silent]
        if not cut_off:
            return []
        reason = (
            f"{_hosts(cut_off)} not known to have heard of snapshot {seq - 1} after "
            f"{self.timing.silence_s:g} s: look whether the SMP there lives, and at the network "
            f"between it and that of host {self.generation.hosts[0].host}"
        )
        return self._direct(now_s, held=reason) if reason != self.directive.held else []

    # -------------------------------------------------------------------- out of turn

    def _take_turn(self, now_s: float) -> list[e.Effect]:
        """Asks for a snapshot out of turn where a host wishes one, and names its call."""
        last = self.directive.turn
        turn = advance(
            last,
            self.statuses,
            [member.host for member in self.generation.hosts],
            open_s=now_s - self._asked_s,
            answer_s=ANSWER_S,
            held=self.directive.held,
        )
        if turn is None:
            return []
        effects: list[e.Effect] = []
        if last is None or turn.number != last.number:
            self._asked_s = now_s
            effects.append(e.Announce("out_of_turn", {"reason": turn.reason}))
        elif turn.result:
            effects.append(e.Announce("out_of_turn_dropped", {"reason": turn.result}))
        return effects + self._direct(now_s, turn=turn)

    # -------------------------------------------------------------------- persisting

    def persist_states(self) -> dict[str, str]:
        """How far each host's helper is with the current order."""
        order = self.directive.persist
        states = {}
        for member in self.generation.hosts:
            status = self.statuses.get(member.host)
            state = status.persist if status is not None else None
            if order is not None and state is not None and state.number == order.number:
                states[member.host] = state.state
        return states

    def _persist_armed(self, step: int) -> bool:
        """Is the snapshot of this step, which is committed, due, and are all helpers ready?"""
        order = self.directive.persist
        if order is None or not order.wanted or order.id is not None or step < order.step:
            return False
        return self._all_ready()

    def _all_ready(self) -> bool:
        states = self.persist_states()
        return len(states) == len(self.generation.hosts) and set(states.values()) == {"ready"}

    def _persist_due(self, now_s: float) -> int | None:
        """The step that is to be persisted next, or the least one, if it is time to start helpers:
        they are to be ready when its snapshot is committed."""
        first = self.statuses.get(self.generation.hosts[0].host)
        options = None if first is None else first.options
        outcome = self.directive.outcome
        if options is None or options.persist_every <= 0 or outcome is None or not outcome.ok:
            return None
        from_step = self._persist_from_step
        if from_step is None:
            from_step = stored_step(options, self.directive.base)
        if from_step is None:
            return outcome.step
        due_step = from_step + options.persist_every
        retry_s = PERSIST_RETRY_S * 2 ** max(0, self._persist_failures - 1)
        if self._persist_failures and now_s >= self._persist_failed_s + retry_s:
            return min(due_step, outcome.step)
        reports = [one.report for one in self.statuses.values() if one.report is not None]
        self._step_s = max([one.step_s for one in reports], default=self._step_s)
        lead_steps = self._persist_lead_s / self._step_s if self._step_s else 0
        # The snapshot after the next one would be late.
        lead_steps = max(lead_steps, outcome.interval)
        return due_step if outcome.step + lead_steps >= due_step else None

    def _persist(self, now_s: float) -> list[e.Effect]:
        order = self.directive.persist
        if order is None or order.result:
            ready = order is None or self._all_heard_the_end_of(order)
            due_step = self._persist_due(now_s) if ready else None
            return [] if due_step is None else self._start_persist(due_step, now_s)
        if not self._persist_ready and self._all_ready():
            self._persist_ready = True
            self._persist_lead_s = LEAD_MARGIN * (now_s - self._persist_started_s)
        states = self.persist_states()
        whole = len(states) == len(self.generation.hosts)
        reason = self._persist_failure(order, now_s)
        if reason:
            return self._end_persist(order, reason, now_s)
        coordinator = self._persist_coordinator()
        if coordinator and coordinator != order.coordinator:
            order = msgspec.structs.replace(order, coordinator=coordinator)
            return self._direct(now_s, persist=order)
        if order.pinned and whole and set(states.values()) <= {"copied", "written"}:
            return self._direct(now_s, persist=msgspec.structs.replace(order, pinned=False))
        if order.id is not None and whole and set(states.values()) == {"written"}:
            return self._end_persist(order, "written", now_s)
        return []

    def _all_heard_the_end_of(self, order: PersistOrder) -> bool:
        """Does every host know what became of it? The next order takes its place."""
        known = [self.statuses.get(member.host) for member in self.generation.hosts]
        return all(one is not None and one.persist_ended == order.number for one in known)

    def _start_persist(self, due_step: int, now_s: float) -> list[e.Effect]:
        self._persist_number += 1
        self._persist_started_s = now_s
        self._persist_ready = False
        order = PersistOrder(number=self._persist_number, wanted=True, step=due_step)
        return self._direct(now_s, persist=order)

    def _persist_coordinator(self) -> str:
        status = self.statuses.get(self.generation.hosts[0].host)
        state = status.persist if status is not None else None
        order = self.directive.persist
        if state is None or order is None or state.number != order.number:
            return ""
        return state.coordinator

    def _persist_failure(self, order: PersistOrder, now_s: float) -> str:
        for member in self.generation.hosts:
            status = self.statuses.get(member.host)
            state = status.persist if status is not None else None
            if state is not None and state.number == order.number and state.state == "failed":
                return f"{member.host}: {state.detail}"
        waits = order.id is None and self._all_ready()
        if not waits and now_s - self._persist_started_s > self.timing.persist_s:
            return f"not done within {self.timing.persist_s:.0f} s"
        return ""

    def _end_persist(self, order: PersistOrder, result: str, now_s: float) -> list[e.Effect]:
        ended = msgspec.structs.replace(order, wanted=False, pinned=False, result=result)
        self._persist_from_step = order.step
        if result == "written":
            self._persist_failures = 0
        else:
            self._persist_failures += 1
            self._persist_failed_s = now_s
            if self.directive.outcome is not None:
                self._persist_from_step = max(order.step, self.directive.outcome.step)
        kind = "persisted" if result == "written" else "persist_failed"
        detail: dict[str, str | int | float] = {
            "generation": self.generation.number,
            "step": order.step,
            "result": result,
        }
        return [e.Announce(kind, detail), *self._direct(now_s, persist=ended)]


def stored_step(options: RankOptions, base: SnapshotId | None) -> int | None:
    """The step of the newest checkpoint that a generation with this base goes on from, or behind.
    One of a future that was given up does not count."""
    return max(
        (
            entry.step
            for entry in options.storage or ()
            if base is not None and not entry.damaged and (entry.id is None or entry.id <= base)
        ),
        default=None,
    )


def _hosts(names: list[str]) -> str:
    return f"host {names[0]} is" if len(names) == 1 else f"hosts {', '.join(names)} are"


def _order_of(ledger: Ledger) -> PersistOrder | None:
    """The newest persist order, as a root finds it that was started again. The outcome that says
    what is persisted is written before the order that names it."""
    order, outcome = ledger.persist, ledger.outcome
    if order is None or order.id is not None or outcome is None or not outcome.persist:
        return order
    identity = SnapshotId(ledger.generation, outcome.seq, ledger.nonce)
    return msgspec.structs.replace(order, id=identity, step=outcome.step, pinned=True)
