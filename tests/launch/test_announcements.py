"""What agents say to a person, in words."""

from __future__ import annotations

import pytest

from jaxft.group.placement import form_groups
from jaxft.group.world import Code, Generation, Member
from jaxft.launch.announcements import Facts, code_of, in_words


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        ("settled", {"base": "1.3", "step": 30}, "goes on from step 30 (snapshot 1.3)"),
        ("settled", {"base": "", "step": 0}, "begins anew"),
        ("persisted", {"step": 30, "result": "written"}, "step 30 is on storage"),
        ("held", {"host": "a", "reason": "host b is silent"}, "snapshots are held, training goes"),
        ("held_over", {"host": "a"}, "snapshots are held no longer"),
        ("out_of_turn", {"reason": "host a is told to end"}, "asked for: host a is told to end"),
        ("generation_floor", {"number": 7}, "storage holds a checkpoint of generation 7"),
        ("waiting_for_memory", {"newest": "1.3", "rejoin_s": 5.0}, "known, 1.3: waits 5 s"),
        ("aborted", {"seq": 3, "step": 30, "reason": "x"}, "snapshot of step 30 came to nothing"),
        ("of_tomorrow", {"host": "a", "reason": ""}, "of_tomorrow: host a"),
    ],
)
def test_announcements_are_plain_words(kind: str, facts: Facts, words: str) -> None:
    assert words in in_words(kind, facts)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "code 1+0, so memory protects from the loss of processes only, not of the host"),
        (2, "code 1+1"),
        (8, "code 3+1"),
        (7, "groups 3+1, 2+1"),
    ],
)
def test_the_code_in_force_is_named(count: int, words: str) -> None:
    code = Code(data=3, parity=1)
    generation = Generation(
        job="j",
        number=1,
        nonce="n",
        hosts=tuple(Member(f"h{i}", "agent", "arena", "address") for i in range(count)),
        groups=form_groups(count, code),
        code=code,
    )
    assert code_of(generation) == words
