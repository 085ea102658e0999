"""What a run may be asked to do, and what it is told when it cannot be."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from jaxft.__main__ import app
from jaxft.config import failure_domain
from jaxft.errors import ConfigError
from jaxft.launch.options import RunOptions, parse_rate
from jaxft.launch.run import placed
from jaxft.launch.stores import open_store

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


APART = msgspec.structs.replace(RUN, store="etcd://127.0.0.1:2379")


@pytest.mark.parametrize("environ", [{}, {"JAXFT_ADDRESS": "127.0.0.1"}])
def test_hosts_that_meet_on_this_machine_need_no_address(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert placed(RUN, "", "", one_machine=False).address == ""
    assert placed(APART, "", "", one_machine=True).address == ""
    assert placed(APART, "", "", one_machine=False).address == environ.get("JAXFT_ADDRESS", "")


def test_an_option_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFT_INTERFACE", "none-such")
    assert placed(APART, "127.0.0.1", "", one_machine=False).address == "127.0.0.1"
    with pytest.raises(ConfigError, match="--interface none-such: there is none"):
        placed(APART, "", "", one_machine=False)


TOPOLOGY = "spine.leaf2.n7"


@pytest.mark.parametrize(
    ("said", "environ", "domain"),
    [
        ("", {}, ""),
        ("rack1", {"JAXFT_FAILURE_DOMAIN": "rack2", "MEGASCALE_SLICE_ID": "3"}, "rack1"),
        ("", {"JAXFT_FAILURE_DOMAIN": "rack2", "SLURM_TOPOLOGY_ADDR": TOPOLOGY}, "rack2"),
        ("", {"JAXFT_FAILURE_DOMAIN": "", "SLURM_TOPOLOGY_ADDR": TOPOLOGY}, "spine.leaf2"),
        ("none", {"SLURM_TOPOLOGY_ADDR": TOPOLOGY}, ""),
        ("", {"JAXFT_FAILURE_DOMAIN": "none", "SLURM_TOPOLOGY_ADDR": TOPOLOGY}, ""),
        ("", {"SLURM_TOPOLOGY_ADDR": "n7"}, ""),  # without a topology
        ("", {"MEGASCALE_SLICE_ID": "0", "MEGASCALE_NUM_SLICES": "2"}, "slice0"),
        ("", {"MEGASCALE_SLICE_ID": "0", "MEGASCALE_NUM_SLICES": "1"}, ""),
    ],
)
def test_a_hosts_failure_domain(said: str, environ: dict[str, str], domain: str) -> None:
    assert failure_domain(said, environ=environ) == domain
    assert failure_domain(said, one_machine=True, environ=environ) == said.removeprefix("none")


@pytest.mark.parametrize("name", ["rack 7", "rack\n7", "räck", "r" * 256])
def test_a_failure_domain_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--failure-domain .* expected a name"):
        failure_domain(name)
    with pytest.raises(ConfigError, match=r"^JAXFT_FAILURE_DOMAIN .* expected a name"):
        failure_domain(environ={"JAXFT_FAILURE_DOMAIN": name})


@pytest.mark.parametrize(
    "said",
    [
        ("--address", "127.0.0.1"),
        ("--interface", "lo"),
        ("--job-key-file", "key"),
        ("--trust-network",),
    ],
)
@pytest.mark.parametrize("where", [("--local-hosts", "2"), ("--hosts", "1")])
def test_what_is_for_several_machines_is_refused_on_one(
    said: tuple[str, ...], where: tuple[str, ...]
) -> None:
    ended = CliRunner().invoke(app, ["run", *where, *said, "--", "true"])
    assert ended.exit_code == 2
    assert f"{said[0]} is for hosts on several machines" in ended.output
    assert "--store etcds://" in ended.output


@pytest.mark.parametrize(
    "url", ["etcd:/10.0.0.9:2379", "etcd:10.0.0.9", "10.0.0.9:2379", "sqlite:/tmp/store.db"]
)
def test_a_url_that_is_not_quite_one_is_not_taken_for_a_path(url: str) -> None:
    """On each machine there would be a file of that name, and nobody would meet."""
    with pytest.raises(ConfigError, match=r"looks like a URL.*etcd://HOST:PORT"):
        open_store(url, job="j")


def test_an_option_that_would_do_nothing_is_refused() -> None:
    said = CliRunner().invoke(app, ["run", "--no-respawn", "--", "true"])
    assert said.exit_code == 2
    assert "--no-respawn is for --local-hosts" in said.output


def test_an_option_of_the_training_command_is_told_from_ours() -> None:
    for arguments in (["run", "python", "-c", "print(1)"], ["run", "--no-such", "--", "true"]):
        ran = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
        assert ran.exit_code == 2
        assert f"No such option: {next(a for a in arguments if a.startswith('-'))}" in ran.output
        assert ("the training command comes after --" in ran.output) == ("--" not in arguments)
