"""What a helper that persists knows of its host's ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from jaxft.group.messages import RankOptions
from jaxft.persist import Helper


def test_what_ranks_want_is_known_while_an_smp_that_was_started_again_waits_for_them() -> None:
    options = RankOptions(directory="/checkpoints", persist_every=100)
    client: Any = SimpleNamespace(welcome=SimpleNamespace(options=options))
    env: Any = SimpleNamespace(rank=0, ranks=1)
    helper = Helper(client, env, 1)
    client.welcome = SimpleNamespace(options=None)
    assert helper.wishes() == options
    later = RankOptions(directory="/others")
    client.welcome = SimpleNamespace(options=later)
    assert helper.wishes() == later
