"""What the processes that write checkpoints have in common: a JAX of their own, apart from the
training's. Nothing here imports JAX, since its variables are read when it is imported.
"""

from __future__ import annotations

import logging
import os
import threading

from jaxft import config, faults

NICE = 10


def begin_apart(env: config.RankEnv, what: str) -> None:
    """How such a process begins: its log, faults on purpose, and a JAX of its own.

    Args:
        what: it is called in the log.
    """
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {env.host} {what}[{os.getpid()}] %(levelname)s %(message)s",
    )
    logging.getLogger("absl").setLevel(logging.WARNING)
    faults.arm(config.faults_text())
    set_jax_apart(env.ranks)


def set_jax_apart(processes: int) -> None:
    """JAX on one CPU device, whatever the variables say that the ranks were started with.

    Args:
        processes: of the world that it will be part of.
    """
    for name in list(os.environ):
        if name.startswith(("JAX_", "XLA_", "LIBTPU_")):
            del os.environ[name]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    os.environ["JAX_ENABLE_X64"] = "true"
    os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "false"
    if processes > 1:
        os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"


def lower_priority() -> None:
    """For this thread, and the threads that it starts from now on (see setpriority(2))."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
