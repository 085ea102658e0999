"""`jaxft export`: a snapshot out of a job's memory by hand, whoever of the job still lives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jaxft import salvage
from jaxft.checkpoint import read_record
from jaxft.config import StoreAccess
from jaxft.errors import ConfigError, NothingRecoverable
from jaxft.group.messages import Plan
from jaxft.group.records import END, HOST, JOB_KEY, HostRecord, JobEnd
from jaxft.group.recovery import Holder
from jaxft.group.world import encode
from jaxft.host.accountant import read_account
from jaxft.host.job_key import JobKey
from jaxft.host.local import LocalListener
from jaxft.host.recall import bulk_address
from jaxft.host.trust import Trust
from jaxft.launch.stores import open_store
from tests.launch.test_export import plain
from tests.launch.training import Training, train


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not the export's own: its variables are those of the tests after it, too."""
    monkeypatch.setattr(salvage, "set_jax_apart", lambda processes: None)


@contextlib.contextmanager
def slow_reads(training: Training, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A newer snapshot is there before one is read, whose slot would be given away then."""
    real, read = salvage._Export._copy, []

    def copy(self: salvage._Export, plan: Plan, holders: Sequence[Holder]) -> object:
        read.append(plan.step)
        training.until("latest", plan.step + 5)
        for one in self.found:
            account = read_account(self.network.reader(), bulk_address(one.address), 5.0)
            assert plan.chosen in account.pinned
        return real(self, plan, holders)

    with monkeypatch.context() as patched:
        patched.setattr(salvage._Export, "_copy", copy)
        yield read


def test_memory_is_exported_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the job trains; after its launcher and agents, and so its ranks, were killed; and after
    one of its two hosts was lost, too."""
    with train(5) as training:
        world = training.world
        monkeypatch.setenv("JAXFT_RUN_DIR", str(world.run_dir))
        training.until("latest", 11)
        step = salvage.export("j", tmp_path / "a")
        assert plain(tmp_path / "a") == [(step, step)]
        assert step >= 11
        training.until("latest", step + 10)  # training goes on, and no slot is kept from it

        with pytest.raises(
            ConfigError, match=r"no snapshot process of job k .* the jobs here are j"
        ):
            salvage.export("k", tmp_path / "a")
        with pytest.raises(ConfigError, match=r"no snapshot of step 3: it has \d+, \d+"):
            salvage.export("j", tmp_path / "a", step=3)
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="checkpoints cannot go to"):
            salvage.export("j", tmp_path / "file")

        monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "elsewhere"))
        with pytest.raises(ConfigError, match="no job runs here; for hosts on other machines"):
            salvage.export("j", tmp_path / "a")
        store = f"sqlite://{world.run_dir}/j/store.db"
        with slow_reads(training, monkeypatch) as read:
            step = salvage.export("j", tmp_path / "d", store=store)
        assert plain(tmp_path / "d") == [(step, step)]
        assert read == [step]  # at the first try
        training.until("latest", step + 15)  # after that no slot is kept
        with monkeypatch.context() as patched:
            patched.setattr(salvage, "kept", lambda *_: contextlib.nullcontext(["b"]))
            why = r"given up after 5 tries: snapshot 1\..* was replaced .* lengthen their interval"
            with pytest.raises(NothingRecoverable, match=why):
                salvage.export("j", tmp_path / "e", store=store)
        monkeypatch.setenv("JAXFT_RUN_DIR", str(world.run_dir))

        held = training.hold(5)
        ranks = {world.pid(host, "rank") for host in ("host0", "host1")}
        world.process.kill()
        world.until_gone(ranks | {world.pid(host, "agent") for host in ("host0", "host1")})
        command = [sys.executable, "-m", "jaxft", "export", "--job", "j", str(tmp_path / "b")]
        done = subprocess.run(
            command, env=world.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        [(last, w)] = plain(tmp_path / "b")
        assert (last, w) == (held, held)
        assert f"step {last} of job j is in {tmp_path / 'b'}" in done.stdout

        before = last - 5
        assert salvage.export("j", tmp_path / "b", step=before) == before
        assert plain(tmp_path / "b") == [(before, before), (last, last)]

        smp = world.pid("host1", "smp")
        os.kill(smp, signal.SIGKILL)
        world.until_gone({smp})
        assert salvage.export("j", tmp_path / "c") == last
        assert plain(tmp_path / "c") == [(last, last)]
        assert read_record(tmp_path / "c" / str(last)).job == "j"


def test_a_snapshot_process_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(salvage, "ASK_S", 0.05)
    place = tmp_path / "j" / "h0"
    for path in (place.parent, place):
        path.mkdir(mode=0o700)
    listener = LocalListener(place / "smp.sock")
    try:
        with pytest.raises(ConfigError, match=r"these do not answer: .*/j/h0: the snapshot"):
            salvage.export("j", tmp_path / "a")
    finally:
        listener.close()


KEY, OTHER = JobKey(bytes(32)), JobKey(bytes(range(32)))


def test_a_job_that_has_ended_says_how(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    store = open_store(url, job="j")
    store.commit({}, {END: encode(JobEnd(kind="finished", reason="step 9 is on storage, in /c"))})
    store.close()
    with pytest.raises(NothingRecoverable, match=r"has ended, .*: step 9 is on storage, in /c"):
        salvage.export("j", tmp_path / "out", store=url)


def test_hosts_on_other_machines_want_the_jobs_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is asked for, or refused, in plain words, before anybody is waited for."""
    for name in ("JAXFT_JOB_KEY", "JAXFT_JOB_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    far = "tcp://127.0.0.1:1,tcp://127.0.0.1:2"
    found = [salvage.Found("kk2", "n1", far)]
    with pytest.raises(ConfigError, match=r"no store of that job is on this machine.*--store"):
        salvage._trust("kk2", found, salvage._Stored(), "", False)

    monkeypatch.setenv("JAXFT_RUN_DIR", str(tmp_path / "run"))
    store = open_store(str(tmp_path / "store.db"), job="kk2")
    record = HostRecord(
        host="n1", agent="1", arena="m", address=far, coordinator="", trust=Trust(KEY).name
    )
    store.commit({}, {f"{HOST}n1": encode(record), JOB_KEY: OTHER.text.encode()})
    store.close()
    key_file = tmp_path / "key"
    key_file.write_text(KEY.text)
    key_file.chmod(0o600)

    def export(key: str = "", clear: bool = False) -> None:
        url = str(tmp_path / "store.db")
        salvage.main("kk2", str(tmp_path / "a"), None, url, StoreAccess(), key, clear)

    with pytest.raises(ConfigError, match=r"the store's is .* do not take this job key"):
        export()
    with pytest.raises(ConfigError, match="leave --trust-network away"):
        export(str(key_file), clear=True)
    monkeypatch.setattr(salvage, "ASK_S", 0.1)
    with pytest.raises(NothingRecoverable, match=r"no host of job kk2 answers: n1: "):
        export(str(key_file))  # the right one, and nobody is there
