"""The snapshot management process: `python -m jaxft.host.smp`, started and watched by the agent.

One loop waits for peers, local clients and jobs, and feeds what happens to the core. The process
ends when the agent says so, or when it has been without an agent for `orphan_s`. SIGINT and SIGTERM
do not end it: what tells a whole machine to end must leave the agents time for a last snapshot.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from jaxft import config, faults
from jaxft.errors import JaxftError, WireError
from jaxft.group.account import ACCOUNT_KEY
from jaxft.group.timing import Timing
from jaxft.host import protocol as p
from jaxft.host.accountant import Accountant, account_of
from jaxft.host.clients import Clients
from jaxft.host.descriptors import allow_all
from jaxft.host.desk import Desk
from jaxft.host.driver import Driver
from jaxft.host.holds import HOLD_PREFIX, Holds
from jaxft.host.job_key import KEY_BYTES, JobKey
from jaxft.host.local import LocalListener
from jaxft.host.pace import Pace
from jaxft.host.shares import Shares
from jaxft.host.trust import Trust
from jaxft.host.wire import Refused, Shared
from jaxft.host.wire_zmq import ZmqNetwork

_log = logging.getLogger("jaxft.smp")
# How often the loop turns at least, with an agent and without, and how often time passes in the
# core at most; all that must be quick wakes the loop itself.
TURN_S = 5.0
ALONE_S = 0.5
TICK_S_MIN = 0.02
ORPHAN_S = 600.0


class Smp:
    """The process: memory, network, clients, and the loop.

    Args:
        job, host: names.
        directory: this user's alone; the sockets lie in it.
        shares: new memory, or that of a dead SMP.
        timing: the root's patience.
        orphan_s: how long to live without an agent.
        memory_bytes_max: what the snapshot slots may take, if not all that there is.
        bandwidth_max: bytes a second that coding may pull from peers; 0 is no limit.
        listen: where peers reach this SMP, "control,bulk"; "": at Unix sockets in the directory.
        trust: what it and its peers know each other by, if they are on other machines.
    """

    def __init__(
        self,
        *,
        job: str,
        host: str,
        directory: Path,
        shares: Shares,
        timing: Timing,
        orphan_s: float,
        memory_bytes_max: int | None = None,
        bandwidth_max: float = 0.0,
        listen: str = "",
        trust: Trust | None = None,
    ) -> None:
        self.orphan_s = orphan_s
        self.shares = shares
        ledger = shares.load()
        self.network = ZmqNetwork(trust)
        # The same for every start on this memory: peers know it from the generation's record.
        tag = ledger.arena[:8]
        control, bulk = f"ipc://{directory}/c{tag}", f"ipc://{directory}/b{tag}"
        if listen:
            control, _, bulk = listen.partition(",")
        self.endpoint = self.network.endpoint(control)
        self.accountant = Accountant(self.endpoint.wake)
        self.holds = Holds(self.endpoint.wake)
        self.bulk = self.network.serve(bulk, self._provide)
        self.clients = Clients()
        self.driver = Driver(
            job=job,
            host=host,
            address=f"{self.endpoint.address},{self.bulk.address}",
            shares=shares,
            ledger=ledger,
            network=self.network,
            endpoint=self.endpoint,
            clients=self.clients,
            timing=timing,
            memory_bytes_max=memory_bytes_max,
            pace=Pace(bandwidth_max) if bandwidth_max else None,
            trust=trust.name if trust is not None else "",
        )
        self.desk = Desk(self.driver, self.clients)
        self.listener = LocalListener(directory / "smp.sock")
        self._agent_at_s = time.monotonic()
        self._alone = True

    def run(self) -> None:
        """Serves until told to stop or orphaned."""
        ticked_s = 0.0
        while not self.desk.stopping and not self._orphaned():
            self.clients.beat()
            due_s = max(self.driver.due_s, ticked_s + TICK_S_MIN)
            turn_s = ALONE_S if self._alone else TURN_S
            wait_s = min(turn_s, max(0.0, due_s - time.monotonic()))
            fds = [self.listener.fileno(), *self.clients.fds(), *self.driver.writer_fds()]
            ready = self.endpoint.wait(fds, wait_s)
            for payload in self.endpoint.receive(0):
                self.driver.hear(payload)
            self._serve_clients(ready)
            self.driver.jobs.reap()
            self.driver.try_frozen()
            if time.monotonic() >= due_s:
                self.driver.tick()
                ticked_s = time.monotonic()
            self.desk.attend_waiting()
            self.accountant.answer(lambda: account_of(self.driver, self.clients))
            self.holds.answer(self.driver)
            self._let_go()

    def _provide(self, key: bytes, offset: int, nbytes: int) -> memoryview | Shared | Refused:
        """Answers a bulk read, in a thread of the server's."""
        if key == ACCOUNT_KEY:
            return self.accountant.provide(nbytes)
        if key.startswith(HOLD_PREFIX):
            return self.holds.provide(key)
        return self.shares.provide(key, offset, nbytes)

    def _serve_clients(self, ready: list[int]) -> None:
        for fd in ready:
            client = self.clients.at(fd)
            if client is not None:
                self.desk.serve(client)
        # A new connection may get the number of one that has just ended.
        self._let_go()
        if self.listener.fileno() in ready:
            channel = self.listener.accept()
            if channel is not None:
                self.clients.add(channel)

    def _let_go(self) -> None:
        for client in self.clients.drop_ended():
            self.desk.left(client)

    def _orphaned(self) -> bool:
        self._alone = not any(True for _ in self.clients.seated("agent"))
        if not self._alone:
            self._agent_at_s = time.monotonic()
        elif not self.listener.is_reachable:
            _log.warning(
                "no agent, and the socket %s that one could find this SMP by is gone: this SMP "
                "ends and its memory is let go",
                self.listener.path,
            )
            return True
        alone_s = time.monotonic() - self._agent_at_s
        if alone_s > self.orphan_s:
            _log.warning("no agent for %.0f s: this SMP ends and its memory is let go", alone_s)
            return True
        return False

    def close(self) -> None:
        self.driver.jobs.cancel()
        self.listener.close()
        self.clients.close()
        self.endpoint.close()
        self.bulk.close()
        self.network.close()


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jaxft.host.smp", description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--dir", required=True, type=Path, help="directory of this host's sockets")
    parser.add_argument("--fds", default="", help="inherited descriptors: ledger,slot0,slot1")
    parser.add_argument("--listen", default="", help="control,bulk addresses; else Unix sockets")
    parser.add_argument("--key-fd", type=int, default=-1, help="a pipe that the job's key is in")
    parser.add_argument("--trust-network", action="store_true", help="do not encrypt")
    parser.add_argument("--bandwidth-max", type=float, default=0.0, help="bytes a second; 0: any")
    parser.add_argument("--orphan-s", type=float, default=ORPHAN_S)
    parser.add_argument("--silence-s", type=float, default=Timing().silence_s)
    parser.add_argument("--rejoin-s", type=float, default=Timing().rejoin_s)
    parser.add_argument("--persist-s", type=float, default=Timing().persist_s)
    return parser.parse_args(argv)


def _trust(args: argparse.Namespace) -> Trust | None:
    """What the agent has handed over, in a pipe that nobody else can read."""
    if args.key_fd < 0:
        return None
    with open(args.key_fd, "rb") as pipe:
        return Trust(JobKey(pipe.read(KEY_BYTES)), clear=args.trust_network)


def main(argv: list[str] | None = None) -> int:
    """Runs an SMP; returns the exit status."""
    args = _arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {args.host} smp[{os.getpid()}] %(levelname)s %(name)s: %(message)s",
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    allow_all()
    faults.arm(config.faults_text())
    timing = Timing(silence_s=args.silence_s, rejoin_s=args.rejoin_s, persist_s=args.persist_s)
    try:
        fds = [int(fd) for fd in args.fds.split(",")] if args.fds else []
        shares = Shares.adopt(fds) if fds else Shares.create(args.host)
        smp = Smp(
            job=args.job,
            host=args.host,
            directory=args.dir,
            shares=shares,
            timing=timing,
            orphan_s=args.orphan_s,
            memory_bytes_max=config.memory_bytes_max(),
            bandwidth_max=args.bandwidth_max,
            listen=args.listen,
            trust=_trust(args),
        )
    except JaxftError as error:
        _log.error("cannot start: %s", error)
        return p.CANNOT_LISTEN if isinstance(error, WireError) else 1
    try:
        smp.run()
    finally:
        smp.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
