"""The command line: `jaxft run`, `jaxft status`, `jaxft export`, `jaxft demo`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from jaxft import __version__, config
from jaxft.config import StoreAccess
from jaxft.errors import ConfigError, JaxftError, JobInUse
from jaxft.launch.first import be_two_if_first
from jaxft.launch.hostdir import local_store
from jaxft.launch.options import LOCAL_HOSTS_MAX, RunOptions, parse_hosts
from jaxft.launch.run import EXIT_USAGE, EXIT_WORLD, check_command, fail, placed
from jaxft.launch.run import run_agent as agent
from jaxft.launch.run import run_local as local
from jaxft.launch.stores import etcd_endpoints

# The panels of `jaxft run --help`.
_WORLD = "World"
_MACHINES = "Several machines"
_WAITING = "Waiting, in seconds"
_ANEW = "Going on, and starting anew"
_OUTPUT = "Output"

# Options that several commands have.
_StoreCert = Annotated[
    str,
    typer.Option(
        rich_help_panel=_MACHINES,
        help="The certificate to show to the store. Also JAXFT_STORE_CERT.",
    ),
]
_StoreKey = Annotated[
    str,
    typer.Option(
        rich_help_panel=_MACHINES,
        help="That certificate's private key. Also JAXFT_STORE_KEY.",
    ),
]

app = typer.Typer(
    name="jaxft",
    help="Keeps JAX training alive: in-memory snapshots, erasure coded across hosts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"jaxft {__version__}")
        raise typer.Exit()


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it, and end."),
    ] = False,
) -> None:
    """Keeps JAX training alive: in-memory snapshots, erasure coded across hosts."""


@contextlib.contextmanager
def _said(*failures: type[Exception]) -> Iterator[None]:
    """Errors are said in a line, and are an exit status: bad usage, or one of the `failures`."""
    try:
        yield
    except ConfigError as error:
        fail(error)
        raise typer.Exit(EXIT_USAGE) from None
    except failures as error:
        fail(error)
        raise typer.Exit(EXIT_WORLD) from None


# Of click, or of typer itself: which one depends on typer's version.
_UsageError: Any = typer.BadParameter.__base__


class _Run(TyperCommand):
    """Says of an unknown option that it may be the training command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if "--" not in given and type(error).__name__ == "NoSuchOption":
                error.message += " (the training command comes after --: jaxft run [OPTIONS] -- "
                error.message += "python train.py)"
            raise


@app.command(cls=_Run)
def run(
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: the training command.")
    ] = None,
    job: Annotated[str, typer.Option(help="Name of the job; snapshots go by it.")] = "job",
    hosts: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WORLD,
            help="MIN:MAX: how many hosts the world may have; N: so many, no fewer (default: "
            "all that --local-hosts starts, or this one alone; with etcd there is none).",
        ),
    ] = "",
    local_hosts: Annotated[
        int,
        typer.Option(
            rich_help_panel=_WORLD,
            help="Run this many hosts on this machine, named host0, host1, ...",
        ),
    ] = 0,
    host: Annotated[
        str,
        typer.Option(rich_help_panel=_WORLD, help="Name of this host (default: the machine's)."),
    ] = "",
    store: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WORLD,
            help="sqlite:///FILE (one machine), etcds://HOST:PORT (many; etcd:// without TLS).",
        ),
    ] = "",
    code: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WORLD, help="K+M: any M hosts of K+M may be lost (default: 3+1)."
        ),
    ] = "",
    failure_domain: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WORLD,
            help="What this host would fail together with: rack, slice, power (default: as SLURM's "
            "topology or a TPU's slices say; none: nothing). Also JAXFT_FAILURE_DOMAIN.",
        ),
    ] = "",
    ranks_per_host: Annotated[
        int, typer.Option(rich_help_panel=_WORLD, help="Processes on each host.")
    ] = 1,
    bandwidth_max: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WORLD,
            help="Most bytes a second a host pulls to code a snapshot, like 2GB (default: any).",
        ),
    ] = "",
    address: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MACHINES,
            help="Where other hosts reach this one (default: where this one reaches the store "
            "from). Also JAXFT_ADDRESS.",
        ),
    ] = "",
    interface: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MACHINES,
            help="The network interface whose address that is. Also JAXFT_INTERFACE.",
        ),
    ] = "",
    job_key_file: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MACHINES,
            help="The job's key, 64 hexadecimal digits, the same on all hosts (default: made, and "
            "kept in the store). Also JAXFT_JOB_KEY, JAXFT_JOB_KEY_FILE.",
        ),
    ] = "",
    trust_network: Annotated[
        bool,
        typer.Option(
            "--trust-network",
            rich_help_panel=_MACHINES,
            help="Do not encrypt what goes from host to host; it must prove the key all the same.",
        ),
    ] = False,
    store_ca: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MACHINES,
            help="Who may vouch for the store (default: whom the system trusts). Also "
            "JAXFT_STORE_CA.",
        ),
    ] = "",
    store_cert: _StoreCert = "",
    store_key: _StoreKey = "",
    lease_s: Annotated[
        float, typer.Option(rich_help_panel=_WAITING, help="A host silent for so long is lost.")
    ] = 5.0,
    settle_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING, help="With MIN hosts there: how long to wait for more."
        ),
    ] = 3.0,
    rejoin_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING, help="How long to wait for hosts with a newer snapshot."
        ),
    ] = 5.0,
    form_timeout_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING,
            help="How long to wait for the store, and for MIN hosts, before the job fails.",
        ),
    ] = 300.0,
    agent_grace_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING,
            help="How long to wait for the agent of a host whose memory answers.",
        ),
    ] = 10.0,
    store_grace_s: Annotated[
        float,
        typer.Option(rich_help_panel=_WAITING, help="How long to train on without the store."),
    ] = 60.0,
    silence_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING,
            help="How long a snapshot process may be silent; after twice that it is restarted.",
        ),
    ] = 5.0,
    hang_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING,
            help="How long a rank may not call save, or ten times its longest pause; 0: for ever.",
        ),
    ] = 600.0,
    start_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING,
            help="The same before its third call: how long it may compile, load, restore.",
        ),
    ] = 3600.0,
    exit_grace_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING, help="How long after the first rank the last one may end."
        ),
    ] = 30.0,
    grace_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_WAITING,
            help="On SIGTERM: how long this host may take to go, with a last snapshot, which gets "
            "to storage where all hosts go.",
        ),
    ] = 25.0,
    max_restarts: Annotated[
        int,
        typer.Option(
            rich_help_panel=_ANEW,
            help="Restarts after failures within --restart-window-s; one more failure ends the "
            "job. Lost hosts do not count.",
        ),
    ] = 30,
    restart_window_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_ANEW, help="The window in which they count; 0: the whole run."
        ),
    ] = 3600.0,
    same_step_max: Annotated[
        int,
        typer.Option(
            rich_help_panel=_ANEW,
            help="Failures in a row at the same step, without a newer snapshot, that end the job.",
        ),
    ] = 3,
    flap_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_ANEW,
            help="How long a host lost twice within that window waits before it is taken in again, "
            "twice as long after the next loss, and so on; 0: it never does.",
        ),
    ] = 30.0,
    warm: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_ANEW,
            help="Keep a process for each rank that waits, with JAX imported, to follow it.",
        ),
    ] = True,
    preemption_file: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ANEW,
            help="When this file appears, this host is to go, as on SIGTERM; {host} in it is the "
            "host's name.",
        ),
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", rich_help_panel=_ANEW, help="Ignore earlier snapshots.")
    ] = False,
    respawn: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_ANEW,
            help="With --local-hosts: start killed agents again. Without, fewer hosts can only "
            "go on if --hosts MIN:MAX lets them.",
        ),
    ] = True,
    log_dir: Annotated[
        str,
        typer.Option(
            rich_help_panel=_OUTPUT, help="Keep logs here (default: only after a failure)."
        ),
    ] = "",
    quiet: Annotated[
        bool,
        typer.Option("--quiet", rich_help_panel=_OUTPUT, help="Do not show the ranks' output."),
    ] = False,
) -> None:
    """Runs a training command on this host (or on several simulated ones), and keeps it alive.

    Exit status: 0 all ranks ended well, 1 the training script failed, 2 bad usage or a name in
    use, 3 the world could not be formed or could not go on, 128 + n ended by signal n (143 also by
    a preemption file). docs/failures.md says what happens when what is lost.
    """
    with _said(JaxftError):
        if not 0 <= local_hosts <= LOCAL_HOSTS_MAX:
            raise ConfigError(f"--local-hosts {local_hosts}: expected 1 to {LOCAL_HOSTS_MAX}")
        if local_hosts and host:
            raise ConfigError(
                "--host names one host, --local-hosts starts several: use one of them"
            )
        if not (respawn or local_hosts):
            raise ConfigError(
                "--no-respawn is for --local-hosts: nobody here starts a lone agent again"
            )
        low, high = parse_hosts(hosts or str(local_hosts or 1))
        if local_hosts and low > local_hosts:
            raise ConfigError(
                f"--hosts {hosts} needs at least {low} hosts, --local-hosts starts {local_hosts}"
            )
        check_command(tuple(command or ()))
        options = RunOptions(
            job=job,
            host=host or ("host0" if local_hosts else config.host_name()),
            command=tuple(command or ()),
            store=store or local_store(job),
            store_ca=store_ca,
            store_cert=store_cert,
            store_key=store_key,
            job_key_file=job_key_file,
            trust_network=trust_network,
            hosts_min=low,
            hosts_max=high,
            code=code,
            ranks_per_host=ranks_per_host,
            failure_domain=config.failure_domain(
                failure_domain, one_machine=bool(local_hosts) or high == 1
            ),
            bandwidth_max=bandwidth_max,
            lease_s=lease_s,
            settle_s=settle_s,
            rejoin_s=rejoin_s,
            agent_grace_s=agent_grace_s,
            store_grace_s=store_grace_s,
            silence_s=silence_s,
            hang_s=hang_s,
            start_s=start_s,
            form_timeout_s=form_timeout_s,
            exit_grace_s=exit_grace_s,
            grace_s=grace_s,
            preemption_file=preemption_file,
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            same_step_max=same_step_max,
            flap_s=flap_s,
            warm=warm,
            fresh=fresh,
            log_dir=log_dir or None,
            quiet=quiet,
        )
        if high > 1 and not local_hosts and not store:
            raise ConfigError(
                f"--hosts {hosts}: several hosts need a place to meet: --store etcd://HOST:PORT, "
                "or --local-hosts to run all of them on this machine"
            )
        if etcd_endpoints(store) and not (hosts or local_hosts):
            raise ConfigError(
                f"--store {store} is where several hosts meet: say with --hosts MIN:MAX, on each "
                "of them, how many there are (--hosts 1: this one, and spares)"
            )
        options = placed(options, address, interface, one_machine=bool(local_hosts))
    if local_hosts:
        raise typer.Exit(local(options, local_hosts, respawn=respawn))
    raise typer.Exit(agent(options))


@app.command()
def status(
    job: Annotated[str, typer.Option(help="Name of the job (default: which jobs there are).")] = "",
    store: Annotated[
        str,
        typer.Option(help="Of the job (default: as an agent on this machine has noted it)."),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: docs/status.md explains the keys.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every 2 s, until Ctrl-C.")
    ] = False,
) -> None:
    """Says how a job is: its hosts, its snapshots, and what could be lost right now.

    It only reads. Run it on a host of the job, as the same user, or anywhere with the job's store
    and key (JAXFT_JOB_KEY_FILE, or the store's). Exit status: 0 protected as asked for, 1 degraded,
    2 bad usage, 3 no such job, or nothing of it can be reached, or it is over.
    """
    from jaxft.launch.show_status import show_status

    with _said(JaxftError):
        raise typer.Exit(show_status(job, store, as_json=as_json, watch=watch))


@app.command()
def keep(
    job: Annotated[str, typer.Option(help="Name of the job, as Snapshotter(job=...) has it.")],
    host: Annotated[str, typer.Option(help="Name of this host (default: the machine's).")] = "",
) -> None:
    """Keeps a job's snapshots on this host, for ranks that somebody else starts.

    Ranks that a scheduler starts, with Snapshotter(store=...), find it here, and their snapshots
    outlive whatever the scheduler kills when it starts them again. It ends with the job, ten
    minutes after the last ranks, or when it is told to. Exit status: 0 the job has finished, 2 bad
    usage or another one is here, 3 no ranks came again, 128 + n ended by signal n.
    """
    from jaxft.launch.crew import keep as keep_crews

    with _said(JaxftError):
        try:
            name = config.check_name("host", host or config.host_name())
            raise typer.Exit(keep_crews(config.check_name("job", job), name, crews=True))
        except JobInUse as error:
            raise ConfigError(str(error)) from None


@app.command()
def export(
    directory: Annotated[str, typer.Argument(help="Of checkpoints; made if it is not there.")],
    job: Annotated[str, typer.Option(help="Name of the job.")] = "job",
    step: Annotated[
        int | None, typer.Option(help="Of the snapshot (default: the newest in memory).")
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            help="Of the job, if it has hosts on other machines: etcds://HOST:PORT (default: as "
            "an agent on this machine has noted it)."
        ),
    ] = "",
    job_key_file: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MACHINES,
            help="The job's key, as for jaxft run (default: the one in the store). Also "
            "JAXFT_JOB_KEY, JAXFT_JOB_KEY_FILE.",
        ),
    ] = "",
    trust_network: Annotated[
        bool,
        typer.Option(
            "--trust-network",
            rich_help_panel=_MACHINES,
            help="The job runs with it (found out by itself while an agent lives).",
        ),
    ] = False,
    store_ca: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MACHINES, help="Who may vouch for the store. Also JAXFT_STORE_CA."
        ),
    ] = "",
    store_cert: _StoreCert = "",
    store_key: _StoreKey = "",
) -> None:
    """Writes a snapshot out of a job's memory to storage, as an Orbax checkpoint.

    It only reads: the job may train, or its ranks or its agents may be dead. Run it on a host of
    the job, as the same user, or anywhere with the job's store and key. Exit status: 0 it is
    written, 2 no such job or step, or another key, 3 it cannot be read or written.
    """
    from jaxft.salvage import main as export_by_hand

    with _said(JaxftError, OSError, ValueError):
        access = StoreAccess.of(store_ca, store_cert, store_key)
        written = export_by_hand(job, directory, step, store, access, job_key_file, trust_network)
    typer.echo(f"step {written} of job {job} is in {directory}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Trains a small model on simulated hosts, kills some of it, and shows that nothing is lost."""
    from jaxft.demo.cli import demo as command

    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(command)
    with _said(JaxftError):
        inner(args=context.args, prog_name="jaxft demo")


def main() -> None:
    """The `jaxft` command."""
    be_two_if_first()
    app()


if __name__ == "__main__":
    main()
