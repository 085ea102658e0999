"""Worlds of real JAX processes whose step takes the snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft.group.world import Code
from tests.multiprocess.test_training import Job, digests, restored


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    one.close()


def test_a_rank_dies_while_the_twin_runs_and_training_is_undisturbed_case_20_21(job: Job) -> None:
    """And nothing is compiled again after the restart."""
    hosts = job.add_hosts("h0", "h1")
    ranks = job.run(hosts, steps=9, every=2, fresh=True)
    ranks.finish()
    truth = digests(ranks)

    faults = "stage.half:rank=1,seq=3=kill"
    options = {"steps": 9, "every": 2, "wrap": "all", "parity": "device"}
    ranks = job.run(hosts, fresh=True, faults=faults, **options)
    ranks.die(1)
    assert [one["parity"] for one in ranks.said(0, "stepped") if not one["skipped"]][2] == "device"
    assert digests(ranks).items() <= truth.items()

    ranks = job.run(hosts, **options)
    ranks.finish()
    found = restored(ranks)
    assert (found["step"], found["digest"]) == (4, truth[4])
    assert digests(ranks).items() <= truth.items()
    assert max(digests(ranks)) == 9
    for rank in range(2):  # each had written its program down, and has not compiled it again
        done = ranks.said(rank, "done")[0]
        assert (done["twins"], done["compiled"]) == (1, 0), ranks.log(rank)


def test_no_rank_runs_the_twin_if_one_does_not(job: Job) -> None:
    """Nobody hangs in a collective that the other does not run, and snapshots are taken."""
    hosts = job.add_hosts("h0", "h1")
    ranks = job.run(hosts, steps=9, every=1, fresh=True, wrap="not 1")
    ranks.finish()
    for rank in range(2):
        assert ranks.said(rank, "done")[0]["twins"] == 0
        assert [one["skipped"] for one in ranks.said(rank, "stepped")] == [None] * 9
    assert "the other ranks do not run it" in ranks.log(0)


def test_what_devices_have_coded_hosts_rebuild_case_20_21(job: Job) -> None:
    """Parity of the leaves in rows comes from the step's program, of the others from the hosts."""
    hosts = job.add_hosts("h0", "h1", "h2")
    options = {"every": 2, "code": Code(data=2, parity=1), "wrap": "all", "parity": "device"}
    ranks = job.run(hosts, steps=7, fresh=True, **options)
    ranks.finish()
    truth = digests(ranks)
    for rank in range(3):
        taken = [one["parity"] for one in ranks.said(rank, "stepped") if not one["skipped"]]
        assert taken == ["host", "device", "device", "device"], ranks.log(rank)

    hosts[1].close()
    (hosts[1],) = job.add_hosts("h3")
    ranks = job.run(hosts, steps=8, **{**options, "wrap": ""})
    ranks.finish()
    told = restored(ranks)
    assert (told["step"], told["source"], told["digest"]) == (6, "rebuilt", truth[6])
    assert digests(ranks)[7] == truth[7]
    assert "the hosts compute the parity of what save takes" in ranks.log(0)
