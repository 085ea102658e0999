"""Who takes part: the code, the hosts of a generation, and the groups that protect each other."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxft.errors import ConfigError
from jaxft.group.identity import SnapshotId

DATA_MAX = 16
PARITY_MAX = 4


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """An erasure code: `data` fragments and `parity` more; any `parity` of them may be lost.

    Args:
        data: data fragments a stripe, 1 to 16.
        parity: parity fragments a stripe, 0 to 4. Zero protects against the loss of a process only.

    Raises:
        ConfigError: out of range.
    """

    data: int = 3
    parity: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.data <= DATA_MAX:
            raise ConfigError(f"code {self}: data must be 1 to {DATA_MAX}, found {self.data}")
        if not 0 <= self.parity <= PARITY_MAX:
            raise ConfigError(f"code {self}: parity must be 0 to {PARITY_MAX}, found {self.parity}")

    @classmethod
    def parse(cls, text: str) -> Code:
        """Reads "K+M", for example "3+1"."""
        data, plus, parity = text.partition("+")
        if not (plus and data.strip().isdigit() and parity.strip().isdigit()):
            raise ConfigError(f'code "{text}" is not of the form K+M, for example 3+1')
        return cls(data=int(data), parity=int(parity))

    @property
    def hosts(self) -> int:
        """How many hosts a full group has."""
        return self.data + self.parity

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}"


class Group(msgspec.Struct, frozen=True):
    """Hosts (indices into the world's hosts, ascending) that protect each other.

    Losing any `parity` of them is survived. `parity` is less than the code's where the group is
    too small for it.
    """

    hosts: tuple[int, ...]
    parity: int

    @property
    def data(self) -> int:
        return len(self.hosts) - self.parity


class Member(msgspec.Struct, frozen=True):
    """One host of a generation.

    `agent` is random for each start of the agent, `arena` for each piece of new memory: a changed
    `arena` is a lost host. `address` is where its SMP answers peers. `ranks` may be 0: a host that
    only lends what its memory holds.
    """

    host: str
    agent: str
    arena: str
    address: str
    ranks: int = 1
    domain: str = ""

    @property
    def ip(self) -> str:
        """The IP address of a host that others reach by a network, else ""."""
        scheme, _, place = self.address.partition(",")[0].partition("://")
        return place.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """Where a world's snapshots go on storage: `directory`, in which `keep` checkpoints stay (0: it
    is a manager's of `jaxft.orbax`, which keeps what it will).
    `tries`: how often it was tried to write the newest one before the job ends."""

    directory: str
    keep: int = 2
    tries: int = 0


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of the world; written once, by one transaction.

    `hosts` are in rank order: the first one's SMP is the root and its first rank is process 0.
    `holders` have memory of earlier generations and no ranks. `fresh` ignores all earlier memory.
    `expected` is the newest committed snapshot that the store knows of, `expected_step` its step
    (None and -1: none): where nobody's memory knows of it any more, it is lost, and not unheard of.
    `attached`: the one rank was not started by its host's agent and does not end with it: only the
    next generation ends it.
    `export`: its ranks, one a host, train nothing: they write what it goes on from to storage.
    """

    job: str
    number: int
    nonce: str
    hosts: tuple[Member, ...]
    groups: tuple[Group, ...]
    code: Code
    coordinator: str = ""
    holders: tuple[Member, ...] = ()
    fresh: bool = False
    expected: SnapshotId | None = None
    expected_step: int = -1
    attached: bool = False
    export: Export | None = None
    reason: str = ""

    @property
    def rank_count(self) -> int:
        return sum(member.ranks for member in self.hosts)

    def first_rank(self, index: int) -> int:
        """The `jax.process_index()` of the first rank on the host with this index."""
        return sum(member.ranks for member in self.hosts[:index])

    def index_of(self, host: str) -> int | None:
        """The place of the host with this name, or None if it is not in the world."""
        for index, member in enumerate(self.hosts):
            if member.host == host:
                return index
        return None

    def group_of(self, index: int) -> Group:
        return next(group for group in self.groups if index in group.hosts)


class World(msgspec.Struct, frozen=True):
    """What a share must remember of the generation that made it: who protected whom.

    `hosts` are the host names by index.
    """

    hosts: tuple[str, ...]
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, generation: Generation) -> World:
        return cls(tuple(member.host for member in generation.hosts), generation.groups)

    def group_of(self, index: int) -> Group:
        return next(group for group in self.groups if index in group.hosts)


def encode(value: Any) -> bytes:
    """The one encoding of all values here: MessagePack of typed structs, never pickle."""
    return msgspec.msgpack.encode(value)
