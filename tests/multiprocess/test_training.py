"""Worlds of real JAX processes that lose ranks, hosts and places, and train on, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxft.group.world import Code
from tests.multiprocess.jax_world import Host, Ranks, until

CODE = Code(data=3, parity=1)


class Job:
    """A job's hosts and generations."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = 0
        self.hosts: list[Host] = []
        self._worlds: list[Ranks] = []

    def add_hosts(self, *names: str) -> list[Host]:
        added = [Host(name, self.directory) for name in names]
        self.hosts += added
        return added

    def run(self, hosts: Sequence[Host], **options: Any) -> Ranks:
        """The next generation."""
        self.number += 1
        ranks = Ranks(hosts, self.number, self.directory, **{"code": CODE, **options})
        self._worlds.append(ranks)
        return ranks

    def close(self) -> None:
        for ranks in self._worlds:
            ranks.kill()
        for host in self.hosts:
            host.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    one.close()


def digests(ranks: Ranks) -> dict[int, str]:
    """What every rank said of the state after each step."""
    found: dict[int, str] = {}
    for rank in range(len(ranks.processes)):
        for one in ranks.said(rank, "stepped"):
            assert found.setdefault(one["step"], one["digest"]) == one["digest"]
    return found


def restored(ranks: Ranks) -> dict[str, Any]:
    """What every rank said that it restored: the same on all, and each has its own extras."""
    said = [ranks.said(rank, "restored")[0] for rank in range(len(ranks.processes))]
    step = said[0]["step"]
    for rank, one in enumerate(said):
        assert one["extras"] == {"rank": rank, "position": 24 * step}
        assert {**one, "extras": None} == {**said[0], "extras": None}
    return said[0]


def test_a_rank_dies_at_every_phase_and_training_is_undisturbed_case_20_21_24(job: Job) -> None:
    hosts = job.add_hosts("h0", "h1", "h2", "h3")
    ranks = job.run(hosts, steps=12, every=3, fresh=True)
    ranks.finish()
    truth = digests(ranks)
    assert sorted(truth) == list(range(1, 13))
    for rank in range(4):  # the same calls are skipped on every rank, for the same reason
        assert [one["skipped"] for one in ranks.said(rank, "stepped")][:5] == [
            None,
            "the next snapshot is due at step 4",
            "the next snapshot is due at step 4",
            None,
            "the next snapshot is due at step 7",
        ]
    planned = [ranks.said(rank, "planned")[0] for rank in range(4)]
    assert sum(one["owned"] for one in planned) == planned[0]["whole"]
    assert max(one["owned"] for one in planned) < 0.3 * planned[0]["whole"]
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert set(ranks.said(0, "started")[0]["listening"]) & loopback
    assert set(ranks.said(0, "started")[0]["listening"]) <= loopback

    # Each generation takes snapshots 0 and 1, and dies while it takes snapshot 2.
    step, first = 0, True
    for rank, phase in enumerate(
        ("save.begun", "stage.granted", "stage.half", "stage.copied", "stage.told")
    ):
        victim = (rank + 1) % 4
        faults = f"{phase}:rank={victim},seq=2=kill"
        ranks = job.run(hosts, steps=12, fresh=first, faults=faults)
        ranks.die(victim)
        if not first:
            assert restored(ranks)["source"] == "own"
            assert (restored(ranks)["step"], restored(ranks)["digest"]) == (step, truth[step])
        assert digests(ranks).items() <= truth.items()
        step += 2 if first else 1
        first = False

    hosts[2].close()  # with the memory that the last rank's death left
    (hosts[2],) = job.add_hosts("h4")
    ranks = job.run(hosts, steps=12)
    ranks.finish()
    told = restored(ranks)
    # What was told before the death may have been protected after it.
    assert told["step"] in (step, step + 1)
    assert (told["source"], told["digest"]) == ("rebuilt", truth[told["step"]])
    assert digests(ranks).items() <= truth.items()
    assert [ranks.said(rank, "done")[0]["latest"] for rank in range(4)] == [12] * 4


def test_all_ranks_take_their_snapshots_at_the_intervals_of_a_budget(job: Job) -> None:
    hosts = job.add_hosts("h0", "h1")
    options = {"code": Code(data=1, parity=1), "every": {"overhead": 0.05}, "devices": 1}
    ranks = job.run(hosts, steps=60, fresh=True, **options)
    ranks.finish()
    first, second = (
        [one["step"] for one in ranks.said(rank, "stepped") if one["skipped"] is None]
        for rank in range(2)
    )
    assert first == second
    assert first[:5] == [1, 11, 21, 31, 41]
    intervals = [after - before for before, after in itertools.pairwise(first)]
    for before, after in itertools.pairwise(intervals):
        assert max(1, before // 2) <= after <= 2 * before + 1


def test_worlds_of_other_sizes_names_and_orders_case_19_22(job: Job) -> None:
    hosts = job.add_hosts("h0", "h1", "h2", "h3")
    ranks = job.run(hosts, steps=2)
    ranks.finish()
    last = digests(ranks)[2]

    hosts.pop(1).close()
    ranks = job.run(hosts, steps=3)  # three, and one host's memory is gone
    ranks.finish()
    assert (restored(ranks)["digest"], restored(ranks)["source"]) == (last, "rebuilt")
    last = digests(ranks)[3]

    holder = hosts.pop(1)
    ranks = job.run(hosts, steps=4, holders=[holder])  # two, and a third only lends its memory
    ranks.finish()
    assert (restored(ranks)["digest"], restored(ranks)["source"]) == (last, "peer")
    last = digests(ranks)[4]

    hosts[0].move("z0")
    hosts[1].move("a1")
    hosts = [hosts[1], *job.add_hosts("n1"), holder, hosts[0]]
    ranks = job.run(hosts, steps=5)  # four again: other numbers, other names, two without memory
    ranks.finish()
    told = [ranks.said(rank, "restored")[0] for rank in range(4)]
    assert {one["digest"] for one in told} == {last}
    assert [one["extras"]["rank"] for one in told] == [0, 1, 0, 0]
    last = digests(ranks)[5]

    hosts.reverse()
    ranks = job.run(hosts, steps=6)  # only the numbers change
    ranks.finish()
    assert (restored(ranks)["digest"], restored(ranks)["source"]) == (last, "own")


def test_two_ranks_a_host_and_an_smp_that_dies_between_them_case_25(job: Job) -> None:
    hosts = job.add_hosts("h0", "h1")
    told, go = job.directory / "told", job.directory / "go"
    faults = f"stage.told:rank=0,seq=2=touch:{told};stage.granted:rank=1,seq=2=wait:{go}"
    options = {"code": Code(data=1, parity=1), "ranks": 2, "devices": 1}
    ranks = job.run(hosts, steps=5, faults=faults, **options)
    until(told.exists, "rank 0 has its part in the slot, and rank 1 has not", 60.0)
    hosts[0].kill()
    hosts[0].start()
    go.touch()
    ranks.finish()
    last = digests(ranks)[5]
    assert [ranks.said(rank, "done")[0]["latest"] for rank in range(4)] == [5] * 4
    # Another host takes h1's place, and its SMP dies while its ranks wait for what it rebuilds.
    hosts[1].close()
    waits, never = job.directory / "waits", job.directory / "never"
    hosts[1] = Host("h2", job.directory, faults=f"smp.rebuild_begun=wait:{never}")
    job.hosts.append(hosts[1])
    ranks = job.run(hosts, steps=6, faults=f"restore.making:rank=2=touch:{waits}", **options)
    until(waits.exists, "rank 2 waits for what is rebuilt", 60.0)
    hosts[1].kill()
    hosts[1].start()
    ranks.finish()
    assert (restored(ranks)["digest"], restored(ranks)["source"]) == (last, "rebuilt")
