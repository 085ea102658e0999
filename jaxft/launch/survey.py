"""What is seen of a job from here: its SMPs on this machine, its store, its SMPs on others.

It only reads, and nothing waits longer than its deadline: every SMP is asked at the same time, and
who does not answer within `ANSWER_S` is silent, which is what is said of it then. Sockets are those
of this user, below JAXFT_RUN_DIR; others talk to who has the job's key.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxft import config
from jaxft.config import StoreAccess
from jaxft.errors import ConfigError, JaxftError, LaunchError, PeerUnreachable
from jaxft.group.account import Account
from jaxft.group.records import View, read_view
from jaxft.host import protocol as p
from jaxft.host.accountant import read_account
from jaxft.host.local import connect
from jaxft.host.recall import bulk_address
from jaxft.host.stream_links import Links
from jaxft.host.stream_reader import StreamBulkReader
from jaxft.host.trust import Trust, check_address
from jaxft.launch.hostdir import StoreNote, local_store, noted_store
from jaxft.launch.job_keys import reader_trust
from jaxft.launch.probe import listens
from jaxft.launch.store import Entry
from jaxft.launch.stores import jobs_of, read_entries
from jaxft.status.overview import Survey, newest_generation
from jaxft.status.report import JobLine, JobsReport

ANSWER_S = 2.0
THREADS_MAX = 128


class Seen(NamedTuple):
    """A host's directory on this machine, and what its SMP says; or why it says nothing."""

    directory: Path
    account: Account | None
    why: str = ""


class _Stored(NamedTuple):
    """What the store says, or why it says nothing. `url` is "" if there is none."""

    url: str = ""
    entries: Mapping[str, Entry] = {}
    view: View | None = None
    problem: str = ""


def look_at(job: str, store: str = "") -> Survey:
    """What there is of a job now.

    Args:
        job: its name.
        store: URL of its store; "": the one that an agent has noted here, if there is one.

    Raises:
        ConfigError: not a store's URL, or not a job's name.
        LaunchError: no such job, or nothing of it can be reached.
    """
    config.check_name("job", job)
    here = seen_here()
    mine = {
        one.account.host: one for one in here if one.account is not None and one.account.job == job
    }
    accounts = {host: one.account for host, one in mine.items() if one.account is not None}
    silent = {one.directory.name: one.why for one in here if _is_mute(one, job)}
    relay = next((one.directory / "smp.sock" for one in mine.values()), None)
    stored = _stored(job, store, here)
    asked: set[str] = set()
    for _ in range(2):  # Those who are new to it may know of a newer world.
        addresses = _addresses(accounts, stored.view)
        left = {
            host: address
            for host, address in addresses.items()
            if host not in {*accounts, *asked}
            and not (host in silent and address.startswith("ipc:"))
        }
        asked |= left.keys()
        # Those of this machine once more: the store's answer may have taken its time.
        again = {host: one.directory / "smp.sock" for host, one in mine.items()} if left else {}
        for host, answer in _ask_at_once(left, again, accounts, stored, relay).items():
            if isinstance(answer, str):
                silent.setdefault(host, answer)
            elif (answer.job, answer.host) != (job, host):
                silent[host] = f"job {answer.job} on host {answer.host} answers at its address"
            else:
                accounts[host] = answer
    if not (accounts or silent or stored.entries):
        raise LaunchError(_nothing(job, here, stored))
    return Survey(
        job=job,
        now_s=time.time(),
        accounts=accounts,
        silent={host: why for host, why in silent.items() if host not in accounts},
        view=stored.view,
        store=stored.url,
        store_problem=stored.problem,
    )


def jobs_there(store: str = "") -> JobsReport:
    """The jobs on this machine, and those in a store.

    Raises:
        ConfigError: not a store's URL.
    """
    found: dict[str, list[Account]] = {}
    problems = []
    hosts: dict[str, set[str]] = {}
    for one in seen_here():
        if one.account is not None:
            found.setdefault(one.account.job, []).append(one.account)
        else:
            problems.append(f"{one.directory}: {one.why}")
    try:
        for job in jobs_of(store) if store else ():
            found.setdefault(job, [])
            hosts[job] = set(read_view(read_entries(store, job)).hosts)
    except LaunchError as error:
        problems.append(str(error))
    lines = []
    for job, accounts in sorted(found.items()):
        newest = [(s.id, s.step) for one in accounts for s in one.ledger.slots if s.id is not None]
        known = [one.ledger.committed for one in accounts if one.ledger.committed is not None]
        steps = [step for identity, step in newest if known and identity == max(known)]
        names = {one.host for one in accounts} | hosts.get(job, set())
        lines.append(JobLine(job=job, hosts=tuple(sorted(names)), step=next(iter(steps), None)))
    return JobsReport(jobs=tuple(lines), problems=tuple(problems))


# ------------------------------------------------------------------------------ this machine


def seen_here() -> list[Seen]:
    """All SMPs of this user on this machine, asked at once."""
    run = config.run_dir().absolute()
    paths = sorted({*run.glob("*/smp.sock"), *run.glob("*/*/smp.sock")})
    with ThreadPoolExecutor(min(THREADS_MAX, len(paths) or 1)) as pool:
        return list(pool.map(_ask_here, paths))


def _ask_here(path: Path) -> Seen:
    try:
        told = _ask_socket(path, p.Inspect())
    except JaxftError as error:
        return Seen(path.parent, None, str(error))
    except msgspec.MsgspecError as error:
        return Seen(path.parent, None, f"it is of another version of jaxft ({error})")
    if isinstance(told, p.Inspection):
        return Seen(path.parent, told.account)
    return Seen(path.parent, None, f"it says {type(told).__name__} when asked how it is")


def _ask_socket(path: Path, question: p.ClientMessage) -> p.ServerMessage:
    """What an SMP of this machine answers. Raises WireError, MsgspecError."""
    channel = connect(path, 0.0)
    try:
        channel.send(p.encode(question), timeout_s=ANSWER_S)
        received = channel.receive(ANSWER_S)
    finally:
        channel.close()
    if received is None:
        who = f"process {channel.peer_pid}"
        raise PeerUnreachable(f"it does not answer within {ANSWER_S:g} s ({who})")
    return p.decode_server(received.payload)


def _is_mute(one: Seen, job: str) -> bool:
    """Is it this job's, by its directory's name, and says nothing? (Long names are not in it.)"""
    return one.account is None and one.directory.parent.name == job


# ------------------------------------------------------------------------------ the store


def _stored(job: str, url: str, here: Sequence[Seen]) -> _Stored:
    noted = None if url else _known_store(job, here)
    access = None
    if noted is not None:
        url, access = noted.url, StoreAccess.of(noted.ca, noted.cert, noted.key)
    if not url:
        return _Stored()
    try:
        entries = read_entries(url, job, access)
        return _Stored(url, entries, read_view(entries))
    except LaunchError as error:
        return _Stored(url, problem=str(error))


def _known_store(job: str, here: Sequence[Seen]) -> StoreNote | None:
    """The store that an agent on this machine has noted, or that is always there for its hosts."""
    run = config.run_dir().absolute()
    mine = [
        one.directory
        for one in here
        if _is_mute(one, job) or (one.account is not None and one.account.job == job)
    ]
    # Its SMP may be dead, and its socket with it.
    places = [*mine, *(path.parent for path in sorted(run.glob(f"{job}/*/store")))]
    noted = next((note for note in map(noted_store, places) if note is not None), None)
    own = local_store(job)
    if noted is None and Path(own.removeprefix("sqlite://")).is_file():
        noted = StoreNote(url=own)
    return noted


# ------------------------------------------------------------------------------ other SMPs


def _addresses(accounts: Mapping[str, Account], view: View | None) -> dict[str, str]:
    """Of all hosts that the newest world, or the store, knows: the store's is newer."""
    generation = newest_generation(accounts.values(), view)
    everyone = () if generation is None else (*generation.hosts, *generation.holders)
    found = {member.host: member.address for member in everyone}
    records = () if view is None else view.hosts.values()
    return found | {record.host: record.address for record in records}


def _ask_at_once(
    addresses: Mapping[str, str],
    here: Mapping[str, Path],
    accounts: Mapping[str, Account],
    stored: _Stored,
    relay: Path | None,
) -> dict[str, Account | str]:
    """Each one's account, or why there is none: of hosts elsewhere by their addresses, of those
    of this machine by their sockets. Where this process has no key, an SMP of this
    machine (at the socket `relay`) asks for it."""
    if not addresses:
        return {}
    trust: Trust | None = None
    untrusted = ""
    records = () if stored.view is None else stored.view.hosts.values()
    name = next((one.trust for one in (*records, *accounts.values()) if one.trust), "")
    try:
        trust = reader_trust(name, stored.entries) if name else None
    except ConfigError as error:
        untrusted = str(error)

    def ask(host: str) -> Account | str:
        if host in here:
            seen = _ask_here(here[host])
            return seen.account or seen.why
        address = addresses[host]
        if not (untrusted and address.startswith("tcp:")):
            return _ask_at(bulk_address(address), trust)
        return untrusted if relay is None else _ask_through(relay, host)

    hosts = [*addresses, *here]
    with ThreadPoolExecutor(min(THREADS_MAX, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(ask, hosts), strict=True))


def _ask_at(address: str, trust: Trust | None) -> Account | str:
    scheme, _, place = address.partition("://")
    if scheme == "ipc" and not (Path(place).exists() and listens(address)):
        return f"nobody listens at {place}: it is gone, or on another machine"
    try:
        reader = StreamBulkReader(functools.partial(check_address, trust=trust), Links(trust))
        return read_account(reader, address, ANSWER_S)
    except JaxftError as error:
        return str(error)


def _ask_through(relay: Path, host: str) -> Account | str:
    try:
        told = _ask_socket(relay, p.InspectPeer(host=host))
    except (JaxftError, msgspec.MsgspecError) as error:
        return f"it cannot be asked by {relay}: {error}"
    if not isinstance(told, p.PeerInspection):
        return f"it cannot be asked by {relay}, which says {type(told).__name__}"
    return told.account or told.why


# ------------------------------------------------------------------------------ words


def _nothing(job: str, here: Iterable[Seen], stored: _Stored) -> str:
    if stored.problem:
        return f"job {job}: no snapshot process of it is on this machine, and {stored.problem}"
    jobs = sorted({one.account.job for one in here if one.account is not None})
    there = f"the jobs here are {', '.join(jobs)}" if jobs else "no job runs here"
    where = f"nor in the store {stored.url}" if stored.url else "(of other machines: --store URL)"
    return f"no job {job} is found in {config.run_dir()} {where}: {there}{_elsewhere()}"


def _elsewhere() -> str:
    """Where jobs of others may be, which this user cannot ask."""
    others = config.others_run_dirs()
    if not others:
        return ""
    return f" (others have {', '.join(map(str, others))}: look as the user who runs the job)"
