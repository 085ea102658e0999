"""Options, checked when they are made, and the only reader of environment variables.

Variables that the agent sets for a rank (and for nobody else to set):

    JAXFT_JOB, JAXFT_HOST      names
    JAXFT_GENERATION, JAXFT_NONCE   the incarnation of the world the rank belongs to
    JAXFT_RANK, JAXFT_RANKS    its jax.process_index(), and how many there are
    JAXFT_COORDINATOR          where jax.distributed meets
    JAXFT_SMP                  the Unix socket of the host's snapshot process
    JAXFT_ADDRESS              the IP address of the host, where hosts are on several machines
    JAXFT_CALLS                the page in which the rank counts its calls of `save`
    JAXFT_PERSIST              for a persist helper, whose rank is its host's: the order's number
    JAXFT_EXPORT               for an exporter, a rank that writes to storage: where to, as JSON
    JAXFT_STORE                for these two: the store's URL, "" where there is none

Variables for people:

    JAXFT_RUN_DIR              where sockets, locks and logs live (default: below XDG_RUNTIME_DIR,
                               else the temporary directory, private to the user)
    JAXFT_EVENTS               directory of the event log
    JAXFT_FAULTS               faults on purpose, see `faults`
    JAXFT_ADDRESS, JAXFT_INTERFACE   where other hosts reach this one, as --address and --interface
    JAXFT_FAILURE_DOMAIN       what this host would fail together with, as --failure-domain
    JAXFT_JOB_KEY, JAXFT_JOB_KEY_FILE   the job's key, or the file that has it
    JAXFT_STORE_USER, JAXFT_STORE_PASSWORD   for a store in etcd that asks who one is
    JAXFT_STORE_CA, JAXFT_STORE_CERT, JAXFT_STORE_KEY   as --store-ca, --store-cert, --store-key
    JAXFT_KEPT                 1: `jaxft keep` runs on this host, for ranks that others start
    JAXFT_PARITY               "host" or "device", where `Snapshotter(parity=...)` says nothing
    JAXFT_PARITY_KERNEL        what the devices compute parity with: "xla", "pallas_tpu" or
                               "pallas_gpu" (gpu/check.py says which is fastest)
    NO_COLOR                   if it is not empty: no colours (no-color.org)
    JAXFT_MEMORY_MAX_MIB       the most memory that a host's snapshots may take (both slots
                               together; default: what its machine and its limits leave)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from jaxft.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(what: str, name: str) -> str:
    """Job and host names become file names: letters, digits, dot, dash, underscore."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f'{what} "{name}" must be 1 to 63 letters, digits, ".", "-" or "_" and begin with a '
            "letter or digit"
        )
    return name


class RankEnv(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands, as its agent told it."""

    job: str
    host: str
    generation: int
    nonce: str
    rank: int
    ranks: int
    coordinator: str
    smp: str
    address: str = ""

    def to_environ(self) -> dict[str, str]:
        """The variables for a rank; they replace whatever a previous generation left."""
        return {
            "JAXFT_JOB": self.job,
            "JAXFT_HOST": self.host,
            "JAXFT_GENERATION": str(self.generation),
            "JAXFT_NONCE": self.nonce,
            "JAXFT_RANK": str(self.rank),
            "JAXFT_RANKS": str(self.ranks),
            "JAXFT_COORDINATOR": self.coordinator,
            "JAXFT_SMP": self.smp,
            "JAXFT_ADDRESS": self.address,
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> RankEnv | None:
        """None when this process was not started by an agent."""
        env = os.environ if environ is None else environ
        if "JAXFT_SMP" not in env:
            return None
        try:
            return cls(
                job=env["JAXFT_JOB"],
                host=env["JAXFT_HOST"],
                generation=int(env["JAXFT_GENERATION"]),
                nonce=env["JAXFT_NONCE"],
                rank=int(env["JAXFT_RANK"]),
                ranks=int(env["JAXFT_RANKS"]),
                coordinator=env["JAXFT_COORDINATOR"],
                smp=env["JAXFT_SMP"],
                address=env.get("JAXFT_ADDRESS", ""),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the JAXFT_* variables of this process are incomplete ({error}); start it with "
                "`jaxft run`, or unset JAXFT_SMP"
            ) from None


# What a rank has no business with: these are the agent's.
SECRETS = (
    *("JAXFT_JOB_KEY", "JAXFT_JOB_KEY_FILE"),
    *("JAXFT_STORE_USER", "JAXFT_STORE_PASSWORD", "JAXFT_STORE_KEY"),
)


def job_key(environ: Mapping[str, str] | None = None) -> str:
    """The text of the job's key."""
    return (os.environ if environ is None else environ).get("JAXFT_JOB_KEY", "")


def job_key_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file with the job's key."""
    text = (os.environ if environ is None else environ).get("JAXFT_JOB_KEY_FILE", "")
    return Path(text) if text else None


def own_address(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The address and the interface at which other hosts reach this one, "" where not said."""
    env = os.environ if environ is None else environ
    return env.get("JAXFT_ADDRESS", ""), env.get("JAXFT_INTERFACE", "")


NO_DOMAIN = "none"
DOMAIN = re.compile(r"[!-~]{1,255}")


def failure_domain(
    said: str = "", *, one_machine: bool = False, environ: Mapping[str, str] | None = None
) -> str:
    """What this host would fail together with, "" for nothing that is known.

    What a person says wins, here or in JAXFT_FAILURE_DOMAIN ("none": nothing). Else the TPU slice
    that this host is in, where the job has several (MEGASCALE_SLICE_ID), or the switches and the
    block above the node in SLURM's topology (SLURM_TOPOLOGY_ADDR, "switch1.switch2.node").

    Args:
        said: by an option.
        one_machine: all hosts are on this one, and nothing in the environment tells them apart.
        environ: the environment; by default this process's.

    Raises:
        ConfigError: what a person says is no name.
    """
    env = os.environ if environ is None else environ
    named = said or ("" if one_machine else env.get("JAXFT_FAILURE_DOMAIN", ""))
    if named and not DOMAIN.fullmatch(named):
        where = "--failure-domain" if said else "JAXFT_FAILURE_DOMAIN"
        raise ConfigError(
            f"{where} {named[:80]!r}: expected a name of 1 to 255 ASCII characters without spaces, "
            "for example rack-7"
        )
    if named or one_machine:
        return "" if named == NO_DOMAIN else named
    slice_id = env.get("MEGASCALE_SLICE_ID", "")
    if slice_id and env.get("MEGASCALE_NUM_SLICES", "") != "1":
        return f"slice{slice_id}"
    above, _, _ = env.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    return above


class StoreAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How a store in etcd is reached: whom to trust there, and who one is.

    Args:
        ca: file of the certificates of those who may vouch for it ("": the system's).
        cert, key: files of the certificate and the private key that are shown to it.
        user, password: of etcd's own.

    Raises:
        ConfigError: half of a pair is missing.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ConfigError(
                "--store-cert and --store-key belong together: a certificate and its private key"
            )
        if bool(self.user) != bool(self.password):
            raise ConfigError("JAXFT_STORE_USER and JAXFT_STORE_PASSWORD belong together")

    @classmethod
    def of(
        cls,
        ca: str = "",
        cert: str = "",
        key: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> StoreAccess:
        """As the options say, or else the environment."""
        env = os.environ if environ is None else environ
        if not (cert or key):
            cert, key = env.get("JAXFT_STORE_CERT", ""), env.get("JAXFT_STORE_KEY", "")
        return cls(
            ca=ca or env.get("JAXFT_STORE_CA", ""),
            cert=cert,
            key=key,
            user=env.get("JAXFT_STORE_USER", ""),
            password=env.get("JAXFT_STORE_PASSWORD", ""),
        )

    def to_environ(self) -> dict[str, str]:
        """The variables that `of` reads."""
        return {
            "JAXFT_STORE_CA": self.ca,
            "JAXFT_STORE_CERT": self.cert,
            "JAXFT_STORE_KEY": self.key,
            "JAXFT_STORE_USER": self.user,
            "JAXFT_STORE_PASSWORD": self.password,
        }

    def __repr__(self) -> str:
        return f"StoreAccess(ca={self.ca!r}, cert={self.cert!r}, user={self.user!r})"


def calls_page(environ: Mapping[str, str] | None = None) -> str:
    """Where the page is in which this rank counts its calls of `save`; "": nobody looks."""
    return (os.environ if environ is None else environ).get("JAXFT_CALLS", "")


def persist_number(environ: Mapping[str, str] | None = None) -> int | None:
    """The number of the order that this process, a persist helper, was started for."""
    text = (os.environ if environ is None else environ).get("JAXFT_PERSIST", "")
    return int(text) if text.isdigit() else None


def export(environ: Mapping[str, str] | None = None) -> str:
    """Where this process, an exporter, writes to, as JSON."""
    return (os.environ if environ is None else environ).get("JAXFT_EXPORT", "")


def is_kept(environ: Mapping[str, str] | None = None) -> bool:
    """Does `jaxft keep` run on this host, or is about to?"""
    return (os.environ if environ is None else environ).get("JAXFT_KEPT", "") not in ("", "0")


def host_name(environ: Mapping[str, str] | None = None) -> str:
    """This machine's name, SLURM's if it has given it one, as far as it can be a host's here."""
    given = (os.environ if environ is None else environ).get("SLURMD_NODENAME", "")
    name = given or socket.gethostname().partition(".")[0]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:63]
    return name if NAME.fullmatch(name) else "host0"


def scheduler_tasks(environ: Mapping[str, str] | None = None) -> int:
    """How many processes a scheduler has started together with this one; 0 if none says."""
    env = os.environ if environ is None else environ
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if env.get(name, "").isdigit():
            return int(env[name])
    return 0


def store_url(environ: Mapping[str, str] | None = None) -> str:
    """The store of the job that this process writes a checkpoint of."""
    return (os.environ if environ is None else environ).get("JAXFT_STORE", "")


def memory_bytes_max(environ: Mapping[str, str] | None = None) -> int | None:
    """What a host's snapshot slots may take together, None for all that there is."""
    text = (os.environ if environ is None else environ).get("JAXFT_MEMORY_MAX_MIB", "")
    if not text:
        return None
    if not text.isdigit():
        raise ConfigError(f"JAXFT_MEMORY_MAX_MIB={text}: expected a number of MiB")
    return int(text) << 20


def parity(environ: Mapping[str, str] | None = None) -> str:
    """Who computes parity, "" where the environment does not say."""
    return (os.environ if environ is None else environ).get("JAXFT_PARITY", "")


def parity_kernel(environ: Mapping[str, str] | None = None) -> str:
    """The kernel that devices compute parity with, "" where the environment does not say."""
    return (os.environ if environ is None else environ).get("JAXFT_PARITY_KERNEL", "")


def faults_text(environ: Mapping[str, str] | None = None) -> str:
    return (os.environ if environ is None else environ).get("JAXFT_FAULTS", "")


def no_colour(environ: Mapping[str, str] | None = None) -> bool:
    """Does a person want no colours, even on a terminal?"""
    return bool((os.environ if environ is None else environ).get("NO_COLOR", ""))


def events_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    text = (os.environ if environ is None else environ).get("JAXFT_EVENTS", "")
    return Path(text) if text else None


def compiler_flags(environ: Mapping[str, str] | None = None) -> str:
    """What the environment tells XLA's compilers."""
    env = os.environ if environ is None else environ
    return "\n".join(f"{name}={env.get(name, '')}" for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))


# What JAX, XLA, what drives devices, and Python itself look at once, when they are loaded or begin.
_SURROUNDINGS = (
    *("JAX_", "XLA_", "PJRT_", "PYTHON", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_"),
    *("HIP_", "ROCM_", "ROCR_", "OMP_", "MKL_", "OPENBLAS_"),
)


def surroundings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that JAX, XLA, devices and Python go by, each with a hash of what it says."""
    env = os.environ if environ is None else environ
    return {
        name: hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:8]
        for name, value in sorted(env.items())
        if name.startswith(_SURROUNDINGS)
    }


def notebook(environ: Mapping[str, str] | None = None) -> str:
    """The notebook that this process is the kernel of, or was started from; "" where Jupyter says
    none."""
    name = (os.environ if environ is None else environ).get("JPY_SESSION_NAME", "")
    return name if name.endswith(".ipynb") else ""


def run_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The private directory below which every job has its own."""
    env = os.environ if environ is None else environ
    if env.get("JAXFT_RUN_DIR"):
        return Path(env["JAXFT_RUN_DIR"])
    base = env.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "jaxft"
    return Path(tempfile.gettempdir()) / f"jaxft-{os.getuid()}"


def others_run_dirs() -> list[Path]:
    """Those that other users have where this one would have its own by default."""
    places = [*Path(tempfile.gettempdir()).glob("jaxft-*"), *Path("/run/user").glob("*/jaxft")]
    found = []
    for place in sorted(places):
        with contextlib.suppress(OSError):
            if place.is_dir() and place.stat().st_uid != os.getuid():
                found.append(place)
    return found


def host_dir(run: Path, job: str, host: str) -> Path:
    """Where a host's socket, lock and logs of a job live; short, for the limit of Unix sockets."""
    check_name("job", job)
    check_name("host", host)
    label = f"{job}/{host}"
    if len(label) > 40:
        label = f"{job[:16]}-{hashlib.sha256(label.encode()).hexdigest()[:12]}"
    return run / label
