"""Whether what the ranks say may be: every line of theirs, against what came before. Pure.

Rules
- A state's digest is the known one of its step, in any world.
- All ranks of a generation go on from the same step.
- A generation goes on from a step at least as new as every snapshot that any rank of an earlier one
  was told is protected. After a failure beyond the code, from one at least as new as the newest
  checkpoint on storage; then what was protected before counts no longer.
- No step of a generation begins once a later one trains. (A step that had begun may end: a process
  that was stopped goes on for a moment before it is killed.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from bench.apart.trainer import digests

KEPT = 30  # generations


class Heard(msgspec.Struct):
    """Of one generation's ranks: the step that it began from (-1: not known yet), the newest one
    that they did, the newest protected one, and when their first and last steps began. `latest` has
    what each host has said of the newest protected step since it restored."""

    start: int = -1
    step: int = -1
    protected: int = -1
    first_s: float = math.inf
    last_s: float = -math.inf
    hosts: dict[str, int] = msgspec.field(default_factory=dict)
    latest: dict[str, int] = msgspec.field(default_factory=dict)


class Judge:
    """Hears all ranks, in any order among hosts.

    Args:
        size: of the trainer's state.
    """

    def __init__(self, size: int) -> None:
        self._known: list[int] = []
        self._digests = digests(size)
        self._pardon: tuple[int, int] | None = None
        self._since = 0
        self.generations: dict[int, Heard] = {}
        self.lines = 0

    def pardon(self, generation: int, floor: int) -> None:
        """A failure beyond the code in this generation: later ones may begin from `floor`, until
        `expect_all`."""
        self._pardon = (generation, floor)

    def expect_all(self) -> None:
        """The job has recovered: from the newest generation on nothing may be lost again."""
        if self._pardon is not None:
            self._pardon, self._since = None, self.newest

    def heard(self, host: str, line: Mapping[str, Any]) -> list[str]:
        """What is wrong with this line."""
        self.lines += 1
        number = int(line["generation"])
        found = self.generations.setdefault(number, Heard())
        if "restored" in line:
            step, begins, wrong = int(line["restored"]), True, []
        else:
            step, begins = int(line["step"]), host not in found.hosts
        wrong = self._digest(host, number, step, int(line["digest"]))
        if begins:
            wrong += self._begins(host, number, step if "restored" in line else step - 1)
        if "step" in line:
            found.step = max(found.step, step)
            found.first_s = min(found.first_s, line["began_s"])
            found.last_s = max(found.last_s, line["began_s"])
            latest = -1 if line["latest"] is None else int(line["latest"])
            found.protected = max(found.protected, latest)
            found.latest[host] = latest
        wrong += self._lineage() + self._alone(number)
        for old in sorted(self.generations)[:-KEPT]:
            del self.generations[old]
        return wrong

    @property
    def newest(self) -> int:
        """The newest generation whose ranks have said something; 0: none."""
        return max(self.generations, default=0)

    def _digest(self, host: str, number: int, step: int, digest: int) -> list[str]:
        missing = step + 1 - len(self._known)
        self._known += itertools.islice(self._digests, max(0, missing))
        if digest == self._known[step]:
            return []
        where = f"the state after step {step} on {host} in generation {number}"
        return [f"{where} is wrong: digest {digest}, expected {self._known[step]}"]

    def _begins(self, host: str, number: int, step: int) -> list[str]:
        found = self.generations[number]
        found.hosts[host] = step
        if found.start in (-1, step):
            found.start = step
            return []
        others = ", ".join(f"{other} from {at}" for other, at in found.hosts.items())
        return [f"ranks of generation {number} go on from different steps: {others}"]

    def _lineage(self) -> list[str]:
        wrong, floor, why = [], -1, ""
        for number, found in sorted(self.generations.items()):
            if found.start < 0 or number < self._since:
                continue
            if self._pardon is not None and number > self._pardon[0] and found.start < floor:
                floor, why = self._pardon[1], "on storage"
            if found.start < floor:
                wrong.append(
                    f"generation {number} goes on from step {found.start}, and step {floor} was "
                    f"{why}"
                )
            if max(found.protected, found.start) >= floor:
                floor = max(found.protected, found.start)
                why = f"protected, as ranks of generation {number} were told"
        return wrong

    def _alone(self, number: int) -> list[str]:
        wrong = []
        for other in self.generations:
            older, later = sorted((number, other))
            last_s, first_s = self.generations[older].last_s, self.generations[later].first_s
            if older != later and last_s > first_s:
                wrong.append(
                    f"a step of generation {older} began {last_s - first_s:.3f} s after "
                    f"generation {later} had begun to train"
                )
        return wrong
