"""A SLURM cluster of several nodes on this machine: Debian's programs, in a directory of its own.

Every node is a slurmd with a name and a port of its own. They share the machine's processes, so
what a node's end takes with it is what its slurmd kills.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.launch.conftest import free_ports
from tests.recipes.conftest import marked

WAIT_S = 60.0
# Real clusters find a step's processes by their control group, which needs no systemd in version 1.
FREEZER = Path("/sys/fs/cgroup/freezer")
CGROUPS = os.access(FREEZER, os.W_OK)


class Cluster:
    """Runs from `start` to `close`.

    Args:
        directory: its files; short, for the sockets in it.
        nodes: how many nodes, named n1, n2, ...
        environ: of its daemons and of what is submitted.
    """

    def __init__(self, directory: Path, nodes: int, environ: Mapping[str, str]) -> None:
        self.directory = directory
        self.environ = {**environ, "SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "shared", *(f"spool-n{node}" for node in range(1, nodes + 1))):
            (directory / name).mkdir()
        self.shared = directory / "shared"
        self._nodes = nodes
        self._configure(nodes)

    def start(self) -> None:
        """Starts the daemons, and waits for idle nodes."""
        directory, nodes = self.directory, self._nodes
        key = directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={directory}/munge", f"--pid-file={directory}/munged.pid"),
            *(f"--seed-file={directory}/seed", f"--log-file={directory}/munged.log"),
        )
        self.until((directory / "munge").exists, "munge's socket")
        self._start("slurmctld", "-D")
        for node in range(1, nodes + 1):
            self._start("slurmd", "-D", "-N", f"n{node}")
        self.until(lambda: self.nodes("idle") == nodes, "idle nodes")

    def _configure(self, nodes: int) -> None:
        here, (control, *ports) = self.directory, free_ports(nodes + 1)
        lines = [
            "ClusterName=test",
            "SlurmctldHost=localhost(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"AuthInfo=socket={here}/munge",
            "CredType=cred/munge",
            "MpiDefault=none",
            f"ProctrackType={'proctrack/cgroup' if CGROUPS else 'proctrack/linuxproc'}",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "GresTypes=gpu",
            "ReturnToService=0",
            # Another port for the job's etcd than that of another test's.
            f"FirstJobId={1000 + os.getpid() % 19000}",
            "SlurmdTimeout=300",
            "KillWait=30",
            f"StateSaveLocation={here}/state",
            f"SlurmdSpoolDir={here}/spool-%n",
            f"SlurmctldPidFile={here}/slurmctld.pid",
            f"SlurmdPidFile={here}/slurmd-%n.pid",
            f"SlurmctldLogFile={here}/slurmctld.log",
            f"SlurmdLogFile={here}/slurmd-%n.log",
            *(
                f"NodeName=n{node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
                f"Port={port} CPUs=1 RealMemory=1000 Gres=gpu:8"
                for node, port in enumerate(ports, 1)
            ),
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "TopologyPlugin=topology/tree",
        ]
        # Two nodes at one switch, all others at another one.
        rest = f"n[3-{nodes}]" if nodes > 3 else "n3"
        switches = ("leaf1 Nodes=n[1-2]", f"leaf2 Nodes={rest}", "spine Switches=leaf[1-2]")
        topology = "".join(f"SwitchName={one}\n" for one in switches)
        (here / "topology.conf").write_text(topology)
        (here / "slurm.conf").write_text("\n".join(lines) + "\n")
        (here / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        # What is asked for and handed out by count; no such device is there.
        for gpu in range(8):
            (here / f"gpu{gpu}").touch()
        (here / "gres.conf").write_text(f"Name=gpu File={here}/gpu[0-7]\n")

    def _start(self, *command: str) -> None:
        name = "-".join(command[:1] + command[-1:]) if command[0] == "slurmd" else command[0]
        with (self.directory / f"{name}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            )

    # What is asked of it

    def ask(self, *command: str) -> str:
        """The output of a SLURM command."""
        done = subprocess.run(
            command,
            env=self.environ,
            cwd=self.shared,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def nodes(self, state: str) -> int:
        try:
            return self.ask("sinfo", "-h", "-N", "-o", "%N", "-t", state).count("\n")
        except AssertionError:
            return 0

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        fields = self.ask("scontrol", "show", "job", number, "--oneliner").split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def until(self, condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what}\n{self.logs()}"
            dead = [one.args for one in self._daemons if one.poll() is not None]
            assert not dead, f"ended: {dead}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of all logs."""
        here = self.directory
        paths = [*here.glob("*.log"), *here.glob("*.out"), *self.shared.iterdir()]
        texts = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in paths if path.is_file()]
        return "\n".join(texts)

    def close(self) -> None:
        """Kills the daemons, and all that ran under them: nobody cleans up after a dead slurmd."""
        deadline_s = time.monotonic() + WAIT_S
        while left := marked(f"SLURM_CONF={self.environ['SLURM_CONF']}"):
            assert time.monotonic() < deadline_s, left
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for daemon in self._daemons:
            daemon.wait(timeout=10)
        for group in sorted(FREEZER.glob("slurm_n[0-9]*/**/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()


@contextlib.contextmanager
def cluster(directory: Path, nodes: int, environ: Mapping[str, str]) -> Iterator[Cluster]:
    one = Cluster(directory, nodes, environ)
    try:
        one.start()
        yield one
    finally:
        one.close()
