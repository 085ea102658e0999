"""Which failures the demo causes, and when: read from text, checked before anything is started.

    kind[:count][@step[:host]]

    none            no failure at all
    rank            SIGKILL to the training process of one host
    smp             SIGKILL to its snapshot process
    agent           SIGKILL to its agent
    host            SIGKILL to all three at once; an empty host takes its place
    hosts:N         the same for N hosts of one group at once

A failure `@s` strikes when the host has done step s. Without a step, failures are spread over the
run, each just before a snapshot is due, where most is lost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxft.errors import ConfigError
from jaxft.group.placement import form_groups
from jaxft.group.world import Code, Group

KINDS = ("rank", "smp", "agent", "host", "hosts")
DEFAULT = ("rank", "host")
HOSTS_MAX = 16

_ENTRY = re.compile(r"([a-z]+)(?::(\d+))?(?:@(\d+)(?::host(\d+))?)?")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure: the hosts it strikes, all at once, when the first of them has done `at_step`."""

    kind: str
    at_step: int
    hosts: tuple[str, ...]

    @property
    def takes_hosts(self) -> bool:
        """Whether memory is lost, and not only a process."""
        return self.kind in ("host", "hosts")

    @property
    def victim(self) -> str:
        return self.hosts[0]


@dataclass(frozen=True, kw_only=True)
class _Wish:
    kind: str
    count: int
    step: int | None
    host: int | None


def host_name(index: int) -> str:
    """The name `jaxft run --local-hosts` gives to its host number `index`."""
    return f"host{index}"


def parse_failures(
    texts: Sequence[str], *, hosts: int, code: Code, steps: int, every: int
) -> tuple[Failure, ...]:
    """The failures in the order of their steps.

    Args:
        texts: one failure each; none of them gives the default, a rank and then a host.
        hosts: how many hosts the world begins with.
        code: how many losses a group survives.
        steps: the run's length.
        every: steps between snapshots.

    Raises:
        ConfigError: a failure that cannot be read, or cannot strike in this run.
    """
    wishes = [_read(text) for text in texts or DEFAULT]
    if any(wish.kind == "none" for wish in wishes):
        if len(wishes) > 1:
            raise ConfigError('failure "none" leaves no room for another: give it alone')
        return ()
    wishes = _with_steps(wishes, steps, every)
    groups = form_groups(hosts, code)
    failures = [
        Failure(kind=wish.kind, at_step=wish.step or 0, hosts=_victims(wish, hosts, groups))
        for wish in wishes
    ]
    return tuple(sorted(failures, key=lambda failure: failure.at_step))


def _read(text: str) -> _Wish:
    match = _ENTRY.fullmatch(text.strip())
    kind = match[1] if match else ""
    if match is None or kind not in (*KINDS, "none"):
        raise ConfigError(
            f'failure "{text}" is not of the form kind[:count][@step[:hostK]] with a kind of '
            f"none, {', '.join(KINDS)}; for example rank@10:host0 or hosts:2@20"
        )
    if (match[2] is not None) != (kind == "hosts"):
        raise ConfigError(
            f'failure "{text}": "hosts" needs a count, hosts:2, and nothing else does'
        )
    count, step, host = (int(part) if part else None for part in match.group(2, 3, 4))
    return _Wish(kind=kind, count=1 if count is None else count, step=step, host=host)


def _with_steps(wishes: list[_Wish], steps: int, every: int) -> list[_Wish]:
    """Gives a step to each wish that has none, and checks them all."""
    taken = {wish.step for wish in wishes if wish.step is not None}
    placed = []
    for number, wish in enumerate(wishes, 1):
        if wish.step is None:
            step = _before_due(steps * number // (len(wishes) + 1), every)
            while step in taken:
                step += 1
            taken.add(step)
            wish = replace(wish, step=step)
        placed.append(wish)
    for wish in placed:
        if wish.step is None or not 1 <= wish.step < steps:
            raise ConfigError(
                f"failure {wish.kind}@{wish.step}: a run of {steps} steps can fail after step 1 to "
                f"{steps - 1}; choose another step, or more --steps"
            )
    if len(taken) < len(wishes):
        raise ConfigError("two failures at the same step: give each its own, for example rank@10")
    return placed


def _before_due(step: int, every: int) -> int:
    """The last step up to `step` after which a snapshot is due: they come at 0, every, ..."""
    return max(1, step - (step + 1) % every)


def _victims(wish: _Wish, hosts: int, groups: Sequence[Group]) -> tuple[str, ...]:
    """The wished host, and after it the others of its group, round and round."""
    first = wish.host
    if first is None:
        first = min(1 if wish.kind in ("rank", "smp") else 2, hosts - 1)
    if first >= hosts:
        raise ConfigError(
            f"failure {wish.kind}@{wish.step}: there is no host{first}, the last is host{hosts - 1}"
        )
    group = next(group.hosts for group in groups if first in group.hosts)
    if not 1 <= wish.count <= len(group):
        raise ConfigError(
            f"failure hosts:{wish.count}@{wish.step}: the group of host{first} has {len(group)} "
            f"hosts; choose 1 to {len(group)}"
        )
    at = group.index(first)
    return tuple(host_name((group[at:] + group[:at])[i]) for i in range(wish.count))


def exceeds_parity(failure: Failure, *, hosts: int, code: Code) -> bool:
    """Whether the failure loses more of a group than its parity can give back."""
    if not failure.takes_hosts:
        return False
    lost = {int(name.removeprefix("host")) for name in failure.hosts}
    return any(len(lost & set(group.hosts)) > group.parity for group in form_groups(hosts, code))


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demo is asked to do; made by `plan_demo`, which checks it.

    `wrap`: the ranks train with `jaxft.wrap`, not with `save`. `parity`: who computes it.

    `fallback`: Orbax checkpoints are written, one soon after each start of the world (they take
    four more JAX processes on the same cores).
    """

    hosts: int
    code: Code
    steps: int
    every: int
    seed: int
    elastic: bool
    fallback: bool
    failures: tuple[Failure, ...]
    wrap: bool = False
    parity: str = "host"

    @property
    def hosts_min(self) -> int:
        """How many hosts are left after all failures, where none is replaced."""
        gone = {name for failure in self.failures for name in failure.hosts if _ends(failure)}
        return self.hosts - len(gone) if self.elastic else self.hosts

    @property
    def pause_step(self) -> int | None:
        """Where a failure needs a checkpoint: the step at which training waits until one can be
        begun, so that the next snapshot goes to storage."""
        wanted = any(self.needs_storage(failure) for failure in self.failures)
        return max(1, self.every - 1) if wanted else None

    def needs_storage(self, failure: Failure) -> bool:
        """Whether memory cannot give back what this failure takes."""
        return exceeds_parity(failure, hosts=self.hosts, code=self.code)


def _ends(failure: Failure) -> bool:
    """Whether the hosts do not come back unless their agents are started again."""
    return failure.takes_hosts or failure.kind == "agent"


def plan_demo(
    *,
    hosts: int,
    code: str,
    steps: int,
    every: int,
    seed: int,
    elastic: bool,
    fallback: bool,
    fail: Sequence[str],
    wrap: bool = False,
    parity: str = "host",
) -> DemoOptions:
    """Checks what was asked for; storage is used where a failure of the plan needs it.

    Raises:
        ConfigError: a number out of range, or a failure that cannot strike in this run.
    """
    if not 1 <= hosts <= HOSTS_MAX:
        raise ConfigError(f"--hosts {hosts}: the demo runs 1 to {HOSTS_MAX} hosts on one machine")
    if steps < 2 or not 1 <= every <= steps:
        raise ConfigError(
            f"--steps {steps} --every {every}: needs at least 2 steps, and 1 to {steps} between "
            "snapshots"
        )
    if parity not in ("host", "device"):
        raise ConfigError(f"--parity {parity}: expected host or device")
    if parity == "device" and not wrap:
        raise ConfigError("--parity device: devices compute it in a wrapped step: say --wrap, too")
    parsed = Code.parse(code)
    if parsed.parity >= hosts:
        raise ConfigError(
            f"--code {code} needs at least {parsed.parity + 1} hosts; use more --hosts, or --code "
            f"{parsed.data}+{hosts - 1}"
        )
    failures = parse_failures(fail, hosts=hosts, code=parsed, steps=steps, every=every)
    options = DemoOptions(
        hosts=hosts,
        code=parsed,
        steps=steps,
        every=every,
        seed=seed,
        elastic=elastic,
        fallback=fallback or any(exceeds_parity(f, hosts=hosts, code=parsed) for f in failures),
        failures=failures,
        wrap=wrap,
        parity=parity,
    )
    first_step = 2 + 2 * every
    if options.pause_step is not None and failures[0].at_step < first_step:
        raise ConfigError(
            f"failure {failures[0].kind}@{failures[0].at_step}: a failure of this run needs a "
            f"checkpoint, so the first one can strike at step {first_step}"
        )
    if options.hosts_min < 1:
        raise ConfigError("--elastic: these failures leave no host to train on; leave one out")
    return options
