"""An SMP that has nothing to do hardly wakes up, and its agent can see that it lives."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from jaxft.group.world import Code
from jaxft.host import protocol as p
from jaxft.host.local import connect
from tests.host.ranks import WAIT_S
from tests.host.world import World, segments, until

WATCHED_S = 3.0


def wakes(pid: int) -> int:
    """How often the main thread of a process has gone to sleep."""
    for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError(pid)


def test_hosts_with_nothing_to_do_wake_up_for_signs_of_life_only(make_hosts):
    hosts = make_hosts(4)
    world = World(hosts, 1, Code(data=3, parity=1))
    world.restore()
    assert world.save(0, 0, segments(4)).ok
    time.sleep(0.5)
    before, began_s = [wakes(host.process.pid) for host in hosts], time.monotonic()
    time.sleep(WATCHED_S)
    often = [wakes(host.process.pid) - count for host, count in zip(hosts, before, strict=True)]
    passed_s = time.monotonic() - began_s
    # Three signs of life in five seconds; what the others answer does not wake the root.
    assert max(often) <= passed_s + 2, often


def test_the_loop_counts_its_turns_where_its_agent_looks(make_hosts):
    (host,) = make_hosts(1, "--silence-s", "0.6")
    pulse = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    channel = connect(host.directory / "smp.sock", WAIT_S)
    channel.send(p.encode(p.Hello(role="agent", pid=os.getpid())), (pulse,))

    def turned() -> int:
        try:
            return os.eventfd_read(pulse)
        except BlockingIOError:
            return 0

    for _ in range(3):
        until(turned, "the loop turns")
    host.signal(signal.SIGSTOP)
    turned()
    time.sleep(0.4)
    assert turned() == 0
    host.signal(signal.SIGCONT)
    until(turned, "the loop turns again")
    channel.close()
    os.close(pulse)


@pytest.mark.parametrize("role", ["rank", "helper"])
def test_descriptors_of_others_are_not_written_to(make_hosts, role):
    (host,) = make_hosts(1, "--silence-s", "0.6")
    pulse = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    channel = connect(host.directory / "smp.sock", WAIT_S)
    channel.send(p.encode(p.Hello(role=role, pid=os.getpid(), generation=9)), (pulse,))
    for _ in range(5):
        host.inspect()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(pulse)
    channel.close()
    os.close(pulse)
