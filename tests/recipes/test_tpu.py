"""The scripts for TPU VMs, with stand-ins for `gcloud` and for the metadata server.

Every "host" is a home directory; `gcloud ... ssh --worker=all` runs its command in each of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxft.status.events import Event, EventReader
from tests.launch.local_runs import RANK
from tests.recipes.conftest import environ, marked, program
from tests.recipes.places import ROOT

ALONE, SLICES = ROOT / "tpu/train-tpu-vm.sh", ROOT / "tpu/train-slices.sh"
WORKERS = 2
WAIT_S = 60.0

GCLOUD = f"""
printf '%s\\n' "$*" >>"$BASE/gcloud"
[ "$1 $2 $3" = "compute tpus tpu-vm" ] || exit 9
action=$4; shift 4
case " $* " in *" --zone here --worker=all "*) ;; *) exit 8 ;; esac
if [ "$action" = ssh ]; then slice=$1; else from=$1 slice=${{2%%:*}} to=${{2#*:}}; fi
for worker in $(seq 0 {WORKERS - 1}); do
  home=$BASE/$slice-$worker
  mkdir -p "$home"
  if [ "$action" = scp ]; then cp "$from" "$home/$to"; continue; fi
  for word in "$@"; do case $word in --command=*) command=${{word#--command=}} ;; esac; done
  (cd "$home" && HOME=$home SLICE=${{slice#slice-}} WORKER=$worker JAXFT_RUN_DIR=$home/run \\
    bash -c "$command") || exit
done
"""
CURL = """
case "$*" in
  *"Metadata-Flavor: Google"*/agent-worker-number) echo "$WORKER" ;;
  *"Metadata-Flavor: Google"*/tpu-env)
    printf "ZONE: 'here'\\nMEGASCALE_SLICE_ID: '%s'\\nWORKER_ID: '9'\\n" "$SLICE" ;;
  *) exit 7 ;;
esac
"""


class Hosts:
    """What happens on them."""

    def __init__(self, base: Path, env: dict[str, str]) -> None:
        self.base, self.env = base, env
        self._reader = EventReader(base / "events")
        self.seen: list[Event] = []

    def call(self, *command: str | Path) -> str:
        done = subprocess.run(
            command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{self.text()}"
        return done.stdout

    def events(self, event: str, **fields: Any) -> list[Event]:
        self.seen += self._reader.poll()
        return [
            each
            for each in self.seen
            if each["event"] == event and all(each.get(name) == fields[name] for name in fields)
        ]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what}\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        logs = "\n".join(path.read_text() for path in self.base.glob("*/jaxft-*/log"))
        return f"{logs}\n" + "\n".join(map(str, self.seen))

    def kill_agent(self, host: str) -> None:
        lock = next(self.base.glob(f"*/run/*/{host}/lock"))
        os.kill(int(lock.read_text()), signal.SIGKILL)

    def processes(self) -> list[int]:
        return marked(f"BASE={self.base}")


@pytest.fixture
def hosts(base: Path, programs: Path):
    (base / "events").mkdir()
    program(programs, "gcloud", GCLOUD)
    program(programs, "curl", CURL)
    (base / "rank.py").write_text(RANK)
    env = environ(programs, BASE=str(base), JAXFT_EVENTS=str(base / "events"), HOME=str(base))
    found = Hosts(base, env)
    yield found
    while left := found.processes():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_lone_tpu_vm_goes_on_after_its_agent_is_killed(hosts, base):
    hosts.env["JAXFT_RUN_DIR"] = str(base / "alone/run")
    hosts.env["PLACE"] = str(base / "alone/jaxft-train")
    hosts.call(ALONE, "start", "python", "-S", base / "rank.py", base)
    hosts.until(lambda: hosts.events("rank_started"), "rank")
    (started,) = hosts.events("smp_started")
    refused = subprocess.run(
        [ALONE, "start", "true"], env=hosts.env, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "runs here already" in refused.stderr
    hosts.kill_agent(started["host"])
    hosts.until(lambda: hosts.events("rank_started", generation=2), "second generation")
    (adopted,) = hosts.events("smp_adopted")
    assert (adopted["pid"], adopted["arena"]) == (started["pid"], started["arena"])
    assert "ended with status 143" in hosts.call(ALONE, "stop")
    assert "is killed, and is started again" not in hosts.text()
    assert "the agent was killed, and is started again" in hosts.text()
    assert not hosts.processes()


def test_all_hosts_of_two_slices_are_one_world(hosts, base, etcd_url):
    key = base / "job.key"
    key.write_text("2f" * 32)
    key.chmod(0o600)
    hosts.env |= {"SLICES": "slice-1 slice-0", "ZONE": "here", "HOSTS": "4", "STORE": etcd_url}
    hosts.env |= {"KEY": str(key), "CODE": "1+1", "JOB": f"tpu-{os.getpid()}"}
    hosts.call(SLICES, "start", "python", "-S", base / "rank.py", base, "with a space; and $HOME")
    hosts.until(lambda: len(hosts.events("rank_started")) == 4, "four ranks")
    # In the order of the TPU's workers, whatever order they have come in.
    ranks = {each["rank"]: each["host"] for each in hosts.events("rank_started", generation=1)}
    assert ranks == {
        0: "slice0-worker0",
        1: "slice0-worker1",
        2: "slice1-worker0",
        3: "slice1-worker1",
    }
    hosts.until(lambda: hosts.call(SLICES, "status").count("of generation 1") == 4, "words of all")
    pid = hosts.events("rank_started")[0]["pid"]
    assert b"\0with a space; and $HOME\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert key.read_text() not in (base / "gcloud").read_text()
    for home in base.glob("slice-*"):
        assert (home / f"jaxft-{hosts.env['JOB']}/key").stat().st_mode & 0o777 == 0o600
    hosts.kill_agent("slice1-worker0")
    hosts.until(lambda: len(hosts.events("rank_started", generation=2)) == 4, "generation 2")
    assert len(hosts.events("smp_adopted", host="slice1-worker0")) == 1
    (base / "go").touch()
    hosts.until(lambda: len(list(base.glob("slice-*/jaxft-*/status"))) == 4, "ends")
    statuses = [path.read_text().strip() for path in base.glob("slice-*/jaxft-*/status")]
    assert statuses == ["0"] * 4, hosts.text()
    assert not hosts.processes()


def test_nothing_is_started_without_what_is_needed(hosts):
    done = subprocess.run(
        [SLICES, "start", "true"], env=hosts.env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "SLICES" in done.stderr
    assert not (hosts.base / "gcloud").exists()
