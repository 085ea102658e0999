"""A store in etcd that is reached over TLS and asks who one is; where etcd is installed."""

from __future__ import annotations

import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import requests

from jaxft.config import StoreAccess
from jaxft.errors import ConfigError, StoreError
from jaxft.launch.store import Store
from jaxft.launch.stores import open_store
from tests.launch.certificates import Authority
from tests.launch.conftest import answers, free_ports, start_etcd
from tests.launch.store_site import WAIT_S, values

USER, GUEST, PASSWORD = "trainer", "guest", "not in clear"


class Private:
    """An etcd that wants a certificate and a password of everybody."""

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory)
        own, own_key = authority.vouch("etcd")
        shown, shown_key = authority.vouch("trainer")
        (directory / "other").mkdir()
        self.stranger = Authority(directory / "other").ca
        self.known = StoreAccess(ca=authority.ca, cert=shown, key=shown_key)
        self.named = authority.vouch("named", USER)
        self.access = msgspec.structs.replace(self.known, user=USER, password=PASSWORD)
        self._directory = directory
        self._client = f"https://127.0.0.1:{free_ports(1)[0]}"
        self._options = (
            *("--cert-file", own, "--key-file", own_key),
            *("--trusted-ca-file", authority.ca, "--client-cert-auth"),
        )
        self.start(self.known)
        self._ask_for_passwords()

    def start(self, access: StoreAccess) -> None:
        program = shutil.which("etcd")
        assert program
        self.process: subprocess.Popen[bytes]
        self.process, self.url = start_etcd(
            program, self._directory / "data", self._client, self._options
        )
        assert answers(self.process, self.url, access), (self._directory / "data.log").read_text()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def _ask_for_passwords(self) -> None:
        key, end = (b64encode(text).decode() for text in (b"/jaxft/", b"/jaxft0"))
        everything = {"permType": "READWRITE", "key": key, "range_end": end}
        with requests.Session() as session:
            session.trust_env = False
            session.verify, session.cert = self.known.ca, (self.known.cert, self.known.key)
            for path, body in [
                ("role/add", {"name": "root"}),
                ("user/add", {"name": "root", "password": "root's"}),
                ("user/grant", {"user": "root", "role": "root"}),
                ("role/add", {"name": "jobs"}),
                ("role/grant", {"name": "jobs", "perm": everything}),
                ("user/add", {"name": USER, "password": PASSWORD}),
                ("user/add", {"name": GUEST, "password": PASSWORD}),
                ("user/grant", {"user": USER, "role": "jobs"}),
                ("enable", {}),
            ]:
                answer = session.post(f"{self._client}/v3/auth/{path}", json=body, timeout=5)
                assert answer.ok, answer.text


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    etcd = Private(tmp_path_factory.mktemp("private"))
    yield etcd
    etcd.stop()


@pytest.fixture
def store(private: Private) -> Iterator[Store]:
    opened = open_store(private.url, job="j", access=private.access)
    yield opened
    opened.close()


def test_it_is_a_store_like_any_other(store: Store) -> None:
    assert store.is_private
    assert store.commit({"a": None}, {"a": b"1"})
    assert not store.commit({"a": None}, {"a": b"2"})
    lease = store.lease("hosts/a", b"here", 60.0)
    assert lease.renew()
    assert lease.update(b"still")
    assert values(store) == {"a": b"1", "hosts/a": b"still"}
    assert not store.changed(0.1)
    lease.release()
    assert store.changed(WAIT_S)
    assert store.commit({}, {}, ["a"])


def test_a_token_that_is_not_valid_any_more_is_replaced(private: Private) -> None:
    """etcd forgets its tokens when it is started again."""
    store = open_store(private.url, job="again", access=private.access)
    assert store.commit({"a": None}, {"a": b"1"})
    lease = store.lease("hosts/a", b"here", 60.0)
    private.stop()
    private.start(private.access)
    assert store.commit({}, {"a": b"2"})
    private.stop()
    private.start(private.access)
    assert lease.renew()
    assert values(store) == {"a": b"2", "hosts/a": b"here"}
    store.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"user": "", "password": ""}, "refused: .*user name is empty: .*JAXFT_STORE_USER"),
        ({"password": "a guess"}, "refused: .*user ID or password: .*STORE_PASSWORD"),
        ({"user": GUEST}, "refused: .*permission denied: .*/jaxft/JOB/"),
        ({"ca": ""}, "certificate verify failed: .*--store-ca"),
        ({"cert": "", "key": ""}, "no etcd endpoint answered"),
    ],
)
def test_others_are_told_why_they_do_not_get_in(
    private: Private, changes: dict[str, str], why: str
) -> None:
    access = msgspec.structs.replace(private.access, **changes)
    with pytest.raises(StoreError, match=why) as caught:
        open_store(private.url, job="j", access=access)
    assert PASSWORD not in f"{caught.value} {access}"


def test_a_certificate_with_a_name_is_refused_with_a_remedy(private: Private) -> None:
    cert, key = private.named
    access = msgspec.structs.replace(private.access, cert=cert, key=key)
    with pytest.raises(StoreError, match=r"CommonName .*: make one without .*JAXFT_STORE_USER"):
        open_store(private.url, job="j", access=access)


def test_a_store_that_another_authority_vouches_for_is_not_spoken_to(private: Private) -> None:
    access = msgspec.structs.replace(private.access, ca=private.stranger)
    with pytest.raises(StoreError, match="certificate verify failed"):
        open_store(private.url, job="j", access=access)


def test_files_make_tls_of_a_plain_url(private: Private) -> None:
    store = open_store(private.url.replace("etcds:", "etcd:"), job="j", access=private.access)
    assert store.is_private
    store.close()


def test_what_could_never_work_is_said_at_once() -> None:
    access = StoreAccess(user=USER, password=PASSWORD)
    with pytest.raises(ConfigError, match=r"JAXFT_STORE_PASSWORD would go .* etcds://"):
        open_store("etcd://192.0.2.1", job="j", access=access)
    with pytest.raises(ConfigError, match="--store-ca /none: no such file"):
        open_store("etcds://192.0.2.1", job="j", access=StoreAccess(ca="/none"))
    with pytest.raises(ConfigError, match="--store-cert and --store-key belong together"):
        StoreAccess(cert="a")
    with pytest.raises(ConfigError, match="JAXFT_STORE_USER and JAXFT_STORE_PASSWORD belong"):
        StoreAccess(user=USER)
