"""Who protects whom, and where each byte's parity lies: pure arithmetic, no bytes.

Groups. N hosts under a code k+m form G = max(1, min(ceil(N / (k+m)), floor(N / (m+1)))) groups
whose sizes differ by at most one; a group of n hosts has min(m, n - 1) parity and the rest data.
Hosts are dealt to the groups like cards, one failure domain after the other, so that a domain of
c hosts has at most ceil(c / G) in any group: no deal has fewer, and it is at most m wherever the
numbers allow that.

Stripes. Within a group of n = k + m members (positions 0 to n-1 in `Group.hosts`) a lane has n
stripes. Each member holds one fragment of each stripe:

    stripe s:   parity fragment j  on member (s + j) mod n,      j = 0 .. m-1
                data fragment i    on member (s + m + i) mod n,  i = 0 .. k-1

so each member holds data of k stripes, which is its own lane, cut into k fragments of
`fragment_bytes` in ascending order of their stripes, and parity of m stripes, stored one after
the other with j = 0 first. For n = 4, m = 1 (P: parity, 0 to 2: data fragment):

                member 0   1   2   3
    stripe 0         P     0   1   2
    stripe 1         2     P   0   1
    stripe 2         1     2   P   0
    stripe 3         0     1   2   P

Fragments start at multiples of CHUNK of the lane, so that any piece of one can be checked against
the manifest. A lane is as long as the group's longest; past a member's own bytes it is zeros that
are neither stored nor sent. Rotating the parity over all members is RAID 5's layout (Patterson,
Gibson, Katz: A Case for Redundant Arrays of Inexpensive Disks, 1988), carried to m parities.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from jaxft.errors import CodecError, ConfigError
from jaxft.group.manifest import CHUNK, align
from jaxft.group.world import DATA_MAX, PARITY_MAX, Code, Group

# (offset, length) in bytes
Span = tuple[int, int]


def form_groups(count: int, code: Code, domains: Sequence[str] = ()) -> tuple[Group, ...]:
    """The groups of a world of `count` hosts; every host is in exactly one.

    Args:
        count: how many hosts, at least 1.
        code: the code of a full group.
        domains: the failure domain of each host; "" is a domain of its own. Empty: all are "".

    Returns:
        Groups of host indices. The same arguments always give the same groups.

    Raises:
        ConfigError: no hosts, or not one domain a host.
    """
    if count < 1:
        raise ConfigError(f"a world needs at least one host, found {count}")
    if domains and len(domains) != count:
        raise ConfigError(f"{count} hosts need {count} failure domains, found {len(domains)}")
    group_count = max(1, min(-(-count // code.hosts), count // (code.parity + 1)))
    deck = _by_domain(count, domains)
    hands = (tuple(sorted(deck[index::group_count])) for index in range(group_count))
    return tuple(Group(hosts, min(code.parity, len(hosts) - 1)) for hosts in hands)


def _by_domain(count: int, domains: Sequence[str]) -> list[int]:
    """All hosts, those of one domain next to each other, domains in order of their first host."""
    members: dict[object, list[int]] = {}
    for host in range(count):
        # A host's own index stands for the domain that it is alone in.
        domain = domains[host] if domains else ""
        members.setdefault(domain or host, []).append(host)
    return [host for hosts in members.values() for host in hosts]


class Crowded(msgspec.Struct, frozen=True):
    """Group number `group` has more `hosts` in `domain` than its parity: it dies with that domain.

    `hosts` are indices into the world's hosts.
    """

    group: int
    domain: str
    hosts: tuple[int, ...]


def crowded_domains(groups: Sequence[Group], domains: Sequence[str]) -> tuple[Crowded, ...]:
    """Where the loss of one failure domain loses more than a group survives.

    `domains` are as in `form_groups`. Groups without parity are left out: they survive no loss of
    a host, whatever the domains.
    """
    found = []
    for number, group in enumerate(groups):
        held: dict[str, list[int]] = {}
        for host in group.hosts if group.parity and domains else ():
            if domains[host]:
                held.setdefault(domains[host], []).append(host)
        found += [
            Crowded(number, domain, tuple(hosts))
            for domain, hosts in held.items()
            if len(hosts) > group.parity
        ]
    return tuple(found)


class LaneGeometry(msgspec.Struct, frozen=True):
    """Where the fragments of one coded lane lie in a group of `n` members with `m` parity.

    Fragments are numbered in code order: data fragment i is i, parity fragment j is k + j.

    Args:
        n: members of the group, 1 to 20.
        m: parity fragments a stripe, 0 to 4, less than `n`.
        length: bytes of the group's longest lane.

    Raises:
        CodecError: a code that is not supported, or a negative length.
    """

    n: int
    m: int
    length: int

    def __post_init__(self) -> None:
        if not (0 <= self.m <= PARITY_MAX and 1 <= self.n - self.m <= DATA_MAX):
            raise CodecError(
                f"a group of {self.n} with {self.m} parity has no code: parity must be 0 to "
                f"{PARITY_MAX}, data 1 to {DATA_MAX}"
            )
        if self.length < 0:
            raise CodecError(f"a lane cannot be {self.length} bytes long")

    @classmethod
    def of(cls, group: Group, length: int) -> LaneGeometry:
        return cls(len(group.hosts), group.parity, length)

    @property
    def k(self) -> int:
        """Data fragments a stripe, and a member's lane is cut into as many."""
        return self.n - self.m

    @property
    def fragment_bytes(self) -> int:
        """The size of every fragment, data or parity: a multiple of CHUNK."""
        return align(-(-self.length // self.k), CHUNK)

    @property
    def parity_bytes(self) -> int:
        """What each member stores for this lane beside its own bytes."""
        return self.m * self.fragment_bytes

    # Who holds what

    def holder(self, stripe: int, fragment: int) -> int:
        """The member that holds this fragment (in code order) of the stripe."""
        if fragment < self.k:
            return (stripe + self.m + fragment) % self.n
        return (stripe + fragment - self.k) % self.n

    def fragment_of(self, member: int, stripe: int) -> int:
        """The one fragment of the stripe, in code order, that the member holds."""
        distance = (member - stripe) % self.n
        return self.k + distance if distance < self.m else distance - self.m

    def data_holders(self, stripe: int) -> tuple[int, ...]:
        """The members that hold data fragments 0 to k-1 of the stripe."""
        return tuple(self.holder(stripe, i) for i in range(self.k))

    def parity_holders(self, stripe: int) -> tuple[int, ...]:
        """The members that hold parity fragments 0 to m-1 of the stripe."""
        return tuple(self.holder(stripe, self.k + j) for j in range(self.m))

    def stripes_of_data(self, member: int) -> tuple[int, ...]:
        """The k stripes, ascending, whose data the member holds: the f-th has its f-th fragment."""
        return tuple(s for s in range(self.n) if (member - s) % self.n >= self.m)

    def stripes_of_parity(self, member: int) -> tuple[tuple[int, int], ...]:
        """(stripe, j) of the m parity fragments the member holds, in the order they are stored."""
        return tuple(((member - j) % self.n, j) for j in range(self.m))

    # Who sends what to whom, where the members code each other's data at once

    def shift(self, j: int, i: int) -> int:
        """How many members behind the holder of data fragment i of a stripe the holder of its
        parity j stands, the first following the last; the same for all stripes, never 0."""
        return (j - self.m - i) % self.n

    def order(self, member: int) -> tuple[int, ...]:
        """For i = 0 .. k-1: which of the member's own k fragments is data fragment i of its
        stripe."""
        stripes = self.stripes_of_data(member)
        return tuple(stripes.index((member - self.m - i) % self.n) for i in range(self.k))

    # Where it lies

    def data_range(self, member: int, stripe: int) -> Span:
        """The part of the member's lane that is its data fragment of the stripe, not clipped.

        Raises:
            CodecError: the member holds parity of that stripe.
        """
        stripes = self.stripes_of_data(member)
        if stripe not in stripes:
            raise CodecError(f"member {member} of {self.n} holds no data of stripe {stripe}")
        return stripes.index(stripe) * self.fragment_bytes, self.fragment_bytes

    def parity_range(self, member: int, stripe: int) -> Span:
        """The part of the member's `parity_bytes` that is its parity fragment of the stripe.

        Raises:
            CodecError: the member holds data of that stripe.
        """
        j = self.fragment_of(member, stripe) - self.k
        if j < 0:
            raise CodecError(f"member {member} of {self.n} holds no parity of stripe {stripe}")
        return j * self.fragment_bytes, self.fragment_bytes

    # What is there

    def missing(self, stripe: int, lost: Iterable[int]) -> frozenset[int]:
        """The fragments of the stripe, in code order, that the lost members held."""
        return frozenset(self.fragment_of(member, stripe) for member in lost)

    def sources(self, missing: Collection[int]) -> tuple[int, ...] | None:
        """The k fragments, in code order, to read where those of `missing` cannot be: data first.

        None if fewer than k are left. A fragment that lies wholly past its member's own bytes is
        zeros whoever is lost, and need not be named in `missing`.
        """
        left = [fragment for fragment in range(self.n) if fragment not in missing]
        return tuple(left[: self.k]) if len(left) >= self.k else None


def clip(span: Span, own_bytes: int) -> Span:
    """The part of a span of a lane that is really there, the lane's own length being `own_bytes`.

    The rest is zeros, neither stored nor sent. The offset stays; the length may be 0.
    """
    offset, length = span
    return offset, max(0, min(length, own_bytes - offset))
