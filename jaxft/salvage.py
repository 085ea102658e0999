"""`jaxft export`: a snapshot out of the memory of running SMPs, written to storage by hand.

    SMPs of this machine (their sockets), and of others (the store) -> their ledgers
        -> the newest snapshot that they can give back, or that of a step, as a restore chooses it
        -> held in its slots (`host.holds`) -> read, lost segments rebuilt here
        -> let go -> written as a persist does

It only reads. So it works beside a job that trains, after its ranks have died, and after its agents
have, for as long as the SMPs live without one (`orphan_s`). One process reads the whole state, and
needs two to three times its size in memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from jaxft import config
from jaxft.apart import set_jax_apart
from jaxft.bucket import directory_at, whole_name
from jaxft.checkpoint import BY_HAND
from jaxft.config import StoreAccess
from jaxft.errors import (
    ConfigError,
    JaxftError,
    NothingRecoverable,
    PeerUnreachable,
    StoreError,
    WireError,
)
from jaxft.group.account import Account
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Damage, Ledger, Plan, Slot
from jaxft.group.records import JOB_KEY, View, read_view
from jaxft.group.recovery import Holder, choose
from jaxft.host import protocol as p
from jaxft.host.coding import DamagedFragments
from jaxft.host.holds import kept
from jaxft.host.layout import LEDGER_KEY, segment_check
from jaxft.host.ledger import LEDGER_BYTES, read_bytes
from jaxft.host.local import LocalChannel, connect
from jaxft.host.memory import Bytes
from jaxft.host.protocol import Extent
from jaxft.host.recall import Recall, bulk_address
from jaxft.host.shares import Shares
from jaxft.host.trust import Trust
from jaxft.host.wire import Network, ReadRequest, Refused
from jaxft.host.wire_zmq import ZmqNetwork
from jaxft.launch.hostdir import noted_store
from jaxft.launch.job_keys import given_key, reader_trust
from jaxft.launch.store import Entry
from jaxft.launch.stores import read_entries
from jaxft.status.overview import newest_generation

if TYPE_CHECKING:
    from jaxft.export import Copied

ASK_S = 3.0
TRIES_MAX = 5
THREADS_MAX = 64
HERE = "here"


class Found(NamedTuple):
    """An SMP: its job, its host's name, where it serves what it holds; and what it says of itself
    if it is on this machine."""

    job: str
    host: str
    address: str
    account: Account | None = None


class _Stored(NamedTuple):
    """What the job's store says: nothing where there is none, or (`problem`) it does not answer."""

    url: str = ""
    entries: Mapping[str, Entry] = {}
    view: View | None = None
    problem: str = ""


def export(
    job: str,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    store: str = "",
    access: StoreAccess | None = None,
    job_key_file: str = "",
    trust_network: bool = False,
) -> int:
    """Writes a snapshot of a job's memory to a directory of checkpoints; returns its step.

    Args:
        job: its name.
        directory: of the checkpoints; nothing else in it is deleted.
        step: of the snapshot (None: the newest one).
        store: URL of the job's store, for hosts on other machines ("": as an agent on this machine
            has noted it).
        access: to that store; None: as noted, or as the environment says.
        job_key_file: has the job's key ("": as the environment or the store says).
        trust_network: hosts on other machines do not encrypt; where an agent lives, it says so.

    Raises:
        ConfigError: no such job, or step; says which there are. Or another job key than the hosts'.
        NothingRecoverable: what memory there is gives back no snapshot; says why.
        JaxftError: it could not be read or written.
    """
    local, silent = _local()
    here = [one for one in local if one.job == job]
    stored = _stored(job, store, access)
    view = stored.view
    if not here and view is not None and view.end is not None and not view.hosts:
        raise NothingRecoverable(
            f"job {job} has ended, and its memory went with it: {view.end.reason}"
        )
    found = [*here, *_others(job, here, stored, everywhere=bool(store))]
    if not found:
        if store:
            raise StoreError(f"store {store} knows of no host of job {job}")
        raise ConfigError(_no_job(job, sorted({one.job for one in local}), silent, stored))
    trust = _trust(job, found, stored, job_key_file, trust_network)
    with contextlib.ExitStack() as stack:
        network = ZmqNetwork(trust)
        stack.callback(network.close)
        memory = Shares.create("export")
        stack.callback(memory.close)
        set_jax_apart(1)
        return _Export(job, whole_name(directory), step, found, network, memory).run()


def _no_job(job: str, jobs: Sequence[str], silent: Sequence[str], stored: _Stored) -> str:
    there = f"the jobs here are {', '.join(jobs)}" if jobs else "no job runs here"
    where = "; for hosts on other machines, give --store"
    if stored.problem:
        where = f"; and {stored.problem}"
    if silent:
        where = f", and these do not answer: {'; '.join(silent)}{where}"
    return (
        f"no snapshot process of job {job} is found in {config.run_dir()}: {there}{where}. The "
        "memory of a job goes when its agents end"
    )


def _local() -> tuple[list[Found], list[str]]:
    """All SMPs of this user on this machine; and what is wrong with those that do not answer."""
    found, silent = [], []
    for path in sorted({*config.run_dir().glob("*/smp.sock"), *_sockets()}):
        try:
            channel = connect(path, 0.0)
        except WireError:  # it is left of a process that is dead
            continue
        try:
            told = _inspect(channel)
        except WireError as error:
            silent.append(f"{path.parent}: {error}")
            continue
        finally:
            channel.close()
        job, host = str(told.values["job"]), str(told.values["host"])
        found.append(Found(job, host, str(told.values["address"]), told.account))
    return found, silent


def _sockets() -> Iterator[Path]:
    return config.run_dir().glob("*/*/smp.sock")


def _inspect(channel: LocalChannel) -> p.Inspection:
    channel.send(p.encode(p.Inspect()), timeout_s=ASK_S)
    received = channel.receive(ASK_S)
    message = None if received is None else p.decode_server(received.payload)
    if not isinstance(message, p.Inspection):
        raise WireError(f"the snapshot process (pid {channel.peer_pid}) does not describe itself")
    return message


def _stored(job: str, url: str, access: StoreAccess | None) -> _Stored:
    """What is in the store of this URL, or in the one that an agent has noted here, which may be
    away: what is here may do."""
    if url:
        entries = read_entries(url, job, access)
        return _Stored(url, entries, read_view(entries))
    config.check_name("job", job)
    notes = (noted_store(path.parent) for path in sorted(config.run_dir().glob(f"{job}/*/store")))
    note = next((one for one in notes if one is not None), None)
    if note is None:
        return _Stored()
    if access is None or not (access.ca or access.cert):
        access = StoreAccess.of(note.ca, note.cert, note.key)
    try:
        entries = read_entries(note.url, job, access)
    except StoreError as error:
        return _Stored(problem=str(error))
    return _Stored(note.url, entries, read_view(entries))


def _others(job: str, here: Sequence[Found], stored: _Stored, *, everywhere: bool) -> list[Found]:
    """The hosts that the store, or a host of this machine, knows, and that are not found here: on
    other machines, or `everywhere`."""
    accounts = [one.account for one in here if one.account is not None]
    generation = newest_generation(accounts, stored.view)
    everyone = () if generation is None else (*generation.hosts, *generation.holders)
    records = () if stored.view is None else stored.view.hosts.values()
    addresses = {one.host: one.address for one in (*everyone, *records)}
    known = {one.host for one in here}
    return [
        Found(job, host, address)
        for host, address in addresses.items()
        if host not in known and (everywhere or address.startswith("tcp://"))
    ]


def _trust(
    job: str, found: Sequence[Found], stored: _Stored, key_file: str, trust_network: bool
) -> Trust | None:
    """What hosts on other machines know this process by: the job's key."""
    if not any(one.address.startswith("tcp://") for one in found):
        return None
    records = () if stored.view is None else stored.view.hosts.values()
    known = (*records, *(one.account for one in found if one.account is not None))
    name = next((one.trust for one in known if one.trust), "")
    if JOB_KEY not in stored.entries and given_key(key_file) is None:
        whose = "no store of that job is on this machine, and no job key is given"
        if stored.url or stored.problem:
            whose = stored.problem or f"the store {stored.url} has no key, and none is given"
        raise ConfigError(
            f"job {job} has hosts that only talk to who has its key: {whose}. Give --store "
            "etcd://HOST:PORT, as for jaxft run, or --job-key-file (or JAXFT_JOB_KEY_FILE)"
        )
    return reader_trust(name, stored.entries, key_file, clear=trust_network)


class _Export:
    """One export: what there is, what is read, and where it goes."""

    def __init__(
        self,
        job: str,
        directory: str,
        step: int | None,
        found: Sequence[Found],
        network: Network,
        memory: Shares,
    ) -> None:
        self.job = job
        self.directory = directory
        self.step = step
        self.found = found
        self.network = network
        self.memory = memory
        self.damages: dict[SnapshotId, frozenset[Damage]] = {}
        self.mute: dict[str, str] = {}
        self.why = ""

    def run(self) -> int:
        directory_at(self.directory).check_writable()
        directory_at(self.directory).check_job(self.job)
        self._check_manager()
        for attempt in range(1, TRIES_MAX + 1):
            holders = self._holders()
            plan = self._plan(holders, attempt)
            assert plan.chosen is not None
            if self._has(plan.step, plan.chosen):
                return plan.step
            with kept(self.network, _addresses(plan), plan.chosen) as lost:
                copied = None if lost else self._read(plan, holders)
            if copied is not None:
                self._write(plan.step, copied)
                return plan.step
            if lost:
                self.why = f"snapshot {plan.chosen} was replaced by a newer one as it was chosen"
        raise NothingRecoverable(
            f"given up after {TRIES_MAX} tries: {self.why}. If snapshots come faster than they can "
            "be read from here, run it on a host of the job, or lengthen their interval (`every`)"
        )

    # -------------------------------------------------------------------- the directory

    def _check_manager(self) -> None:
        """Refuses a directory in which another job's `jaxft.orbax` manager writes."""
        from jaxft.orbax.storage import JOB

        path = directory_at(self.directory).path / JOB
        other = path.read_text().strip() if path.exists() else ""
        if other not in ("", self.job):
            raise ConfigError(
                f"{self.directory} is job {other}'s ({path} says so), and this is job {self.job}: "
                "name another directory"
            )

    def _has(self, step: int, identity: SnapshotId) -> bool:
        """Is this snapshot there already?

        Raises:
            ConfigError: something else has its step; it would be lost.
        """
        from jaxft.orbax.exported import stored

        there = [entry.id for entry in stored(self.directory) if entry.step == step]
        if not there or identity in there:
            return bool(there)
        found = there[0]
        other = "one that jaxft knows nothing of" if found is None else f"snapshot {found}"
        raise ConfigError(
            f"{self.directory} has step {step}, which is {other}; the snapshot in memory is "
            f"{identity}. Name another directory, or move that step away"
        )

    # -------------------------------------------------------------------- what there is

    def _holders(self) -> list[Holder]:
        """Every SMP that gives its ledger; and this process, which rebuilds what is lost. One that
        did not is not asked again: the others' snapshots would get old meanwhile."""
        holders = [Holder("", HERE, Ledger(arena=HERE))]
        asked = [one for one in self.found if one.host not in self.mute]
        with ThreadPoolExecutor(min(THREADS_MAX, len(asked) or 1)) as pool:
            for one, answer in zip(asked, pool.map(self._ledger_or_why, asked), strict=True):
                if isinstance(answer, str):
                    self.mute[one.host] = answer
                else:
                    holders.append(Holder(one.host, one.address, answer, member=False))
        if len(holders) == 1:
            why = "; ".join(f"{host}: {reason}" for host, reason in self.mute.items())
            raise NothingRecoverable(f"no host of job {self.job} answers: {why}")
        return holders

    def _ledger_or_why(self, one: Found) -> Ledger | str:
        try:
            return self._ledger(one)
        except JaxftError as error:
            return str(error)

    def _ledger(self, one: Found) -> Ledger:
        request = ReadRequest(bulk_address(one.address), LEDGER_KEY, 0, LEDGER_BYTES, None)
        answers = self.network.reader().read_many([request], peer_s=ASK_S, deadline_s=2 * ASK_S)
        [(_, answer)] = list(answers)
        if isinstance(answer, Refused):
            raise WireError(answer.reason)
        payload = read_bytes(np.frombuffer(answer, np.uint8)).payload
        if payload is None:
            raise NothingRecoverable("its ledger cannot be read")
        return msgspec.msgpack.decode(payload, type=Ledger)

    def _plan(self, holders: Sequence[Holder], attempt: int) -> Plan:
        steps = sorted({slot.step for one in holders for slot in one.ledger.slots if slot.readable})
        if self.step is not None:
            holders = [one._replace(ledger=_only(one.ledger, self.step)) for one in holders]
        plan = choose(holders, attempt=attempt, damages=self.damages)
        if plan.chosen is not None:
            return plan
        if not steps:
            raise ConfigError(f"the memory of job {self.job} holds no snapshot yet")
        there = ", ".join(map(str, steps))
        if self.step is not None and self.step not in steps:
            raise ConfigError(
                f"the memory of job {self.job} has no snapshot of step {self.step}: it has {there}"
            )
        reasons = "; ".join(plan.reasons)
        hosts = ", ".join(one.name for one in holders if one.name)
        mute = "".join(f"; {host} does not answer: {why}" for host, why in self.mute.items())
        raise NothingRecoverable(
            f"of steps {there} on {hosts}, none can be given back: {reasons}{mute}"
        )

    # -------------------------------------------------------------------- reading and writing

    def _read(self, plan: Plan, holders: Sequence[Holder]) -> Copied | None:
        """The snapshot; None if it is to be planned again, for the reason `why`."""
        try:
            return self._copy(plan, holders)
        except DamagedFragments as error:
            assert plan.chosen is not None
            known = self.damages.get(plan.chosen, frozenset())
            self.damages[plan.chosen] = known | error.damaged
            self.why = str(error)
        except PeerUnreachable as error:
            self.why = str(error)
        return None

    def _copy(self, plan: Plan, holders: Sequence[Holder]) -> Copied:
        import jax
        from jax.sharding import Mesh

        from jaxft.device.assembly import Targets, needs
        from jaxft.device.placing import assemble
        from jaxft.export import copy

        assert plan.chosen is not None
        self.memory.drop_rebuilt()  # of an earlier try
        recall = Recall(plan, self.network, threading.Event(), HERE, self.memory)

        def bring(targets: Targets) -> Any:
            pieces = _Pieces(recall, needs(targets))
            return assemble(targets, pieces.read)

        lineage = max((one.ledger.lineage for one in holders), key=len)
        mesh = Mesh(np.array(jax.devices()[:1]), ("host",))
        return copy(plan.chosen, self.job, lineage, recall.manifests(), bring, mesh)

    def _write(self, step: int, copied: Copied) -> None:
        from jaxft.orbax.exported import write_as_saved

        writer = f"{BY_HAND}{secrets.token_hex(4)}"
        try:
            write_as_saved(self.directory, copied, writer=writer)
        except OSError as error:
            raise JaxftError(
                f"step {step} of job {self.job} could not be written to {self.directory}: "
                f"{error}; it is still in memory"
            ) from error


def _addresses(plan: Plan) -> list[str]:
    """Where the shares are that may be read."""
    addresses = [address for _, address in plan.shares]
    addresses += [one.address for one in plan.segments if not one.rebuilt]
    return sorted({bulk_address(address) for address in addresses if address != HERE})


class _Pieces:
    """Pieces of segments, brought and checked; those of lost hosts are rebuilt."""

    def __init__(self, recall: Recall, pieces: dict[int, list[tuple[int, int]]]) -> None:
        self._views: dict[int, list[tuple[int, Bytes]]] = {}
        self._rebuilt: dict[int, Bytes] = {}
        rebuilt = {one.host for one in recall.plan.segments if one.rebuilt}
        for host, spans in pieces.items():
            if host in rebuilt:
                self._rebuilt[host] = _rebuild(recall, host)
                continue
            extents = [Extent(host, start, start + nbytes) for start, nbytes in spans]
            arena, offsets = recall.fetch(extents)[:2]
            self._views[host] = [
                (extent.start, arena.view(offset, extent.stop - extent.start))
                for extent, offset in zip(extents, offsets, strict=True)
            ]
            arena.close()

    def read(self, host: int, offset: int, nbytes: int) -> Bytes:
        if host in self._rebuilt:
            return self._rebuilt[host][offset : offset + nbytes]
        for start, view in self._views[host]:
            if start <= offset and offset + nbytes <= start + view.size:
                return view[offset - start : offset - start + nbytes]
        raise AssertionError(f"bytes {offset} to {offset + nbytes} of {host} were not fetched")


def _rebuild(recall: Recall, host: int) -> Bytes:
    recall.rebuild(host)
    assert recall.memory is not None
    arena = recall.memory.map_rebuilt(recall.id, host)
    assert arena is not None, "it was rebuilt"
    manifest = recall.manifests()[host]
    view = arena.view(0, manifest.length)
    arena.close()
    bad = segment_check(manifest).bad_chunks(0, view)
    if bad:
        recall.raise_bad({(host, at) for at in bad})
    return view


def _only(ledger: Ledger, step: int) -> Ledger:
    """A ledger that knows of no slot but those of this step."""
    first, second = (slot if slot.step == step else Slot() for slot in ledger.slots)
    return msgspec.structs.replace(ledger, slots=(first, second))


def main(
    job: str,
    directory: str,
    step: int | None,
    store: str,
    access: StoreAccess,
    job_key_file: str,
    trust_network: bool,
) -> int:
    """`jaxft export`."""
    return export(
        job,
        whole_name(directory),
        step=step,
        store=store,
        access=access,
        job_key_file=job_key_file,
        trust_network=trust_network,
    )
