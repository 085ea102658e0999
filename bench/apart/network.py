"""Hosts that are apart on one machine: each in a network namespace of its own, on one switch.

    with Network("a", "b", "store") as network:
        subprocess.Popen([*network.enter("a"), "jaxft", "run", ...])
        network.cut("a")      # its cable is pulled: nothing comes through, and nobody is told
        network.mend("a")
        network.spoil("a", delay_s=0.05, loss=0.01)    # or it is a bad one, until it is mended
        network.kill("a")     # its power is: every process there is gone at once

Every host has the address `network.address(name)`, a name that all others know (for itself it is
127.0.1.1, as on many real machines), and a loopback of its own. What was made is taken away in the
end, with all processes in it. Needs root, or CAP_SYS_ADMIN and CAP_NET_ADMIN, and the program `ip`
(iproute2).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_WAIT_S = 10.0
# Found by `ip netns exec` and put in the place of /etc for what it starts.
_ETC = Path("/etc/netns")
_CABLE = str(Path(__file__).with_name("cable.py"))


class Network:
    """Namespaces called jxPID-NAME, of this process.

    Args:
        names: of the hosts.

    Raises:
        RuntimeError: this machine does not let us make any; says what is missing.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._mark = f"jx{os.getpid()}-"
        self._switch = f"{self._mark}switch"
        self._cables: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        try:
            self._ip("netns", "add", self._switch)
            self._in_switch("link", "add", "bridge", "type", "bridge")
            self._in_switch("link", "set", "bridge", "up")
            for name in self._names:
                self._add(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def address(self, name: str) -> str:
        return f"10.77.0.{1 + self._names.index(name)}"

    def enter(self, name: str) -> list[str]:
        """What to put before a command, so that it runs on this host; its process is the same."""
        rename = 'hostname "$0" && exec "$@"'
        inside = [_ip_program(), "netns", "exec", self._namespace(name)]
        return [*inside, "unshare", "--uts", "sh", "-c", rename, name]

    def give(self, name: str, address: str) -> None:
        """One more address of this host, an IPv6 one of /64."""
        space = self._namespace(name)
        self._ip("-n", space, "address", "add", f"{address}/64", "dev", "net", "nodad")

    def give_down(self, name: str, interface: str, address: str) -> None:
        """One more interface of this host, with an IPv4 address, that is down."""
        space = self._namespace(name)
        self._ip("-n", space, "link", "add", interface, "type", "bridge")
        self._ip("-n", space, "address", "add", f"{address}/24", "dev", interface)

    def cut(self, name: str) -> None:
        """From now on nothing that is sent to or from this host arrives."""
        self._in_switch("link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """Its cable is a good one again."""
        self._take_away_cable(name)
        self._in_switch("link", "set", f"to-{name}", "master", "bridge", "up")

    def spoil(
        self,
        name: str,
        *,
        delay_s: float = 0.0,
        loss: float = 0.0,
        ports: Iterable[int] = (),
        seed: int = 0,
    ) -> None:
        """From now on this host's cable is a bad one, see `cable`; it was a good one before.

        Args:
            delay_s: more than before that all takes, each way.
            loss: the share of it that does not arrive.
            ports: TCP ports of which nothing does, on either side.
        """
        self._take_away_cable(name)
        here, there = f"bad-{name}", f"via-{name}"
        self._in_switch("link", "add", here, "type", "veth", "peer", "name", there)
        for end in (here, there):
            self._in_switch("link", "set", end, "up")
        numbers = (seed, delay_s, loss, *ports)
        cable = subprocess.Popen(
            [
                *(_ip_program(), "netns", "exec", self._switch),
                *(sys.executable, "-I", _CABLE, f"to-{name}", here, *map(str, numbers)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self._cables[name] = cable
        assert cable.stdout is not None
        if cable.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the bad cable of host {name} did not start; it says why above")
        self._in_switch("link", "set", f"to-{name}", "nomaster")
        self._in_switch("link", "set", there, "master", "bridge")

    def processes(self, name: str) -> list[int]:
        """All that live on this host."""
        return [int(pid) for pid in self._ip("netns", "pids", self._namespace(name)).split()]

    def signal(self, name: str, number: int) -> None:
        """To all of them: SIGSTOP holds the whole host still."""
        for pid in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, name: str) -> None:
        """Kills them all, held still first, and waits until none is left.

        Raises:
            RuntimeError: some do not die.
        """
        deadline_s = time.monotonic() + _WAIT_S
        while pids := self.processes(name):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"processes {pids} on host {name} do not die")
            time.sleep(0.01)

    def listening(self, name: str) -> set[str]:
        """The IPv4 addresses, "ADDRESS:PORT", that this host's processes listen at (proc(5))."""
        found = set()
        table = self._ip("netns", "exec", self._namespace(name), "cat", "/proc/net/tcp")
        for line in table.splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                digits, port = local.split(":")
                address = ".".join(str(byte) for byte in reversed(bytes.fromhex(digits)))
                found.add(f"{address}:{int(port, 16)}")
        return found

    def close(self) -> None:
        """Takes all of it away, whatever of it there is."""
        for name in tuple(self._cables):
            self._take_away_cable(name)
        made = self._ip("netns", "list").split()
        for name in self._names:
            if self._namespace(name) in made:
                self.kill(name)
        for space in made:
            if space.startswith(self._mark):
                self._ip("netns", "delete", space)
        for path in _ETC.glob(f"{self._mark}*"):
            shutil.rmtree(path)
        with contextlib.suppress(OSError):
            _ETC.rmdir()

    def _namespace(self, name: str) -> str:
        return f"{self._mark}{name}"

    def _add(self, name: str) -> None:
        space, switch = self._namespace(name), self._switch
        self._ip("netns", "add", space)
        peer = ["type", "veth", "peer", "name", "net", "netns", space]
        self._ip("link", "add", f"to-{name}", "netns", switch, *peer)
        self._in_switch("link", "set", f"to-{name}", "master", "bridge")
        self._in_switch("link", "set", f"to-{name}", "up")
        self._ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "net")
        for link in ("lo", "net"):
            self._ip("-n", space, "link", "set", link, "up")
        (_ETC / space).mkdir(parents=True)
        known = {other: self.address(other) for other in self._names} | {name: "127.0.1.1"}
        lines = ["127.0.0.1 localhost", *(f"{known[other]} {other}" for other in known), ""]
        (_ETC / space / "hosts").write_text("\n".join(lines))

    def _take_away_cable(self, name: str) -> None:
        cable = self._cables.pop(name, None)
        if cable is not None:
            cable.kill()
            cable.communicate()
            self._in_switch("link", "delete", f"bad-{name}")

    def _in_switch(self, *arguments: str) -> None:
        self._ip("-n", self._switch, *arguments)

    def _ip(self, *arguments: str) -> str:
        ran = subprocess.run(
            [_ip_program(), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_WAIT_S,
        )
        if ran.returncode:
            raise RuntimeError(
                f"ip {' '.join(arguments)}: {ran.stderr.strip()}: hosts that are apart need "
                "network namespaces, so root, or the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN "
                "(in a container: --privileged)"
            )
        return ran.stdout


def _ip_program() -> str:
    program = shutil.which("ip", path=_PATH)
    if program is None:
        raise RuntimeError("the program `ip` is not installed: apt-get install iproute2")
    return program
