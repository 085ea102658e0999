"""`jaxft export`: a snapshot out of the memory of running SMPs, written to storage by hand.

    SMPs of this machine (their sockets), and of others (the store) -> their ledgers
        -> the newest snapshot that they can give back, or that of a step, as a restore chooses it
        -> held in its slots -> read, lost segments rebuilt here -> written as a persist does

It only reads. So it works beside a job that trains, after its ranks have died, and after its agents
have, for as long as the SMPs live without one (`orphan_s`). One process reads the whole state, and
needs two to three times its size in memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxft import config
from jaxft.apart import set_jax_apart
from jaxft.checkpoint import Directory
from jaxft.errors import ConfigError, JaxftError, NothingRecoverable, StoreError, WireError
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Damage, Ledger, Plan, Slot
from jaxft.group.records import read_view
from jaxft.group.recovery import Holder, choose
from jaxft.host import protocol as p
from jaxft.host.coding import DamagedFragments
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
from jaxft.launch.job_keys import job_trust
from jaxft.launch.options import RunOptions
from jaxft.launch.stores import open_store

ASK_S = 3.0
TRIES_MAX = 5
HERE = "here"


class Found(NamedTuple):
    """An SMP: its job, its host's name, where it serves what it holds, and a connection to it if
    it is on this machine."""

    job: str
    host: str
    address: str
    channel: LocalChannel | None = None


def export(job: str, directory: Path, *, step: int | None = None, store: str = "") -> int:
    """Writes a snapshot of a job's memory to a directory of checkpoints; returns its step.

    Args:
        job: its name.
        directory: of the checkpoints; nothing else in it is deleted.
        step: of the snapshot (None: the newest one).
        store: URL of the job's store, for hosts on other machines.

    Raises:
        ConfigError: no such job, or step; says which there are.
        NothingRecoverable: what memory there is gives back no snapshot; says why.
        JaxftError: it could not be read or written.
    """
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(_local())
        found = [one for one in local if one.job == job]
        found += _remote(store, job, {one.host for one in found}) if store else []
        if not found:
            raise ConfigError(_no_job(job, sorted({one.job for one in local}), store))
        network = ZmqNetwork(_trust(job, store, found))
        stack.callback(network.close)
        memory = Shares.create("export")
        stack.callback(memory.close)
        set_jax_apart(1)
        return _Export(job, directory, step, found, network, memory).run()


def _no_job(job: str, jobs: Sequence[str], store: str) -> str:
    there = f"the jobs here are {', '.join(jobs)}" if jobs else "no job runs here"
    where = "" if store else "; for hosts on other machines, give --store"
    return (
        f"no snapshot process of job {job} is found in {config.run_dir()}: {there}{where}. The "
        "memory of a job goes when its agents end"
    )


@contextlib.contextmanager
def _local() -> Iterator[list[Found]]:
    """All SMPs of this user on this machine."""
    with contextlib.ExitStack() as stack:
        found = []
        for path in sorted({*config.run_dir().glob("*/smp.sock"), *_sockets()}):
            with contextlib.suppress(WireError):
                channel = connect(path, 0.0)
                stack.callback(channel.close)
                values = _inspect(channel)
                job, host = str(values["job"]), str(values["host"])
                found.append(Found(job, host, str(values["address"]), channel))
        yield found


def _sockets() -> Iterator[Path]:
    return config.run_dir().glob("*/*/smp.sock")


def _inspect(channel: LocalChannel) -> dict[str, Any]:
    channel.send(p.encode(p.Inspect()), timeout_s=ASK_S)
    received = channel.receive(ASK_S)
    message = None if received is None else p.decode_server(received.payload)
    if not isinstance(message, p.Inspection):
        raise WireError(f"the snapshot process (pid {channel.peer_pid}) does not describe itself")
    return dict(message.values)


def _remote(url: str, job: str, known: set[str]) -> list[Found]:
    """The hosts that the store knows, and that are not on this machine."""
    store = open_store(url, job=job)
    try:
        view = read_view(store.read())
    finally:
        store.close()
    members = {record.host: record.address for record in view.hosts.values()}
    if view.generation is not None:
        everyone = (*view.generation.hosts, *view.generation.holders)
        members = {member.host: member.address for member in everyone} | members
    if not members and not known:
        raise StoreError(f"store {url} knows of no host of job {job}")
    return [Found(job, host, address) for host, address in members.items() if host not in known]


def _trust(job: str, url: str, found: Sequence[Found]) -> Trust | None:
    """What hosts on other machines know this process by: the job's key."""
    if not any(one.address.startswith("tcp://") for one in found):
        return None
    options = RunOptions(
        job=job, host="export", command=("export",), store=url, address="127.0.0.1"
    )
    store = open_store(url, job=job)
    try:
        return job_trust(options, store, lambda text: None)
    finally:
        store.close()


class _Export:
    """One export: what there is, what is read, and where it goes."""

    def __init__(
        self,
        job: str,
        directory: Path,
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

    def run(self) -> int:
        Directory(self.directory).check_writable()
        Directory(self.directory).check_job(self.job)
        for attempt in range(1, TRIES_MAX + 1):
            holders = self._holders()
            plan = self._plan(holders, attempt)
            assert plan.chosen is not None
            self._hold(plan.chosen)
            try:
                self._write(plan, holders)
            except DamagedFragments as error:
                # Or its slot was given away before it was held: then the newest is another one.
                known = self.damages.get(plan.chosen, frozenset())
                self.damages[plan.chosen] = known | error.damaged
                last: JaxftError = error
            else:
                return plan.step
        raise NothingRecoverable(f"given up after {TRIES_MAX} tries: {last}")

    # -------------------------------------------------------------------- what there is

    def _holders(self) -> list[Holder]:
        """Every SMP that gives its ledger; and this process, which rebuilds what is lost."""
        holders = [Holder("", HERE, Ledger(arena=HERE))]
        why = []
        for one in self.found:
            try:
                holders.append(Holder(one.host, one.address, self._ledger(one), member=False))
            except JaxftError as error:
                why.append(f"{one.host}: {error}")
        if len(holders) == 1:
            raise NothingRecoverable(f"no host of job {self.job} answers: {'; '.join(why)}")
        return holders

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
        raise NothingRecoverable(f"of steps {there} on {hosts}, none can be given back: {reasons}")

    def _hold(self, identity: SnapshotId) -> None:
        """Keeps its slots here from being granted. (Those of other machines are quick, or lost.)"""
        for one in self.found:
            if one.channel is not None:
                with contextlib.suppress(WireError):
                    one.channel.send(p.encode(p.Hold(id=identity)), timeout_s=ASK_S)
                    _inspect(one.channel)

    # -------------------------------------------------------------------- reading and writing

    def _write(self, plan: Plan, holders: Sequence[Holder]) -> None:
        import jax
        from jax.sharding import Mesh

        from jaxft.device.assembly import Targets, needs
        from jaxft.device.placing import assemble
        from jaxft.export import copy, write

        assert plan.chosen is not None
        recall = Recall(plan, self.network, threading.Event(), HERE, self.memory)

        def bring(targets: Targets) -> Any:
            pieces = _Pieces(recall, needs(targets))
            return assemble(targets, pieces.read)

        lineage = max((one.ledger.lineage for one in holders), key=len)
        mesh = Mesh(np.array(jax.devices()[:1]), ("host",))
        copied = copy(plan.chosen, self.job, lineage, recall.manifests(), bring, mesh)
        write(self.directory, *copied, keep=None, may_commit=lambda: None)


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


def main(job: str, directory: str, step: int | None, store: str) -> int:
    """`jaxft export`."""
    return export(job, Path(os.path.abspath(directory)), step=step, store=store)
