"""Where the job's key comes from, and where it does not go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from jaxft.errors import ConfigError, StoreError
from jaxft.group.placement import form_groups
from jaxft.group.records import END, JOB_KEY, NUMBER, JobEnd
from jaxft.group.world import Code, Generation, Member, encode
from jaxft.host.job_key import JobKey
from jaxft.launch.ended_run import clear_ended_run
from jaxft.launch.job_keys import job_trust
from jaxft.launch.options import RunOptions
from jaxft.launch.ranks import rank_environment
from jaxft.launch.store import Store
from jaxft.launch.stores import open_store

KEYS = {name: JobKey(bytes([place]) * 32) for place, name in enumerate(("file", "text", "named"))}
OPTIONS = RunOptions(job="j", host="a", command=("true",), store="", address="10.0.0.1")


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


class Open:
    """A store that others can see being written to."""

    is_private = False

    def __init__(self, store: Store) -> None:
        self.read, self.commit = store.read, store.commit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(str(tmp_path / "store.db"), job="j")
    yield opened
    opened.close()


def key_file(tmp_path: Path, name: str) -> str:
    path = tmp_path / name
    path.write_text(KEYS[name].text)
    path.chmod(0o600)
    return str(path)


def test_an_option_beats_the_environment_and_that_the_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(options: RunOptions = OPTIONS) -> str:
        trust = job_trust(options, store, Said())
        assert trust is not None
        return trust.key.text

    stored = found()
    assert store.read()[JOB_KEY].value.decode() == stored
    monkeypatch.setenv("JAXFT_JOB_KEY_FILE", key_file(tmp_path, "named"))
    assert found() == KEYS["named"].text
    monkeypatch.setenv("JAXFT_JOB_KEY", KEYS["text"].text)
    with pytest.raises(ConfigError, match="JAXFT_JOB_KEY and JAXFT_JOB_KEY_FILE both give"):
        found()
    monkeypatch.delenv("JAXFT_JOB_KEY_FILE")
    assert found() == KEYS["text"].text
    options = msgspec.structs.replace(OPTIONS, job_key_file=key_file(tmp_path, "file"))
    assert found(options) == KEYS["file"].text
    assert KEYS["file"].text not in repr(options)


def test_all_hosts_find_the_key_that_the_first_one_made(store: Store) -> None:
    one, two = (job_trust(OPTIONS, store, Said()) for _ in range(2))
    assert one is not None
    assert two is not None
    assert one.key.text == two.key.text
    assert not one.clear
    proven = job_trust(msgspec.structs.replace(OPTIONS, trust_network=True), store, Said())
    assert proven is not None
    assert proven.clear
    assert proven.name != one.name


def test_hosts_on_one_machine_have_none(store: Store) -> None:
    assert job_trust(msgspec.structs.replace(OPTIONS, address=""), store, Said()) is None
    assert store.read() == {}


def test_a_person_is_told_when_others_can_see_the_key(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said()
    assert job_trust(OPTIONS, store, said) is not None
    assert not said
    assert job_trust(OPTIONS, Open(store), said) is not None  # type: ignore[arg-type]
    assert "kept in the store" in said[0]
    assert "etcds://" in said[0]
    monkeypatch.setenv("JAXFT_JOB_KEY_FILE", key_file(tmp_path, "named"))
    assert job_trust(OPTIONS, Open(store), said) is not None  # type: ignore[arg-type]
    assert len(said) == 1


def test_a_key_that_does_not_stay_is_an_error(store: Store) -> None:
    class Forgetful(Open):
        def __init__(self) -> None:
            self.read, self.commit = (lambda prefix="": {}), (lambda expect, put: True)

    with pytest.raises(StoreError, match="vanishes"):
        job_trust(OPTIONS, Forgetful(), Said())  # type: ignore[arg-type]
    store.commit({}, {JOB_KEY: b"nonsense"})
    with pytest.raises(ConfigError, match="the store's job_key has no job key"):
        job_trust(OPTIONS, store, Said())


def test_it_stays_for_the_next_run(store: Store) -> None:
    before = job_trust(OPTIONS, store, Said())
    store.commit({}, {END: encode(JobEnd(kind="finished", reason=""))})
    clear_ended_run(store)
    assert set(store.read()) == {NUMBER, JOB_KEY}
    assert job_trust(OPTIONS, store, Said()) == before


def test_a_rank_has_none_of_the_agents_secrets() -> None:
    member = Member("a", "", "", "")
    generation = Generation(
        job="j", number=1, nonce="", hosts=(member,), groups=form_groups(1, Code()), code=Code()
    )
    environ = {
        "JAXFT_JOB_KEY": "k",
        "JAXFT_JOB_KEY_FILE": "f",
        "JAXFT_STORE_USER": "u",
        "JAXFT_STORE_PASSWORD": "p",
        "JAXFT_STORE_KEY": "s",
        "PATH": "/bin",
    }
    given = rank_environment(generation, "a", 0, Path("/smp"), environ)
    assert set(given) & set(environ) == {"PATH"}
