"""This host's presence in the store, and what the store says: both kept by one thread.

Rules
- The thread waits for nothing but the store, so a busy agent does not lose its lease.
- It wakes up when the store has changed, and else only when the lease is to be renewed: leases are
  looked at then, and whatever else has its time. A renewal comes before all of that.
- A renewal that fails is tried again RETRIES_A_PAUSE times before the next one would be due.
- How long this host may go on without the store is counted from when the last renewal that
  succeeded was *sent*, by the clock that also counts while the machine sleeps.
- What is registered is state: a change that the store did not take is tried again with the next
  renewal.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxft import config
from jaxft.errors import JobInUse, StoreError
from jaxft.group.records import HOST, HostRecord, View, read_view
from jaxft.group.world import encode
from jaxft.launch.store import Entry, Lease, Store

_log = logging.getLogger(__name__)

RENEWALS_A_LEASE = 3
RETRIES_A_PAUSE = 4
# After so much of a lease without a renewal the store was away, and another host's lease, renewed
# a pause earlier, may have lapsed.
AWAY_SHARE = 1 - 1 / RENEWALS_A_LEASE
RETRY_S = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_S = 0.2


def boot_s() -> float:
    """Seconds since boot, those in which the machine slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def machine_id() -> str:
    """Tells this machine, since its boot, from all others, "" if the system does not say; and a
    container from others on the same machine, unless they share the run directory. There a lock
    keeps two agents of a name apart."""
    try:
        run = config.run_dir().stat()
        return f"{_BOOT_ID.read_text().strip()}/{run.st_dev:x}-{run.st_ino:x}"
    except OSError:
        return ""


def wait_for_name(
    store: Store,
    host: str,
    machine: str,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    """Sees to it that no agent on another machine, or in another container, has this host's name.

    One that was lost with its machine has it until its lease lapses, which is waited for. On the
    same machine an agent that was killed is followed at once: there a lock keeps two apart.

    Args:
        store: of the job.
        host: the name.
        machine: see `machine_id`; of this one.
        say: tells a person.
        check: called now and then; raises to end the wait.

    Raises:
        JobInUse: another machine's agent has it, and lives.
        StoreError: the store does not answer.
    """
    key = f"{HOST}{host}"
    began_s = time.monotonic()
    said = False
    while (entry := store.read(key).get(key)) is not None:
        check()
        other = read_view({key: entry}).hosts[host]
        if not (machine and other.machine) or other.machine == machine:
            return
        left_s = began_s + other.lapse_s - time.monotonic()
        if left_s < 0:
            raise JobInUse(
                f"host {host} of this job lives on another machine, or in another container (its "
                "memory at "
                f"{other.address}, agent {other.agent}): every host needs a name of its own "
                "(--host)"
            )
        if not said:
            say(
                f"host {host} is registered from another machine: waits {other.lapse_s:g} s for "
                "it to go"
            )
        said = True
        store.changed(min(_POLL_S, left_s))


class Registration:
    """This host's record in the store, under a lease, until released.

    Args:
        store: of the job.
        lease_s: how long the record outlives its last renewal; `renew` is called when it is due.
    """

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._lease: Lease | None = None
        self._record: HostRecord | None = None
        self._written: HostRecord | None = None
        self._taken_by = ""
        self._renewed_s = boot_s()
        self._back_s = -math.inf
        self._error: StoreError | None = None
        self._due_s = math.inf
        self._released = False
        self._lock = threading.Lock()

    @property
    def record(self) -> HostRecord | None:
        """What is to be registered."""
        return self._record

    def put(self, record: HostRecord) -> None:
        """Registers, or changes what is registered; tried again until it succeeds."""
        with self._lock:
            self._record = record
        self.renew()

    @property
    def due_s(self) -> float:
        """When to call `renew`, monotonic time."""
        return self._due_s

    @property
    def early_s(self) -> float:
        """By how much sooner that may be."""
        return self._lease_s / RENEWALS_A_LEASE / 2

    def renew(self) -> bool:
        """Brings the store up to date and renews the lease; whether that succeeded."""
        with self._lock:
            pause_s = self._lease_s / RENEWALS_A_LEASE
            began_s = time.monotonic()
            try:
                kept, self._error = self._write(), None
            except StoreError as error:
                kept, self._error = False, error
            self._due_s = began_s + (pause_s if kept else pause_s / RETRIES_A_PAUSE)
            return kept

    @property
    def error(self) -> StoreError | None:
        """Why the store takes no renewal, once it has not for as long as the lease lasts."""
        is_away = boot_s() - self._renewed_s > self._lease_s
        return self._error if is_away else None

    @property
    def taken_by(self) -> str:
        """The agent that has taken this host's name, if one has."""
        return self._taken_by

    def silent_s(self) -> float:
        """For how long the store has not taken a renewal.

        Raises:
            JobInUse: another agent has registered under this host's name.
        """
        if self._taken_by:
            raise JobInUse(
                f"another agent ({self._taken_by}) has registered as this host: every host needs "
                "a name of its own (--host), and a host one agent for each job"
            )
        return boot_s() - self._renewed_s

    def back_s(self) -> float:
        """For how long the store has been back since it was away for so long that leases may have
        lapsed: 0 while it is away, infinite if it never was."""
        now_s = boot_s()
        return 0.0 if self._was_away(now_s) else now_s - self._back_s

    def _was_away(self, now_s: float) -> bool:
        return now_s - self._renewed_s > AWAY_SHARE * self._lease_s

    def release(self) -> None:
        """Takes the record away, for good."""
        with self._lock, contextlib.suppress(StoreError):
            self._released = True
            if self._lease is not None:
                self._lease.release()
            self._lease = None

    def _write(self) -> bool:
        """Whether the record is there, as it is to be."""
        if self._record is None or self._released or self._taken_by:
            return False
        sent_s = boot_s()
        if self._lease is not None and not self._lease.renew():
            self._lease = None
            if self._is_taken():
                return False
        if self._lease is None:
            value = encode(self._record)
            self._lease = self._store.lease(f"{HOST}{self._record.host}", value, self._lease_s)
        elif self._record != self._written and not self._lease.update(encode(self._record)):
            self._lease = None
            return False
        self._written = self._record
        if self._was_away(sent_s):
            self._back_s = boot_s()
        self._renewed_s = sent_s
        return True

    def _is_taken(self) -> bool:
        """A lapsed lease is renewed, one that somebody else took is not."""
        assert self._record is not None
        key = f"{HOST}{self._record.host}"
        entry = self._store.read(key).get(key)
        if entry is not None:
            other = read_view({key: entry}).hosts[self._record.host]
            if other.agent != self._record.agent:
                self._taken_by = other.agent
                return True
        return False


class StoreWatcher:
    """Follows the store in a thread, keeps this host registered, and wakes the agent when there is
    something new.

    Args:
        store: of the job.
        registration: to be renewed.
        look: called from the thread every `look_s` at least; whether the agent is to be woken.
        wake: called from the thread.
    """

    def __init__(
        self,
        store: Store,
        registration: Registration,
        *,
        look: Callable[[], bool],
        look_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._registration = registration
        self._look = look
        self._look_s = look_s
        self._looked_s = 0.0
        self._wake = wake
        self._reading = threading.Lock()  # so that no read overtakes a later one
        self._lock = threading.Lock()
        self._entries: Mapping[str, Entry] | None = None
        self._view: View | None = None
        self._error: StoreError | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="jaxft-store", daemon=True)
        self._thread.start()

    @property
    def error(self) -> StoreError | None:
        """Why the store cannot be read at present, or takes no renewal. Nothing else tells of a
        network that swallows all: there whoever waits for changes only hears of none."""
        return self._error or self._registration.error

    def view(self) -> View | None:
        """What is in the store; None while that cannot be known."""
        with self._lock:
            if self._error is not None or self._entries is None:
                return None
            if self._view is None:
                self._view = read_view(self._entries)
            return self._view

    def refresh(self) -> None:
        """Reads now. Raises StoreError."""
        with self._reading:
            entries = self._store.read()
            with self._lock:
                self._entries, self._view, self._error = entries, None, None

    def close(self) -> None:
        """Takes this host's record away and ends the thread, which that wakes up."""
        self._ending.set()
        self._registration.release()
        self._thread.join()

    def _follow(self) -> None:
        changed = True
        while not self._ending.is_set():
            try:
                self._mind_time()
                if changed:
                    self.refresh()
                    self._wake()
                changed = self._store.changed(self._left_s())
            except Exception as error:  # noqa: BLE001 - see below
                # Whatever it is: without this thread the lease would lapse, and nobody knew why.
                if not isinstance(error, StoreError):
                    _log.exception("the store is taken for away")
                    error = StoreError(f"the store cannot be followed: {error!r}")
                self._error = error
                changed = True
                self._wake()
                self._ending.wait(RETRY_S)

    def _mind_time(self) -> None:
        """Does what is due, and looks in any case, since this thread is awake."""
        self._looked_s = time.monotonic()
        # Sooner than need be, by as much as half a pause, so as not to wake up for it alone.
        due = self._looked_s >= self._registration.due_s - self._registration.early_s
        failed = due and not self._registration.renew()
        if self._look() or failed:
            self._wake()

    def _left_s(self) -> float:
        """How long nothing is due."""
        due_s = min(self._registration.due_s, self._looked_s + self._look_s)
        return max(0.0, due_s - time.monotonic())
