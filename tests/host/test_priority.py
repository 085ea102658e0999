"""Coding and serving step back behind the training; the rest of an SMP does not."""

from __future__ import annotations

import os
import threading

from jaxft.host.jobs import Jobs
from jaxft.host.priority import NICE
from jaxft.host.wire import ReadRequest
from jaxft.host.wire_zmq import ZmqNetwork

OWN = os.getpriority(os.PRIO_PROCESS, 0)


def here() -> tuple[int, int]:
    """(nice, policy) of the calling thread."""
    thread = threading.get_native_id()
    return os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)


def test_only_the_jobs_that_are_to_step_back_do() -> None:
    ended = threading.Semaphore(0)
    jobs = Jobs(ended.release)
    found: dict[str, object] = {}
    for key, low in (("code", True), ("fetch", False)):
        jobs.start(key, lambda _: here(), lambda r, _, k=key: found.update({k: r}), low=low)
        assert ended.acquire(timeout=5)
    jobs.reap()
    assert found == {"code": (max(NICE, OWN), os.SCHED_BATCH), "fetch": (OWN, os.SCHED_OTHER)}
    assert here() == (OWN, os.SCHED_OTHER)


def test_the_threads_that_serve_peers_step_back() -> None:
    network = ZmqNetwork()
    found: list[object] = []

    def provide(key: bytes, offset: int, nbytes: int) -> memoryview:
        found.append(here())
        return memoryview(bytes(nbytes))

    server = network.serve("tcp://127.0.0.1:*", provide)
    requests = [ReadRequest(server.address, b"", 0, 10, None)]
    assert len(list(network.reader().read_many(requests, peer_s=5, deadline_s=5))) == 1
    server.close()
    network.close()
    assert found == [(max(NICE, OWN), os.SCHED_BATCH)]
