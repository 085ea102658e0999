"""A soak notices what must not be."""

from __future__ import annotations

from typing import Any

from bench.apart.trainer import expected
from bench.soak.judge import Judge

SIZE = 240
DIGESTS = expected(100, SIZE)


def step(
    generation: int, number: int, latest: int | None = None, *, began_s: float = 0.0
) -> dict[str, Any]:
    at_s = began_s or float(number)
    return {
        "generation": generation,
        "step": number,
        "digest": DIGESTS[number],
        "latest": latest,
        "began_s": at_s,
    }


def restored(generation: int, number: int) -> dict[str, Any]:
    return {"generation": generation, "restored": number, "digest": DIGESTS[number]}


def judged(*lines: dict[str, Any], judge: Judge | None = None, host: str = "a") -> list[str]:
    judge = judge or Judge(SIZE)
    return [wrong for line in lines for wrong in judge.heard(host, line)]


def test_a_run_that_goes_on_from_what_was_protected_is_well() -> None:
    assert not judged(
        *(step(1, n, latest=n // 5 * 5 or None) for n in range(1, 13)),
        restored(2, 10),
        *(step(2, n, latest=10, began_s=n + 20.0) for n in range(11, 20)),
    )


def test_a_wrong_digest_is_noticed() -> None:
    (wrong,) = judged(step(1, 1) | {"digest": 7})
    assert wrong == (
        f"the state after step 1 on a in generation 1 is wrong: digest 7, expected {DIGESTS[1]}"
    )
    assert judged(restored(2, 3) | {"digest": 7})


def test_a_lost_protected_step_is_noticed() -> None:
    (wrong,) = judged(restored(1, 0), step(1, 7, latest=5), restored(3, 4))
    assert "generation 3 goes on from step 4, and step 5 was protected" in wrong
    (wrong,) = judged(restored(1, 5), step(2, 1, began_s=30.0))  # began anew
    assert "goes on from step 0" in wrong


def test_a_word_that_is_read_late_counts_too() -> None:
    judge = Judge(SIZE)
    assert not judged(restored(1, 0), step(1, 7, latest=0), restored(2, 4), judge=judge)
    assert judged(restored(1, 0), step(1, 8, latest=5), judge=judge, host="b")


def test_a_failure_beyond_the_code_may_go_back_to_storage_and_no_further() -> None:
    judge = Judge(SIZE)
    judged(step(1, 31, latest=30), judge=judge)
    judge.pardon(1, 20)
    assert not judged(restored(2, 20), judge=judge)
    assert not judged(step(2, 21, latest=20, began_s=50.0), judge=judge)
    judge.expect_all()
    assert not judged(restored(3, 20), judge=judge)
    (wrong,) = judged(restored(4, 19), judge=judge)
    assert "generation 4 goes on from step 19, and step 20 was protected" in wrong

    judge = Judge(SIZE)
    judged(step(1, 31, latest=30), judge=judge)
    judge.pardon(1, 20)
    (wrong,) = judged(restored(2, 19), judge=judge)
    assert wrong == "generation 2 goes on from step 19, and step 20 was on storage"


def test_a_pardon_ends_with_the_recovery_where_nothing_was_lost() -> None:
    judge = Judge(SIZE)
    judged(step(1, 31, latest=30), judge=judge)
    judge.pardon(1, 20)
    assert not judged(restored(2, 30), judge=judge)
    judge.expect_all()
    assert judged(restored(3, 20), judge=judge)


def test_ranks_that_restore_different_steps_are_noticed() -> None:
    judge = Judge(SIZE)
    assert not judged(restored(2, 10), judge=judge)
    (wrong,) = judged(restored(2, 15), judge=judge, host="b")
    assert wrong == "ranks of generation 2 go on from different steps: a from 10, b from 15"


def test_two_worlds_at_once_are_noticed() -> None:
    judge = Judge(SIZE)
    judged(restored(1, 0), step(1, 7, latest=5, began_s=10.0), restored(2, 5), judge=judge)
    assert not judged(step(2, 6, began_s=12.0), judge=judge)
    # It had begun before, and was only written down later.
    assert not judged(step(1, 8, latest=5, began_s=11.9), judge=judge)
    (wrong,) = judged(step(1, 9, latest=5, began_s=12.5), judge=judge)
    assert wrong == "a step of generation 1 began 0.500 s after generation 2 had begun to train"
