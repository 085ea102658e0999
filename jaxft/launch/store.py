"""The store: where the agents of a job, one a host, find each other.

Two back ends keep one contract: SQLite for the hosts of one machine, etcd for many machines. The
conformance tests run the same tests on both.

Rules
- The store of a job is a small map from keys to values. Every write of a key gives it a new
  revision, never used before for any key, so that a key that was deleted and came back differs.
- Writes are all or nothing and conditional on revisions (`Store.commit`). Whoever forms a
  generation names in `expect` the revisions of the last generation's key and of all members'
  leases: then a member that vanished, or another agent that was quicker, undoes the whole commit.
- A lease is a key that vanishes, for all readers at the same moment, when its owner has not renewed
  it for `ttl_s`. A key that is there is alive. There is no half-dead lease to be judged by each
  reader: an owner that renews too late is told so (`Lease.renew` returns False), and registers
  anew. Renewing changes no revision and wakes nobody who waits in `Store.changed`.
- A store that does not answer within its deadline raises StoreError. Nothing waits for ever.

etcd expires leases itself. SQLite has no server that could: there a lease is a counter, and the
readers, by the rule of `LeaseObserver`, delete the key of a lease whose counter stands still. So
with SQLite a dead host's key vanishes `ttl_s` after some live agent has begun to look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """One key's value. `revision` changes with each write of the key, not with a renewal."""

    value: bytes
    revision: int
    leased: bool = False


class Lease(Protocol):
    """A key that lives only while it is renewed: about every `ttl_s / 3`, from any one thread.

    Each method may raise StoreError: then it is unknown whether it took effect, and it may be
    called again. Once a method has returned False, the lease is gone for good: the key lapsed, was
    deleted, or now belongs to someone else. Ask `Store.lease` for a new one.
    """

    key: str

    def renew(self) -> bool:
        """Says that the owner lives. False if the key is no longer there under this lease."""
        ...

    def update(self, value: bytes) -> bool:
        """Writes another value; this is no renewal. False as in `renew`, nothing written."""
        ...

    def release(self) -> None:
        """Deletes the key now, if it is still this lease's. May be called twice."""
        ...


class Store(Protocol):
    """The keys of one job; may be used from several threads.

    Each method may raise StoreError, within its deadline: the store is away, locked or unusable.
    """

    def read(self, prefix: str = "") -> dict[str, Entry]:
        """One consistent snapshot of all keys that begin with `prefix`, living leases included."""
        ...

    def commit(
        self,
        expect: Mapping[str, int | None],
        put: Mapping[str, bytes],
        delete: Iterable[str] = (),
    ) -> bool:
        """Writes and deletes all, if every key in `expect` has that revision (None: is not there).

        A leased key may be expected, deleted (its owner is told at its next renewal) and
        overwritten (it is then an ordinary key). Deleting what is not there is no error.

        Returns:
            False if an expectation failed; then nothing was written.

        Raises:
            StoreError: it is unknown whether it was written. Read again before going on.
        """
        ...

    def changed(self, timeout_s: float) -> bool:
        """Waits, at most `timeout_s`, until the keys may differ from this thread's last `read`.

        Own writes count too. True may be a false alarm, and False may mean that the store did not
        answer. Agents that loop over this and read whenever it is True see dead leases in time.
        """
        ...

    def lease(self, key: str, value: bytes, ttl_s: float) -> Lease:
        """Writes a key that vanishes when it is not renewed for `ttl_s` (etcd: whole seconds, up).

        It takes the key over from whoever has it: a former lease is told at its next renewal.
        """
        ...

    @property
    def is_private(self) -> bool:
        """Whether nobody on a network can see what is written: on this machine, or encrypted."""
        ...

    def close(self) -> None:
        """Lets go of files and connections. Leases are not released: they lapse."""
        ...


class Pulse(NamedTuple):
    """What a reader sees of a counted lease: `counter` goes up with each renewal by `owner`."""

    owner: str
    counter: int
    ttl_s: float


class LeaseObserver:
    """Decides which counted leases are dead, by this observer's own clock alone.

    A lease is dead when its pulse has stood still for more than `ttl_s` under the observer's eyes.
    What the observer has just met counts as alive, so nobody dies before `ttl_s` of watching. The
    observer's own late tick, a gap of more than `ttl_s / 2` since its last look, restarts the
    count: then it was the observer, or the whole machine, that stood still, and an owner paused
    with it must have time to renew. A shorter pause kills nobody either: with a renewal every
    `ttl_s / 3` the silence is at most `ttl_s * (1/3 + 1/2)`.

    Pure: no clock, no I/O.
    """

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Pulse, float]] = {}
        self._last_look_s = -math.inf

    @property
    def look_s(self) -> float:
        """When to look again: when the first of them could be dead, if none of them moves, and soon
        enough not to be late."""
        soonest_s = math.inf
        for pulse, since_s in self._heard.values():
            due_s = math.nextafter(since_s + pulse.ttl_s, math.inf)
            soonest_s = min(soonest_s, due_s, self._last_look_s + pulse.ttl_s / 3)
        return soonest_s

    def observe(self, now_s: float, pulses: Mapping[str, Pulse]) -> frozenset[str]:
        """Takes note of all pulses there are now and returns the keys of the dead.

        Args:
            now_s: monotonic time, taken before the pulses were read: so the time that the reading
                took does not count as silence.
            pulses: every counted lease that there is; what is left out is forgotten.
        """
        gap_s = now_s - self._last_look_s
        heard: dict[str, tuple[Pulse, float]] = {}
        for key, pulse in pulses.items():
            before = self._heard.get(key)
            if before is None or before[0] != pulse or gap_s > pulse.ttl_s / 2:
                heard[key] = (pulse, now_s)
            else:
                heard[key] = before
        self._heard, self._last_look_s = heard, now_s
        return frozenset(
            key for key, (pulse, since_s) in heard.items() if now_s - since_s > pulse.ttl_s
        )
