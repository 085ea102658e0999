"""Where the hosts of a job reach each other: on one machine, or at an address that each one has.

Rules
- The hosts of a job that meet in a store on loopback, or in a file, are all on this machine: they
  talk over Unix sockets and need no address.
- Else a host has one IP address, and whatever it listens at for others is there, never on all
  addresses at once: the one that was named, that of an interface that was named, or the one that
  this machine reaches the store from.
- It is one of this machine's own, looked at when the run begins, and not a loopback address, which
  other machines would take for themselves.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from jaxft.errors import ConfigError, LaunchError

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # netdevice(7)
_IFF_UP = 1
REMEDY = "name the address at which other hosts reach this one: --address, or --interface"


def own_address(
    endpoints: Sequence[tuple[str, int]], *, address: str = "", interface: str = ""
) -> str:
    """The IP address at which other hosts reach this one; "" if all hosts are on this machine.

    Args:
        endpoints: hosts and ports of the store.
        address: an IP address or a name of this machine.
        interface: of the network that the hosts share; not both.

    Raises:
        ConfigError: that is not an address of this machine that others could reach.
        LaunchError: this machine does not reach the store.
    """
    if address and interface:
        raise ConfigError("--address and --interface both say where this host is: use one of them")
    if not (address or interface):
        found = _toward(endpoints)
        if _ip(found).version == 6 and _ip(found).is_link_local:
            raise ConfigError(
                f"this machine reaches the store from {found}, which does not lead to one host: "
                f"{REMEDY}"
            )
        return "" if _ip(found).is_loopback else found
    named = f"--address {address}" if address else f"--interface {interface}"
    found = _resolve(address, named) if address else _of_interface(interface)
    if ipaddress.ip_address(found).is_loopback and not _on_loopback(endpoints):
        raise ConfigError(
            f"{named}: {found} is a loopback address, where nobody else reaches this host, and the "
            f"store is on another machine: {REMEDY}"
        )
    _check_own(found, named)
    return found


def _toward(endpoints: Sequence[tuple[str, int]]) -> str:
    """The address that packets to the store leave from."""
    failures = []
    for host, port in endpoints:
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError) as error:
            failures.append(f"{host}: {_why(error)}")
            continue
        for family, _, _, _, place in places:
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(place)  # which sends nothing
                    return str(probe.getsockname()[0])
            except OSError as error:
                failures.append(f"{host}: {_why(error)}")
    raise LaunchError(f"no way to the store from here ({'; '.join(failures)}): is its name right?")


def _on_loopback(endpoints: Sequence[tuple[str, int]]) -> bool:
    return ipaddress.ip_address(_toward(endpoints)).is_loopback


def _resolve(address: str, named: str) -> str:
    """Of this name's IP addresses the first that is this machine's and not loopback, if it has
    one; else the first that is this machine's; else the first."""
    try:
        places = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{named}: {_why(error)}") from error
    found = [str(place[0]) for *_, place in places]
    return min(found, key=lambda one: (bool(_fault_of(one)), _ip(one).is_loopback))


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text)


def _why(error: OSError | UnicodeError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _check_own(found: str, named: str) -> None:
    if fault := _fault_of(found):
        raise ConfigError(f"{named}: {found} {fault}")


def _fault_of(found: str) -> str:
    """Why others do not reach this machine at this address; "" if they may."""
    ip = _ip(found)
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local:
        return f"does not lead to one host: {REMEDY}"
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((found, 0))
    except OSError as error:
        return (
            f"is not an address of this machine ({_why(error)}); it has to be one of its own, "
            "since this host listens there and nowhere else"
        )
    return ""


def _of_interface(name: str) -> str:
    """The interface's IPv4 address, or else an IPv6 address of it that is not link-local."""
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise ConfigError(f"--interface {name}: there is none; there are {', '.join(names)}")
    asked = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (flags,) = struct.unpack_from("H", fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, asked), 16)
        if not flags & _IFF_UP:
            raise ConfigError(f"--interface {name}: it is down; bring it up, or use another one")
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            found = _ipv6_of(name)
    if not found:
        raise ConfigError(f"--interface {name}: it has no address; use --address, or another one")
    return found


def _ipv6_of(interface: str) -> str:
    """From /proc/net/if_inet6, see proc(5)."""
    path = Path("/proc/net/if_inet6")
    for line in path.read_text().splitlines() if path.exists() else ():
        digits, *_, name = line.split()
        ip = ipaddress.IPv6Address(bytes.fromhex(digits))
        if name == interface and not ip.is_link_local:
            return str(ip)
    return ""
