"""Eight CPU devices in one process, set before JAX looks for devices."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
