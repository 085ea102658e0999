"""The failures of a soak are drawn from its seed, and only such as may be survived."""

from __future__ import annotations

from collections import Counter

from bench.soak.plan import KINDS, Episode, Plan


def drawn(count: int, *, seed: int = 1, parity: int = 1) -> list[Episode]:
    plan = Plan(seed, tuple(KINDS), parity)
    return [plan.draw() for _ in range(count)]


def test_a_seed_draws_the_same_failures_again() -> None:
    assert drawn(200) == drawn(200)
    assert drawn(200) != drawn(200, seed=2)


def test_every_kind_comes_before_any_comes_twice() -> None:
    episodes = drawn(3 * len(KINDS))
    for start in range(0, len(episodes), len(KINDS)):
        deck = episodes[start : start + len(KINDS)]
        assert Counter(one.first.kind for one in deck) == dict.fromkeys(KINDS, 1)


def test_no_episode_takes_more_memory_than_the_code_survives() -> None:
    for parity in (1, 2):
        pairs = [one for one in drawn(2000, parity=parity) if one.second is not None]
        assert len(pairs) > 400
        for one in pairs:
            kinds = [KINDS[strike.kind] for strike in one.strikes]
            assert not any(kind.alone for kind in kinds)
            lost = [kind.memories for kind in kinds if kind.memories]
            assert len(lost) < 2 or sum(lost) <= parity
        both = [one for one in pairs if all(KINDS[two.kind].memories for two in one.strikes)]
        assert bool(both) == (parity == 2)


def test_failures_last_as_long_as_their_kind_says() -> None:
    for one in drawn(1000):
        for strike in one.strikes:
            low, high = KINDS[strike.kind].hold_s
            assert low <= strike.hold_s <= high
        assert one.pause_s > 0
        assert one.after_s >= 0
