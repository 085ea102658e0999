"""A host's directory, when its agent is done with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxft.launch.hostdir import Lock, remove


@pytest.mark.parametrize("keep_logs", [False, True])
def test_everything_in_it_goes_but_logs_that_are_to_be_kept(
    tmp_path: Path, keep_logs: bool
) -> None:
    host = tmp_path / "job" / "host"
    (tmp_path / "job").mkdir(mode=0o700)
    lock = Lock(host / "lock", "host")
    for name in ("logs", "executables"):  # ranks keep compiled programs here
        (host / name).mkdir()
        (host / name / "file").touch()
    (host / "socket").touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (host / "link").symlink_to(outside)
    remove(host, lock, keep_logs=keep_logs)
    assert outside.is_dir()
    assert host.exists() == keep_logs
    assert not keep_logs or [path.name for path in host.iterdir()] == ["logs"]
