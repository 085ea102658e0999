"""A step's own program is kept, and given back to the step of the next start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from jaxft.device.executables import Executables
from jaxft.device.kept_step import bring_back

COMPILED = "Finished XLA compilation of jit(step)"


def new_step(*, scale: float = 0.5, calls_back: bool = False) -> Any:
    """A step as the next start of the script makes it."""

    def step(state: dict[str, jax.Array], power: int) -> tuple[dict[str, jax.Array], jax.Array]:
        moved = jnp.tanh(state["w"] * scale) ** power
        if calls_back:
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            moved = moved + jax.pure_callback(lambda: np.float32(1), shape)
        return {"w": moved}, moved.sum()

    return jax.jit(step, donate_argnums=0, static_argnums=1)


def start() -> dict[str, jax.Array]:
    return {"w": jnp.linspace(-1, 1, 999)}


def run(executables: Executables, step: Any) -> tuple[bytes, jax.Array]:
    """The bytes of a first call's outputs, and its donated input."""
    state = start()
    keep = bring_back(executables, step, (state, 3), {})
    moved, loss = step(state, 3)
    keep()
    return np.asarray(moved["w"]).tobytes() + np.asarray(loss).tobytes(), state["w"]


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Any:
    """How often a step was compiled so far."""
    caplog.set_level(logging.DEBUG, "jax._src.dispatch")
    return lambda: sum(COMPILED in one.getMessage() for one in caplog.records)


def test_the_next_start_compiles_no_step_and_computes_the_same(
    tmp_path: Path, compiled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    executables = Executables(tmp_path / "kept")
    first, _ = run(executables, new_step())
    assert (compiled(), len(list((tmp_path / "kept").iterdir()))) == (1, 1)
    step = new_step()
    second, donated = run(executables, step)
    assert second == first
    assert donated.is_deleted()
    step(step(start(), 3)[0], 3)
    assert compiled() == 1
    run(executables, new_step(scale=0.25))
    assert (compiled(), len(list((tmp_path / "kept").iterdir()))) == (2, 2)
    step(start(), 2)  # with other arguments it is compiled as ever
    assert compiled() == 3
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_what_jax_had_kept_itself_is_not_kept_once_more(tmp_path: Path, compiled: Any) -> None:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    compilation_cache.reset_cache()
    try:
        for name, value in zip(names, (str(tmp_path / "jax"), 0), strict=True):
            jax.config.update(name, value)
        first, _ = run(Executables(tmp_path / "first"), new_step())
        jax.clear_caches()
        again, _ = run(Executables(tmp_path / "again"), new_step())
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert (tmp_path / "first").exists()
    assert not (tmp_path / "again").exists()
    assert again == first


def test_what_is_bound_to_its_process_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executables = Executables(tmp_path / "kept")
    run(executables, new_step(calls_back=True))
    assert not (tmp_path / "kept").exists()
    bring_back(executables, lambda state: state, (start(),), {})()
    bring_back(executables, new_step(), ("no array", 3), {})()
    assert not (tmp_path / "kept").exists()
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
