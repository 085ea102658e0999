"""The exporter of one host: `python -m jaxft.exporter`, a rank of an export generation.

    all hosts say what they hold -> the root chooses, as for any generation (`group.ending`)
        -> each exporter reads its share of the arrays -> all have verified -> written by all,
           and the first one gives the checkpoint its name

It is started by the agent with a rank's variables, JAXFT_EXPORT and JAXFT_STORE (see `config`). No
rank trains any more, so it works at normal priority. It ends with status 0 once storage has the
newest snapshot, whoever wrote it, and leaves by `os._exit`: threads of JAX and Orbax may wait for
exporters that are dead.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jaxft import config
from jaxft.apart import begin_apart
from jaxft.bucket import directory_at
from jaxft.errors import ConfigError, NothingRecoverable
from jaxft.faults import reach
from jaxft.group.messages import RankOptions
from jaxft.group.world import Export
from jaxft.host import protocol as p
from jaxft.host.client import SmpClient, greeting
from jaxft.launch.standing import check_current

if TYPE_CHECKING:
    from jaxft.export import Copied

_log = logging.getLogger(__name__)
WAIT_S = 120.0


def main() -> int:
    """Exports; returns the exit status."""
    env, text = config.RankEnv.from_environ(), config.export()
    if env is None or not text:
        raise ConfigError("an exporter is started by the agent, with its JAXFT_* variables")
    begin_apart(env, "export")
    try:
        Exporter(env, msgspec.json.decode(text, type=Export)).run()
    except Exception as error:  # noqa: BLE001 (its last line is what the agent says)
        _log.exception("the newest snapshot is not exported")
        print(f"{type(error).__name__}: {error}".partition("\n")[0], flush=True)
        return 1
    return 0


class Exporter:
    """One host's part.

    Args:
        env: its seat.
        export: where to.
    """

    def __init__(self, env: config.RankEnv, export: Export) -> None:
        self.env = env
        self.export = export
        self.store = config.store_url()
        # Before anything is written: a directory that cannot be read is no empty one.
        if export.keep:
            self.stored = tuple(one.entry for one in directory_at(export.directory).found())
        else:
            from jaxft.orbax.exported import stored

            self.stored = stored(export.directory)

    def run(self) -> None:
        """Writes what the root chooses, unless storage has it already.

        Raises:
            NothingRecoverable: memory cannot give back what was committed.
            JaxftError: it could not be read or written.
        """
        import jax

        from jaxft.restorer import agree
        from jaxft.startup import initialize

        initialize()
        options = RankOptions(
            every_steps=1,
            directory=self.export.directory,
            persist_keep=self.export.keep,
            storage=self.stored,
        )
        env = self.env
        hello = greeting(
            "rank", generation=env.generation, nonce=env.nonce, rank=env.rank, options=options
        )
        client = SmpClient(Path(env.smp), hello, connect_s=WAIT_S)
        copied = agree(client, lambda told: self._copy(client, told), WAIT_S)
        if copied is not None:
            reach("export.copied", host=env.host, rank=env.rank)
            self._write(copied)
            _log.info("step %d is written", copied.record.step)
        if env.ranks > 1:
            jax.distributed.shutdown()  # type: ignore[no-untyped-call]

    def _write(self, copied: Copied) -> None:
        from jaxft.export import write
        from jaxft.orbax.exported import write_as_saved

        directory, keep = self.export.directory, self.export.keep
        writer = f"export{self.env.generation}"
        if keep:
            write(directory, *copied, keep=keep, may_commit=self._may_commit, writer=writer)
        else:
            write_as_saved(directory, copied, may_commit=self._may_commit, writer=writer)

    def _copy(self, client: SmpClient, told: p.PlanTold) -> Copied | None:
        """This host's share of the chosen snapshot; None where storage has the newest."""
        import jax
        import numpy as np

        from jaxft.export import copy
        from jaxft.restorer import SnapshotReader

        plan = told.plan
        if plan.chosen is None and plan.storage is None:
            raise NothingRecoverable("; ".join(plan.reasons) or "no host holds a snapshot")
        if plan.chosen is None or plan.chosen in {entry.id for entry in self.stored}:
            _log.info("storage has step %d already", plan.step)
            return None
        if not self.export.keep:
            from jaxft.orbax.exported import is_deleted

            if is_deleted(self.export.directory, plan.chosen):
                _log.info("step %d was deleted by its script", plan.step)
                return None
            ahead = max((entry.step for entry in self.stored), default=plan.step - 1)
            if ahead >= plan.step:
                raise ConfigError(
                    f"storage has step {ahead}, and Orbax writes none up to it: step {plan.step} "
                    "is in memory only"
                )
        reader = SnapshotReader(
            client, plan.chosen, told.own, attempt=plan.attempt, timeout_s=WAIT_S
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("host",))
        job, lineage = self.env.job, told.lineage
        return copy(plan.chosen, job, lineage, reader.manifests, reader.assemble, mesh)

    def _may_commit(self) -> None:
        reach("export.committing", host=self.env.host, rank=self.env.rank)
        check_current(self.store, self.env.job, self.env.generation, self.env.nonce)


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
