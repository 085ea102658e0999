"""A manager's snapshot, as processes that are none of its script write it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as plain
import pytest

import jaxft.orbax as ocp
from jaxft.errors import ConfigError
from jaxft.export import Copied, copy
from jaxft.orbax import exported
from jaxft.orbax.exported import stored, write_as_saved
from tests.orbax.test_bucket import on_storage
from tests.orbax.test_manager import Make, save, state


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "6"),
        ({"step_prefix": "ckpt"}, "ckpt_6"),
        ({"step_prefix": "a_b", "step_format_fixed_length": 4}, "a_b_0006"),
    ],
)
def test_an_export_has_the_name_that_the_manager_gives(
    make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, options: Any, name: str
) -> None:
    """Its items too, metrics and custom metadata."""
    manager = make(save_interval_steps=4, best_fn=lambda metrics: metrics["loss"], **options)
    for step in range(7):
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state(step)), note=ocp.args.JsonSave([step])
            ),
            metrics={"loss": 1.0 / (step + 1)},
            custom_metadata={"by": "me"},
        )
    manager.wait_until_finished()
    newest = manager._memory.newest()
    copied = copied_of(manager._memory, newest)
    looked: list[str] = []
    write_as_saved(
        str(tmp_path / "run"), copied, may_commit=lambda: looked.append("looked"), writer="test"
    )
    assert looked
    assert (tmp_path / "run" / name).is_dir()
    assert [(entry.step, entry.id) for entry in stored(str(tmp_path / "run"))][-1] == (
        6,
        newest.id,
    )
    with plain.CheckpointManager(
        tmp_path / "run",
        options=plain.CheckpointManagerOptions(best_fn=lambda m: m["loss"], **options),
    ) as unchanged:
        assert sorted(unchanged.all_steps()) == [0, 4, 6]
        restored = unchanged.restore(
            6,
            args=plain.args.Composite(
                state=plain.args.StandardRestore(state(0)), note=plain.args.JsonRestore()
            ),
        )
        assert (restored.state["n"], restored.note) == (6, [6])
        assert unchanged.metrics(6) == {"loss": 1.0 / 7}
        assert unchanged.metadata(6).custom_metadata["by"] == "me"


def copied_of(memory: Any, newest: Any) -> Copied:
    """The snapshot, as an exporter has it."""
    reader = memory._reader(newest)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("host",))
    return copy(newest.id, "j", (), reader.manifests, reader.assemble, mesh)


def test_a_name_that_only_the_script_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match='step 6 is called "epoch-six" by its manager'):
        exported._name_format(6, "epoch-six")


def test_what_may_not_be_committed_is_not_seen(
    make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make(save_interval_steps=4)
    for step in range(2):
        save(manager, step)
    manager.wait_until_finished()
    copied = copied_of(manager._memory, manager._memory.newest())

    def refuse() -> None:
        raise ConfigError("not any more")

    with pytest.raises(ConfigError, match="not any more"):
        write_as_saved(str(tmp_path / "run"), copied, may_commit=refuse, writer="test")
    assert on_storage(tmp_path / "run") == [0]
