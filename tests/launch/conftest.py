"""A real etcd for the tests that need one, where its program is installed."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft import launch
from jaxft.config import StoreAccess
from jaxft.errors import StoreError
from jaxft.launch.stores import open_store

START_S = 20.0

collect_ignore = (
    []
    if shutil.which("etcd")
    else [
        *("test_store_etcd.py", "test_store_etcd_private.py", "test_store_etcd_members.py"),
        "test_export_etcd.py",
    ]
)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: another process may take one before its user binds it."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


# Dies with the test run, so that one that is killed leaves no etcd.
DIES_WITH_US = (sys.executable, "-I", "-S", str(Path(launch.__file__).with_name("rank_exec.py")))


def start_etcd(
    program: str, directory: Path, client: str = "", options: tuple[str, ...] = ()
) -> tuple[subprocess.Popen[bytes], str]:
    """Starts one, by default on any port and without TLS; returns its URL."""
    free, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    client = client or free
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD")}
    if platform.machine() in ("aarch64", "arm64"):
        environment["ETCD_UNSUPPORTED_ARCH"] = "arm64"
    # Short intervals, since etcd's shortest lease is 1.5 times the election timeout.
    arguments = (
        f"--data-dir {directory} --listen-client-urls {client} --advertise-client-urls {client} "
        f"--listen-peer-urls {peer} --initial-advertise-peer-urls {peer} "
        f"--initial-cluster default={peer} --heartbeat-interval 50 --election-timeout 500"
    )
    with open(f"{directory}.log", "ab") as log:
        process = subprocess.Popen(
            [*DIES_WITH_US, str(os.getpid()), program, *arguments.split(), *options],
            env=environment,
            stdout=log,
            stderr=log,
        )
    return process, client.replace("http", "etcd")


def answers(process: subprocess.Popen[bytes], url: str, access: StoreAccess | None = None) -> bool:
    """Waits until etcd answers; False if it ended (its port was taken) or took too long."""
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            open_store(url, job="ready?", access=access).close()
            return True
        except StoreError:
            time.sleep(0.05)
    return False


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("etcd")
    assert program, "etcd is not installed: apt-get install etcd-server"
    directory = tmp_path_factory.mktemp("etcd")
    for attempt in range(3):
        process, url = start_etcd(program, directory / str(attempt))
        try:
            if answers(process, url):
                yield url
                return
        finally:
            process.kill()
            process.wait(timeout=10)
    pytest.fail(f"etcd did not start; its logs are in {directory}")
