"""Event logs as the demo's runs leave them, small enough to be written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxft.demo.controller import RunLog, Strike
from jaxft.demo.plan import Failure
from jaxft.status.events import Event

HOSTS = ("host0", "host1")
KILL_T = 1010.0


class Script:
    """Builds a run's events; every host is pid 10 + its number and 100 later in each generation."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.t = 1000.0
        self.generation = 0

    def say(self, event: str, host: str = "host0", role: str = "agent", **fields: Any) -> None:
        pid = fields.pop("pid", 1)
        head = {"t": self.t, "host": host, "role": role, "pid": pid, "event": event}
        self.events.append(head | fields)

    def form(self, number: int, hosts: tuple[str, ...] = HOSTS) -> None:
        self.generation = number
        self.say("generation_formed", number=number, hosts=list(hosts), reason="because")
        for host in hosts:
            self.say("rank_started", host, pid=self.rank_pid(host), rank=0, generation=number)

    def rank_pid(self, host: str) -> int:
        return 10 + int(host[-1]) + 100 * self.generation

    def rank(self, event: str, **fields: Any) -> None:
        """The same from every host's rank."""
        for host in HOSTS:
            self.say(
                event,
                host,
                "rank",
                pid=self.rank_pid(host),
                generation=self.generation,
                **fields,
            )

    def step(self, step: int, loss: float | None = None) -> None:
        self.t += 1.0
        value = 5.0 - step / 10 if loss is None else loss
        self.rank("step", step=step, loss=value, bits=value.hex())

    def snapshot(self, seq: int, step: int) -> None:
        self.rank("saved", seq=seq, step=step)
        self.rank("stall", step=step, stall_s=0.0301 if step == 1 else 0.002)
        self.say("committed", seq=seq, step=step)

    def final(self, step: int, digest: str = "a" * 32) -> None:
        for number, host in enumerate(HOSTS):
            part = {f"['w'][{number}:{number + 1}]": digest}
            self.say("final", host, "rank", generation=self.generation, step=step, digest=part)


def undisturbed() -> Script:
    """Six steps, snapshots after 1, 3 and 5."""
    script = Script()
    script.form(1)
    for step in range(1, 7):
        script.step(step)
        if step % 2:
            script.snapshot(step // 2, step)
        else:
            script.rank("save_skipped", step=step, reason="not due")
    script.final(6)
    return script


def disturbed(source: str = "own") -> Script:
    """A failure after step 4 at KILL_T; goes on from step 3."""
    script = Script()
    script.form(1)
    for step in range(1, 5):
        script.step(step)
        if step % 2:
            script.snapshot(step // 2, step)
    script.t = KILL_T + 0.25
    script.say("fault", generation=1, kind="rank", detail="killed by signal 9")
    script.t += 1.0
    script.form(2)
    script.t += 1.0
    script.say("chosen", source=source, step=3, snapshot="1.1", rebuilt="", reasons="")
    for number, host in enumerate(HOSTS):
        seconds = 0.1 + number / 10
        script.say("restored", host, "rank", step=3, source=source, restore_s=seconds)
    script.snapshot(0, 3)
    for step in range(4, 7):
        script.step(step)
    script.final(6)
    return script


def run_log(script: Script, *strikes: Strike, status: int = 0) -> RunLog:
    return RunLog(
        status=status,
        events=tuple(script.events),
        strikes=strikes,
        wall_s=12.345,
        logs=Path("logs"),
    )


def strike(kind: str = "rank", at_step: int = 4, hosts: tuple[str, ...] = ("host1",)) -> Strike:
    failure = Failure(kind=kind, at_step=at_step, hosts=hosts)
    return Strike(failure=failure, t=KILL_T, generation=1)
