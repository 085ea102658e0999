"""The store in etcd: for many machines.

Needs the package `etcd3gw` (the extra `etcd`) and etcd 3.4 or newer; talks to its JSON gateway
(etcd.io/docs/v3.4/dev-guide/api_grpc_gateway), where keys and values are base64 and 64-bit
integers are strings.

Rules
- The keys of a job lie below `/jaxft/JOB/`. A revision is etcd's mod_revision, a lease is etcd's.
- Every request has a deadline (`REQUEST_S`). The endpoints are tried in turn, beginning with the
  one that answered last. A write goes to a second endpoint only if it never left for the first:
  sent twice, a conditional write would find its own traces and report that it failed.
- A commit may name as many keys as etcd's --max-txn-ops allows, 128 by default.
- Who one is, where etcd asks for it, is a token that etcd gives for a password, and takes back when
  it likes. A request that is refused for its token has had no effect: it is sent again with a new
  one, once.
- What etcd says is JSON. An answer that is none, or not of etcd's form, is somebody else's (a proxy
  on the way, another service at that port), and an error like any other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import re
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import etcd3gw
import requests
import urllib3
from etcd3gw.exceptions import (
    ConnectionFailedError,
    ConnectionTimeoutError,
    Etcd3Exception,
    InternalServerError,
)

from jaxft.config import StoreAccess
from jaxft.errors import ConfigError, StoreAway, StoreError
from jaxft.launch.store import Entry

REQUEST_S = 2.0
WATCH_S_MIN = 0.05
_REASON_CHARS_MAX = 300
_NOT_ETCD = "what answers there is not etcd"
_AWAY = "is etcd running, and does the network let this host reach it?"
# What urllib3 says, and what it means.
_PLAIN = {
    r"^Failed to establish a new connection: \[Errno -?\d+\] ": "",
    r"^Failed to resolve '(.*)' \(\[Errno -?\d+\] .*\)$": r"there is no host \1",
    r"^\('Connection aborted\.', BadStatusLine\(.*\)\)$": _NOT_ETCD,
    r"^\('Connection aborted\.', .*\)$": "the connection was broken off",
    r"^Read timed out\. \(read timeout=.*\)$": "no answer in time",
    r"^Connection to .* timed out\..*$": "no answer in time",
}
_REMEDIES = {
    "user name is empty": "it asks who one is: set JAXFT_STORE_USER and JAXFT_STORE_PASSWORD",
    "invalid user ID or password": "look at JAXFT_STORE_USER and JAXFT_STORE_PASSWORD",
    "permission denied": "JAXFT_STORE_USER needs to read and write the keys below /jaxft/JOB/",
    "database space exceeded": "it is full: compact it, and disarm its alarm (etcdctl)",
}


class EtcdStore:
    """A `Store` in etcd; see `jaxft.launch.store` for the contract.

    Args:
        endpoints: host and port of one or more members of the cluster.
        job: the job whose keys this is about.
        access: whom to trust there, and who one is.
        is_encrypted: whether to talk in TLS.

    Raises:
        ConfigError: a file that `access` names is not there, or a password would go in clear.
        StoreError: no endpoint answers, or it does not let this user in.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        *,
        job: str,
        access: StoreAccess,
        is_encrypted: bool,
    ) -> None:
        self._namespace = f"/jaxft/{quote(job, safe='')}/"
        self._gateway = _Gateway(endpoints, access, is_encrypted)
        self._seen = _Seen()
        try:
            answer = self._gateway.ask("/kv/range", {**self._range(""), "count_only": True})
            with _understanding(self._gateway.place):
                int(answer["header"]["revision"])
        except BaseException:
            self.close()
            raise

    def read(self, prefix: str = "") -> dict[str, Entry]:
        answer = self._gateway.ask("/kv/range", self._range(prefix))
        entries: dict[str, Entry] = {}
        with _understanding(self._gateway.place):
            for item in answer.get("kvs", ()):
                key = b64decode(item["key"]).decode()[len(self._namespace) :]
                leased = int(item.get("lease", 0)) != 0
                entries[key] = Entry(
                    b64decode(item.get("value", "")), int(item["mod_revision"]), leased
                )
            self._seen.revision = int(answer["header"]["revision"])
        return entries

    def commit(
        self,
        expect: Mapping[str, int | None],
        put: Mapping[str, bytes],
        delete: Iterable[str] = (),
    ) -> bool:
        gone = list(delete)
        assert not set(gone) & set(put), "a key is both written and deleted"
        # The mod_revision of a key that is not there is 0.
        compare = [
            {
                "key": self._key(key),
                "target": "MOD",
                "result": "EQUAL",
                "mod_revision": revision or 0,
            }
            for key, revision in expect.items()
        ]
        success: list[dict[str, Any]] = [self._put(key, value) for key, value in put.items()]
        success += [{"request_delete_range": {"key": self._key(key)}} for key in gone]
        return self._transaction(compare, success)

    def changed(self, timeout_s: float) -> bool:
        seen = self._seen.revision
        if seen is None:
            return True
        return self._gateway.watch({**self._range(""), "start_revision": seen + 1}, timeout_s)

    def lease(self, key: str, value: bytes, ttl_s: float) -> EtcdLease:
        assert ttl_s > 0
        granted = self._gateway.ask("/lease/grant", {"TTL": math.ceil(ttl_s), "ID": 0})
        with _understanding(self._gateway.place):
            lease = EtcdLease(self, key, int(granted["ID"]))
        try:
            self._transaction([], [self._put(key, value, lease.number)])
        except _LeaseGone as error:
            raise StoreError(f"etcd took back the new lease of {key} at once; try again") from error
        return lease

    def jobs(self) -> set[str]:
        """All that have keys here, not only this one."""
        keys = {"key": _base64(b"/jaxft/"), "range_end": _base64(b"/jaxft0"), "keys_only": True}
        answer = self._gateway.ask("/kv/range", keys)
        with _understanding(self._gateway.place):
            found = [b64decode(item["key"]).decode() for item in answer.get("kvs", ())]
        return {unquote(key.split("/")[2]) for key in found}

    @property
    def is_private(self) -> bool:
        return self._gateway.is_private

    def close(self) -> None:
        self._gateway.close()

    def _key(self, key: str) -> str:
        return _base64((self._namespace + key).encode())

    def _range(self, prefix: str) -> dict[str, str]:
        start = (self._namespace + prefix).encode()
        # UTF-8 has no byte 0xff, so the last byte has a successor.
        end = start[:-1] + bytes([start[-1] + 1])
        return {"key": _base64(start), "range_end": _base64(end)}

    def _put(self, key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
        return {"request_put": {"key": self._key(key), "value": _base64(value), "lease": lease}}

    def _transaction(self, compare: list[dict[str, Any]], success: list[dict[str, Any]]) -> bool:
        answer = self._gateway.tell("/kv/txn", {"compare": compare, "success": success})
        with _understanding(self._gateway.place):
            return bool(answer.get("succeeded", False))

    # What a lease does with its key, if the key still is its own

    def _renew(self, key: str, number: int) -> bool:
        kept = self._gateway.ask("/lease/keepalive", {"ID": number})
        with _understanding(self._gateway.place):
            if int(kept["result"].get("TTL", 0)) <= 0:
                return False
        # etcd's lease outlives its key, where another agent deleted that or took it over.
        found = self._gateway.ask("/kv/range", {"key": self._key(key), "keys_only": True})
        with _understanding(self._gateway.place):
            return any(int(item.get("lease", 0)) == number for item in found.get("kvs", ()))

    def _update(self, key: str, number: int, value: bytes) -> bool:
        own = {"key": self._key(key), "target": "LEASE", "result": "EQUAL", "lease": number}
        try:
            return self._transaction([own], [self._put(key, value, number)])
        except _LeaseGone:
            return False

    def _release(self, number: int) -> None:
        try:
            self._gateway.ask("/lease/revoke", {"ID": number})
        except _LeaseGone:
            return


class EtcdLease:
    """A `Lease`: etcd's own, with one key."""

    def __init__(self, store: EtcdStore, key: str, number: int) -> None:
        self.key = key
        self.number = number
        self._store = store

    def renew(self) -> bool:
        return self._store._renew(self.key, self.number)

    def update(self, value: bytes) -> bool:
        return self._store._update(self.key, self.number, value)

    def release(self) -> None:
        self._store._release(self.number)


class _Seen(threading.local):
    """What a thread knows: the cluster's revision at its last read."""

    revision: int | None = None


class _LeaseGone(StoreError):
    """etcd knows no lease with this number (any more)."""


class _Gateway:
    """Requests to whichever endpoint answers; one at a time, but for `watch`."""

    def __init__(
        self, endpoints: Sequence[tuple[str, int]], access: StoreAccess, is_encrypted: bool
    ) -> None:
        self.is_private = is_encrypted or all(_is_loopback(host) for host, _ in endpoints)
        _check(access, self.is_private)
        self._access = access
        self._clients = [
            etcd3gw.client(
                host=host,
                port=port,
                protocol="https" if is_encrypted else "http",
                timeout=REQUEST_S,
                api_path="/v3/",
                session=_session(access),
            )
            for host, port in endpoints
        ]
        self._watching = _session(access)
        self._token = ""
        self._current = 0
        self._lock = threading.Lock()  # held for at most REQUEST_S an endpoint

    @property
    def place(self) -> str:
        """Of the endpoint that answered last."""
        return str(self._clients[self._current].base_url)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Sends what may arrive twice: all but transactions (a lease granted for nobody lapses)."""
        return self._send(path, body, may_repeat=True)

    def tell(self, path: str, body: dict[str, Any]) -> Any:
        """Sends what must not arrive twice."""
        return self._send(path, body, may_repeat=False)

    def _send(self, path: str, body: dict[str, Any], *, may_repeat: bool) -> Any:
        failures: list[str] = []
        with self._lock:
            for _ in self._clients:
                client = self._clients[self._current]
                try:
                    return self._post(client, path, body)
                except (Etcd3Exception, requests.RequestException) as error:
                    reason = _reason(error)
                    if "lease not found" in reason:
                        raise _LeaseGone(f"etcd {client.base_url}: {reason}") from error
                    if not _is_away(error):
                        raise StoreError(
                            f"etcd {client.base_url} refused: {reason}{_remedy(reason)}"
                        ) from error
                    if not (may_repeat or _never_left(error)):
                        raise StoreError(
                            f"etcd {client.base_url} broke off a write ({reason}): it is unknown "
                            "whether it was written; read again"
                        ) from error
                    failures.append(f"{client.base_url}: {reason}")
                    self._current = (self._current + 1) % len(self._clients)
        raise self._nobody(failures)

    def _post(self, client: etcd3gw.Etcd3Client, path: str, body: dict[str, Any]) -> Any:
        """Sends, as this user, to one endpoint."""
        if self._access.user and not self._token:
            self._token = self._authenticate(client)
        url = client.get_url(path)
        try:
            return client.post(url, json=body, headers=self._headers())
        except Etcd3Exception as error:
            if not (self._access.user and _is_stale_token(error)):
                raise
            self._token = self._authenticate(client)
            return client.post(url, json=body, headers=self._headers())

    def _authenticate(self, client: etcd3gw.Etcd3Client) -> str:
        """A new token for this user."""
        body = {"name": self._access.user, "password": self._access.password}
        answer = client.post(client.get_url("/auth/authenticate"), json=body)
        with _understanding(client.base_url):
            return str(answer["token"])

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def watch(self, create: dict[str, Any], timeout_s: float) -> bool:
        """Whether anything happened in a range since a revision, within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        failures: list[str] = []
        for _ in self._clients:
            current = self._current
            client = self._clients[current]
            left_s = max(deadline_s - time.monotonic(), WATCH_S_MIN)
            try:
                with self._watching.post(
                    client.get_url("/watch"),
                    json={"create_request": create},
                    headers=self._headers(),
                    stream=True,
                    timeout=(min(left_s, REQUEST_S), left_s),
                ) as stream:
                    # The first message says that the watch is there. Any other one, and the
                    # stream's end, is a reason to look: an event, a compaction, an error.
                    lines = (line for line in stream.iter_lines() if not _is_greeting(line))
                    if b'"events"' not in next(lines, b""):
                        time.sleep(WATCH_S_MIN)  # it may end as soon again
                    return True
            except (requests.RequestException, ValueError) as error:
                if time.monotonic() >= deadline_s:
                    return False
                failures.append(f"{client.base_url}: {_reason(error)}")
                self._current = (current + 1) % len(self._clients)
        raise self._nobody(failures)

    def close(self) -> None:
        for client in self._clients:
            client.session.close()
        self._watching.close()

    def _nobody(self, failures: list[str]) -> StoreError:
        said = "; ".join(failures)
        advice = _AWAY
        if "SSL" in said:
            advice = "is it reached over TLS, and do --store-ca, --store-cert and --store-key fit?"
        elif "CommonName" in said:
            advice = (
                "its gateway refuses client certificates with a common name (CN): make one without "
                "for --store-cert, and say who this is by JAXFT_STORE_USER"
            )
        may_come = advice == _AWAY and _NOT_ETCD not in said
        kind = StoreAway if may_come else StoreError
        return kind(f"no etcd endpoint answered ({said}): {advice}")


def _session(access: StoreAccess) -> requests.Session:
    session = requests.Session()
    # etcd is reached directly: proxies in the environment are for the world outside.
    session.trust_env = False
    if access.ca:
        session.verify = access.ca
    if access.cert:
        session.cert = (access.cert, access.key)
    return session


def _check(access: StoreAccess, is_private: bool) -> None:
    """Refuses what would fail at each request, or give a password away."""
    names = {"--store-ca": access.ca, "--store-cert": access.cert, "--store-key": access.key}
    for option, path in names.items():
        if path and not os.access(path, os.R_OK):
            raise ConfigError(f"{option} {path}: no such file, or it cannot be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if access.ca and not os.path.isdir(access.ca):
            context.load_verify_locations(access.ca)
    except OSError as error:
        raise ConfigError(
            f"--store-ca {access.ca}: expected certificates in PEM ({_in_short(error)})"
        ) from error
    try:
        if access.cert:
            context.load_cert_chain(access.cert, access.key, password="")  # and no question for one
    except OSError as error:
        raise ConfigError(
            f"--store-cert {access.cert}, --store-key {access.key}: expected a certificate and its "
            f"own private key, without a passphrase, in PEM ({_in_short(error)})"
        ) from error
    if access.user and not is_private:
        raise ConfigError(
            "JAXFT_STORE_PASSWORD would go over the network for everybody to read: reach the store "
            "over TLS, --store etcds://HOST:PORT"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_stale_token(error: Exception) -> bool:
    """Whether etcd only wants a new token: it has forgotten this one, or its users have changed."""
    reason = _reason(error)
    return "invalid auth token" in reason or "revision of auth store is old" in reason


def _is_away(error: Exception) -> bool:
    """Whether another endpoint might do better; else etcd understood the request and said no."""
    away = (
        ConnectionFailedError
        | ConnectionTimeoutError
        | InternalServerError
        | requests.RequestException
    )
    return isinstance(error, away) or not _is_json(getattr(error, "detail_text", None) or "")


def _never_left(error: Exception) -> bool:
    """Whether no connection came about, so that etcd cannot have seen the request."""
    cause = error.__context__  # what `requests` raised and etcd3gw mapped
    return isinstance(cause, requests.ConnectTimeout) or isinstance(
        _innermost(cause), urllib3.exceptions.NewConnectionError
    )


def _innermost(error: BaseException | None) -> Exception | None:
    """Why no connection came about, below all that `requests` and urllib3 say around it."""
    inner = error.args[0] if isinstance(error, requests.ConnectionError) and error.args else None
    reason = getattr(inner, "reason", None)
    return reason if isinstance(reason, Exception) else None


def _reason(error: Exception) -> str:
    if inner := _innermost(error) or _innermost(error.__context__):
        return _in_short(inner)
    text = getattr(error, "detail_text", None) or str(error) or type(error).__name__
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(_in_short(Exception(text)).split())[:_REASON_CHARS_MAX]


def _remedy(reason: str) -> str:
    return next((f": {what}" for why, what in _REMEDIES.items() if why in reason), "")


def _in_short(error: Exception) -> str:
    """Without the place in the source of Python's module, and without urllib3's own words."""
    text = re.sub(r" \(_ssl\.c:\d+\)", "", str(error))
    text = re.sub(r"^<?HTTPS?Connection(Pool)?\(.*?\)>?: ", "", text)
    text = re.sub(r"^\(<HTTPS?Connection\(.*?\) at \w+>, '(.*)'\)$", r"\1", text)
    for theirs, plain in _PLAIN.items():
        text = re.sub(theirs, plain, text)
    return text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _understanding(place: str) -> Iterator[None]:
    """What is read within is an answer of etcd's. Raises StoreError if it is of another form."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"what answers at {place} is not etcd ({error!r}): a proxy on the way, or another "
            "service?"
        ) from error


def _is_greeting(line: bytes) -> bool:
    """Whether this line of a watch tells of nothing. Raises ValueError: it is none of etcd's."""
    if not line.strip():
        return True
    said = json.loads(line)
    if not isinstance(said, dict):
        raise ValueError(f"{said!r} is none of etcd's answers")
    result = said.get("result") or {}
    return bool(result.get("created")) and not (result.get("canceled") or result.get("events"))


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
