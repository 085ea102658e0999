"""The bucket that keeps snapshots from taking all of the network, under a clock of the test's."""

from __future__ import annotations

import threading

import pytest

from jaxft.host.pace import BURST_S, Bucket, Pace

MIB = 1 << 20


def last_s(bucket: Bucket, pieces: int, nbytes: int, work_s: float = 0.0) -> float:
    """When the last of so many pieces, taken one after the other, may be asked for."""
    now_s = 100.0
    for _ in range(pieces):
        now_s += bucket.take(nbytes, now_s)
        now_s += work_s
    return now_s - 100.0


@pytest.mark.parametrize("rate", [MIB, 100 * MIB, 3e9])
@pytest.mark.parametrize("nbytes", [1000, 2 * MIB])
def test_the_rate_is_kept_but_for_one_burst(rate: float, nbytes: int) -> None:
    took_s = last_s(Bucket(rate), 500, nbytes)
    assert took_s == pytest.approx(max(0.0, 500 * nbytes / rate - BURST_S), abs=1e-6)


def test_who_is_slower_than_the_rate_never_waits() -> None:
    bucket = Bucket(100 * MIB)
    assert last_s(bucket, 50, MIB, work_s=0.02) == pytest.approx(50 * 0.02)


def test_a_pause_saves_up_one_burst_and_no_more() -> None:
    bucket = Bucket(MIB)
    assert bucket.take(MIB, 0.0) == pytest.approx(1 - BURST_S)
    assert bucket.take(0, 1000.0) == 0.0
    assert bucket.take(MIB, 1000.0) == pytest.approx(1 - BURST_S)


def test_several_that_take_in_turn_share_the_rate() -> None:
    bucket = Bucket(10 * MIB)
    waits = [bucket.take(MIB, 5.0) for _ in range(4)]
    assert waits == pytest.approx([0.1 * (n + 1) - BURST_S for n in range(4)])


def test_a_clock_that_stands_still_or_steps_back_gives_nothing() -> None:
    bucket = Bucket(MIB)
    first = bucket.take(MIB, 10.0)
    assert bucket.take(MIB, 9.0) == pytest.approx(first + 1)


def test_a_cancelled_wait_ends_and_no_limit_of_others_is_lifted_by_it() -> None:
    pace = Pace(1000, clock=lambda: 1.0)
    cancel = threading.Event()
    cancel.set()
    pace.wait(10**9, cancel)
    assert pace.lasts_s(5000) == 5
