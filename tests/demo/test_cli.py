"""The command line of the demo: what it refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxft.__main__ import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0"], "1 to 16 hosts"),
        (["--code", "3-1"], "K+M"),
        (["--fail", "disk"], "hosts:2@20"),
        (["--fail", "rank@40"], "after step 1 to 29"),
        (["--fail", "none", "--fail", "rank"], "give it alone"),
        (["--json", "/no/such/x.json"], "its directory has to be there"),
        (["--keep", "/proc/no"], "--keep /proc/no: it cannot be used"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_logs_are_not_mixed_with_others(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    result = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path)])
    assert result.exit_code == 2
    assert "name an empty directory" in result.output


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in ("--fail", "--hosts", "--code", "--elastic", "--steps", "--every", "--json"):
        assert option in result.output
    for option in ("--seed", "--keep", "--fallback", "--wrap", "--parity"):
        assert option in result.output
