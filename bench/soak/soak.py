"""One failure after the other, and after each: has the job recovered, and is all as it should be?

A job has recovered when every rank of the newest generation says that snapshots taken after the
last failure are protected, nothing is wrong any more, and whatever was to die is dead. It has
`patience_s` for that, from when nothing is wrong any more, and what a kind of failure takes to be
found. Then it is looked over, and left alone for a while, in which nothing may happen. Before more
is lost than the code survives, it is left alone until storage has a checkpoint that is newer than
the interval of checkpoints, so no more is lost then either.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.apart.world import ROOT, World
from bench.soak.hosts import Machine
from bench.soak.judge import Judge
from bench.soak.leaks import WATCHED, Growth, files_left, sampled, unexpected
from bench.soak.plan import KINDS, Episode, Plan
from bench.soak.record import Line, Record
from bench.soak.strikes import Blow, Hands
from jaxft.group.world import Code

# The state: 3.8 MiB, some chunks for each host, and the same number of elements for 1 to 6 hosts.
SIZE = 60 << 14
EVERY = 5
PERSIST = 200
STEP_S = 0.1
OPTIONS = (
    *("--lease-s", "5", "--settle-s", "2", "--rejoin-s", "5", "--agent-grace-s", "6"),
    *("--store-grace-s", "15", "--silence-s", "5", "--hang-s", "15", "--start-s", "60"),
    *("--grace-s", "12", "--flap-s", "2", "--max-restarts", "1000", "--same-step-max", "10"),
    "--quiet",
)
TURN_S = 0.1
CLEAN_S = 20.0
STORED_S = 120.0
END_S = 120.0
NEWS = {
    "fault": "generation {generation} ends: {detail}",
    "generation_formed": "generation {number} of {hosts}: {reason}",
    "chosen": "goes on from {source}, step {step}{rebuilt}",
    "plan_failed": "plans again: {reason}",
    "waiting_for_memory": "waits for memory",
    "smp_died": "its SMP is dead",
    "last_snapshot": "last snapshot of step {step}: {result}",
    "held": "snapshots are held: {reason}",
    "persisted": "step {step} is on storage",
    "persist_failed": "storage did not get a checkpoint: {result}",
}


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak is to do.

    Args:
        minutes: for how long it begins episodes.
        seed: of the plan.
        hosts: how many the job's world may have, from and to; one more takes part.
        code: of the job.
        kinds: what may happen, see `plan.KINDS`.
        patience_s: how long a recovery may take.
    """

    minutes: float
    seed: int
    hosts: tuple[int, int]
    code: Code
    kinds: tuple[str, ...] = tuple(KINDS)
    patience_s: float = 120.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that is over: how long training stood still, how long it took from when nothing
    was wrong any more until snapshots were protected again, how many steps were done again, and how
    many generations it took."""

    number: int
    kinds: tuple[str, ...]
    stood_s: float
    protected_s: float
    steps_again: int
    generations: int


class Violated(Exception):
    """Something is not as it has to be."""


def trainer_arguments(checkpoints: Path) -> tuple[str, ...]:
    """What the ranks are started with."""
    where = ("--checkpoints", str(checkpoints), "--persist", str(PERSIST))
    return (str(EVERY), "--size", str(SIZE), "--step-s", str(STEP_S), *where)


class Soak:
    """A soak of a world.

    Args:
        world: whose hosts are all off, one more than the job's world may have.
        orders: what to do.
        say: tells a person.
    """

    def __init__(self, world: World, orders: Orders, say: Callable[[str], None]) -> None:
        self._world = world
        self._orders = orders
        self._say = say
        low, high = orders.hosts
        code = f"{orders.code.data}+{orders.code.parity}"
        options = (*OPTIONS, "--hosts", f"{low}:{high}", "--code", code)
        self._machines = {}
        for name, host in world.hosts.items():
            (host.base / "tmp").mkdir()
            env = {"TMPDIR": str(host.base / "tmp"), "JAX_PLATFORMS": "cpu"}
            logs = ("--log-dir", str(host.base / "logs"))
            self._machines[name] = Machine(host, (*options, *logs), env)
        self._record = Record(world)
        self._judge = Judge(SIZE)
        self._growth = Growth()
        self._hands = Hands(world, self._machines, self._record, orders.code, low)
        self._blows: list[Blow] = []
        self._marked: dict[int, int] = {}
        self._stood_s, self._step_s = 0.0, 0.0
        self.struck: Counter[str] = Counter()
        self.outcomes: list[Outcome] = []

    @property
    def figures(self) -> dict[str, Any]:
        """What there was of it, beside the outcomes."""
        return {
            "lines_checked": self._judge.lines,
            "generations": self._record.newest.number,
            "growth": self._growth.summary(),
        }

    def run(self) -> None:
        """From the first host to the last.

        Raises:
            Violated: something is not as it has to be.
        """
        orders = self._orders
        for machine in list(self._machines.values())[: orders.hosts[1]]:
            machine.wanted = True
        self._until(self._protects, "the first snapshots", orders.patience_s)
        self._say(f"trains in {self._names()}")
        plan = Plan(orders.seed, orders.kinds, orders.code.parity)
        end_s = time.monotonic() + 60 * orders.minutes
        while time.monotonic() < end_s:
            self._look_over()
            self._episode(plan.draw())
        self._look_over()
        self._end()

    # -------------------------------------------------------------------- an episode

    def _episode(self, episode: Episode) -> None:
        self._calm(episode.pause_s)
        if "too many lost" in (strike.kind for strike in episode.strikes):
            self._until(self._is_stored, "a checkpoint on storage", STORED_S)
        before, began_s = self._record.newest.number, time.monotonic()
        trains = self._trains()
        newest = self._judge.generations[self._judge.newest].step
        self._stood_s, self._step_s = 0.0, began_s
        self._blows = []
        self._strike(episode, 0)
        if episode.second is not None:
            over_s = time.monotonic() + episode.after_s
            while time.monotonic() < over_s:
                self._turn()
            self._strike(episode, 1)
        self._turn()
        while not all(blow.is_undone for blow in self._blows) or not self._all_on():
            self._turn()
        right_s = time.monotonic()
        self._mark()
        patience_s = self._orders.patience_s
        patience_s += sum(KINDS[strike.kind].found_s for strike in episode.strikes)
        what = f"recovery from {' and '.join(strike.kind for strike in episode.strikes)}"
        self._until(self._has_recovered, what, patience_s)
        self._judge.expect_all()
        heard = sorted(self._judge.generations.items())
        new = [one for number, one in heard if number > before and one.start >= 0]
        done = max([newest, *(one.step for one in new[:-1])])
        outcome = Outcome(
            number=episode.number,
            kinds=tuple(strike.kind for strike in episode.strikes),
            stood_s=round(self._stood_s, 2),
            protected_s=round(time.monotonic() - right_s, 2),
            steps_again=max(0, done - new[-1].start) if new else 0,
            generations=self._record.newest.number - before,
        )
        self.outcomes.append(outcome)
        self._say(
            f"#{episode.number} recovered: stood still for {outcome.stood_s:g} s, protected "
            f"{outcome.protected_s:g} s after all was right, {outcome.steps_again} steps again; "
            f"{self._names()}"
        )
        # What was not training yet, as it was growing just then, has to have all its SMPs.
        stopped = trains and before in self._record.faulty
        if stopped and len(self._blows) == 1 and KINDS[episode.first.kind].goes_on:
            raise Violated(f"training was stopped by: {self._blows[0].text}")

    def _strike(self, episode: Episode, index: int) -> None:
        strike = episode.strikes[index]
        struck = {name: blow.strike.kind for blow in self._blows for name in blow.hosts}
        if strike.kind == "too many lost":
            self._judge.pardon(self._record.newest.number, max(0, self._record.persisted))
        blow = self._hands.strike(strike, struck)
        self._blows.append(blow)
        self.struck[strike.kind] += 1
        self._say(f"#{episode.number} {strike.kind}: {blow.text}")

    def _mark(self) -> None:
        """What is protected from now on counts, twice, so that nothing older is taken for it."""
        self._marked = {
            number: max(one.start, one.protected) for number, one in self._judge.generations.items()
        }

    def _has_recovered(self) -> bool:
        if any(os.path.exists(f"/proc/{pid}") for blow in self._blows for pid in blow.gone):
            return False
        return self._all_on() and self._protects()

    def _protects(self) -> bool:
        """Does every rank of the newest generation know of new snapshots that are protected?"""
        formed = self._record.newest
        heard = self._judge.generations.get(formed.number)
        if heard is None:
            return False
        least = self._marked.get(formed.number, heard.start) + 2 * EVERY
        return all(heard.latest.get(name, -1) >= least for name in formed.hosts)

    def _trains(self) -> bool:
        """Do all ranks of the newest generation?"""
        formed = self._record.newest
        heard = self._judge.generations.get(formed.number)
        return heard is not None and heard.latest.keys() >= set(formed.hosts)

    def _is_stored(self) -> bool:
        """Is no more than the interval of checkpoints not on storage?"""
        step = self._judge.generations[self._judge.newest].step
        return self._record.persisted >= step - PERSIST

    def _all_on(self) -> bool:
        return all(bool(machine.agent) == machine.wanted for machine in self._machines.values())

    def _calm(self, for_s: float) -> None:
        faults, over_s = len(self._record.faulty), time.monotonic() + for_s
        while time.monotonic() < over_s:
            self._turn()
            if len(self._record.faulty) > faults:
                raise Violated("a generation has ended, and nothing was wrong")

    # -------------------------------------------------------------------- what is always minded

    def _turn(self) -> None:
        """Looks at everything once, and ends what is to be ended."""
        for machine in self._machines.values():
            if wrong := machine.turn():
                raise Violated(wrong)
        now_s = time.monotonic()
        for blow in self._blows:
            if now_s > blow.over_s and not blow.is_undone:
                blow.undo()
                self._say(f"over: {blow.strike.kind}")
        for event in self._record.events():
            self._tell(event)
        if self._record.ended and not any(one.last for one in self._machines.values()):
            raise Violated(f"the job has ended: {self._record.ended}")
        for host, line in self._record.lines():
            if wrongs := self._judge.heard(host, line):
                raise Violated("; ".join(wrongs))
            if "step" in line and line["at_s"] > self._step_s:
                self._stood_s = max(self._stood_s, line["at_s"] - self._step_s)
                self._step_s = line["at_s"]
        time.sleep(TURN_S)

    def _tell(self, event: Line) -> None:
        if event["event"] not in NEWS:
            return
        facts = dict(event)
        if event["event"] == "generation_formed":
            facts["hosts"] = ", ".join(event["hosts"])
        if event["event"] == "chosen":
            facts["rebuilt"] = f", rebuilt: {event['rebuilt']}" if event["rebuilt"] else ""
        self._say(f"  {event['host']}: {NEWS[event['event']].format_map(facts)}")

    def _until(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise Violated(f"not within {within_s:g} s: {what}")
            self._turn()

    def _look_over(self) -> None:
        """In a calm: processes, descriptors, memory, files."""
        machines = list(self._machines.values())
        wrong: list[str] = []

        def is_clean() -> bool:
            wrong[:] = unexpected(self._world.network, machines, self._record)
            return not wrong

        deadline_s = time.monotonic() + CLEAN_S
        while not is_clean():
            if time.monotonic() > deadline_s:
                raise Violated("; ".join(wrong))
            self._turn()
        for machine in machines:
            pids = {"agent": machine.agent, "SMP": self._record.pid(machine.name, "SMP")}
            for role in WATCHED if machine.agent else ():
                sample = sampled(pids[role])
                if sample is not None:
                    is_member = machine.name in self._record.newest.hosts
                    wrong += self._growth.note(
                        machine.name, role, pids[role], sample, is_member=is_member
                    )
        wrong += files_left({name: host.base for name, host in self._world.hosts.items()})
        if wrong:
            raise Violated("; ".join(wrong))

    # -------------------------------------------------------------------- the end

    def _end(self) -> None:
        """All ranks end well, at one step; nothing is left, and the last snapshot is on storage."""
        last = max(one.step for one in self._judge.generations.values()) + 4 * EVERY
        members = self._record.newest.hosts
        for machine in self._machines.values():
            machine.last = True
        for host in self._world.hosts.values():
            host.end_at(last)
        self._say(f"the job is to end after step {last}")
        hosts = [self._world[name] for name, one in self._machines.items() if one.agent]
        self._until(lambda: all(one.status is not None for one in hosts), "its end", END_S)
        self._turn()
        bad = {host.name: host.status for host in hosts if host.status}
        if bad:
            raise Violated(f"the job was to end well: statuses {bad}, {self._record.ended}")
        heard = self._judge.generations[self._judge.newest]
        if heard.step != last:
            raise Violated(f"the last step of {', '.join(members)} was {heard.step}, not {last}")
        if self._record.persisted < heard.protected:
            raise Violated(
                f"the newest snapshot, of step {heard.protected}, is not on storage, which has "
                f"{self._record.persisted}"
            )
        for name in self._machines:
            if left := self._world.network.processes(name):
                raise Violated(f"{name} has processes left: {left}")

    def _names(self) -> str:
        formed = self._record.newest
        return f"generation {formed.number} of {', '.join(formed.hosts)}"

    def evidence(self) -> None:
        """What `jaxft status` says, and how the processes are, into the world's directory."""
        for blow in self._blows:
            blow.undo()
        for name, machine in self._machines.items():
            if machine.agent:
                host = self._world[name]
                command = [*self._world.network.enter(name), sys.executable, "-m", "jaxft"]
                env = {"PYTHONPATH": str(ROOT), "JAXFT_RUN_DIR": str(host.base / "run")}
                with (
                    (host.base / "status").open("wb") as out,
                    contextlib.suppress(subprocess.TimeoutExpired),
                ):
                    subprocess.run(
                        [*command, "status", "--job", "j"],
                        env=os.environ | env,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        timeout=20,
                        check=False,
                    )
