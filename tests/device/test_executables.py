"""Compiled programs are kept on disk, and used only if nobody else can have written them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxft.device import executables
from jaxft.device.executables import MAGIC, Executables, key_of

KEY = "ab" * 32
DEVICES = jax.devices()[:1]


def program(factor: int = 2) -> Any:
    return jax.jit(lambda x: x * factor).lower(jnp.arange(4.0))


def load(directory: Path, lowered: Any) -> Any:
    return Executables(directory).load(KEY, lowered.in_tree, lowered.out_tree, DEVICES)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    directory = tmp_path / "kept"
    Executables(directory).keep(KEY, program().compile())
    return directory


def test_what_is_kept_is_loaded_and_computes_the_same(kept: Path) -> None:
    found = load(kept, program())
    assert found(jnp.arange(4.0)).tolist() == [0.0, 2.0, 4.0, 6.0]
    (path,) = kept.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_mode & 0o777 == 0o700


def test_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path / "nowhere", program()) is None
    assert caplog.text == ""


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "readable": (lambda path: path.chmod(0o644), "it has mode 644, expected 600"),
    "open": (lambda path: path.parent.chmod(0o755), "its directory has mode 755, expected 700"),
    "link": (lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"), "OSError"),
    "flipped": (
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
        "its checksum is another one",
    ),
    "short": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "its checksum"),
    "empty": (lambda path: path.write_bytes(b""), "its checksum"),
    "directory": (lambda path: path.unlink() or path.mkdir(), "IsADirectoryError"),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_passed_over_with_one_line(
    kept: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    do, reason = DAMAGES[damage]
    (path,) = kept.iterdir()
    do(path)
    assert load(kept, program()) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "compiled anew" in record.getMessage()
    assert reason in record.getMessage()


def test_another_users_file_is_passed_over(
    kept: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert load(kept, program()) is None
    assert "belongs to user" in caplog.text


def test_what_jax_cannot_load_is_passed_over(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its checksum is right: another version wrote it."""
    (path,) = kept.iterdir()
    Executables(kept)._write(path, b"no pickle")
    assert load(kept, program()) is None
    assert "compiled anew" in caplog.text


def test_a_bad_file_is_written_anew(kept: Path) -> None:
    (path,) = kept.iterdir()
    path.write_bytes(MAGIC)
    Executables(kept).keep(KEY, program().compile())
    assert load(kept, program()) is not None
    assert len(list(kept.iterdir())) == 1


def test_files_are_bounded_and_the_longest_unused_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with another static argument in each call is compiled, and kept, as often; a process
    that was killed while it wrote has left a file too."""
    monkeypatch.setattr(executables, "FILES_MAX", 3)
    directory = tmp_path / "kept"
    keys = [f"{number:064x}" for number in range(6)]
    mine, another = (Executables(directory, f"job/{rank}") for rank in (0, 1))
    lowered = program()
    compiled = lowered.compile()

    def kept(one: Executables) -> list[int]:
        found = [one.load(key, lowered.in_tree, lowered.out_tree, DEVICES) for key in keys]
        return [number for number, program in enumerate(found) if program is not None]

    another.keep(keys[0], compiled)
    for number, key in enumerate(keys):
        mine.keep(key, compiled)
        for path in directory.iterdir():  # one unit of time later
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**15))
        if number:  # the first is used in each start
            assert mine.load(keys[0], lowered.in_tree, lowered.out_tree, DEVICES) is not None
    assert kept(mine) == [0, 4, 5]
    assert kept(another) == [0]
    assert len(list(directory.iterdir())) == 4
    handle, begun = tempfile.mkstemp(prefix=mine._prefix, dir=directory)
    os.close(handle)
    os.utime(begun, ns=(0, 0))
    assert len(list(directory.iterdir())) == 5
    for key in keys[:3]:
        mine.keep(key, compiled)
    assert kept(mine) == [0, 1, 2]
    assert len(list(directory.iterdir())) == 4


def test_where_nothing_can_be_kept_nothing_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    Executables(tmp_path).keep(KEY, program().compile())
    assert "could not be kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_of_all_that_a_program_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text = program().as_text()
    keys = {key_of(text, DEVICES), key_of(program(3).as_text(), DEVICES)}
    keys.add(key_of(text, jax.devices()[1:2]))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    keys.add(key_of(text, DEVICES))
    monkeypatch.setattr(executables.jax, "__version__", "0.0")
    keys.add(key_of(text, DEVICES))
    monkeypatch.setattr(executables, "_processor_flags", lambda: "another")
    keys.add(key_of(text, DEVICES))
    monkeypatch.setattr(executables.jax, "process_index", lambda: 3)
    keys.add(key_of(text, DEVICES))
    assert len(keys) == 7
    assert key_of(text, DEVICES) == key_of(text, DEVICES)
