"""One host whose only rank is this very process: the whole way of a snapshot, without a start-up.

Each `open` is a new generation of the world, as after a crash of the script. The process has eight
CPU devices, which is said here, before JAX looks for devices.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import jaxft
from jaxft.device.assembly import Table, match
from jaxft.errors import JaxftError
from jaxft.group.world import Code
from jaxft.restorer import SnapshotReader
from tests.multiprocess.jax_world import WAIT_S, Host, generation_of, seat

jax.config.update("jax_num_cpu_devices", 8)


class Lone:
    """The host, and the snapshotters that were opened on it. `options` are the host's."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.host = Host("h0", directory, **options)
        self.generation = 0
        self._fresh = True
        self._opened: list[jaxft.Snapshotter] = []
        self._environ = pytest.MonkeyPatch()

    def enter(self, *, faults: str = "") -> None:
        """A new generation, whose rank is this process. `faults` are those of the rank."""
        self.generation += 1
        generation = generation_of([self.host], self.generation, Code(), fresh=self._fresh)
        self._fresh = False
        self.host.enter(generation)
        for key, value in seat(self.host, generation).to_environ().items():
            self._environ.setenv(key, value)
        self._environ.setenv("JAXFT_FAULTS", faults)

    def open(self, *, faults: str = "", **options: Any) -> jaxft.Snapshotter:
        """A new generation, and its rank's snapshotter. `faults` are those of the rank."""
        self.enter(faults=faults)
        snapshotter = jaxft.Snapshotter(timeout_s=WAIT_S, **options)
        self._opened.append(snapshotter)
        return snapshotter

    def begin_anew(self) -> None:
        """What the memory holds counts no more."""
        self._fresh = True

    def leave(self) -> None:
        """The rank is gone; the host lives on."""
        for snapshotter in self._opened:
            try:
                snapshotter.close(timeout_s=1.0, failing=True)
            except JaxftError as error:
                print(f"left behind: {error}")
        self._opened.clear()
        self._environ.undo()

    def close(self) -> None:
        self.leave()
        self.host.close()


def read_back(snapshotter: jaxft.Snapshotter, receipt: jaxft.Receipt, like: Any) -> Any:
    """What the memory holds of the newest snapshot, read while training goes on."""
    receipt.protected.result(WAIT_S)
    assert receipt.id is not None
    slot = snapshotter.client.granted[receipt.id.seq].slot
    reader = SnapshotReader(
        snapshotter.client, receipt.id, (slot, 0), attempt=None, timeout_s=WAIT_S
    )
    return reader.assemble(match(like, Table.of(reader.manifests.values())))
