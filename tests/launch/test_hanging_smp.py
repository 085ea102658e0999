"""SMPs that stand still under ranks that train: nothing of the training is lost."""

from __future__ import annotations

import os
import signal

import pytest

from tests.launch.training import train


@pytest.mark.parametrize("host", ["host0", "host1"])
def test_one_that_hangs_is_started_again_and_training_goes_on(host: str) -> None:
    """Host 0 is the root's."""
    with train(5, "--silence-s", "1") as training:
        world = training.world
        training.until("latest", 10)
        arena = world.wait("smp_started", host=host)["arena"]
        os.kill(world.pid(host, "smp"), signal.SIGSTOP)
        world.wait("held")
        assert world.wait("smp_restarted", host=host)["arena"] == arena
        world.wait("held_over")
        training.until("latest", 20 + max(training.newest(rank, "step") for rank in (0, 1)))
        assert training.end() == 0, world.text()
        assert len(world.events("generation_formed")) == 1, world.text()
        assert not world.events("fault")
        steps = [one["step"] for one in training.said(0) if "step" in one]
        assert steps == list(range(1, len(steps) + 1))
        world.assert_nothing_left()
