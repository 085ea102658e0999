"""Who is where, as the processes of a start of a script tell each other."""

from __future__ import annotations

import jax
import pytest

from jaxft.device import roll_call as rolls
from jaxft.device.roll_call import roll_call
from jaxft.errors import ConfigError, LaunchError


class Service:
    """JAX's, in which process 0 has spoken."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self.said[key] = value
        place, _, _ = key.rpartition("/")
        self.said[f"{place}/0"] = "run0 n1"

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        if key not in self.said:
            raise RuntimeError("DEADLINE_EXCEEDED: it did not come")
        return self.said[key]


def process(monkeypatch: pytest.MonkeyPatch, index: int, count: int, service: object) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(rolls, "coordination_service", lambda: service)


def test_all_know_where_each_is_and_by_which_name_this_start_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process(monkeypatch, 1, 2, Service())
    assert roll_call("n2", 2) == roll_call("n2", 0) == ("run0", ("n1", "n2"))


def test_one_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    process(monkeypatch, 1, 3, Service())
    with pytest.raises(LaunchError, match="not all 3 processes have said where they are"):
        roll_call("n2", 3)


def test_one_process_is_alone_unless_more_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    process(monkeypatch, 0, 1, None)
    run, places = roll_call("n1", 0)
    assert (len(run), places) == (16, ("n1",))
    with pytest.raises(ConfigError, match=r"3 tasks were started, .*distributed.initialize"):
        roll_call("n1", 3)
    process(monkeypatch, 0, 2, None)
    with pytest.raises(ConfigError, match="coordination service is not found"):
        roll_call("n1", 2)
