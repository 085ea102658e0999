"""What the agents of a job write into the store for each other, and how it is read.

host/NAME          HostRecord, under a lease: it is there while the host's agent lives
generation         the newest Generation; whoever replaces it says which one it replaces
fault/NUMBER       Fault: generation NUMBER cannot go on. The first to write it is right, except
                   that the loss of a host replaces what was only its consequence
progress/NUMBER    Progress: generation NUMBER has settled, and how far its snapshots are. The
                   newest one stays when older records go, also after a run that has failed
done/NUMBER/NAME   the ranks of this host that ended with status 0 in generation NUMBER
still/NUMBER/NAME  HostStill: how the ranks of this host stand, while one of generation NUMBER, here
                   or elsewhere, seems to hang
ending             JobEnd: what the job ends with, once its newest snapshot is on storage
end                JobEnd: the job is over. Nothing but a new run of it replaces that
surroundings       what JAX goes by in the ranks that train, as JSON, for processes of spares that
                   wait to become ranks
number             the largest generation number of earlier runs
job_key            the text of the job's key, where the hosts are on several machines and were not
                   given one; it stays for later runs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

import msgspec

from jaxft.errors import LaunchError
from jaxft.group.manifest import SnapshotId
from jaxft.group.world import Export, Generation, Member

HOST = "host/"
GENERATION = "generation"
FAULT = "fault/"
PROGRESS = "progress/"
DONE = "done/"
STILL = "still/"
ENDING = "ending"
END = "end"
SURROUNDINGS = "surroundings"
NUMBER = "number"
JOB_KEY = "job_key"

# How much longer than it was asked for a lease may last: etcd counts whole seconds.
LAPSE_S = 2.0


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A host that is there.

    `agent` is random for each start of the agent, `arena` for each piece of the SMP's memory.
    `coordinator` is a reserved port, for the case that this host becomes the first. `newest` and
    `snapshot` are the largest generation and the newest snapshot that its memory knows of. `left`
    is the newest generation of this agent of which no rank lives here any more. `fresh`: the run
    was started to ignore earlier memory. `leaving`: it was told to end. `waits` is why it takes no
    part, if it was lost again and again. `trust` is the name of what
    hosts on other machines must have, to talk to this one. `asks` are the options, with their
    values, that have to be the same on all hosts. `lease_s` is how long the record outlives its
    last renewal (0: not known). `machine` is another one on each machine and after each of its
    boots ("": not known). Of ranks that agents have not started, `run` names
    the start of the script that they are of, and `place` is this host's among its hosts: others
    have numbered the ranks.
    """

    host: str
    agent: str
    arena: str
    address: str
    coordinator: str
    ranks: int = 1
    domain: str = ""
    newest: int = 0
    snapshot: SnapshotId | None = None
    left: int = 0
    fresh: bool = False
    leaving: bool = False
    waits: str = ""
    trust: str = ""
    asks: tuple[tuple[str, str], ...] = ()
    lease_s: float = 0.0
    machine: str = ""
    run: str = ""
    place: int = -1

    @property
    def lapse_s(self) -> float:
        """How long this may be on record once its agent is gone, at most (0: not known). Whoever
        looks may have begun to count a lease after the last renewal."""
        return 2 * self.lease_s + LAPSE_S if self.lease_s else 0.0

    def member(self) -> Member:
        return Member(
            host=self.host,
            agent=self.agent,
            arena=self.arena,
            address=self.address,
            ranks=self.ranks,
            domain=self.domain,
        )


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Generation `generation` cannot go on, because of `host`.

    `kind` is one of

        rank_exited, rank_killed   a rank ended with a status other than 0, or by a signal
        left_behind                some ranks ended well and others did not follow
        hung                       a rank has not called `save` for longer than it may
        smp_report                 the root says that this world cannot go on
        unreachable                the root says that it does not hear an SMP while it restores
        host_lost, memory_lost, agent_restarted, smp_moved    a member is not what it was
        cut_off                    a member could not reach the store, and killed its ranks
        memory_returned            a host with memory came before the generation had settled
        grown                      hosts came that the world had room for; no fault of anybody
        told_to_end                a host was told to end
        export_failed, export_late    the newest snapshot did not get to storage

    `rank` and `code` (negative: a signal) are of the rank that ended, `lived_s` is for how long it
    ran, `tail` the last lines of its log, or where a rank that hangs is, `error` the error in them.
    `at_s` is when it was written, in seconds since the epoch, by the clock of who wrote it, and
    `earlier_s` when the failures before it were, as far as they are counted (`restarts`).
    """

    generation: int
    host: str
    kind: str
    detail: str
    rank: int = -1
    code: int = 0
    lived_s: float = 0.0
    tail: str = ""
    error: str = ""
    at_s: float = 0.0
    earlier_s: tuple[float, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The generation has settled, going on from step `base`; `step` is of its newest committed
    snapshot, or of the one it went on from while it has none, and `snapshot` is the identity of
    that. -1 and None: there is none. `export` is where the job's checkpoints go, None if
    nowhere; `stored` is the step of the newest one there that belongs to what was gone on from."""

    base: int = -1
    step: int = -1
    snapshot: SnapshotId | None = None
    export: Export | None = None
    stored: int = -1

    @property
    def unsaved(self) -> Export | None:
        """Where the newest snapshot is to be written, if it is not there and can be."""
        return self.export if self.snapshot is not None and self.step > self.stored else None


class RankStill(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has not called `save` for `still_s`, since call `calls` of this generation, and
    may for `limit_s` (0: for ever). `starts`: it has hardly begun, and that is the limit of such
    ones. `phase` is the long phase that it has announced,
    `state` its process's as in proc(5), `stack` the lines where it is, innermost first."""

    rank: int
    calls: int
    still_s: float
    limit_s: float = 0.0
    starts: bool = False
    phase: str = ""
    state: str = ""
    stack: str = ""

    @property
    def is_late(self) -> bool:
        return 0 < self.limit_s < self.still_s and not self.phase


class HostStill(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of a host stand, see `hanging`."""

    host: str
    ranks: tuple[RankStill, ...]


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The job is over. `kind` is "finished", "script" (the training script is at fault), "world"
    (the world could not be formed, or could not go on) or "told" (all hosts were told to end).
    `failures` are those that led to it, as far as they are on record, the first one first."""

    kind: str
    reason: str
    generation: int = 0
    host: str = ""
    rank: int = -1
    tail: str = ""
    failures: tuple[Fault, ...] = ()

    @property
    def ok(self) -> bool:
        return self.kind == "finished"


class Entry(Protocol):
    """What a store gives for a key."""

    @property
    def value(self) -> bytes: ...
    @property
    def revision(self) -> int: ...


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All of the above as one agent sees it; `done` are ranks of `generation`, and `still` is of
    its hosts, by name."""

    revisions: Mapping[str, int] = {}
    hosts: Mapping[str, HostRecord] = {}
    generation: Generation | None = None
    faults: Mapping[int, Fault] = {}
    progress: Mapping[int, Progress] = {}
    done: frozenset[int] = frozenset()
    still: Mapping[str, HostStill] = {}
    ending: JobEnd | None = None
    end: JobEnd | None = None
    surroundings: str = ""
    number: int = 0

    @property
    def fault(self) -> Fault | None:
        """What ended the newest generation, if something did."""
        return None if self.generation is None else self.faults.get(self.generation.number)

    @property
    def newest_progress(self) -> Progress:
        """That of the newest generation that has settled: all earlier snapshots led to what it went
        on from, or were left by it; generations that never settled have changed nothing."""
        return self.progress[max(self.progress)] if self.progress else Progress()

    @property
    def next_number(self) -> int:
        """1 + the largest generation number that anybody knows of."""
        known = [self.number, *self.faults, *(record.newest for record in self.hosts.values())]
        if self.generation is not None:
            known.append(self.generation.number)
        return 1 + max(known)


T = TypeVar("T")


def read_view(entries: Mapping[str, Entry]) -> View:
    """Makes a view of everything in the store.

    Raises:
        LaunchError: a record that this version does not understand.
    """
    generation = None
    if GENERATION in entries:
        generation = _decode(GENERATION, entries[GENERATION], Generation)
    number = generation.number if generation is not None else 0
    done, stands = f"{DONE}{number}/", f"{STILL}{number}/"
    ended = [_decode(key, entries[key], tuple[int, ...]) for key in entries if key.startswith(done)]
    hosts = [_decode(key, entries[key], HostRecord) for key in entries if key.startswith(HOST)]
    return View(
        revisions={key: entry.revision for key, entry in entries.items()},
        hosts={record.host: record for record in hosts},
        generation=generation,
        faults=_numbered(entries, FAULT, Fault),
        progress=_numbered(entries, PROGRESS, Progress),
        done=frozenset(rank for ranks in ended for rank in ranks),
        still={
            key[len(stands) :]: _decode(key, entries[key], HostStill)
            for key in entries
            if key.startswith(stands)
        },
        ending=_decode(ENDING, entries[ENDING], JobEnd) if ENDING in entries else None,
        end=_decode(END, entries[END], JobEnd) if END in entries else None,
        surroundings=_text(SURROUNDINGS, entries),
        number=_decode(NUMBER, entries[NUMBER], int) if NUMBER in entries else 0,
    )


def _text(key: str, entries: Mapping[str, Entry]) -> str:
    return _decode(key, entries[key], str) if key in entries else ""


def _numbered(entries: Mapping[str, Entry], prefix: str, kind: type[T]) -> dict[int, T]:
    return {
        int(key[len(prefix) :]): _decode(key, entry, kind)
        for key, entry in entries.items()
        if key.startswith(prefix)
    }


def _decode(key: str, entry: Entry, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(entry.value, type=kind)
    except msgspec.MsgspecError as error:
        raise LaunchError(
            f'the store\'s record "{key}" is not one of this version of jaxft ({error}): run the '
            "same version on all hosts, and let no other program write below this job's name"
        ) from error
