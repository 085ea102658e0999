"""The page in which a rank counts its calls of `save`, from both sides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft import watched
from jaxft.errors import ConfigError
from jaxft.group.hanging import Reading
from jaxft.host.calls_page import SIZE_BYTES, CallsPage

# A rank that says where it is when its agent asks; with "own", the script has a handler there.
RANK = """
import signal, sys
from jaxft.watched import SIGNAL, be_watched, long_phase
if sys.argv[1] == "own":
    signal.signal(SIGNAL, lambda number, frame: None)
def here():
    print("there", flush=True)
    return sys.stdin.readline()
page = be_watched()
page.counter[0] = 7
with long_phase("evaluation", at_most_s=100):
    here()
page.end()
"""


@pytest.mark.parametrize("handler", ["none", "own"])
def test_an_agent_sees_what_a_rank_says_and_where_it_is(handler: str, tmp_path: Path) -> None:
    page = CallsPage.create()
    assert page.read() == Reading(0, arrived=False)
    errors = tmp_path / "errors"
    with errors.open("wb") as log:
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK, handler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "JAXFT_CALLS": page.path},
        )
    assert rank.stdin is not None
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"there\n"
    said = page.read()
    assert (said.calls, said.phase, said.closed) == (7, "evaluation", False)
    assert said.until_s > 0
    assert page.pid == rank.pid
    assert page.signal == (watched.SIGNAL if handler == "none" else 0)
    os.kill(rank.pid, watched.SIGNAL)
    rank.communicate(b"go\n", timeout=10)
    assert rank.returncode == 0
    assert ("in here" in errors.read_text()) == (handler == "none")
    assert page.read() == Reading(7, closed=True)
    page.close()


def test_phases_within_each_other() -> None:
    page = CallsPage()
    page.arrive(1, 1, 0)
    outer = page.enter_phase("outer", 100.0)
    until_s = page.read().until_s
    inner = page.enter_phase("inner", 1.0)
    assert page.read() == Reading(0, until_s, "inner")
    page.leave_phase(inner)
    assert page.read() == Reading(0, until_s, "outer")
    page.leave_phase(outer)
    assert page.read() == Reading(0)


def test_what_jax_goes_by_is_told_if_there_is_room() -> None:
    page = CallsPage()
    page.tell_surroundings("x" * SIZE_BYTES)
    assert page.surroundings == ""
    page.tell_surroundings('{"JAX_PLATFORMS": "ü"}')
    assert page.surroundings == '{"JAX_PLATFORMS": "ü"}'


def test_a_phase_takes_some_time() -> None:
    with pytest.raises(ConfigError, match="at_most_s=0"), watched.long_phase("evaluation", 0):
        pass


def test_nobody_writes_into_what_is_no_page(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE_BYTES))
    with pytest.raises(ValueError, match="no page"):
        CallsPage.open(str(other))


def test_the_signal_is_one_that_nobody_else_uses() -> None:
    assert signal.SIGRTMIN < watched.SIGNAL < signal.SIGRTMAX
