"""What a run is asked to do: the options of `jaxft run`, checked when they are made."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from jaxft import config
from jaxft.errors import ConfigError
from jaxft.group.membership import Rules
from jaxft.group.restarts import EARLIER_MAX, RestartPolicy
from jaxft.group.world import Code

KILL_S = 10.0
# A host that tries each member of a store in vain notices so late that one is back.
STORE_TRY_S = 5.0
LOCAL_HOSTS_MAX = 64


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's orders, but for the store, the host and `fresh` the same on all hosts.

    Args:
        job: the job's name; its snapshots are found again under it.
        host: this host's name, another one on each host.
        command: the training command and its arguments, run once a rank.
        store: URL of the store, see `jaxft.launch.stores.open_store`.
        store_ca, store_cert, store_key: files for TLS to a store in etcd, see `StoreAccess`.
        address: the IP address at which hosts on other machines reach this one; "" while all are on
            one machine.
        job_key_file: has the job's key, see `jaxft.launch.job_keys`.
        trust_network: what goes from host to host is not encrypted, only proved to be of the job.
        hosts_min, hosts_max: how many hosts the world may have.
        code: "K+M"; "" is 3+1, with as much parity as the world has hosts for; 1+0 where it is of
            one host.
        ranks_per_host: how many processes on each host.
        failure_domain: what this host would fail together with (rack, slice, power); "": nothing.
        lease_s: a host that says nothing for so long is lost.
        settle_s: how long to wait for more hosts once there are `hosts_min`.
        rejoin_s: how long to wait for hosts that may bring back a newer snapshot.
        agent_grace_s: how long to wait for the agent of a host whose memory still answers.
        store_grace_s: how long to train on without the store.
        form_timeout_s: how long to wait for the store at the start, and for `hosts_min` hosts,
            before the job fails.
        exit_grace_s: how long the ranks may take to end after the first one did.
        grace_s: how long this host may take to go, once it is told to by SIGTERM or by its
            preemption file: for a last snapshot, taken out of turn, for the ranks to end, and,
            where all hosts are told, for that snapshot to get to storage (`leaving`). A SIGINT
            after that ends it at once.
        preemption_file: its presence means what SIGTERM does; `{host}` in it is the host's name;
            "": there is none.
        orphan_s: how long a host's memory lives on without an agent.
        silence_s: how long an SMP may be silent before snapshots are held or, while recovering,
            a new generation is formed; after twice as long its agent starts it again.
        hang_s: a rank that does not call `save` for so long, or for ten times its longest pause
            lately, whichever is longer, hangs; 0: none ever does.
        start_s: instead of that, how long it may take from its Snapshotter, and from call to call,
            to the third one; 0: for ever.
        max_restarts: so many failures within `restart_window_s` (0: in the whole run) are followed
            by a restart; one more ends the job. Lost hosts do not count.
        same_step_max: failures in a row, without a newer snapshot, after which the job fails.
        flap_s: how long a host that was lost twice within the window waits before it is taken in
            again; then twice as long, and so on. 0: it never does.
        bandwidth_max: bytes a second that each host's SMP may pull from others while it codes a
            snapshot, for example "2GB" ("": as much as there is). Restoring is not held back.
        warm: while ranks train, keep a process for each that waits, with JAX imported, to follow
            it; it takes 70 MiB or so. See `jaxft.launch.warm`.
        fresh: ignore snapshots of earlier runs.
        log_dir: where logs go (None: into the run directory, removed after a success).
        quiet: do not show the ranks' output.
        shares_console: the agents of all hosts say what they say to one person: what all of them
            know, one says.

    Raises:
        ConfigError: values, or combinations of values, that cannot work.
    """

    job: str
    host: str
    command: tuple[str, ...]
    store: str
    store_ca: str = ""
    store_cert: str = ""
    store_key: str = ""
    address: str = ""
    job_key_file: str = ""
    trust_network: bool = False
    hosts_min: int = 1
    hosts_max: int = 1
    code: str = ""
    ranks_per_host: int = 1
    failure_domain: str = ""
    lease_s: float = 5.0
    settle_s: float = 3.0
    rejoin_s: float = 5.0
    agent_grace_s: float = 10.0
    store_grace_s: float = 60.0
    form_timeout_s: float = 300.0
    exit_grace_s: float = 30.0
    grace_s: float = 25.0
    preemption_file: str = ""
    orphan_s: float = 600.0
    silence_s: float = 5.0
    hang_s: float = 600.0
    start_s: float = 3600.0
    max_restarts: int = 30
    restart_window_s: float = 3600.0
    same_step_max: int = 3
    flap_s: float = 30.0
    bandwidth_max: str = ""
    warm: bool = True
    fresh: bool = False
    log_dir: str | None = None
    quiet: bool = False
    shares_console: bool = False

    def __post_init__(self) -> None:
        config.check_name("job", self.job)
        config.check_name("host", self.host)
        if not self.command:
            raise ConfigError("there is no command to run: jaxft run [OPTIONS] -- python train.py")
        if not 1 <= self.hosts_min <= self.hosts_max:
            raise ConfigError(
                f"--hosts {self.hosts_min}:{self.hosts_max}: expected 1 <= MIN <= MAX"
            )
        if not 1 <= self.ranks_per_host <= 1024:
            raise ConfigError(f"--ranks-per-host {self.ranks_per_host}: expected 1 to 1024")
        for name in ("lease_s", "store_grace_s", "form_timeout_s", "silence_s", "exit_grace_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{_option(name)} {getattr(self, name):g}: expected more than 0")
        for name in (
            *("settle_s", "rejoin_s", "agent_grace_s"),
            *("grace_s", "orphan_s", "hang_s", "start_s"),
            *("restart_window_s", "flap_s"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{_option(name)} {getattr(self, name):g}: expected 0 or more")
        if not 0 <= self.max_restarts <= EARLIER_MAX:
            raise ConfigError(f"--max-restarts {self.max_restarts}: expected 0 to {EARLIER_MAX}")
        if self.same_step_max < 1:
            raise ConfigError(f"--same-step-max {self.same_step_max}: expected at least 1")
        if self.store_grace_s < self.lease_s:
            raise ConfigError(
                f"--store-grace-s {self.store_grace_s:g} is shorter than --lease-s "
                f"{self.lease_s:g}: a host would stop before the others could count it lost"
            )
        self._check_code()
        _ = self.store_access()
        _ = self.bandwidth_bytes_per_s

    def store_access(self) -> config.StoreAccess:
        """How the store is reached, the environment's part included. Raises ConfigError."""
        return config.StoreAccess.of(self.store_ca, self.store_cert, self.store_key)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """`bandwidth_max` as a number; 0: no limit."""
        return parse_rate("--bandwidth-max", self.bandwidth_max) if self.bandwidth_max else 0.0

    def _check_code(self) -> None:
        if self.code and (code := Code.parse(self.code)).parity >= self.hosts_max:
            raise ConfigError(
                f"--code {code} needs at least {code.parity + 1} hosts to keep parity away from "
                f"the data, and this job has at most {self.hosts_max}: use "
                f"--hosts MIN:{code.hosts}, or a code with less parity, for example --code "
                f"{code.data}+{self.hosts_max - 1}"
            )

    def _asked_code(self) -> Code:
        """A job of one host has nobody to protect it, and asks nobody to."""
        if self.code:
            return Code.parse(self.code)
        return Code() if self.hosts_max > 1 else Code(data=1, parity=0)

    def rules(self) -> Rules:
        """What of this the decisions about the world need."""
        return Rules(
            job=self.job,
            code=self._asked_code(),
            hosts_min=self.hosts_min,
            hosts_max=self.hosts_max,
            settle_s=self.settle_s,
            agent_grace_s=self.agent_grace_s,
            cut_off_s=self.store_grace_s + KILL_S,
            return_s=self.lease_s + STORE_TRY_S,
            form_timeout_s=self.form_timeout_s,
            exit_grace_s=self.exit_grace_s,
            ack_s=KILL_S + self.lease_s,
            late_s=max(1.0, self.lease_s / 2),
            restarts=RestartPolicy(
                max_restarts=self.max_restarts,
                window_s=self.restart_window_s,
                same_step_max=self.same_step_max,
                flap_s=self.flap_s,
            ),
        )

    def asks(self) -> tuple[tuple[str, str], ...]:
        """The options that have to be the same on all hosts, with their values. Whoever writes a
        generation goes by its own, and hosts have to know how long another one may train on without
        the store, or be silent."""
        return (
            ("--hosts", f"{self.hosts_min}:{self.hosts_max}"),
            ("--code", str(self._asked_code())),
            ("--lease-s", f"{self.lease_s:g}"),
            ("--store-grace-s", f"{self.store_grace_s:g}"),
        )

    def directory(self) -> Path:
        """Where this host's socket, lock and logs of the job are."""
        return config.host_dir(config.run_dir().absolute(), self.job, self.host)

    def logs(self) -> Path:
        return (
            Path(self.log_dir).absolute() / self.host if self.log_dir else self.directory() / "logs"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


# Below that, a single piece of a snapshot would take longer than its server waits.
RATE_MIN = 1e6
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?(?:/s)?", re.IGNORECASE)


def parse_rate(option: str, text: str) -> float:
    """Bytes a second as people write them: "2GB", "2GB/s", "1.5G", "500 MiB", "1000000".

    Raises:
        ConfigError: not of that form, or nothing.
    """
    match = _RATE.fullmatch(text.strip())
    rate = 0.0
    if match is not None:
        number, unit, binary = match.groups()
        rate = float(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper())
    if not RATE_MIN <= rate < math.inf:
        raise ConfigError(
            f"{option} {text}: expected bytes a second, at least 1MB, for example 2GB or 800MiB"
        )
    return rate


def parse_hosts(text: str) -> tuple[int, int]:
    """Reads "MIN:MAX", or "N" for exactly N.

    Raises:
        ConfigError: not of that form.
    """
    low, colon, high = text.partition(":")
    if not low.isdigit() or (colon and not high.isdigit()):
        raise ConfigError(f"--hosts {text}: expected N or MIN:MAX, for example 3:4")
    return int(low), int(high or low)
