"""All processes get the same answer, also where one of them comes too late."""

from __future__ import annotations

import threading

import jax
import pytest

from jaxft.device import agreement
from jaxft.device.agreement import Agreement


class Service:
    """The coordination service of a world of `count`, as far as it is used."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._changed = threading.Condition()
        self._keys: dict[str, str] = {}
        self._came: dict[str, int] = {}
        self._failed: set[str] = set()

    def key_value_set(self, key: str, value: str) -> None:
        self._keys[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self._keys.items() if key.startswith(prefix + "/")]

    def wait_at_barrier(self, name: str, timeout_ms: int) -> None:
        with self._changed:
            self._came[name] = self._came.get(name, 0) + 1
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: name in self._failed or self._came[name] == self.count, timeout_ms / 1000
            ):
                self._failed.add(name)
            if name in self._failed:
                raise RuntimeError(f"DEADLINE_EXCEEDED: {name}")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service(3)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(agreement, "coordination_service", lambda: made)
    return made


def ask(answers: list[bool], number: int, timeout_s: float = 30.0) -> list[bool]:
    found: dict[int, bool] = {}

    def one(index: int) -> None:
        found[index] = Agreement("g").all_say("q", number, answers[index], timeout_s)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(answers))]


def test_all_say_yes_or_all_hear_no(service: Service) -> None:
    for number, answers in enumerate([[True] * 3, [True, False, True], [True] * 3, [False] * 3]):
        assert ask(answers, number) == [all(answers)] * 3


def test_one_that_does_not_answer_says_no_and_so_it_is_told(service: Service) -> None:
    assert ask([True, True], 1, timeout_s=0.05) == [False, False]
    assert not Agreement("g").all_say("q", 1, True, 30.0)
    assert ask([True] * 3, 2) == [True] * 3


def test_answers_that_one_cannot_read_are_no_answer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have read them, and do what all have said."""

    def fail(prefix: str) -> list[tuple[str, str]]:
        raise RuntimeError("UNAVAILABLE")

    monkeypatch.setattr(service, "count", 1)
    monkeypatch.setattr(service, "key_value_dir_get", fail)
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        Agreement("g").all_say("q", 0, True, 30.0)


def test_alone_it_is_the_answer() -> None:
    assert Agreement("g").all_say("q", 0, True, 0.0)
    assert not Agreement("g").all_say("q", 0, False, 0.0)


def test_without_the_service_it_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert agreement.coordination_service() is None
    assert not Agreement("g").all_say("q", 0, True, 0.0)
