"""What came first: errors in a rank's last words, and causes among faults."""

from __future__ import annotations

import pytest

from jaxft.group.causes import ended, error_in, in_short, is_consequence, outranks
from jaxft.group.records import Fault

GLOO = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step(state)
jax.errors.JaxRuntimeError: FAILED_PRECONDITION: Gloo all-reduce failed: Connection closed by peer
"""
CHAINED = """step 3
Traceback (most recent call last):
  File "train.py", line 3, in load
    open(path)
FileNotFoundError: [Errno 2] No such file

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
    ~~~~^^
ValueError: no such data
F1130 coordination_service_agent.cc:597 Polled an error
*** Check failure stack trace: ***
    @     0x7f0  (unknown)
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CHAINED, "ValueError: no such data"),
        (GLOO, GLOO.splitlines()[-1]),
        ("Traceback ...:\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("python: can't open file '/nowhere.py'\n\n", "python: can't open file '/nowhere.py'"),
        (
            "    indented\n  File x, line 1\n    x = = 1\n        ^\nSyntaxError: invalid",
            "SyntaxError: ",
        ),
        ("[Gloo] Rank 0 is connected to 3 peer ranks\n", ""),
        ("", ""),
        ("E" * 1000, "E" * 300),
    ],
)
def test_the_error_is_found_in_the_last_words(text: str, error: str) -> None:
    assert error_in(text).startswith(error)
    assert bool(error) == bool(error_in(text))


def test_how_a_process_ended_is_said_in_words() -> None:
    assert ended(3) == "status 3"
    assert ended(-9) == "signal 9 (SIGKILL)"
    assert ended(-200) == "signal 200"


GREETING = (
    "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
)


def fault(kind: str = "rank_exited", error: str = "", code: int = 1, tail: str = "") -> Fault:
    return Fault(generation=1, host="h", kind=kind, detail="", error=error, code=code, tail=tail)


def test_what_was_seen_first_is_told_in_short() -> None:
    assert in_short("rank 1 failed") == "rank 1 failed"
    assert in_short("x" * 200) == "x" * 97 + "..."


def test_survivors_are_told_from_who_failed_first() -> None:
    lost = fault("host_lost", code=0)
    own = fault(error="ValueError: no", tail=f"{GREETING}\nValueError: no")
    survivor = fault(error=GLOO.splitlines()[-1])
    aborted = fault(
        "rank_killed", code=-6, tail="coordination_service_agent.cc:597 Polled an error"
    )
    killed = fault("rank_killed", code=-9, tail="gloo is fine")
    assert not is_consequence(fault("rank_killed", code=-6, tail=f"{GREETING}\nout of memory"))
    assert not is_consequence(fault(error=GREETING))
    assert [is_consequence(one) for one in (survivor, aborted, own, killed)] == [
        *(True, True),
        *(False, False),
    ]
    for found, known in ((lost, own), (lost, survivor), (own, survivor), (killed, aborted)):
        assert outranks(found, known)
        assert not outranks(known, found)
    # What an agent sees once its ranks were killed, and a second failure, change nothing.
    for found in (fault("cut_off", code=0), killed, survivor):
        assert not outranks(found, own)
    assert not outranks(lost, lost)
