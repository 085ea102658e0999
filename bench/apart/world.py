"""A job whose hosts are apart, with the store on a host of its own; its ranks are `trainer.py`."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.apart.network import Network
from jaxft.status.events import Event, EventReader

ROOT = Path(__file__).parents[2]
TRAINER = str(Path(__file__).with_name("trainer.py"))
STORE = "store"
WAIT_S = 90.0
ETCD_BYTES = 1 << 30  # its log is made in pieces of 64 MiB
# Asks etcd for a key, from a machine that reaches it.
_ASK = """
import json, sys, urllib.request
asked = json.dumps({"key": sys.argv[2]}).encode()
print(urllib.request.urlopen(sys.argv[1] + "/v3/kv/range", asked, timeout=5).read().decode())
"""


class Host:
    """One host: its `jaxft run`, and what that and its ranks have said."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.base = world.base / name
        self._world = world
        self._seen: list[Event] = []
        self._process: subprocess.Popen[bytes] | None = None
        (self.base / "events").mkdir(parents=True)
        self._reader = EventReader(self.base / "events")

    def start(self, *options: str, ranks: Sequence[str] = (), **env: str) -> None:
        """Its `jaxft run`, with these options; `ranks` is the ranks' command, else `trainer.py`.
        One that was there before has to be dead."""
        self.reap()
        command = [*self._world.network.enter(self.name), sys.executable, "-m", "jaxft", "run"]
        command += ["--job", "j", "--host", self.name, "--store", self._world.url, *options]
        command += ["--"]
        command += ranks or (sys.executable, TRAINER, str(self.base), *self._world.trainer)
        environ = {
            "PYTHONPATH": str(ROOT),
            "JAXFT_RUN_DIR": str(self.base / "run"),
            "JAXFT_EVENTS": str(self.base / "events"),
            **env,
        }
        with (self.base / "out").open("ab") as out:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is not for it
            )

    def events(self, event: str, **fields: Any) -> list[Event]:
        self._seen += self._reader.poll()
        return [
            one
            for one in self._seen
            if one["event"] == event and all(one.get(key) == val for key, val in fields.items())
        ]

    def said(self, what: str, generation: int = 0) -> list[dict[str, Any]]:
        """What its ranks have said that has a word on this, in one generation or all."""
        lines: list[str] = []
        for path in self.base.glob("rank-*"):
            lines += path.read_text().split("\n")[:-1]
        found = [json.loads(line) for line in lines]
        return [
            one
            for one in found
            if one.get(what) is not None and generation in (0, one["generation"])
        ]

    def newest(self, what: str, generation: int = 0) -> int:
        return max((int(one[what]) for one in self.said(what, generation)), default=-1)

    def end_at(self, step: int) -> None:
        """Its ranks are to end after this step."""
        (self.base / "order").write_text(str(step))
        (self.base / "order").rename(self.base / "last")

    def ended(self) -> int:
        assert self._process is not None
        return self._process.wait(WAIT_S)

    @property
    def pid(self) -> int:
        """Of its newest `jaxft run`; 0: it was not started."""
        return 0 if self._process is None else self._process.pid

    @property
    def status(self) -> int | None:
        """How its `jaxft run` has ended; None: it was not started, or runs."""
        return None if self._process is None else self._process.poll()

    @property
    def has_failed(self) -> bool:
        """Has it ended by itself, and not well?"""
        return (self.status or 0) > 0

    def text(self) -> str:
        out = self.base / "out"
        logs = sorted(self.base.glob("run/**/*.log"))
        return "\n".join(
            [f"--- {self.name}", out.read_text() if out.exists() else ""]
            + [f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs]
            + list(map(str, self._seen))
        )

    def reap(self) -> None:
        if self._process is not None:
            self._process.wait(WAIT_S)


class World:
    """The network, the store, and the hosts.

    Args:
        network: with a host "store".
        base: a directory for all of it, with a short name.
        names: of the other hosts.
        trainer: the ranks' arguments, after BASE.
    """

    def __init__(
        self, network: Network, base: Path, names: tuple[str, ...], trainer: Sequence[str] = ("2",)
    ) -> None:
        self.network = network
        self.base = base
        self.trainer = trainer
        self.url = f"etcd://{network.address(STORE)}:2379"
        self.hosts = {name: Host(self, name) for name in names}
        self._disk = _disk()
        self.start_store()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def until(self, condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}\n{self.text()}"
            assert not any(host.has_failed for host in self.hosts.values()), self.text()
            time.sleep(0.02)

    def is_registered(self, name: str) -> bool:
        """Whether the store has a living lease of this host."""
        key = base64.b64encode(f"/jaxft/j/host/{name}".encode()).decode()
        ask = [*self.network.enter(STORE), sys.executable, "-S", "-c", _ASK]
        place = self.url.replace("etcd:", "http:")
        answer = subprocess.run([*ask, place, key], capture_output=True, timeout=WAIT_S, check=True)
        return b'"kvs"' in answer.stdout

    def text(self) -> str:
        return "\n".join(host.text() for host in self.hosts.values())

    def close(self) -> None:
        for name in (*self.hosts, STORE):
            self.network.kill(name)
        for host in self.hosts.values():
            host.reap()
        self._etcd.wait(WAIT_S)
        self._disk.cleanup()

    def kill_store(self) -> None:
        """What it has written is still there."""
        self.network.kill(STORE)
        self._etcd.wait(WAIT_S)

    def start_store(self) -> None:
        program = shutil.which("etcd")
        assert program, "etcd is not installed: apt-get install etcd-server"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ETCD")}
        if platform.machine() in ("aarch64", "arm64"):
            environ["ETCD_UNSUPPORTED_ARCH"] = "arm64"
        client, peer = (f"http://{self.network.address(STORE)}:{port}" for port in (2379, 2380))
        # Short intervals, since etcd's shortest lease is 1.5 times the election timeout.
        arguments = (
            f"--data-dir {self._disk.name} --listen-client-urls {client} "
            f"--advertise-client-urls {client} --listen-peer-urls {peer} "
            f"--initial-advertise-peer-urls {peer} --initial-cluster default={peer} "
            "--heartbeat-interval 50 --election-timeout 500"
        )
        with (self.base / "etcd.log").open("ab") as log:
            self._etcd = subprocess.Popen(
                [*self.network.enter(STORE), program, *arguments.split()],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def _disk() -> tempfile.TemporaryDirectory[str]:
    """For the store, of memory if there is enough: etcd waits for its disk at every write, and on
    one that others keep busy that may take longer than a lease lasts."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and shutil.disk_usage(memory).free > ETCD_BYTES
    return tempfile.TemporaryDirectory(prefix="jx-etcd-", dir=memory if enough else None)


@contextlib.contextmanager
def apart(base: Path, *names: str, trainer: Sequence[str] = ("2",)) -> Iterator[World]:
    """A world of hosts of these names, and nothing left of it afterwards."""
    with Network(*names, STORE) as network:
        world = World(network, base, names, trainer)
        try:
            yield world
        finally:
            world.close()
