"""A soak notices what grows, and nothing else."""

from __future__ import annotations

from bench.soak.leaks import FDS_MORE, MEMORY_MORE_BYTES, SETTLED, Growth, Sample

MIB = 1 << 20


def noted(*samples: Sample) -> list[str]:
    growth = Growth()
    return [wrong for one in samples for wrong in growth.note("a", "SMP", 7, one)]


def test_what_comes_and_goes_is_no_leak() -> None:
    calm = [Sample(30 + n % 3, (28 + n % 2) * MIB, 5 * MIB) for n in range(20)]
    assert not noted(*calm)
    # Until an interpreter has all it needs, it may grow.
    assert not noted(*(Sample(10 * n, 20 * n * MIB, 0) for n in range(1, SETTLED + 1)))


def test_descriptors_and_memory_that_grow_are_leaks() -> None:
    calm = [Sample(30, 28 * MIB, 5 * MIB)] * SETTLED
    (wrong,) = noted(*calm, Sample(31 + FDS_MORE, 28 * MIB, 5 * MIB))
    assert wrong == "the SMP of a (7) has 47 descriptors, had 30"
    grown = 40 * MIB + MEMORY_MORE_BYTES
    (wrong,) = noted(*calm, Sample(30, grown, 5 * MIB))
    assert "MiB of memory, had 28" in wrong
    (wrong,) = noted(*calm, Sample(30, 28 * MIB, grown))
    assert "MiB of shared memory, had 5" in wrong


def test_another_process_begins_anew() -> None:
    growth = Growth()
    for pid in range(10):
        assert not growth.note("a", "SMP", pid, Sample(30 * pid, pid * 100 * MIB, 0))


def test_a_spare_that_becomes_a_member_has_more_of_all() -> None:
    growth = Growth()
    for number in range(2 * SETTLED):
        for is_member in (False, True):
            sample = Sample(24 + 21 * is_member, 30 * MIB + 300 * MIB * is_member, 0)
            assert not growth.note("g", "SMP", 7, sample, is_member=is_member), number
