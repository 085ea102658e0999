"""An example, as a user runs it, on four hosts of which one is lost and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench.apart.world import ROOT, apart
from tests.apart.seen import SOON

SCRIPT = str(ROOT / "examples" / "train_nnx.py")
STEPS, TOLERANCE = 300, 1e-5  # as the example says
OPTIONS = ("--hosts", "3:4", "--code", "3+1", *SOON)


def undisturbed(base: Path, out: Path) -> subprocess.Popen[bytes]:
    """The same training, by one process on its own."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--steps", str(STEPS), "--out", str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAXFT_RUN_DIR": str(base / "alone")},
        stdout=subprocess.DEVNULL,
    )


def in_order(text: str, *words: str) -> None:
    """A person who reads on finds these, one after the other."""
    at = 0
    for word in words:
        assert word in text[at:], f'no "{word}" after\n{text[:at]}\nin\n{text[at:]}'
        at = text.index(word, at) + len(word)


def test_a_world_shrinks_and_grows_and_trains_what_it_would_have(base: Path) -> None:
    alone, shared = base / "alone.npz", base / "shared.npz"
    ranks = [sys.executable, SCRIPT, "--steps", str(STEPS), "--every", "5", "--step-s", "0.05"]
    with apart(base, "a", "b", "c", "d") as world:
        a, d = world["a"], world["d"]

        def committed(generation: int) -> int:
            found = a.events("committed", generation=generation)
            return max((one["step"] for one in found), default=-1)

        for host in world.hosts.values():
            host.start(*OPTIONS, ranks=[*ranks, "--out", str(shared)])
        world.until(lambda: committed(1) >= 10, "four hosts protect snapshots")
        with undisturbed(base, alone) as reference:
            world.network.kill("d")
            known = committed(1)
            world.until(lambda: committed(2) >= known + 10, "three hosts protect snapshots")
            assert a.events("settled", generation=2)[0]["step"] >= known
            d.start(*OPTIONS, ranks=[*ranks, "--out", str(shared)])
            world.until(lambda: committed(3) >= 0, "four hosts protect snapshots again")
            assert reference.wait(60) == 0
        for host in world.hosts.values():
            assert host.ended() == 0, world.text()

        formed = [
            (one["number"], one["hosts"])
            for host in world.hosts.values()
            for one in host.events("generation_formed")
        ]
        four = ["a", "b", "c", "d"]
        assert sorted(formed) == [(1, four), (2, four[:3]), (3, four)]
        # The newest that was protected before the world grew is what it goes on from.
        step = committed(2)
        assert a.events("settled", generation=3)[0]["step"] == step
        in_order(
            a.text(),
            "generation 1 (a, b, c, d; code 3+1): 4 hosts are there",
            "generation 2 (a, b, c; code 2+1): d is lost",
            "goes on from step",
            "d can join generation 2",
            "generation 3 (a, b, c, d; code 3+1): d is there, so the world grows from 3 to 4 hosts",
            f"goes on from step {step}",
            f"going on from step {step}, on 4 devices",
            f"step {STEPS}: loss",
        )
    with np.load(alone) as one, np.load(shared) as other:
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_allclose(other[name], one[name], atol=TOLERANCE, rtol=0)
