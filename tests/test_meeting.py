"""Processes meet at a coordinator's that begins to listen when they wait for it already."""

from __future__ import annotations

import socket
import threading

from jaxft.launch.hostdir import ReservedPort
from jaxft.meeting import wait_until_listening

WAIT_S = 30.0


def test_it_is_seen_when_somebody_begins_to_listen_at_a_reserved_port() -> None:
    reserved = ReservedPort()
    host, _, port = reserved.address.rpartition(":")
    seen: list[bool] = []
    looking = threading.Thread(
        target=lambda: seen.append(wait_until_listening(f"{host}:{port}", WAIT_S))
    )
    looking.start()
    looking.join(0.2)
    assert looking.is_alive(), "nobody listens there yet"
    with socket.socket() as coordinator:
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        coordinator.bind((host, int(port)))
        coordinator.listen()
        looking.join(WAIT_S)
    reserved.close()
    assert seen == [True]


def test_a_coordinator_that_never_listens_is_given_up() -> None:
    reserved = ReservedPort(host="::1")
    assert not wait_until_listening(reserved.address, 0.1)
    reserved.close()
