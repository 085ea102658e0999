"""Which store a URL names."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from jaxft.config import StoreAccess
from jaxft.errors import ConfigError, StoreAway
from jaxft.launch.sqlite import SqliteStore, jobs_in, read_file
from jaxft.launch.store import Entry, Store

ETCD_PORT = 2379
ETCD = ("etcd", "etcds")
_RETRY_S = 1.0


def wait_for_store(
    reach: Callable[[], Store],
    patience_s: float,
    say: Callable[[str], None],
    check: Callable[[float], None],
) -> Store:
    """A store that may start later than the hosts, as after a power cut.

    Args:
        reach: opens it.
        patience_s: how long to try.
        say: tells a person what is waited for.
        check: waits for so many seconds between two tries; raises to end that.

    Raises:
        StoreAway: nobody has answered all that time. What else `reach` raises comes at once.
    """
    deadline_s = time.monotonic() + patience_s
    said = False
    while True:
        try:
            return reach()
        except StoreAway as error:
            if time.monotonic() >= deadline_s:
                raise
            if not said:
                say(f"{error} It is tried for {patience_s:g} s.")
            said = True
            check(_RETRY_S)


def open_store(url: str, *, job: str, access: StoreAccess | None = None) -> Store:
    """Opens the store of a job.

    Args:
        url: `sqlite:///absolute/path/file.db` or a plain path, on a local file system: for the
            hosts of one machine. Or `etcds://host:port,host:port`, the port 2379 where left out:
            etcd 3.4 or newer, for many machines, reached over TLS. `etcd://` is without TLS, unless
            `access` names files for it: for a network that only the job's machines share.
        job: the job's name. Jobs with other names in the same store do not meet.
        access: to etcd; None: as the environment says.

    Raises:
        ConfigError: not such a URL, or etcd's client is not installed.
        StoreError: the store is not there, locked, damaged, or on a network file system.
    """
    if not job:
        raise ConfigError("the job's name is empty: a store keeps jobs apart by their names")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "sqlite":
        return SqliteStore(_sqlite_path(url, rest if separator else url), job=job)
    if scheme in ETCD:
        endpoints = etcd_endpoints(url)
        access = StoreAccess.of() if access is None else access
        try:
            from jaxft.launch.etcd import EtcdStore
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"store {url}: the package {error.name} is not installed: pip install 'jaxft[etcd]'"
            ) from error
        is_encrypted = scheme == "etcds" or bool(access.ca or access.cert)
        return EtcdStore(endpoints, job=job, access=access, is_encrypted=is_encrypted)
    raise ConfigError(
        f"store {scheme}://...: unknown kind {scheme}, expected sqlite:///absolute/path/file.db, "
        "a plain path, or etcd://host:port,host:port (etcds:// with TLS)"
    )


def read_entries(url: str, job: str, access: StoreAccess | None = None) -> dict[str, Entry]:
    """All keys of a job, for who only looks: nothing is made, and no lease expired. Raises as
    `open_store` does."""
    path = _file_of(url)
    if path is not None:
        return read_file(path, job)
    store = open_store(url, job=job, access=access)
    try:
        return store.read()
    finally:
        store.close()


def jobs_of(url: str) -> set[str]:
    """The jobs that have keys in a store, which is only read. Raises as `open_store` does."""
    path = _file_of(url)
    if path is not None:
        return jobs_in(path)
    store = open_store(url, job="any")
    from jaxft.launch.etcd import EtcdStore

    assert isinstance(store, EtcdStore)
    try:
        return store.jobs()
    finally:
        store.close()


def _file_of(url: str) -> Path | None:
    """The file of a store in SQLite; None of another kind. Raises ConfigError."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme != "sqlite":
        return None
    return _sqlite_path(url, rest if separator else url)


def etcd_endpoints(url: str) -> list[tuple[str, int]]:
    """Hosts and ports of a store in etcd; none of another kind.

    Raises:
        ConfigError: not such a URL.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ETCD:
        return []
    if "@" in rest:
        raise ConfigError(
            "the store's URL has a user, or a password, in it, where others see them: say "
            "JAXFT_STORE_USER and JAXFT_STORE_PASSWORD"
        )
    return [_endpoint(url, part.strip()) for part in rest.rstrip("/").split(",")]


def _sqlite_path(url: str, path: str) -> Path:
    if "://" in url and not path.startswith("/"):
        raise ConfigError(f"store {url}: expected sqlite:///absolute/path/file.db")
    if not path:
        raise ConfigError("the store's path is empty")
    if "://" not in url and ":" in path.partition("/")[0]:
        # Each machine would have a store of its own there, and not meet the others.
        raise ConfigError(
            f"store {url}: it looks like a URL, or host:port, and not like a path (which may be "
            "./NAME): etcds://HOST:PORT, etcd://HOST:PORT, or sqlite:///absolute/path/file.db"
        )
    return Path(path)


def _endpoint(url: str, part: str) -> tuple[str, int]:
    try:
        split = urlsplit(f"//{part}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise ConfigError(f"store {url}: {part!r} is not host:port ({error})") from error
    if not host or part != split.netloc:
        raise ConfigError(f"store {url}: {part!r} is not host:port")
    return host, port or ETCD_PORT
