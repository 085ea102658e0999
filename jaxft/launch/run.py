"""`jaxft run`: one agent, or a whole world of them on this machine; and what it ends with."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxft import config, faults
from jaxft.errors import ConfigError, JaxftError, JobInUse, StoreError
from jaxft.group.records import JobEnd
from jaxft.launch.addresses import own_address
from jaxft.launch.agent import Agent, Interrupted
from jaxft.launch.console import Console
from jaxft.launch.hostdir import local_job, local_store
from jaxft.launch.local import LocalWorld
from jaxft.launch.options import RunOptions
from jaxft.launch.stores import etcd_endpoints
from jaxft.launch.summary import summary

EXIT_OK = 0
EXIT_SCRIPT = 1
EXIT_USAGE = 2
EXIT_WORLD = 3
EXIT_SIGNAL = 128
EXIT_STORE = 4


def run_agent(options: RunOptions) -> int:
    """Runs this host's agent until the job is over; returns the exit status.

    0: all ranks ended with status 0. 1: the training script failed. 2: bad usage, or the name is in
    use. 3: the world could not be formed, or could not go on. 128 + n: ended by signal n, and 143
    also where the host was to go by its preemption file.
    """
    console = Console(options.host, quiet=options.quiet)

    def run() -> JobEnd:
        with contextlib.ExitStack() as stack:
            if options.store == local_store(options.job):
                stack.enter_context(local_job(options.job, options.store))
            return Agent(options, console).run()

    return _ended(run, options)


def run_local(options: RunOptions, count: int, *, respawn: bool) -> int:
    """Runs `count` agents on this machine, each a host of its own; returns as `run_agent`.

    Args:
        options: for all of them; `host` is not used.
        respawn: start an agent that died again, as a machine that comes back would.
    """

    def run() -> JobEnd:
        with local_job(options.job, options.store):
            return LocalWorld(options, count, respawn=respawn).run()

    return _ended(run, options)


def check_command(command: tuple[str, ...]) -> None:
    """Refuses a command that does not exist, before anything is started.

    Raises:
        ConfigError: it is not there, or not executable.
    """
    if command and shutil.which(command[0]) is None:
        remedy = "check its name and PATH"
        if Path(command[0]).is_file():
            remedy = f"it is not executable; for a Python script: -- python {command[0]}"
        raise ConfigError(f"command not found: {command[0]} ({remedy})")


def placed(options: RunOptions, address: str, interface: str, *, one_machine: bool) -> RunOptions:
    """The options with this host's address, if the job's hosts may be on several machines.

    Args:
        address, interface: as a person has said; "": as the environment says, or as is found.
        one_machine: all hosts are on this one.

    Raises:
        ConfigError: what was said cannot be.
        LaunchError: the store cannot be reached from here.
    """
    endpoints = etcd_endpoints(options.store)
    if one_machine or not endpoints:
        said = {
            "--address": address,
            "--interface": interface,
            "--job-key-file": options.job_key_file,
            "--trust-network": options.trust_network,
        }
        for option in (option for option, value in said.items() if value):
            raise ConfigError(
                f"{option} is for hosts on several machines, which meet in etcd: say "
                "--store etcds://HOST:PORT, and not --local-hosts"
            )
        return options
    if not (address or interface):
        address, interface = config.own_address()
    found = own_address(endpoints, address=address, interface=interface)
    return msgspec.structs.replace(options, address=found)


def check_environ() -> None:
    """Refuses variables that every process would fail at.

    Raises:
        ConfigError: one that cannot be read.
    """
    config.memory_bytes_max()
    faults.parse(config.faults_text())


def fail(error: object) -> None:
    """One clear message."""
    # One write, so that what two agents say at the same time does not mix.
    sys.stderr.write(f"jaxft: error: {error}\n")
    sys.stderr.flush()


def _ended(run: Callable[[], JobEnd], options: RunOptions) -> int:
    try:
        check_environ()
        end = run()
    except Interrupted as interrupted:
        return EXIT_SIGNAL + interrupted.number
    except (ConfigError, JobInUse) as error:
        fail(error)
        return EXIT_USAGE
    except JaxftError as error:
        fail(error)
        return EXIT_WORLD
    if end.ok:
        return EXIT_OK
    if end.kind == "told":
        sys.stderr.write(f"jaxft: {end.reason}\n")
        return EXIT_SIGNAL + signal.SIGTERM
    where = Path(options.log_dir) if options.log_dir else config.run_dir() / options.job
    print("\n".join(summary(end, where)), file=sys.stderr, flush=True)
    return EXIT_SCRIPT if end.kind == "script" else EXIT_WORLD


def main() -> int:
    """`python -m jaxft.launch.run OPTIONS`: an agent that `LocalWorld` starts.

    It says itself why it has failed, but for the store, which fails all of them: EXIT_STORE.
    """
    options = msgspec.json.decode(sys.argv[1], type=RunOptions)
    console = Console(options.host, quiet=options.quiet)
    try:
        end = Agent(options, console).run()
    except Interrupted as interrupted:
        return EXIT_SIGNAL + interrupted.number
    except (ConfigError, JobInUse) as error:
        fail(f"{options.host}: {error}")
        return EXIT_USAGE
    except StoreError as error:
        console.say(str(error))
        return EXIT_STORE
    except JaxftError as error:
        fail(f"{options.host}: {error}")
        return EXIT_WORLD
    return EXIT_OK if end.ok else EXIT_SCRIPT if end.kind == "script" else EXIT_WORLD


if __name__ == "__main__":
    sys.exit(main())
