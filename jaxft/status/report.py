"""What `jaxft status` says of a job, as `--json` prints it: docs/status.md explains each key.

Ages and durations are seconds; times are seconds since the epoch. null: it is not known, or there
is none.
"""

from __future__ import annotations

import msgspec

VERSION = 1

PROTECTED = "protected"
DEGRADED = "degraded"
ENDED = "ended"
UNREACHABLE = "unreachable"


class SlotReport(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is "empty", "writing", "staged", "coded" or "committed"; `pinned` is what the slot is
    kept for: "" (nothing), "newest", "storage" or "reader"."""

    state: str
    snapshot: str | None
    step: int | None
    size_bytes: int
    pinned: str


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """`role` is "member", "holder", "spare" or "left"; `agent` "alive", "lapsed", "gone" or
    "unknown"; `smp` "alive" or "silent", and `why` it is silent. `ranks` are those that are
    connected, of `ranks_expected`; `hanging` are words on those that have not called `save` for too
    long. `unheard_s`: for how long the root has not heard it."""

    host: str
    role: str
    address: str | None
    domain: str
    agent: str
    smp: str
    why: str
    ranks: int | None
    ranks_expected: int
    hanging: tuple[str, ...]
    is_root: bool
    leaving: bool
    unheard_s: float | None
    generation: int | None
    slots: tuple[SlotReport, ...]


class WorldReport(msgspec.Struct, frozen=True, kw_only=True):
    """`phase` is "restoring", "running", "exporting", "failed" or "ended". `left_out` are spares
    that have to wait, since they were lost again and again, and why."""

    generation: int
    phase: str
    age_s: float | None
    reason: str
    hosts: tuple[str, ...]
    ranks: int
    holders: tuple[str, ...]
    spares: tuple[str, ...]
    left_out: dict[str, str] = {}
    root: str
    code: str


class SharedDomain(msgspec.Struct, frozen=True, kw_only=True):
    """These members fail together; `fatal`: they are more than the group's parity."""

    domain: str
    hosts: tuple[str, ...]
    fatal: bool


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is what the group has; `less_than_asked`: its parity is less than the job's code's."""

    group: int
    hosts: tuple[str, ...]
    code: str
    less_than_asked: bool
    domains: tuple[SharedDomain, ...]


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: str
    step: int | None
    age_s: float | None


class LossReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of a group of the world that made the snapshot: any `more` hosts may be lost."""

    group: int
    hosts: tuple[str, ...]
    parity: int
    missing: tuple[str, ...]
    more: int


class LossesReport(msgspec.Struct, frozen=True, kw_only=True):
    """What memory gives back now (`snapshot`, of step `step`), and what would be lost with whom.
    `lost` is a newer one that was committed and cannot be had, `reasons` why not."""

    snapshot: str | None
    step: int | None
    groups: tuple[LossReport, ...]
    fatal_hosts: tuple[str, ...]
    lost: str | None
    reasons: tuple[str, ...]


class PersistReport(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is "starting", "ready" or "writing"; `helpers` are how far those of each host are."""

    step: int
    state: str
    helpers: dict[str, str]


class StorageReport(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    step: int | None
    age_s: float | None
    persist: PersistReport | None
    failed: str


class HeldReport(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    age_s: float | None


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float | None
    host: str
    kind: str
    detail: str
    generation: int | None


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """`problem` is why it was not read, "" if it was or there is none."""

    url: str | None
    problem: str


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `health` is "protected", "degraded", "ended" or "unreachable"."""

    version: int = VERSION
    job: str
    now_s: float
    health: str
    problems: tuple[str, ...]
    ended: str
    store: StoreReport
    world: WorldReport | None
    groups: tuple[GroupReport, ...]
    hosts: tuple[HostReport, ...]
    newest: SnapshotReport | None
    losses: LossesReport
    storage: StorageReport
    held: HeldReport | None
    failures: tuple[FailureReport, ...]


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was found: `hosts` that answer here, or that the store knows."""

    job: str
    hosts: tuple[str, ...]
    step: int | None


class JobsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What there is without --job. `problems` are what could not be looked at."""

    version: int = VERSION
    jobs: tuple[JobLine, ...]
    problems: tuple[str, ...]
