"""How each failure is done, and undone. What can be hit is looked for in the world as it is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import numpy as np

from bench.apart.world import STORE, World
from bench.soak.hosts import Machine
from bench.soak.plan import Strike
from bench.soak.record import Record
from jaxft.group.placement import form_groups
from jaxft.group.world import Code
from jaxft.host.ledger import LEDGER_BYTES

EXIT = 17
SEGMENT_BYTES = 1 << 19  # of a slot, at its beginning: less than a segment in any world


class Blow:
    """A failure that was done.

    Args:
        strike: what was to be done.
        hosts: whom it hit.
        text: what was done, for a person.
        undo: what ends it (None: nothing has to).
        gone: processes that it ends, sooner or later.
    """

    def __init__(
        self,
        strike: Strike,
        hosts: tuple[str, ...],
        text: str,
        undo: Callable[[], None] | None = None,
        gone: tuple[int, ...] = (),
    ) -> None:
        self.strike = strike
        self.gone = gone
        self.hosts = hosts
        self.text = text
        self.struck_s = time.monotonic()
        self.over_s = self.struck_s + strike.hold_s
        self._undo = undo

    @property
    def is_undone(self) -> bool:
        return self._undo is None

    def undo(self) -> None:
        """May be repeated."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class Hands:
    """Does what a plan says.

    Args:
        world, machines, record: of the soak.
        code: of the job.
        hosts_min: with fewer it waits.
    """

    def __init__(
        self,
        world: World,
        machines: Mapping[str, Machine],
        record: Record,
        code: Code,
        hosts_min: int,
    ) -> None:
        self._world = world
        self._network = world.network
        self._machines = machines
        self._record = record
        self._code = code
        self._hosts_min = hosts_min

    def strike(self, strike: Strike, struck: Mapping[str, str]) -> Blow:
        """Does it.

        Args:
            struck: hosts that another failure has hit just now: not these.
        """
        chance = Random(strike.seed)
        members = [name for name in self._record.newest.hosts if name not in struck]
        ways: dict[str, Callable[[Strike, list[str], Random], Blow]] = {
            "rank killed": self._rank_killed,
            "rank exits": self._rank_exits,
            "rank hangs": self._rank_hangs,
            "SMP killed": self._smp_killed,
            "SMP hangs": self._smp_hangs,
            "agent killed": self._agent_killed,
            "all agents killed": self._agents_killed,
            "memory lost": self._memory_lost,
            "host lost": self._host_lost,
            "hosts lost": self._hosts_lost,
            "too many lost": self._too_many_lost,
            "host told to end": self._told_to_end,
            "host taken": self._host_taken,
            "host added": self._host_added,
            "host stopped briefly": self._host_stopped,
            "host stopped": self._host_stopped,
            "byte flipped": self._byte_flipped,
            "ledger damaged": self._ledger_damaged,
            "store killed": self._store_killed,
            "store away": self._store_stopped,
            "SMP's network down": self._smp_network_down,
            "cable cut briefly": self._cable_cut,
            "cable cut": self._cable_cut,
            "cable slow": self._cable_slow,
            "cable lossy": self._cable_lossy,
        }
        return ways[strike.kind](strike, members or list(self._machines), chance)

    # -------------------------------------------------------------------- processes

    def _rank_killed(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        return self._signalled(strike, name, "rank", signal.SIGKILL)

    def _rank_exits(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        base, pid = self._world[name].base, self._pid(name, "rank")
        (base / "order").write_text(str(EXIT))
        (base / "order").rename(base / "exit")
        text = f"the rank of {name} ({pid}) is to end with status {EXIT}"
        return Blow(strike, (name,), text, gone=(pid,))

    def _rank_hangs(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        return self._signalled(strike, name, "rank", signal.SIGSTOP)

    def _smp_killed(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        return self._signalled(strike, name, "SMP", signal.SIGKILL)

    def _smp_hangs(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        return self._signalled(strike, name, "SMP", signal.SIGSTOP)

    def _agent_killed(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        self._machines[name].hold(strike.hold_s)
        more = f"; another one after {strike.hold_s:g} s"
        return self._signalled(strike, name, "agent", signal.SIGKILL, more)

    def _agents_killed(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        """As when a launcher is killed with all that it has started; SMPs are not among that."""
        blows = []
        for name in members:
            self._machines[name].hold(strike.hold_s)
            blows.append(self._signalled(strike, name, "agent", signal.SIGKILL))
        text = f"{'; '.join(blow.text for blow in blows)}; others after {strike.hold_s:g} s"
        gone = tuple(pid for blow in blows for pid in blow.gone)
        return Blow(strike, tuple(members), text, gone=gone)

    def _memory_lost(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        self._machines[name].hold(strike.hold_s)
        self._send(name, "agent", signal.SIGSTOP)
        self._send(name, "SMP", signal.SIGKILL)
        more = f", and so does its SMP: its memory is gone; another one after {strike.hold_s:g} s"
        return self._signalled(strike, name, "agent", signal.SIGKILL, more)

    # -------------------------------------------------------------------- hosts

    def _power_fails(self, strike: Strike, names: tuple[str, ...]) -> Blow:
        for name in names:
            self._network.signal(name, signal.SIGSTOP)
        for name in names:
            self._machines[name].hold(strike.hold_s)
            self._network.kill(name)
        text = f"the power of {', '.join(names)} fails, for {strike.hold_s:g} s"
        return Blow(strike, names, text)

    def _host_lost(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        return self._power_fails(strike, (chance.choice(members),))

    def _hosts_lost(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        """Up to as many of every group as it has parity."""
        lost: list[str] = []
        for group, parity in self._groups():
            lost += chance.sample(group, chance.randint(0, parity))
        return self._power_fails(strike, tuple(lost or [chance.choice(members)]))

    def _too_many_lost(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        group, parity = chance.choice(self._groups())
        return self._power_fails(strike, tuple(chance.sample(group, parity + 1)))

    def _groups(self) -> list[tuple[list[str], int]]:
        hosts = self._record.newest.hosts
        return [
            ([hosts[index] for index in group.hosts], group.parity)
            for group in form_groups(len(hosts), self._code)
        ]

    def _told_to_end(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        self._machines[name].hold(strike.hold_s)
        more = f", and the host comes back after {strike.hold_s:g} s"
        return self._signalled(strike, name, "agent", signal.SIGTERM, more)

    def _host_taken(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        on = [name for name, machine in self._machines.items() if machine.wanted]
        if len(on) <= self._hosts_min:
            return self._host_added(strike, members, chance)
        name = chance.choice(members)
        self._machines[name].wanted = False
        more = ", and the host does not come back"
        return self._signalled(strike, name, "agent", signal.SIGTERM, more)

    def _host_added(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        off = [name for name, machine in self._machines.items() if not machine.wanted]
        if not off:
            return self._host_taken(strike, members, chance)
        name = chance.choice(off)
        self._machines[name].wanted = True
        return Blow(strike, (name,), f"{name} is one host more")

    def _host_stopped(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        for _ in range(2):  # what was just being started, too
            self._network.signal(name, signal.SIGSTOP)
        text = f"all of {name} stands still, for {strike.hold_s:g} s"
        return Blow(strike, (name,), text, lambda: self._network.signal(name, signal.SIGCONT))

    def _byte_flipped(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        """One byte in each of a host's slots. A rank is killed, so that they are read; before, so
        that no snapshot is written over them."""
        name = chance.choice(members)
        smp = self._send(name, "SMP", signal.SIGSTOP)
        killed = self._signalled(strike, chance.choice(members), "rank", signal.SIGKILL)
        flipped = flip_bytes(smp, "-slot", SEGMENT_BYTES, chance)
        self._send(name, "SMP", signal.SIGCONT)
        text = f"{killed.text}, and bytes of {name} are flipped ({flipped})"
        return Blow(strike, (name,), text, gone=killed.gone)

    def _ledger_damaged(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        """One byte of what a host knows of its memory, which the SMP after that one reads."""
        name = chance.choice(members)
        smp = self._send(name, "SMP", signal.SIGSTOP)
        flipped = flip_bytes(smp, "-ledger", LEDGER_BYTES, chance)
        killed = self._signalled(strike, name, "SMP", signal.SIGKILL)
        text = f"the ledger of {name} is damaged ({flipped}), and {killed.text}"
        return Blow(strike, (name,), text, gone=killed.gone)

    # -------------------------------------------------------------------- the store, the network

    def _store_killed(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        self._world.kill_store()
        text = f"the store is killed, for {strike.hold_s:g} s"
        return Blow(strike, (), text, self._world.start_store)

    def _store_stopped(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        self._network.signal(STORE, signal.SIGSTOP)
        text = f"the store does not answer, for {strike.hold_s:g} s"
        return Blow(strike, (), text, lambda: self._network.signal(STORE, signal.SIGCONT))

    def _smp_network_down(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        # Those of all hosts: it reaches the others at theirs.
        ports = {port for host in self._machines for port in self._record.ports(host)}
        self._network.spoil(name, ports=sorted(ports))
        text = f"what SMPs say does not get to or from {name}, for {strike.hold_s:g} s"
        return Blow(strike, (name,), text, lambda: self._network.mend(name))

    def _cable_cut(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name = chance.choice(members)
        self._network.cut(name)
        text = f"the cable of {name} is cut, for {strike.hold_s:g} s"
        return Blow(strike, (name,), text, lambda: self._network.mend(name))

    def _cable_slow(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name, delay_s = chance.choice(members), round(chance.uniform(0.01, 0.1), 3)
        self._network.spoil(name, delay_s=delay_s)
        text = f"the cable of {name} takes {delay_s:g} s each way, for {strike.hold_s:g} s"
        return Blow(strike, (name,), text, lambda: self._network.mend(name))

    def _cable_lossy(self, strike: Strike, members: list[str], chance: Random) -> Blow:
        name, loss = chance.choice(members), round(chance.uniform(0.01, 0.05), 3)
        self._network.spoil(name, loss=loss, seed=strike.seed)
        text = f"the cable of {name} loses {loss:.1%}, for {strike.hold_s:g} s"
        return Blow(strike, (name,), text, lambda: self._network.mend(name))

    def _pid(self, name: str, role: str) -> int:
        """Of a process of a host; 0: there is none just now."""
        machine = self._machines[name]
        pid = machine.agent if role == "agent" else self._record.pid(name, role)
        return pid if pid in self._network.processes(name) else 0

    def _send(self, name: str, role: str, number: signal.Signals) -> int:
        """A signal to a process of a host; which that was, 0: there is none."""
        pid = self._pid(name, role)
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, number)
        return pid

    def _signalled(
        self, strike: Strike, name: str, role: str, number: signal.Signals, more: str = ""
    ) -> Blow:
        pid = self._send(name, role, number)
        text = f"the {role} of {name} ({pid}) gets {number.name}{more}"
        if not pid:
            text = f"there is no {role} on {name} just now"
        return Blow(strike, (name,), text, gone=(pid,) if pid else ())


def flip_bytes(pid: int, what: str, within: int, chance: Random) -> str:
    """Flips a bit of one byte in each piece of an SMP's memory that is called so; says where.

    Args:
        within: the first so many bytes.
    """
    pieces: dict[int, Path] = {}  # which may have several descriptors
    with contextlib.suppress(OSError):
        for path in sorted(Path(f"/proc/{pid}/fd").iterdir()):
            target = os.readlink(path)
            if target.startswith("/memfd:jaxft-") and what in target:
                pieces[path.stat().st_ino] = path
        return (
            ", ".join(_flip_byte(path, within, chance) for path in pieces.values()) or "of nothing"
        )
    return "it is gone"


def _flip_byte(path: Path, within: int, chance: Random) -> str:
    """One that is not 0, if there is one: what was never written is of no meaning."""
    fd = os.open(path, os.O_RDWR)
    try:
        held = np.frombuffer(os.pread(fd, within, 0), np.uint8)
        written = np.flatnonzero(held)
        found = int(written[chance.randrange(len(written))]) if len(written) else 0
        os.pwrite(fd, bytes([int(held[found]) ^ (1 << chance.randrange(8))]), found)
        return f"{os.readlink(path).rpartition('-')[2].split()[0]}+{found}"
    finally:
        os.close(fd)
