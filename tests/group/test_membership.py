"""Who is in the world: decisions over views that are made by hand, and over a small store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import pytest

from jaxft.errors import LaunchError
from jaxft.group import membership as m
from jaxft.group.manifest import SnapshotId
from jaxft.group.records import (
    DONE,
    END,
    FAULT,
    GENERATION,
    HOST,
    NUMBER,
    PROGRESS,
    Fault,
    HostRecord,
    JobEnd,
    Progress,
    View,
    read_view,
)
from jaxft.group.restarts import RestartPolicy
from jaxft.group.world import Code, Generation, encode

RULES = m.Rules(job="j", code=Code(data=3, parity=1), hosts_min=4, hosts_max=4)
ELASTIC = msgspec.structs.replace(RULES, hosts_min=2)
NAMES = ("host0", "host1", "host2", "host3")
SNAPSHOT = SnapshotId(1, 0, "n")


class Entry(NamedTuple):
    value: bytes
    revision: int


class Board:
    """A store in a dictionary, with the same conditions on writing."""

    def __init__(self, *hosts: str) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        for host in hosts:
            self.join(host)

    def put(self, key: str, value: object) -> None:
        self.revision += 1
        self.entries[key] = Entry(encode(value), self.revision)

    def commit(self, expect: Mapping[str, int | None], put: Mapping[str, object]) -> bool:
        for key, revision in expect.items():
            entry = self.entries.get(key)
            if (entry.revision if entry else None) != revision:
                return False
        for key, value in put.items():
            self.put(key, value)
        return True

    def view(self) -> View:
        return read_view(self.entries)

    def join(self, host: str, agent: str = "a", arena: str = "m", **more: object) -> None:
        record = HostRecord(
            host=host,
            agent=f"{host}-{agent}",
            arena=f"{host}-{arena}",
            address=f"ipc:///{host}",
            coordinator=f"127.0.0.1:{5000 + len(self.entries)}",
        )
        self.put(f"{HOST}{host}", msgspec.structs.replace(record, **more))

    def change(self, host: str, **more: object) -> None:
        self.put(f"{HOST}{host}", msgspec.structs.replace(self.view().hosts[host], **more))

    def leave(self, host: str) -> None:
        del self.entries[f"{HOST}{host}"]

    def fault(self, kind: str = "rank_exited", host: str = "host0", **more: object) -> Fault:
        number = self.generation.number
        given = Fault(generation=number, host=host, kind=kind, detail=f"{host} failed", code=1)
        fault = msgspec.structs.replace(given, **more)
        self.put(f"{FAULT}{number}", fault)
        return fault

    def acknowledge(self, *hosts: str) -> None:
        for host in hosts:
            self.change(host, left=self.generation.number)

    @property
    def generation(self) -> Generation:
        generation = self.view().generation
        assert generation is not None
        return generation

    def form(self, rules: m.Rules = RULES, at_s: float = 0.0) -> Generation:
        """Forms the next generation as the first host's agent would."""
        host = min(self.view().hosts)
        answers = dict.fromkeys([*NAMES, "spare"], False)
        decision = settle(m.Observer(rules), self, me(host, answers=answers), at_s)
        assert isinstance(decision, m.Form), decision
        assert self.commit(decision.expect, {GENERATION: decision.generation})
        for key in decision.delete:
            del self.entries[key]
        return self.generation


def me(host: str = "host0", **more: object) -> m.Me:
    return msgspec.structs.replace(m.Me(host=host, agent=f"{host}-a"), **more)


def inside(number: int, host: str = "host0", **more: object) -> m.Me:
    """An agent whose ranks run in this generation."""
    return me(host, entered=number, running=number, **more)


def settle(observer: m.Observer, board: Board, who: m.Me, now_s: float = 0.0) -> m.Decision:
    """Decides again and again, as time passes, until there is something to do."""
    for _ in range(2000):
        decision = observer.decide(board.view(), who, now_s, f"n{now_s:g}")
        if not isinstance(decision, m.Wait):
            return decision
        now_s += 1.0
    return decision


def decide(board: Board, who: m.Me, rules: m.Rules = RULES) -> m.Decision:
    """What an agent decides at once."""
    return m.Observer(rules).decide(board.view(), who, 0.0, "n")


# ------------------------------------------------------------------------------ the first world


def test_the_first_generation_is_formed_when_all_are_there() -> None:
    board = Board(*NAMES[:3])
    waits = decide(board, me())
    assert isinstance(waits, m.Wait)
    assert "3 of 4 hosts" in waits.reason
    board.join("host3")
    formed = decide(board, me())
    assert isinstance(formed, m.Form)
    generation = formed.generation
    assert (generation.number, generation.nonce, generation.rank_count) == (1, "n", 4)
    assert [member.host for member in generation.hosts] == list(NAMES)
    assert generation.coordinator == board.view().hosts["host0"].coordinator
    assert [group.hosts for group in generation.groups] == [(0, 1, 2, 3)]
    assert set(formed.expect) == {GENERATION, END, *(f"{HOST}{name}" for name in NAMES)}


def test_fewer_than_max_settle_first() -> None:
    board = Board(*NAMES[:2])
    observer = m.Observer(ELASTIC)

    def at(now_s: float) -> m.Decision:
        return observer.decide(board.view(), me(), now_s, "n")

    assert isinstance(at(0.0), m.Wait)
    assert isinstance(at(2.0), m.Wait)
    board.join("host2")  # a change of the set restarts the count
    assert isinstance(at(2.5), m.Wait)
    assert isinstance(at(4.5), m.Wait)
    formed = at(5.5)
    assert isinstance(formed, m.Form)
    assert len(formed.generation.hosts) == 3


def test_a_paused_observer_counts_again() -> None:
    board = Board(*NAMES[:2])
    observer = m.Observer(ELASTIC)
    assert isinstance(observer.decide(board.view(), me(), 0.0, "n"), m.Wait)
    assert isinstance(observer.decide(board.view(), me(), 1000.0, "n"), m.Wait)
    assert isinstance(settle(observer, board, me(), 1001.0), m.Form)


def test_too_few_hosts_end_the_job_with_a_reason() -> None:
    board = Board("host0")
    end = settle(m.Observer(RULES), board, me())
    assert isinstance(end, m.Finish)
    assert end.end.kind == "world"
    assert "1 of 4 hosts are there" in end.reason
    assert "--hosts MIN:MAX" in end.reason


def test_names_are_sorted_as_people_do() -> None:
    names = [f"host{index}" for index in range(12)]
    rules = msgspec.structs.replace(RULES, hosts_max=12)
    formed = decide(Board(*names), me(), rules)
    assert isinstance(formed, m.Form)
    assert [member.host for member in formed.generation.hosts] == names


@pytest.mark.parametrize("known", [{"newest": 7}, {"newest": 0}], ids=["in memory", "in the store"])
def test_numbers_go_on_from_the_largest_that_anybody_knows(known: dict[str, int]) -> None:
    board = Board(*NAMES)
    board.change("host2", **known)
    board.put(NUMBER, 5)
    assert board.form().number == 1 + max(known["newest"], 5)


def test_two_that_form_at_once_make_one_world() -> None:
    board = Board(*NAMES)
    one, other = decide(board, me("host0")), decide(board, me("host3"))
    assert isinstance(one, m.Form)
    assert isinstance(other, m.Form)
    assert board.commit(one.expect, {GENERATION: one.generation})
    assert not board.commit(other.expect, {GENERATION: other.generation})
    assert isinstance(decide(board, me("host3")), m.Enter)


def test_a_member_that_vanishes_undoes_the_forming() -> None:
    board = Board(*NAMES)
    formed = decide(board, me())
    assert isinstance(formed, m.Form)
    board.leave("host2")
    assert not board.commit(formed.expect, {GENERATION: formed.generation})


def test_spares_wait_and_hosts_with_memory_come_first() -> None:
    board = Board(*NAMES, "a-spare")
    board.change("host3", snapshot=SNAPSHOT)
    generation = board.form()
    # By name the spare comes first, and host2 last of those without memory.
    assert [member.host for member in generation.hosts] == ["a-spare", "host0", "host1", "host3"]
    assert isinstance(decide(board, me("host2")), m.Wait)


# ------------------------------------------------------------------------------ a world that lives


def test_members_enter_once() -> None:
    board = Board(*NAMES)
    board.form()
    enters = decide(board, me("host2"))
    assert isinstance(enters, m.Enter)
    assert enters.index == 2
    assert isinstance(decide(board, inside(1, "host2")), m.Wait)


LOSSES = {
    "host_lost": lambda board: board.leave("host1"),
    "memory_lost": lambda board: board.join("host1", "b", "new"),
    "agent_restarted": lambda board: board.join("host1", "b"),
    "smp_moved": lambda board: board.change("host1", address="ipc:///elsewhere"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_member_that_is_not_what_it_was_is_a_fault(kind: str) -> None:
    board = Board(*NAMES)
    board.form()
    LOSSES[kind](board)
    declared = decide(board, inside(1))
    assert isinstance(declared, m.DeclareFault)
    assert (declared.fault.kind, declared.fault.host) == (kind, "host1")
    assert declared.expect is None


def test_ones_own_lapsed_lease_is_for_others_to_judge() -> None:
    board = Board(*NAMES)
    board.form()
    board.leave("host0")
    assert isinstance(decide(board, inside(1, "host0")), m.Wait)
    assert isinstance(decide(board, inside(1, "host1")), m.DeclareFault)


def test_a_failed_rank_is_a_fault_and_kills_all_ranks() -> None:
    board = Board(*NAMES)
    board.form()
    gone = m.Exit(rank=0, code=3, lived_s=9.0, tail="ValueError")
    declared = decide(board, inside(1, exits=(gone,)))
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "rank_exited"
    assert declared.fault.tail == "ValueError"
    assert "rank 0 on host0 ended with status 3 after 9.0 s" in declared.reason
    assert board.commit({f"{FAULT}1": declared.expect}, {f"{FAULT}1": declared.fault})
    assert isinstance(decide(board, inside(1, "host3")), m.KillRanks)


def test_of_two_ranks_that_failed_the_one_that_failed_by_itself_is_the_cause() -> None:
    board = Board(*NAMES)
    board.form()
    survivor = m.Exit(rank=0, code=1, tail="...\nRuntimeError: Gloo all-reduce: Connection reset")
    culprit = m.Exit(rank=1, code=1, tail="ValueError: no")
    declared = decide(board, inside(1, exits=(survivor, culprit)))
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.rank == 1
    # On another host, which was faster, the first word was the survivor's.
    board.put(f"{FAULT}1", m.rank_fault(1, "host2", survivor))
    replaced = decide(board, inside(1, exits=(culprit,)))
    assert isinstance(replaced, m.DeclareFault)
    assert replaced.expect == board.view().revisions[f"{FAULT}1"]
    assert replaced.reason.startswith("rank 1 on host0 ended with status 1 after 0.0 s: ValueError")
    assert "(first seen as: rank 0 on host2 ended" in replaced.reason
    board.put(f"{FAULT}1", replaced.fault)
    assert isinstance(decide(board, inside(1, exits=(survivor,))), m.KillRanks)


def test_who_has_been_cut_off_says_so() -> None:
    board = Board(*NAMES)
    board.form()
    declared = decide(board, me(entered=1))
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "cut_off"


def test_hosts_whose_leases_lapsed_while_the_store_was_away_are_not_lost() -> None:
    board = Board(*NAMES)
    board.form()
    board.leave("host1")
    board.leave("host2")
    back = decide(board, inside(1, store_back_s=0.0))
    assert isinstance(back, m.Wait)
    assert back.reason == "the store is back; waits for host1, host2 to register again"
    assert back.left_s == RULES.return_s
    board.join("host1")
    later = decide(board, inside(1, store_back_s=RULES.return_s - 1))
    assert isinstance(later, m.Wait)
    assert (later.left_s, "for host2 to" in later.reason) == (1.0, True)
    gone = decide(board, inside(1, store_back_s=RULES.return_s))
    assert isinstance(gone, m.DeclareFault)
    assert (gone.fault.kind, gone.fault.host) == ("host_lost", "host2")


def test_a_host_that_was_started_again_while_the_store_was_away_is_known_at_once() -> None:
    board = Board(*NAMES)
    board.form()
    board.join("host1", "b")
    declared = decide(board, inside(1, store_back_s=0.0))
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "agent_restarted"


def test_a_world_is_not_formed_before_all_know_that_the_store_is_back() -> None:
    board = Board(*NAMES)
    board.form()
    board.fault("cut_off")
    board.acknowledge("host0")
    for name in ("host1", "host2", "host3"):
        board.leave(name)
    settled = m.Observer(msgspec.structs.replace(RULES, hosts_min=1, settle_s=0.0))
    answers = dict.fromkeys(NAMES, False)
    waits = settled.decide(board.view(), me(answers=answers, store_back_s=1.0), 0.0, "n")
    assert isinstance(waits, m.Wait)
    assert waits.left_s == RULES.return_s - 1
    formed = settled.decide(board.view(), me(answers=answers, store_back_s=99.0), 1.0, "n")
    assert isinstance(formed, m.Form)


def test_what_the_root_says_is_a_fault() -> None:
    board = Board(*NAMES)
    board.form()
    declared = decide(board, inside(1, report=("host2", "silent", "smp_report")))
    assert isinstance(declared, m.DeclareFault)
    assert (declared.fault.kind, declared.fault.host) == ("smp_report", "host2")


def test_all_ranks_done_is_the_end_case_35() -> None:
    board = Board(*NAMES)
    board.form()
    gone = m.Exit(rank=0, code=0)
    told = decide(board, inside(1, exits=(gone,)))
    assert told == m.ReportDone(1, (0,), told.reason)
    for index, name in enumerate(NAMES):
        board.put(f"{DONE}1/{name}", (index,))
    end = decide(board, inside(1, "host3"))
    assert isinstance(end, m.Finish)
    assert end.end.ok
    assert not end.known


def test_a_host_that_is_done_may_go() -> None:
    board = Board(*NAMES)
    board.form()
    board.put(f"{DONE}1/host1", (1,))
    board.leave("host1")
    assert isinstance(decide(board, inside(1)), m.Wait)


def test_ranks_that_do_not_follow_the_first_are_a_fault() -> None:
    board = Board(*NAMES)
    board.form()
    board.put(f"{DONE}1/host0", (0,))
    declared = settle(m.Observer(RULES), board, inside(1, "host1"))
    assert isinstance(declared, m.DeclareFault)
    assert (declared.fault.kind, declared.fault.host) == ("left_behind", "host1")
    assert "rank 1 on host1 still runs 30 s" in declared.reason


def test_memory_that_comes_before_the_world_has_settled_is_taken_in() -> None:
    board = Board(*NAMES)
    rules = msgspec.structs.replace(ELASTIC, hosts_max=5)
    board.form(rules)
    board.join("spare")
    assert isinstance(decide(board, me("spare"), rules), m.Wait)  # it has none
    board.change("spare", snapshot=SNAPSHOT)
    declared = decide(board, me("spare"), rules)
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "memory_returned"
    board.put(f"{PROGRESS}1", Progress())
    assert isinstance(decide(board, me("spare"), rules), m.Wait)


# ------------------------------------------------------------------------------ the next world


def test_the_next_world_waits_until_all_ranks_are_dead() -> None:
    board = Board(*NAMES)
    board.form()
    board.fault()
    board.acknowledge("host0", "host1", "host2")
    assert isinstance(decide(board, me("host3")), m.KillRanks)  # has none, and has to say so
    waits = decide(board, me("host0", entered=1))
    assert isinstance(waits, m.Wait)
    assert "host3 still has ranks" in waits.reason
    board.acknowledge("host3")
    formed = decide(board, me("host0", entered=1))
    assert isinstance(formed, m.Form)
    assert formed.generation.number == 2
    assert "host0 failed" in formed.generation.reason


def test_a_member_that_never_acknowledges_is_left_out() -> None:
    board = Board(*NAMES)
    board.form(ELASTIC)
    board.fault()
    board.acknowledge(*NAMES[:3])
    formed = settle(m.Observer(ELASTIC), board, me())
    assert isinstance(formed, m.Form)
    assert [member.host for member in formed.generation.hosts] == list(NAMES[:3])


def test_places_are_kept_and_newcomers_fill_gaps_case_22() -> None:
    board = Board(*NAMES, "spare")
    board.form()
    board.leave("host1")
    board.fault("host_lost", "host1")
    board.acknowledge("host0", "host2", "host3")
    generation = board.form()
    assert [member.host for member in generation.hosts] == ["host0", "spare", "host2", "host3"]


def test_a_replaced_host_of_the_same_name_keeps_its_place() -> None:
    board = Board(*NAMES)
    board.form()
    board.put(f"{PROGRESS}1", Progress(base=-1, step=10))
    board.join("host1", "b", "new")
    board.fault("memory_lost", "host1")
    board.acknowledge("host0", "host2", "host3")
    generation = board.form()
    assert [member.host for member in generation.hosts] == list(NAMES)
    assert generation.hosts[1].arena == "host1-new"


def test_a_world_shrinks_when_nobody_comes_and_keeps_order() -> None:
    board = Board(*NAMES)
    board.form(ELASTIC)
    board.leave("host1")
    board.fault("host_lost", "host1")
    board.acknowledge("host0", "host2", "host3")
    who = me("host0", answers={"host1": False})
    observer = m.Observer(ELASTIC)
    assert isinstance(observer.decide(board.view(), who, 0.0, "n"), m.Wait)
    assert isinstance(observer.decide(board.view(), who, 2.4, "n"), m.Wait)
    formed = observer.decide(board.view(), who, 3.0, "n")
    assert isinstance(formed, m.Form)
    assert [member.host for member in formed.generation.hosts] == ["host0", "host2", "host3"]
    assert formed.generation.holders == ()


def test_a_dead_agent_whose_memory_answers_is_waited_for_and_then_only_lends_it() -> None:
    board = Board(*NAMES)
    board.form(ELASTIC)
    board.leave("host1")
    board.fault("host_lost", "host1")
    board.acknowledge("host0", "host2", "host3")
    asks = decide(board, me("host0"), ELASTIC)
    assert isinstance(asks, m.Wait)
    assert [member.host for member in asks.probe] == ["host1"]
    who = me("host0", answers={"host1": True})
    observer = m.Observer(ELASTIC)
    for now_s in range(10):
        assert isinstance(observer.decide(board.view(), who, now_s, "n"), m.Wait)
    formed = observer.decide(board.view(), who, 10.0, "n")
    assert isinstance(formed, m.Form)
    assert [(one.host, one.ranks) for one in formed.generation.holders] == [("host1", 0)]


def test_a_spare_with_memory_lends_it() -> None:
    board = Board(*NAMES, "spare")
    for name in (*NAMES, "spare"):
        board.change(name, snapshot=SNAPSHOT)
    generation = board.form()
    assert [member.host for member in generation.holders] == ["spare"]
    enters = decide(board, me("spare"))
    assert isinstance(enters, m.Enter)
    assert enters.index is None


def test_no_second_world_while_the_last_one_may_live_on() -> None:
    board = Board(*NAMES)
    board.form()
    for name in NAMES:
        board.leave(name)
    for name in ("other0", "other1", "other2", "other3"):
        board.join(name)
    board.fault("host_lost")
    who = me("other0", answers=dict.fromkeys(NAMES, False))
    observer = m.Observer(RULES)
    now_s = 0.0
    while isinstance(observer.decide(board.view(), who, now_s, "n"), m.Wait):
        now_s += 1.0
    assert RULES.cut_off_s < now_s < RULES.cut_off_s + 3
    assert isinstance(observer.decide(board.view(), who, now_s, "n"), m.Form)


def test_one_host_of_the_last_world_is_enough_for_the_next() -> None:
    board = Board(*NAMES)
    board.form()
    for name in NAMES[1:]:
        board.leave(name)
        board.join(f"{name}b")
    board.fault("host_lost", "host1")
    board.acknowledge("host0")
    assert board.form().hosts[0].host == "host0"


def test_who_missed_a_generation_kills_its_ranks() -> None:
    board = Board(*NAMES)
    board.form()
    board.fault()
    board.acknowledge(*NAMES)
    board.form()
    assert decide(board, inside(1, "host2")) == m.KillRanks(
        1, "generation 2 has replaced generation 1"
    )


def test_fresh_ignores_memory_until_it_has_settled() -> None:
    board = Board(*NAMES)
    for name in NAMES:
        board.change(name, fresh=True, snapshot=SNAPSHOT)
    assert board.form().fresh
    board.fault()
    board.acknowledge(*NAMES)
    assert board.form().fresh
    board.put(f"{PROGRESS}2", Progress())
    board.fault()
    board.acknowledge(*NAMES)
    assert not board.form().fresh


# ------------------------------------------------------------------------------ lost memory


def expected(board: Board) -> tuple[SnapshotId | None, int]:
    """What the next generation is told that the store knows of."""
    board.fault("agent_restarted", "host1")  # a loss, which is no failure in vain
    board.acknowledge(*NAMES)
    generation = board.form()
    return generation.expected, generation.expected_step


def test_the_next_world_is_told_what_the_store_knows_to_be_committed() -> None:
    board = Board(*NAMES)
    assert board.form().expected is None
    board.put(f"{PROGRESS}1", Progress(step=30, snapshot=SnapshotId(1, 3, "n")))
    assert expected(board) == (SnapshotId(1, 3, "n"), 30)
    # A generation that never settles changes nothing, however many there are.
    for _ in range(m.FAULTS_KEPT + 2):
        assert expected(board) == (SnapshotId(1, 3, "n"), 30)


def test_after_a_rollback_the_snapshots_that_were_left_are_not_expected() -> None:
    board = Board(*NAMES)
    board.form()
    board.put(f"{PROGRESS}1", Progress(step=30, snapshot=SnapshotId(1, 3, "n")))
    board.fault()
    board.acknowledge(*NAMES)
    board.form()
    board.put(f"{PROGRESS}2", Progress(base=20, step=20, snapshot=SnapshotId(1, 2, "n")))
    assert expected(board) == (SnapshotId(1, 2, "n"), 20)
    board.put(f"{PROGRESS}3", Progress())  # the script did not restore
    assert expected(board) == (None, -1)


def test_nothing_is_expected_by_a_world_that_begins_anew() -> None:
    board = Board(*NAMES)
    board.put(f"{PROGRESS}1", Progress(step=30, snapshot=SnapshotId(1, 3, "n")))
    board.put(NUMBER, 1)
    for name in NAMES:
        board.change(name, fresh=True)
    generation = board.form()
    assert (generation.number, generation.fresh, generation.expected) == (2, True, None)
    assert expected(board) == (None, -1)  # it had not settled, so that the next one is fresh too
    board.put(f"{PROGRESS}3", Progress())
    assert expected(board) == (None, -1)


def test_a_job_that_ends_since_nothing_is_recoverable_is_not_told_to_mend_its_script() -> None:
    board = Board(*NAMES)
    tail = "jaxft.errors.NothingRecoverable: snapshot 1.3 was committed and cannot be given back"
    board.form()
    assert isinstance(fail_again(board, None, lived_s=90.0, tail=tail), m.Form)
    board.form()
    end = fail_again(board, None, lived_s=90.0, tail=tail)
    assert isinstance(end, m.Finish)
    assert end.end.kind == "world"
    assert "what was protected is lost" in end.reason
    assert "NothingRecoverable" in end.reason
    assert "script fails" not in end.reason
    assert end.end.tail == tail


# ------------------------------------------------------------------------------ failures in vain


def fail_again(board: Board, progress: Progress | None, **fault: object) -> m.Decision:
    """The newest generation gets as far as that, fails, and all ranks are killed."""
    if progress is not None:
        board.put(f"{PROGRESS}{board.generation.number}", progress)
    board.fault(**fault)  # type: ignore[arg-type]
    board.acknowledge(*NAMES)
    return settle(m.Observer(RULES), board, me())


def test_a_script_that_fails_at_once_twice_is_not_started_again() -> None:
    board = Board(*NAMES)
    board.form()
    assert isinstance(fail_again(board, None, lived_s=1.0), m.Form)
    board.form()
    end = fail_again(board, None, lived_s=1.0, tail="ImportError: no module")
    assert isinstance(end, m.Finish)
    assert end.end.kind == "script"
    assert end.end.tail == "ImportError: no module"
    assert "the script fails whenever it is started" in end.reason


def test_a_crash_at_the_same_step_ends_the_job_and_names_the_step_case_37() -> None:
    board = Board(*NAMES)
    board.form()
    snapshot = SnapshotId(1, 3, "n")
    assert isinstance(fail_again(board, Progress(base=-1, step=50, snapshot=snapshot)), m.Form)
    again = Progress(base=50, step=50, snapshot=snapshot)
    for _ in range(2):
        board.form()
        assert isinstance(fail_again(board, again), m.Form)
    board.form()
    end = fail_again(board, again)
    assert isinstance(end, m.Finish)
    assert end.reason.endswith(
        "3 failures in a row brought no snapshot newer than step 50: always host0; "
        "the snapshot of step 50 goes with the run's memory, since there is no OrbaxFallback"
    )
    # What this run was given from storage, of an earlier one, is not in memory alone.
    board.put(NUMBER, 1)
    end = settle(m.Observer(RULES), board, me())
    assert end.reason.endswith("newer than step 50: always host0")


def test_a_script_that_begins_anew_each_time_is_given_up_case_37() -> None:
    """It does not restore, so each of its snapshots is newer than those before; none is further."""
    board = Board(*NAMES)
    for step in (8, 6, 8):
        board.form()
        assert isinstance(fail_again(board, Progress(base=-1, step=step)), m.Form)
    board.form()
    end = fail_again(board, Progress(base=-1, step=7))
    assert isinstance(end, m.Finish)
    assert "3 failures in a row brought no snapshot newer than step 8" in end.reason


def test_a_job_that_went_back_and_comes_nearer_is_not_given_up() -> None:
    board = Board(*NAMES)
    board.form()
    assert isinstance(fail_again(board, Progress(base=-1, step=100)), m.Form)
    for step in range(50, 90, 5):
        board.form()
        assert isinstance(fail_again(board, Progress(base=step, step=step + 5)), m.Form)


def test_one_failure_is_none_in_a_row() -> None:
    board = Board(*NAMES)
    board.form()
    board.fault(lived_s=90.0)
    board.acknowledge(*NAMES)
    rules = msgspec.structs.replace(RULES, restarts=RestartPolicy(same_step_max=1))
    end = settle(m.Observer(rules), board, me())
    assert end.reason.endswith("; 1 failure brought no snapshot at all")


def test_progress_and_losses_do_not_count_as_failures() -> None:
    board = Board(*NAMES)
    for step in range(8):
        board.form()
        assert isinstance(fail_again(board, Progress(base=step, step=step + 1)), m.Form)
    for _ in range(8):
        board.form()
        assert isinstance(fail_again(board, None, kind="host_lost", host="host1"), m.Form)
    assert len(board.view().faults) <= m.FAULTS_KEPT + 1


def test_the_job_is_not_given_up_while_a_member_may_turn_out_to_be_lost() -> None:
    board = Board(*NAMES)
    board.form()
    fail_again(board, None, lived_s=1.0)
    board.form()
    board.fault(lived_s=1.0)
    board.acknowledge("host0", "host1", "host2")
    observer = m.Observer(RULES)
    assert isinstance(observer.decide(board.view(), me(), 0.0, "n"), m.Wait)
    board.leave("host3")
    declared = observer.decide(board.view(), me(), 1.0, "n")
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "host_lost"


def test_repeated_failures_are_followed_by_a_pause() -> None:
    board = Board(*NAMES)
    board.form()
    fail_again(board, None, kind="rank_killed", code=-9)
    board.form()
    board.fault("rank_killed", code=-9)
    board.acknowledge(*NAMES)
    waits = decide(board, me())
    assert isinstance(waits, m.Wait)
    assert waits.left_s == 1.0


def test_the_loss_of_a_host_replaces_what_was_only_its_consequence() -> None:
    board = Board(*NAMES)
    board.form()
    board.fault("rank_killed", "host2")
    board.join("host1", "b", "new")
    declared = decide(board, inside(1))
    assert isinstance(declared, m.DeclareFault)
    assert declared.fault.kind == "memory_lost"
    assert "first seen as: host2 failed" in declared.fault.detail
    assert declared.expect == board.view().revisions[f"{FAULT}1"]
    assert board.commit({f"{FAULT}1": declared.expect}, {f"{FAULT}1": declared.fault})
    assert isinstance(decide(board, inside(1)), m.KillRanks)


# ------------------------------------------------------------------------------ the end


def test_the_end_is_the_end_for_all() -> None:
    board = Board(*NAMES)
    board.form()
    end = JobEnd(kind="script", reason="no good")
    board.put(END, end)
    assert decide(board, inside(1)) == m.Finish(end, True, "no good")


def test_a_record_of_another_version_is_an_error_that_names_it() -> None:
    with pytest.raises(LaunchError, match='"host/x" is not one of this version'):
        read_view({"host/x": Entry(b"\xc1", 1)})


def test_an_observer_knows_when_the_time_alone_decides_nothing() -> None:
    """Then its agent may sleep until something happens."""
    observer, board = m.Observer(RULES), Board(*NAMES[:3])
    assert isinstance(observer.decide(board.view(), me("host0"), 0.0, "n"), m.Wait)
    assert observer.counts  # how long there have been too few
    board.join(NAMES[3])
    board.form()
    assert isinstance(observer.decide(board.view(), inside(1, "host0"), 1.0, "n"), m.Wait)
    assert not observer.counts
    board.put(f"{DONE}1/host0", (0,))
    assert isinstance(observer.decide(board.view(), inside(1, "host0"), 2.0, "n"), m.Wait)
    assert observer.counts  # how long the others may run on
