"""The persist helper of one host: `python -m jaxft.persist`, started by the agent for one order.

    started -> ready -> the snapshot is decided -> copied -> written
               |        |                          |         |
               |        |                          |         all helpers have written, the first
               |        |                          |         one has given the checkpoint its name
               |        |                          the slot is let go
               |        committed snapshots go on meanwhile, the order names one of them
               JAX and Orbax are imported, the helpers' own world is formed

The rules:
- The helpers of all hosts are a JAX world of their own, on CPU, with one process a host. Each reads
  its share of the arrays out of its SMP, through the same checks as a restore.
- Only the copy runs at normal priority; what comes before and after it leaves the cores to the
  training. (A thread cannot get its priority back, so that what comes before is another thread's.)
- A helper may be killed at any moment: what was a checkpoint stays one, see `checkpoint`.
- A checkpoint gets its name only while the order holds and its generation is the store's newest.
- A helper ends when its order does, when its SMP lets it go, and after WHOLE_S at the latest. It
  leaves by `os._exit`: threads of JAX and Orbax may wait for helpers that are dead.

Its variables are a rank's (see `config`), with JAXFT_RANK the host's index and JAXFT_RANKS the
number of hosts, and JAXFT_PERSIST, the order's number. JAX is imported after they were read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxft import config
from jaxft.apart import begin_apart, lower_priority
from jaxft.errors import ConfigError, JaxftError, SnapshotLost
from jaxft.faults import reach
from jaxft.group.messages import PersistOrder, RankOptions
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from jaxft.launch.standing import check_current

_log = logging.getLogger(__name__)

CONNECT_S = 60.0
RECONNECT_S = 20.0
MEET_S = 120  # for all helpers to be there
COPY_S = 120.0
RESULT_S = 60.0
CAUSE_S = 1.0
WHOLE_S = 3600.0
LOOPBACK = "127.0.0.1"


def main() -> int:
    """Persists once; returns the exit status."""
    env, number = config.RankEnv.from_environ(), config.persist_number()
    if env is None or number is None:
        raise ConfigError("a persist helper is started by the agent, with its JAXFT_* variables")
    begin_apart(env, "persist")
    hello = greeting("helper", generation=env.generation, nonce=env.nonce, rank=env.rank)
    try:
        client = SmpClient(Path(env.smp), hello, connect_s=CONNECT_S, reconnect_s=RECONNECT_S)
    except JaxftError as error:
        _log.error("%s", error)
        return 1
    return Helper(client, env, number).run()


class Helper:
    """One host's part in one order."""

    def __init__(self, client: SmpClient, env: config.RankEnv, number: int) -> None:
        self.client = client
        self.env = env
        self.number = number
        self._written = False
        self._wanted = client.welcome.options

    def run(self) -> int:
        """Does it; returns the exit status. 0: the checkpoint is written, by all."""
        threading.Thread(target=self._watch, daemon=True, name="jaxft-persist-watch").start()
        try:
            return self._persist()
        except Exception as error:  # noqa: BLE001 (the root must hear of whatever it is)
            _log.exception("persist %d failed", self.number)
            detail = f"{type(error).__name__}: {error}".partition("\n")[0][:500]
            if self.env.ranks > 1:
                # It may fail because another helper died: that is the cause, and ends the order.
                with contextlib.suppress(JaxftError):
                    self.client.wait(self._over, CAUSE_S, "the end of this persist")
            self._say("failed", detail=detail)
            _log.error("persist %d failed: %s", self.number, detail)
            return 1

    def _persist(self) -> int:
        with contextlib.ExitStack() as stack:
            coordinator = ""
            if self.env.rank == 0 and self.env.ranks > 1:
                host = self.env.coordinator.rpartition(":")[0] or LOOPBACK
                reserved = stack.enter_context(_reserve(host.strip("[]")))
                coordinator = f"{host}:{reserved.getsockname()[1]}"
            self._say("starting", coordinator=coordinator)
            with ThreadPoolExecutor(1) as low:
                low.submit(self._prepare).result(CONNECT_S + 2 * MEET_S)
        self._say("ready")
        self._reach("ready")
        told = self.client.wait(self._decided, WHOLE_S, "the word which snapshot to persist")
        self._reach("decided")
        self._write(told)
        if self.env.ranks > 1:
            import jax

            jax.distributed.shutdown()  # type: ignore[no-untyped-call]
        self._reach("written")
        self._written = True
        self._say("written")
        order = self.client.wait(self._over, RESULT_S, "the word that all have written")
        return 0 if self._is_good(order) else 1

    def _prepare(self) -> None:
        """All that can be done before it is known what to write."""
        lower_priority()
        import jax
        import orbax.checkpoint  # noqa: F401
        from jax.experimental import multihost_utils

        import jaxft.export
        import jaxft.restorer  # noqa: F401
        from jaxft.meeting import meet

        if self.env.ranks > 1:
            coordinator = self.client.wait(
                lambda: self._order_is("coordinator"), MEET_S, "the first host's helper"
            ).coordinator
            meet(
                coordinator,
                self.env.ranks,
                self.env.rank,
                address=self.env.address,
                timeout_s=MEET_S,
                leave_timeout_s=int(RESULT_S),
            )
            # Connects them: the first collective would else come while the checkpoint is written.
            multihost_utils.sync_global_devices("ready")
        jax.devices()

    def _write(self, told: p.PersistTold) -> None:
        """Copies the snapshot, lets it go, and writes it."""
        import jax
        import numpy as np

        from jaxft.export import copy, write
        from jaxft.restorer import SnapshotReader

        order, options = told.order, self.wishes()
        if order.id is None or options is None or not options.directory:
            raise ConfigError("this host's ranks named no directory for checkpoints")
        reader = SnapshotReader(self.client, order.id, told.own, attempt=None, timeout_s=COPY_S)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("host",))
        job, lineage = self.env.job, told.lineage
        copied = copy(order.id, job, lineage, reader.manifests, reader.assemble, mesh)
        self._say("copied")
        self._reach("copied")
        lower_priority()
        del reader
        self._reach("writing")
        write(
            options.directory,
            *copied,
            keep=options.persist_keep,
            may_commit=self._may_commit,
            writer=f"persist{self.number}",
        )

    def wishes(self) -> RankOptions | None:
        """What this host's ranks want. An SMP that was started again does not know it before they
        have come back; then what the one before it has said counts."""
        self._wanted = self.client.welcome.options or self._wanted
        return self._wanted

    # -------------------------------------------------------------------- the order

    def _order_is(self, known: str) -> PersistOrder | None:
        """The order, once it says this."""
        order = self.client.persist
        is_ours = order is not None and order.number == self.number
        return order if is_ours and getattr(order, known) else None

    def _decided(self) -> p.PersistTold | None:
        return self.client.persist_told if self._order_is("id") is not None else None

    def _may_commit(self) -> None:
        """The last look before the checkpoint can be seen."""
        self._reach("committing")
        order = self.client.persist
        if self.client.failure is not None:
            raise self.client.failure
        if order is None or order.number != self.number or not order.wanted:
            raise SnapshotLost("the order was withdrawn while its checkpoint was written")
        env = self.env
        check_current(config.store_url(), env.job, env.generation, env.nonce)

    def _watch(self) -> None:
        """Ends this process with its order, wherever it is waiting."""
        try:
            order = self.client.wait(self._over, WHOLE_S, "the end of this persist")
        except JaxftError as error:
            _log.error("persist %d is given up: %s", self.number, error)
            os._exit(1)
        if not self._is_good(order):
            reason = order.result if order.number == self.number else "another has begun"
            _log.error("persist %d is over: %s", self.number, reason)
            os._exit(1)

    def _is_good(self, order: PersistOrder) -> bool:
        """Did our order end well? The root's next one may be heard instead of its result."""
        if order.number == self.number:
            return order.result == "written"
        return self._written

    def _over(self) -> PersistOrder | None:
        order = self.client.persist
        if order is None or (order.number == self.number and order.wanted):
            return None
        return order if order.number >= self.number else None

    # -------------------------------------------------------------------- saying things

    def _say(self, state: str, *, coordinator: str = "", detail: str = "") -> None:
        message = p.HelperState(
            number=self.number, state=state, coordinator=coordinator, detail=detail
        )
        _log.info("persist %d: %s", self.number, state)
        self.client.say(message, open_as="helper")

    def _reach(self, point: str) -> None:
        reach(f"persist.{point}", host=self.env.host, rank=self.env.rank, number=self.number)


def _reserve(host: str) -> socket.socket:
    """A port that nobody else is given and that the coordinator, which sets the same option, can
    still listen on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, 0))
    return reserved


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
