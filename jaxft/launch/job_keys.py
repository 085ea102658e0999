"""Where an agent has the job's key from: a file, its environment, or the store.

In the store it is as secret as that is: whoever can read the job's keys there can join the job, and
so can whoever sees it pass where the store is reached without TLS. It is made there by the first
agent that looks for it, and stays for the job's later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from jaxft import config
from jaxft.errors import ConfigError, StoreError
from jaxft.group.records import JOB_KEY
from jaxft.host.job_key import JobKey
from jaxft.host.trust import Trust
from jaxft.launch.options import RunOptions
from jaxft.launch.store import Entry, Store

_TRIES_MAX = 10


def job_trust(options: RunOptions, store: Store, say: Callable[[str], None]) -> Trust | None:
    """What this host and its peers know each other by; None while all are on one machine.

    Args:
        say: tells a person.

    Raises:
        ConfigError: the file or the variable is not fit to be used.
        StoreError: the key is to be in the store, which does not answer.
    """
    if not options.address:
        return None
    key = given_key(options.job_key_file)
    if key is None:
        key = _stored(store)
        if not store.is_private:
            say(
                "the job's key is kept in the store, which is reached without TLS: whoever sees "
                "that network can join the job. Use --store etcds://HOST:PORT, or give all hosts "
                "the same --job-key-file"
            )
    return Trust(key, clear=options.trust_network)


def reader_trust(
    name: str, entries: Mapping[str, Entry], file: str = "", *, clear: bool = False
) -> Trust:
    """What hosts know a process by that only looks at them. Nothing is made for it.

    Args:
        name: of what the hosts have, see `Trust.name`; "": nobody who lives has said.
        entries: what is in the store.
        file: has the key; "": as the environment or the store says.
        clear: the hosts are said to send in clear.

    Raises:
        ConfigError: there is no key here, or another one.
    """
    key, whence = given_key(file), "that of --job-key-file" if file else "the environment's"
    if key is None and JOB_KEY in entries:
        text = entries[JOB_KEY].value.decode(errors="replace")
        key, whence = JobKey.parse(text, f"the store's {JOB_KEY}"), "the store's"
    if key is None:
        raise ConfigError(
            "hosts on other machines only talk to who has the job's key: JAXFT_JOB_KEY_FILE, or "
            "the store that keeps it (--store)"
        )
    if not name:
        return Trust(key, clear=clear)
    for trust in (Trust(key, clear=True),) if clear else (Trust(key), Trust(key, clear=True)):
        if trust.name == name:
            return trust
    if Trust(key).name == name:
        raise ConfigError("the hosts encrypt what they send: leave --trust-network away")
    raise ConfigError(
        f"the hosts have job key {name}, and {whence} is {key.name}: they do not take this job key"
    )


def given_key(file: str = "") -> JobKey | None:
    """The key in this file, or in what the environment says; None if neither names one.

    Raises:
        ConfigError: it is not fit to be used.
    """
    if file:
        return JobKey.read(Path(file), "--job-key-file")
    text, path = config.job_key(), config.job_key_file()
    if text and path:
        raise ConfigError(
            "JAXFT_JOB_KEY and JAXFT_JOB_KEY_FILE both give the job's key: use one of them"
        )
    if text:
        return JobKey.parse(text, "JAXFT_JOB_KEY")
    return JobKey.read(path, "JAXFT_JOB_KEY_FILE") if path else None


def _stored(store: Store) -> JobKey:
    """The key in the store, made there if there is none."""
    for _ in range(_TRIES_MAX):
        entry = store.read(JOB_KEY).get(JOB_KEY)
        if entry is not None:
            return JobKey.parse(entry.value.decode(errors="replace"), f"the store's {JOB_KEY}")
        store.commit({JOB_KEY: None}, {JOB_KEY: JobKey.make().text.encode()})
    raise StoreError("the job's key vanishes from the store again and again: who deletes it?")
