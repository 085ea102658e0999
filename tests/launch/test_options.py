"""What a run may be asked to do, and what it is told when it cannot be."""

from __future__ import annotations

import msgspec
import pytest

from jaxft.errors import ConfigError
from jaxft.launch.options import RunOptions, parse_rate

RUN = RunOptions(job="j", host="a", command=("true",), store="")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("2GB", 2e9),
        ("2GB/s", 2e9),
        ("2 GiB", 2 * 2**30),
        ("1.5g", 1.5e9),
        ("500MB", 5e8),
        ("8000kib/s", 8000 * 1024),
        ("1000000", 1e6),
        ("2000000B", 2e6),
        ("1T", 1e12),
    ],
)
def test_a_rate_is_read_as_people_write_it(text: str, bytes_per_s: float) -> None:
    assert parse_rate("--bandwidth-max", text) == bytes_per_s
    assert msgspec.structs.replace(RUN, bandwidth_max=text).bandwidth_bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    "text", ["0", "0GB", "999kB", "-1GB", "fast", "2XB", "GB", "1e9", "2iB", "2GB/m"]
)
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--bandwidth-max .*2GB"):
        RunOptions(job="j", host="a", command=("true",), store="", bandwidth_max=text)


def test_without_a_rate_there_is_no_limit() -> None:
    assert RUN.bandwidth_bytes_per_s == 0
