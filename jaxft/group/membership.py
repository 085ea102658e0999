"""Who is in the world: one agent's decision from what it sees in the store, with the reason.

Theory of operation. There is no leader. Every agent looks at the same records (`records`) and
decides by the same rules; what is written is conditional on what was seen, so of two agents that
decide at the same time one is refused, looks again, and finds that the other has done it.

    no generation --Form--> generation n --Enter, by each member--> its ranks run
         generation n --DeclareFault--> every agent: KillRanks --Form--> generation n + 1
         generation n --all ranks done--> Finish;   failures in vain, or too few hosts --> Finish

Rules
- A generation that has a fault never runs again. The first fault written is the cause, except that
  the loss of a host replaces what other hosts saw of it first.
- A new generation is formed from hosts whose ranks of the last one are seen dead: each member says
  so in its record (`left`), or is another incarnation of its agent, or has lost its lease, or is
  left out because it has said neither for `ack_s`.
- A world grows at a snapshot boundary (`growing`), while it has fewer hosts than it may have: then
  it is ended for a larger one. Who comes later than that is a spare until the next generation. One
  that has not settled yet is formed again when memory comes that it could go on from.
- It contains a host of the last one (whose ranks are dead, so that the last world cannot go on), or
  waits until all of their leases have been gone for longer than a cut-off member trains on.
- Hosts keep their places from generation to generation, and so ranks keep their numbers; a newcomer
  takes the place of a lost host.
- A host that was lost again and again waits longer each time before it is in a world (`flapping`).
- Hosts that were told to end are in no generation but an export (`ending`), which comes before
  every end; they lend their memory while others cannot do without.
- A host whose lease lapsed while the store was away is not lost: it has `return_s` to register
  again.
- Durations are counted by `Observer` from what it saw itself. When it has not looked for
  `late_s`, it was paused, it or the machine, and all counts begin again: a pause expires nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from jaxft.group.causes import ended, error_in, in_short, is_consequence, outranks
from jaxft.group.ending import are_needed, ending, in_words, is_told, wanted_export, writers
from jaxft.group.flapping import BackedOff, Flapping, needed
from jaxft.group.formation import natural, next_generation, of_one_run
from jaxft.group.growing import Growth, grown, newcomers
from jaxft.group.hanging import find_hang, is_suspected, who_is_late
from jaxft.group.records import (
    DONE,
    END,
    FAULT,
    GENERATION,
    HOST,
    PROGRESS,
    STILL,
    Fault,
    HostRecord,
    JobEnd,
    View,
)
from jaxft.group.restarts import RestartPolicy, give_up, pause_s, remembering
from jaxft.group.world import Code, Export, Generation, Member

TOLD = JobEnd(kind="told", reason="all hosts were told to end")
FAULTS_KEPT = 16


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the job asks of its world.

    `settle_s`: how long the set of hosts must stay the same before a world of fewer than
    `hosts_max` is formed. `agent_grace_s`: how long a host whose SMP answers without an agent is
    waited for. `cut_off_s`: how long a member that does not reach the store may train on, killing
    its ranks included. `return_s`: how long a host may take to register again, once a store that
    was away is back. `form_timeout_s`: how long too few hosts are waited on. `exit_grace_s`: how
    long after the first rank the last one may end. `ack_s`: how long a member may take to kill its
    ranks. `late_s`: see the module. `restarts`: what failures mean for the job. `export_s`: how
    long an export may take.
    """

    job: str
    code: Code
    hosts_min: int = 1
    hosts_max: int = 1
    settle_s: float = 3.0
    agent_grace_s: float = 10.0
    cut_off_s: float = 70.0
    return_s: float = 10.0
    form_timeout_s: float = 300.0
    exit_grace_s: float = 30.0
    ack_s: float = 15.0
    late_s: float = 2.5
    restarts: RestartPolicy = RestartPolicy()
    export_s: float = 600.0


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank ended; `code` is negative for a signal. `tail` are its last lines, and `error` the
    error that ended it, "" if that is to be looked for in them."""

    rank: int
    code: int
    lived_s: float = 0.0
    tail: str = ""
    error: str = ""


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """What the deciding agent knows of its own host.

    `entered` is the generation it has entered last, `running` the one whose ranks it has not yet
    seen dead (0: none), `exits` are those of its ranks that ended by themselves. `report` is what
    its SMP, as the root, says is wrong with `entered`: (host, reason, kind of fault). `answers`
    says of hosts without an agent whether their SMP can still be reached. `leaving`: this agent was
    told to end. `store_back_s` is for how long the store has been back since it was away for so
    long that leases may have lapsed: 0 while it is away, infinite if it never was.
    """

    host: str
    agent: str
    entered: int = 0
    running: int = 0
    exits: tuple[Exit, ...] = ()
    report: tuple[str, str, str] | None = None
    answers: Mapping[str, bool] = {}
    leaving: bool = False
    store_back_s: float = math.inf


# ------------------------------------------------------------------------------ decisions


class Wait(msgspec.Struct, frozen=True):
    """Nothing is to be done, for `left_s` at most if that is not 0. Whether the SMPs of the members
    in `probe` answer would help. `tell`: a person may wonder, though nobody knows how long."""

    reason: str
    left_s: float = 0.0
    probe: tuple[Member, ...] = ()
    tell: bool = False


class Form(msgspec.Struct, frozen=True):
    """Write the generation, if the revisions in `expect` still hold. `end` is
    what the job ends with after it, if it does."""

    generation: Generation
    expect: Mapping[str, int | None]
    delete: tuple[str, ...]
    end: JobEnd | None = None


class Enter(msgspec.Struct, frozen=True):
    """Take part in the generation: start the ranks of the host with this index (None: it only lends
    its memory)."""

    generation: Generation
    index: int | None
    reason: str


class AskSnapshot(msgspec.Struct, frozen=True):
    """Wish a snapshot out of turn of the generation that runs."""

    reason: str


class KillRanks(msgspec.Struct, frozen=True):
    """No rank of this host may live on; then say in its record that `generation` is left."""

    generation: int
    reason: str


class DeclareFault(msgspec.Struct, frozen=True):
    """Write the fault, if the record still has the revision `expect`."""

    fault: Fault
    expect: int | None
    reason: str


class ReportDone(msgspec.Struct, frozen=True):
    """Say that these ranks ended well."""

    generation: int
    ranks: tuple[int, ...]
    reason: str


class Finish(msgspec.Struct, frozen=True):
    """The job is over: write it, if it is not there yet (`known`), and end."""

    end: JobEnd
    known: bool
    reason: str


Decision = Wait | Form | Enter | AskSnapshot | KillRanks | DeclareFault | ReportDone | Finish


class Observer:
    """Decides for one agent, and remembers since when it has seen what it sees."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._since: dict[str, tuple[object, float]] = {}
        self._asked: set[str] = set()
        self._growth = Growth(self._held_s)
        self._flapping = Flapping(rules.restarts)
        self._backed_off: dict[str, BackedOff] = {}
        self._now_s = -math.inf

    def decide(self, view: View, me: Me, now_s: float, nonce: str) -> Decision:
        """What the agent `me` is to do now.

        Args:
            view: what it has just read.
            now_s: monotonic time of reading.
            nonce: random, for the generation that it may form.
        """
        if now_s - self._now_s > self.rules.late_s:
            self._since.clear()
        self._now_s = now_s
        self._backed_off = self._flapping.backed_off(view, now_s)
        self._asked = set()
        decision = self._decide(view, me, nonce)
        if isinstance(decision, Finish) and not decision.known:
            decision = self._finish(view, me, decision.end, nonce)
        if isinstance(decision, DeclareFault):
            fault = remembering(decision.fault, view, self.rules.restarts)
            decision = DeclareFault(fault, decision.expect, decision.reason)
        self._since = {key: self._since[key] for key in self._asked}
        return decision

    @property
    def counts(self) -> bool:
        """May the last decision become another one by the mere passing of time?"""
        return bool(self._since)

    def why_it_waits(self, view: View, host: str) -> str:
        """Why this host, which is not in the world, has to wait; "" if it does not. Of the last
        decision."""
        generation = view.generation
        if generation is None or generation.index_of(host) is not None:
            return ""
        return self._backed_off[host].reason if host in self._backed_off else ""

    def _held_s(self, what: str, value: object) -> float:
        """For how long `what` has had this value under the observer's eyes."""
        self._asked.add(what)
        known = self._since.get(what)
        if known is None or known[0] != value:
            known = self._since[what] = (value, self._now_s)
        return self._now_s - known[1]

    def _decide(self, view: View, me: Me, nonce: str) -> Decision:
        if view.end is not None:
            return Finish(view.end, True, view.end.reason)
        generation = view.generation
        if generation is None:
            return self._form(view, me, nonce)
        if me.running not in (0, generation.number):
            reason = f"generation {generation.number} has replaced generation {me.running}"
            return KillRanks(me.running, reason)
        found = find_fault(view, me, self.rules.return_s)
        found = found or self._left_behind(view) or self._late_export(view) or self._hung(view)
        known = view.fault
        if found is not None and (known is None or outranks(found, known)):
            revision = view.revisions.get(f"{FAULT}{found.generation}")
            if known is not None:
                detail = f"{found.detail} (first seen as: {in_short(known.detail)})"
                found = msgspec.structs.replace(found, detail=detail)
            return DeclareFault(found, revision, found.detail)
        if known is None:
            return self._live(view, me, generation, nonce)
        if me.running or me.host in unacknowledged(view):
            return KillRanks(generation.number, known.detail)
        return self._form(view, me, nonce)

    # -------------------------------------------------------------------- a world that lives

    def _left_behind(self, view: View) -> Fault | None:
        generation = view.generation
        assert generation is not None
        if not 0 < len(view.done) < generation.rank_count:
            return None
        if self._held_s("some done", generation.number) <= self.rules.exit_grace_s:
            return None
        rank = min(set(range(generation.rank_count)) - view.done)
        member = host_of(generation, rank)
        detail = (
            f"rank {rank} on {member.host} still runs {self.rules.exit_grace_s:g} s after the "
            f"first rank has ended with status 0 (ranks that did: {_numbers(view.done)})"
        )
        return Fault(
            generation=generation.number,
            host=member.host,
            kind="left_behind",
            detail=detail,
            rank=rank,
        )

    def _late_export(self, view: View) -> Fault | None:
        generation = view.generation
        assert generation is not None
        if generation.export is None or is_done(view):
            return None
        if self._held_s("export", generation.number) <= self.rules.export_s:
            return None
        return Fault(
            generation=generation.number,
            host=generation.hosts[0].host,
            kind="export_late",
            detail=f"it was not written within {self.rules.export_s:g} s",
        )

    def _hung(self, view: View) -> Fault | None:
        generation = view.generation
        assert generation is not None
        if is_done(view) or not is_suspected(view.still):
            return None
        waited_s = self._held_s("suspicion", generation.number)
        same_s = self._held_s("late", who_is_late(view.still))
        return find_hang(generation, view.still, waited_s, same_s)

    def _live(self, view: View, me: Me, generation: Generation, nonce: str) -> Decision:
        number = generation.number
        if is_done(view) and generation.export is not None and ending(view) is None:
            return self._form(view, me, nonce)
        if is_done(view):
            reason = f"all {generation.rank_count} ranks ended with status 0"
            end = ending(view) or JobEnd(kind="finished", reason=reason, generation=number)
            return Finish(end, False, end.reason)
        done = tuple(gone.rank for gone in me.exits if gone.code == 0)
        if me.running == number and not view.done.issuperset(done):
            return ReportDone(number, done, f"ranks {_numbers(done)} ended with status 0")
        index = generation.index_of(me.host)
        member = me.host in {one.host for one in (*generation.hosts, *generation.holders)}
        if member and me.entered != number:
            return Enter(generation, index, generation.reason)
        if index is not None:
            return (
                self._grow(view) or self._returning(view, me) or Wait(f"generation {number} runs")
            )
        if member:
            return Wait(self._spare(view, me), tell=True)
        record = view.hosts.get(me.host)
        if record is not None and record.snapshot is not None and number not in view.progress:
            detail = (
                f"{me.host} came with memory of snapshot {record.snapshot} before generation "
                f"{number} had settled"
            )
            fault = Fault(generation=number, host=me.host, kind="memory_returned", detail=detail)
            return DeclareFault(fault, None, detail)
        return Wait(self._spare(view, me), tell=True)

    def _returning(self, view: View, me: Me) -> Decision | None:
        """Waits for members that may not have seen yet that the store is back."""
        assert view.generation is not None
        left_s = self.rules.return_s - me.store_back_s
        gone = [one.host for one in view.generation.hosts if one.host not in view.hosts]
        if left_s <= 0 or not gone:
            return None
        return Wait(f"the store is back; waits for {_names(gone)} to register again", left_s)

    def _grow(self, view: View) -> Decision | None:
        """What the hosts that wait beside a world with room for them make of it."""
        new = self._newcomers(view)
        step = self._growth.decide(view, new, self.rules.settle_s)
        if step is None:
            return None
        if step.action == "ask":
            return AskSnapshot(step.reason)
        if step.action == "wait":
            return Wait(step.reason, step.left_s)
        fault = grown(view, new)
        return DeclareFault(fault, None, fault.detail)

    def _newcomers(self, view: View) -> list[HostRecord]:
        return newcomers(view, self.rules.hosts_max, waiting=self._backed_off)

    def _spare(self, view: View, me: Me) -> str:
        """Why this host does not train."""
        assert view.generation is not None
        there = f"generation {view.generation.number} runs without this host"
        if me.leaving:
            return f"{there}, which was told to end and lends it its memory"
        if me.host in self._backed_off:
            return f"{there}: {self._backed_off[me.host].reason}"
        if me.host in {record.host for record in self._newcomers(view)}:
            return f"{there}, which it takes in after its next snapshot"
        count = len(view.generation.hosts)
        return f"{there}, a spare: it takes the place of one of the {count} hosts that is lost"

    # -------------------------------------------------------------------- forming a world

    def _form(self, view: View, me: Me, nonce: str) -> Decision:
        rules, last = self.rules, view.generation
        busy = unacknowledged(view)
        busy_s = self._held_s("busy", (last and last.number, busy))
        if busy and busy_s < rules.ack_s:
            reason = f"{_names(busy)} still has ranks of the last generation to kill"
            return Wait(reason, rules.ack_s - busy_s)
        # Not before: a silent host may turn out to be lost, and the failure its consequence.
        end = ending(view) or (TOLD if is_told(view) else give_up(view, rules.restarts))
        if end is not None:
            return Finish(end, False, end.reason)
        if me.leaving:
            return Wait("this host was told to end")
        ready = {
            host: record
            for host, record in view.hosts.items()
            if host not in busy and not record.leaving
        }
        ready = of_one_run(ready, me.host)
        told = {host: one for host, one in view.hosts.items() if host not in busy and one.leaving}
        gone = () if last is None else tuple(m for m in last.hosts if m.host not in view.hosts)
        gone_s = self._held_s("gone", frozenset(member.agent for member in gone))
        if any(member.host not in me.answers for member in gone):
            return Wait(f"asks the SMPs of {_names(m.host for m in gone)}", 1.0, gone)
        if last is not None and may_live_on(last, ready | told):
            if busy:
                return self._too_few(f"{_names(busy)} does not kill its ranks", gone)
            if gone_s <= rules.cut_off_s:
                reason = "no host of the last generation is there; without the store it may live on"
                return Wait(reason, rules.cut_off_s - gone_s, gone)
        left_s, why = pause_s(view, rules.restarts)
        if last is not None and (left_s := left_s - self._held_s("fault", last.number)) > 0:
            return Wait(why, left_s)
        left_out = self._left_out(view, ready)
        # The same question that they ask themselves before they go (`launch.leaving`).
        lent = told if are_needed(view) else {}
        lent |= {host: ready.pop(host) for host in left_out}
        settled_s = self._held_s("ready", frozenset((r.host, r.agent) for r in ready.values()))
        if len(ready) >= rules.hosts_max:
            there = _and(_are_there(rules.hosts_max), left_out)
            return _form(view, ready, gone, me, rules, nonce, there, lent=lent)
        low, high = rules.hosts_min, rules.hosts_max
        there = f"{_are_there(len(ready))} ({low} to {high} are wanted)"
        if low == high:
            there = f"{len(ready)} of {low} hosts are there"
        if len(ready) < rules.hosts_min:
            if (export := wanted_export(view)) is not None and ready:
                return self._save_memory(view, me, ready, gone, export, nonce, there, lent)
            return self._too_few(there, gone)
        # Where all are that were, nobody is waited for: the world grows when more come.
        known = () if last is None else last.hosts
        missed = [one for one in known if one.host not in self._backed_off]
        whole = bool(missed) and all(_is_same(one, ready.get(one.host)) for one in missed)
        wait_s = 0.0 if whole else rules.settle_s - settled_s
        if any(me.answers[one.host] for one in gone if one.host not in self._backed_off):
            wait_s = max(wait_s, rules.agent_grace_s - gone_s)
        if gone:
            wait_s = max(wait_s, rules.return_s - me.store_back_s)
        if wait_s > 0:
            return Wait(_and(f"{there}; waits for more", left_out), wait_s, gone)
        there = _and(there if whole else f"{there} and nobody else came", left_out)
        return _form(view, ready, gone, me, rules, nonce, there, lent=lent)

    def _left_out(self, view: View, ready: Mapping[str, HostRecord]) -> dict[str, str]:
        """The hosts that are there and wait, since they were lost again and again; and why. None of
        those without whom there are too few, and not the one that the last world has ended for."""
        came = view.fault.host if view.fault is not None and view.fault.kind == "grown" else ""
        waiting = {host: one for host, one in self._backed_off.items() if host in ready}
        waiting.pop(came, None)
        taken = needed(waiting, self.rules.hosts_min - len(ready) + len(waiting))
        return {host: one.reason for host, one in waiting.items() if host not in taken}

    def _save_memory(
        self,
        view: View,
        me: Me,
        ready: Mapping[str, HostRecord],
        gone: tuple[Member, ...],
        export: Export,
        nonce: str,
        there: str,
        lent: Mapping[str, HostRecord],
    ) -> Decision:
        """Too few hosts are there: what they hold goes to storage before more are waited for."""
        wait_s = self.rules.settle_s - self._held_s("too few", True)
        if any(me.answers[member.host] for member in gone):
            wait_s += self.rules.agent_grace_s
        if wait_s > 0:
            return Wait(f"{there}; waits for more", wait_s, gone)
        reason = f"{there}, so the newest snapshot goes to storage"
        return _form(view, ready, gone, me, self.rules, nonce, reason, export, lent=lent)

    def _finish(self, view: View, me: Me, end: JobEnd, nonce: str) -> Decision:
        """The end, or the export that comes before it."""
        export, last, busy = wanted_export(view), view.generation, unacknowledged(view)
        ready = {host: record for host, record in view.hosts.items() if host not in busy}
        if export is None or last is None or not ready:
            end = in_words(view, end)
            return Finish(end, False, end.reason)
        gone = tuple(member for member in last.hosts if member.host not in view.hosts)
        if any(member.host not in me.answers for member in gone):
            return Wait(f"asks the SMPs of {_names(m.host for m in gone)}", 1.0, gone)
        reason = f"{end.reason}: the newest snapshot goes to storage"
        formed = _form(view, ready, gone, me, self.rules, nonce, reason, export)
        return msgspec.structs.replace(formed, end=end)

    def _too_few(self, there: str, gone: tuple[Member, ...]) -> Decision:
        left_s = self.rules.form_timeout_s - self._held_s("too few", True)
        missing = f" ({_names(m.host for m in gone)} gone)" if gone else ""
        if left_s > 0:
            return Wait(f"{there}{missing}; waits for more, then the job fails", left_s, gone)
        reason = (
            f"{there}{missing}, and no more came within {self.rules.form_timeout_s:g} s: start "
            "`jaxft run` on more hosts, or allow fewer with --hosts MIN:MAX"
        )
        return Finish(JobEnd(kind="world", reason=reason), False, reason)


# ------------------------------------------------------------------------------ what is wrong


def is_done(view: View) -> bool:
    """Have all ranks of the newest generation ended well?"""
    return view.generation is not None and len(view.done) == view.generation.rank_count


def find_fault(view: View, me: Me, return_s: float) -> Fault | None:
    """What keeps the newest generation from going on, as far as can be seen at once.

    Args:
        return_s: see `Rules`.
    """
    generation = view.generation
    assert generation is not None
    number = generation.number
    if is_done(view):
        return None
    for member in (*generation.hosts, *generation.holders):
        holder = generation.index_of(member.host) is None
        if holder or _ranks_of(generation, member) <= view.done:
            continue
        lost = _lost(member, view.hosts.get(member.host), me, return_s)
        if lost is not None:
            kind, detail = lost
            return Fault(generation=number, host=member.host, kind=kind, detail=detail)
    if me.running == number:
        failed = [gone for gone in me.exits if gone.code != 0]
        if failed and generation.export is not None:
            return _export_fault(number, me.host, failed[0])
        if failed:
            found = (rank_fault(number, me.host, gone) for gone in failed)
            return min(found, key=is_consequence)  # the first of those that are none, if there is
    index = generation.index_of(me.host)
    if me.entered == number and index is not None and me.running != number:
        if me.leaving:
            detail = f"{me.host} was told to end"
            return Fault(generation=number, host=me.host, kind="told_to_end", detail=detail)
        detail = f"{me.host} was cut off from the store for too long and killed its ranks"
        return Fault(generation=number, host=me.host, kind="cut_off", detail=detail)
    if me.report is not None and me.entered == number:
        host, reason, kind = me.report
        return Fault(generation=number, host=host, kind=kind, detail=f"{host}: {reason}")
    return None


def _lost(
    member: Member, record: HostRecord | None, me: Me, return_s: float
) -> tuple[str, str] | None:
    """Is this member what it was when the generation was formed? Kind and detail if not."""
    if record is None:
        # An agent that has lost its own lease registers again; whether it is lost, others say.
        if member.host == me.host or me.store_back_s < return_s:
            return None
        return "host_lost", f"{member.host} is lost: its lease has ended"
    if record.arena != member.arena:
        return "memory_lost", f"{member.host} is lost: it came back with new memory"
    if record.agent != member.agent:
        return "agent_restarted", f"the agent of {member.host} was started again"
    if record.address != member.address:
        return "smp_moved", f"the SMP of {member.host} answers at another address"
    return None


def rank_fault(number: int, host: str, gone: Exit) -> Fault:
    error = gone.error or error_in(gone.tail)
    said = f": {error}" if error and gone.code > 0 else ""
    return Fault(
        generation=number,
        host=host,
        kind="rank_exited" if gone.code > 0 else "rank_killed",
        detail=f"rank {gone.rank} on {host} ended with {ended(gone.code)} after "
        f"{gone.lived_s:.1f} s{said}",
        rank=gone.rank,
        code=gone.code,
        lived_s=gone.lived_s,
        tail=gone.tail,
        error=error,
    )


def _export_fault(number: int, host: str, gone: Exit) -> Fault:
    words = gone.error or error_in(gone.tail) or f"the exporter ended with {ended(gone.code)}"
    return Fault(
        generation=number,
        host=host,
        kind="export_failed",
        detail=f"{host}: {words}",
        rank=gone.rank,
        code=gone.code,
        lived_s=gone.lived_s,
        tail=gone.tail,
    )


def unacknowledged(view: View) -> frozenset[str]:
    """Live members of the faulty generation that may still have ranks of it."""
    generation = view.generation
    if generation is None or is_done(view):
        return frozenset()
    return frozenset(
        member.host
        for member in generation.hosts
        if (record := view.hosts.get(member.host)) is not None
        and record.agent == member.agent
        and record.left < generation.number
    )


def _is_same(member: Member, record: HostRecord | None) -> bool:
    """Is this host there as it was when the generation was formed?"""
    return record is not None and (record.agent, record.arena) == (member.agent, member.arena)


def may_live_on(last: Generation, ready: Mapping[str, HostRecord]) -> bool:
    """Could the last world still train, without the store? Not once the ranks of one of its hosts
    are seen dead."""
    return not any(member.host in ready for member in last.hosts)


def host_of(generation: Generation, rank: int) -> Member:
    """The host that this rank runs on."""
    return next(m for m in generation.hosts if rank in _ranks_of(generation, m))


def _ranks_of(generation: Generation, member: Member) -> frozenset[int]:
    index = generation.index_of(member.host)
    if index is None:
        return frozenset()
    first = generation.first_rank(index)
    return frozenset(range(first, first + member.ranks))


def _form(
    view: View,
    ready: Mapping[str, HostRecord],
    gone: Iterable[Member],
    me: Me,
    rules: Rules,
    nonce: str,
    there: str,
    export: Export | None = None,
    *,
    lent: Mapping[str, HostRecord] = {},
) -> Form:
    """Forms the next generation of the hosts that are `ready`; `gone` have lost their lease, and of
    those that are left out only the memory is used, that of the records in `lent`."""
    if export is not None:
        everybody, ready = ready, writers(view, ready)
        lent = {**lent, **{host: one for host, one in everybody.items() if host not in ready}}
    generation = next_generation(
        view,
        ready,
        [member for member in gone if me.answers.get(member.host, True)],
        job=rules.job,
        code=rules.code,
        hosts_max=rules.hosts_max,
        nonce=nonce,
        reason=there if view.fault is None else f"{view.fault.detail}; {there}",
        export=export,
        lent=lent,
    )
    members = [member.host for member in (*generation.hosts, *generation.holders)]
    keys = [f"{HOST}{host}" for host in members if host in ready or host in lent]
    expect: dict[str, int | None] = {key: view.revisions.get(key) for key in (GENERATION, *keys)}
    expect[END] = None
    oldest = generation.number - FAULTS_KEPT
    stale = [key for key in view.revisions if key.startswith((DONE, STILL))]
    stale += [f"{FAULT}{number}" for number in view.faults if number < oldest]
    stale += [
        f"{PROGRESS}{number}"
        for number in view.progress
        if number < oldest and number != max(view.progress)
    ]
    return Form(generation, expect, tuple(stale))


def _and(there: str, left_out: Mapping[str, str]) -> str:
    """Who is there, and who waits."""
    return "; ".join((there, *left_out.values()))


def _are_there(count: int) -> str:
    return "1 host is there" if count == 1 else f"{count} hosts are there"


def _names(hosts: Iterable[str]) -> str:
    return ", ".join(sorted(hosts, key=natural))


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
