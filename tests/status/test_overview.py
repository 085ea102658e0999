"""What is said of a job, made of what was seen of it."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from jaxft.group.account import Account, Committed, Note, from_block, to_block
from jaxft.group.identity import SnapshotId
from jaxft.group.messages import Ledger, Lineage, Outcome, PersistOrder, Slot
from jaxft.group.placement import form_groups
from jaxft.group.records import (
    Fault,
    HostRecord,
    HostStill,
    JobEnd,
    Progress,
    RankStill,
    View,
)
from jaxft.group.world import Code, Export, Generation, Member, World
from jaxft.status import report as r
from jaxft.status.overview import Survey, overview
from jaxft.status.printed import printed, printed_jobs

NOW_S = 1_000_000.0
OLD, NEW = SnapshotId(3, 6, "n"), SnapshotId(3, 7, "n")
HOSTS = ("a", "b", "c")


def generation(count: int = 3, code: str = "2+1", **facts: object) -> Generation:
    members = tuple(Member(h, "agent", h, f"tcp://10.0.0.1:1{i},x") for i, h in enumerate(HOSTS))
    made = Generation(
        job="j",
        number=3,
        nonce="n",
        hosts=members[:count],
        groups=form_groups(count, Code.parse(code)),
        code=Code.parse(code),
        reason="3 hosts are there",
    )
    return msgspec.structs.replace(made, **facts)


def account(host: str, world: Generation, **facts: object) -> Account:
    """One that has heard, four seconds ago, that NEW is committed; its clock is 100 s ahead."""
    place = HOSTS.index(host)
    slots = [
        Slot(state="coded", id=one, step=one.seq * 10, host=place, world=World.of(world))
        for one in (OLD, NEW)
    ]
    ledger = Ledger(
        arena=host,
        generation=3,
        nonce="n",
        lineage=(Lineage(3, None),),
        slots=(slots[0], slots[1]),
        committed=NEW,
        outcome=Outcome(seq=7, step=70, ok=True, committed=NEW),
    )
    made = Account(
        job="j",
        host=host,
        pid=1,
        address=f"tcp://10.0.0.1:1{place},x",
        now_s=NOW_S + 100,
        ledger=ledger,
        generation=world,
        settled=True,
        is_root=place == 0,
        agent_pid=2,
        ranks=((place, 3),),
        pinned=(NEW,),
        entered_s=NOW_S + 100 - 60,
        committed=Committed(NEW, NOW_S + 100 - 4),
    )
    return msgspec.structs.replace(made, **facts)


def survey(world: Generation, *accounts: Account, **facts: object) -> Survey:
    made = Survey(job="j", now_s=NOW_S, accounts={one.host: one for one in accounts})
    return msgspec.structs.replace(made, **facts)


def healthy(world: Generation) -> list[Account]:
    return [account(member.host, world) for member in world.hosts]


def text(report: r.JobReport | r.JobsReport, width: int = 120) -> str:
    out = io.StringIO()
    shown = printed(report) if isinstance(report, r.JobReport) else printed_jobs(report)
    Console(file=out, width=width).print(shown)
    return out.getvalue()


def test_a_whole_world_is_protected_as_asked_for() -> None:
    world = generation()
    report = overview(survey(world, *healthy(world)))
    assert (report.health, report.problems) == (r.PROTECTED, ())
    assert report.world is not None
    assert (report.world.phase, report.world.age_s, report.world.root) == ("running", 60, "a")
    assert report.newest == r.SnapshotReport(snapshot="3.7", step=70, age_s=4)
    [group] = report.losses.groups
    assert (group.more, report.losses.fatal_hosts, report.losses.lost) == (1, (), None)
    old, new = report.hosts[0].slots
    assert (old.state, old.pinned, new.state, new.pinned) == (
        "committed",
        "",
        "committed",
        "newest",
    )
    said = text(report)
    assert "job j: protected" in said
    assert "of step 70: any 1 more host" in said
    assert "step 70 (snapshot 3.7), committed 4 s ago" in said
    # On a terminal of the usual width a host is a line.
    narrow = text(report, 80).splitlines()
    assert sum(line.startswith(("a ", "b ", "c ")) for line in narrow) == len(HOSTS)
    first = next(at for at, line in enumerate(narrow) if line.startswith("host "))
    assert not any(line.startswith("  ") for line in narrow[first:])
    assert max(map(len, said.splitlines())) <= 120


def test_who_is_silent_is_named_and_counts_as_lost() -> None:
    world = generation()
    records = {h: HostRecord(host=h, agent="", arena=h, address="", coordinator="") for h in "abd"}
    seen = survey(
        world,
        *healthy(world)[:2],
        silent={"c": "it does not answer within 2 s"},
        view=View(hosts=records, generation=world),
    )
    report = overview(seen)
    assert report.health == r.DEGRADED
    assert report.world is not None
    assert report.world.spares == ("d",)
    assert [(host.host, host.role, host.agent, host.smp) for host in report.hosts] == [
        ("a", "member", "alive", "alive"),
        ("b", "member", "alive", "alive"),
        ("c", "member", "gone", "silent"),
        ("d", "spare", "alive", "silent"),
    ]
    assert report.problems == (
        "c: its snapshot process is silent: it does not answer within 2 s",
        "c: its agent is gone",
        "group 0 of step 70 can lose no host (c missing), asked for are 1",
    )
    assert report.losses.fatal_hosts == ("a", "b")
    assert "Memory is lost with any of: a, b" in text(report)


def test_a_host_that_waits_since_it_was_lost_again_and_again_is_named() -> None:
    world = generation()
    records = {h: HostRecord(host=h, agent="", arena=h, address="", coordinator="") for h in "abcd"}
    records["d"] = msgspec.structs.replace(records["d"], waits="d was lost 3 times lately")
    report = overview(survey(world, *healthy(world), view=View(hosts=records, generation=world)))
    assert report.world is not None
    assert report.world.left_out == {"d": "d was lost 3 times lately"}
    assert "left out  d was lost 3 times lately" in text(report)


def test_where_nobody_answers_nothing_is_made_up() -> None:
    seen = Survey(job="j", now_s=NOW_S, silent={"a": "it does not answer within 2 s"})
    report = overview(seen)
    assert report.health == r.UNREACHABLE
    assert report.problems == (
        "nobody says which world there is",
        "no snapshot process answers: what memory holds is not known",
        "a: it does not answer within 2 s",
    )
    assert "newest   not known" in text(report)
    report = overview(msgspec.structs.replace(seen, view=View(), store="sqlite:///s"))
    assert report.problems[0] == "no world has been formed yet"


def test_an_agent_that_is_there_without_a_lease_is_not_said_to_live() -> None:
    world = generation()
    records = {h: HostRecord(host=h, agent="", arena=h, address="", coordinator="") for h in "ab"}
    view = View(generation=world, hosts=records)
    report = overview(survey(world, *healthy(world), view=view))
    assert [one.agent for one in report.hosts] == ["alive", "alive", "lapsed"]
    assert report.problems == (
        "c: its agent is there without a lease: it hangs, or does not reach the store",
    )


def test_hosts_seen_before_and_after_a_commit_lose_nothing() -> None:
    world = generation()
    late, *others = healthy(world)
    before = msgspec.structs.replace(late.ledger.slots[1], state="staged")
    ledger = msgspec.structs.replace(
        late.ledger, slots=(late.ledger.slots[0], before), committed=OLD
    )
    view = View(generation=world, progress={3: Progress(step=80, snapshot=SnapshotId(3, 8, "n"))})
    first = msgspec.structs.replace(late, ledger=ledger)
    report = overview(survey(world, first, *others, view=view))
    assert (report.losses.snapshot, report.losses.lost) == ("3.7", None)
    assert [group.more for group in report.losses.groups] == [1]


def test_memory_that_is_gone_is_said_by_the_store() -> None:
    world = generation(number=4, nonce="m")
    anew: dict[str, object] = {"ledger": Ledger(arena="x"), "committed": None}
    empty = [msgspec.structs.replace(one, **anew) for one in healthy(world)]
    view = View(generation=world, progress={3: Progress(step=70, snapshot=NEW)})
    report = overview(survey(world, *empty, view=view))
    assert (report.newest, report.losses.lost) == (
        r.SnapshotReport(snapshot="3.7", step=70, age_s=None),
        "3.7",
    )
    assert "snapshot 3.7 (step 70) cannot be rebuilt: nothing is left in memory" in report.problems


def test_less_parity_and_domains_that_fail_at_once_are_degraded() -> None:
    world = generation(1)
    [problem] = overview(survey(world, *healthy(world))).problems
    assert problem.startswith("group 0 (a) has code 1+0, less than asked for (2+1)")
    racks = [msgspec.structs.replace(one, domain="rack1") for one in generation().hosts[:2]]
    world = generation(hosts=(*racks, generation().hosts[2]))
    report = overview(survey(world, *healthy(world)))
    assert report.groups[0].domains == (
        r.SharedDomain(domain="rack1", hosts=("a", "b"), fatal=True),
    )
    [problem] = report.problems
    assert "a, b share domain rack1" in problem


def test_a_world_within_one_domain_has_no_better_groups() -> None:
    rack = tuple(msgspec.structs.replace(one, domain="rack1") for one in generation().hosts)
    world = generation(hosts=rack)
    report = overview(survey(world, *healthy(world)))
    assert report.groups[0].domains[0].fatal
    assert report.problems == ()


def test_what_an_older_world_with_less_parity_has_made_is_not_enough() -> None:
    world, older = generation(), generation(1, number=2)
    first, *others = healthy(world)
    slot = Slot(state="coded", id=OLD, step=60, world=World.of(older))
    anew = Ledger(arena="x", generation=3, lineage=(Lineage(3, OLD),))
    ledger = msgspec.structs.replace(anew, slots=(slot, Slot()), committed=OLD)
    accounts = [msgspec.structs.replace(first, ledger=ledger)]
    accounts += [msgspec.structs.replace(one, ledger=anew) for one in others]
    late = msgspec.structs.replace(anew, generation=2)
    accounts[2] = msgspec.structs.replace(accounts[2], ledger=late)
    report = overview(survey(world, *accounts))
    assert report.losses.fatal_hosts == ("a",)
    assert report.problems == (
        "c: is still in generation 2",
        "group 0 of step 60 can lose no host, asked for are 1",
    )


def test_a_rank_that_hangs_is_named() -> None:
    world = generation()
    late = RankStill(rank=1, calls=7, still_s=620, limit_s=600)
    still = {"b": HostStill(host="b", ranks=(late,))}
    records = {h: HostRecord(host=h, agent="", arena=h, address="", coordinator="") for h in HOSTS}
    view = View(generation=world, still=still, hosts=records)
    [problem] = overview(survey(world, *healthy(world), view=view)).problems
    assert problem.startswith("b: rank 1 has not called save for 620 s (its last call was number 7")


def test_a_script_that_nobody_launched_asks_for_no_parity() -> None:
    world = generation(1, attached=True)
    report = overview(survey(world, *healthy(world)))
    assert (report.health, report.losses.fatal_hosts) == (r.PROTECTED, ("a",))


def test_the_end_of_a_job_has_its_newest_snapshot_on_storage() -> None:
    export = Export(directory="/ckpt", tries=1)
    world = msgspec.structs.replace(generation(), export=export)
    newest = Progress(base=147, step=147, snapshot=OLD, export=export, stored=137)
    view = View(generation=world, progress={world.number: newest})
    assert overview(survey(world, view=view)).storage.step == 137
    done = msgspec.structs.replace(view, done=frozenset(range(world.rank_count)))
    assert overview(survey(world, view=done)).storage.step == 147
    fault = Fault(generation=world.number, host="a", kind="export_failed", detail="disk full")
    failed = msgspec.structs.replace(done, faults={world.number: fault})
    assert overview(survey(world, view=failed)).storage.step == 137


def test_what_is_held_what_is_persisted_and_what_failed() -> None:
    world = generation()
    order = PersistOrder(number=1, wanted=True, step=80)
    root, *others = healthy(world)
    notes = (Note(NOW_S + 100 - 9, "aborted", "snapshot 3.5 of step 50: it was cold"),)
    root = msgspec.structs.replace(
        root,
        ledger=msgspec.structs.replace(root.ledger, persist=order),
        held="b is out of reach",
        held_s=NOW_S + 100 - 7,
        helpers={"a": "ready", "b": "starting", "c": "ready"},
        directory="/ckpt",
        stored=40,
        notes=notes,
        silent={"b": 7.0},
    )
    others = [msgspec.structs.replace(one, notes=notes) for one in others]
    fault = Fault(generation=2, host="b", kind="host_lost", detail="b is lost", at_s=NOW_S - 99)
    view = View(generation=world, faults={2: fault})
    report = overview(survey(world, root, *others, view=view))
    assert report.held == r.HeldReport(reason="b is out of reach", age_s=7)
    assert (report.storage.directory, report.storage.step) == ("/ckpt", 40)
    assert report.storage.persist is not None
    assert report.storage.persist.state == "starting"
    assert [(one.kind, one.at_s) for one in report.failures] == [
        ("aborted", NOW_S - 9),
        ("host_lost", NOW_S - 99),
    ]
    said = text(report)
    assert "a persist of the first snapshot from step 80 is under way (starting, 2 of 3" in said
    assert "b: the root has not heard it for 7 s" in said
    assert "snapshots are held: b is out of reach" in said


def test_the_store_is_away_or_says_that_all_is_over() -> None:
    world = generation()
    report = overview(survey(world, *healthy(world), store="etcd://x", store_problem="no answer"))
    assert report.health == r.DEGRADED
    assert report.problems == ("the store does not answer, this is what hosts know: no answer",)
    end = View(end=JobEnd(kind="finished", reason="all 3 ranks ended with status 0"))
    report = overview(Survey(job="j", now_s=NOW_S, view=end))
    assert report.health == r.ENDED
    assert "the job is over: finished: all 3 ranks ended" in text(report)
    nobody = overview(survey(world, silent={"a": "gone"}, view=View(generation=world)))
    assert nobody.health == r.UNREACHABLE
    assert nobody.losses == r.LossesReport(
        snapshot=None, step=None, groups=(), fatal_hosts=(), lost=None, reasons=()
    )
    assert "no snapshot process answers" in text(nobody)


def test_a_world_of_which_nobody_answers_is_what_the_store_says() -> None:
    world = generation()

    def phase(**facts: object) -> str | None:
        seen = overview(survey(world, silent={"a": "gone"}, view=View(generation=world, **facts)))
        return None if seen.world is None else seen.world.phase

    progress = {world.number: Progress(base=0, step=70, snapshot=NEW)}
    assert phase() == "restoring"
    assert phase(progress=progress) == "running"
    assert phase(progress=progress, end=JobEnd(kind="finished", reason="well")) == "ended"


@pytest.mark.parametrize("settled", [True, False])
def test_who_has_lent_its_memory_and_gone_is_missed_only_while_it_is_restored(
    settled: bool,
) -> None:
    world = generation()
    lender = Member(host="z", agent="", arena="", address="tcp://10.0.0.9:1,x", ranks=0)
    world = msgspec.structs.replace(world, holders=(lender,))
    accounts = [msgspec.structs.replace(one, settled=settled) for one in healthy(world)]
    report = overview(survey(world, *accounts, silent={"z": "it does not answer"}))
    assert any(one.startswith("z: ") for one in report.problems) is not settled


def test_an_account_goes_into_a_block_or_says_how_large_it_must_be() -> None:
    one = account("a", generation())
    size_bytes = from_block(to_block(one, 16))
    assert isinstance(size_bytes, int)
    assert from_block(to_block(one, size_bytes)) == one
    assert from_block(to_block(one, 2 * size_bytes)) == one


def test_the_jobs_that_were_found() -> None:
    report = r.JobsReport(jobs=(r.JobLine(job="j", hosts=HOSTS, step=None),), problems=("x: y",))
    assert "jaxft status --job j" in text(report)
    assert "no job is found" in text(r.JobsReport(jobs=(), problems=()))


REPORTS = [one for one in vars(r).values() if isinstance(one, type) and one is not msgspec.Struct]


@pytest.mark.parametrize("kind", REPORTS, ids=lambda one: one.__name__)
def test_every_key_is_documented(kind: type[msgspec.Struct]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
    missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in page]
    assert not missing
