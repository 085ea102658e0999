"""Who may listen where, and by what the processes of a job know each other: all in one place.

Rules
- Unix sockets in a directory of this user alone, and TCP on loopback, need nothing: the kernel
  keeps others away, or they are on this machine.
- Whatever other machines can reach needs the job's key, `Trust`, or is refused. Then every
  connection over TCP proves that it has the key, before a byte of it is looked at, in one of two
  ways: encrypted (CURVE for control messages, TLS 1.3 for streams), or, where the network itself is
  trusted, in clear after a proof (streams) or with a proof in every message (control messages).
- Nobody listens on all addresses at once: an address is that of one network.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from jaxft.errors import ConfigError
from jaxft.host.job_key import JobKey
from jaxft.host.local import private_socket_path

MAC_BYTES = 32


@dataclass(frozen=True)
class Trust:
    """The job's key, and how it is used.

    Attributes:
        key: of the job.
        clear: the network is trusted: connections prove the key and are not encrypted.
    """

    key: JobKey
    clear: bool = False

    @property
    def name(self) -> str:
        """What two processes have in common that can talk to each other."""
        return f"{self.key.name} {'in clear' if self.clear else 'encrypted'}"


def check_address(address: str, trust: Trust | None) -> None:
    """Refuses what is neither a Unix socket in a private directory, nor TCP on loopback, nor, for
    those who have the job's key, TCP at the address of one network.

    Raises:
        ConfigError: says what is wrong with it, and what to do.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        private_socket_path(Path(rest))
        return
    if scheme != "tcp":
        raise ConfigError(f'address "{address}" is neither tcp://IP:PORT nor ipc:///PATH')
    host, _, port = rest.rpartition(":")
    if not (port == "*" or port.isdigit()):
        raise ConfigError(f'address "{address}" has no port: a number, or * for any')
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        ip = None
    if trust is None and (ip is None or not ip.is_loopback):
        raise ConfigError(
            f'address "{address}" can be reached from other machines, which needs the job\'s key '
            "for authentication (--job-key-file, JAXFT_JOB_KEY_FILE, or a store in etcd that keeps "
            "one): without it use tcp://127.0.0.1:PORT or ipc:///PATH"
        )
    if ip is None or ip.is_unspecified or ip.is_multicast:
        raise ConfigError(
            f'address "{address}" is not that of one network: use the IP address at which other '
            "hosts reach this one (--address or --interface)"
        )


def is_secured(address: str, trust: Trust | None) -> bool:
    """Whether a connection to this address has to prove the key."""
    return trust is not None and address.startswith("tcp:")


class MessageSeal:
    """A proof of the key in every message, for control messages in clear.

    Not at the start of a connection: ZeroMQ makes, breaks and makes connections anew by itself, and
    its messages go one way, so that no challenge can be answered. A message that is repeated by
    somebody has no effect, since what messages say is state with a version; one that was meant for
    another receiver is no message here.
    """

    def __init__(self, trust: Trust) -> None:
        self._key = trust.key.derive("message")

    def close(self, address: str, payload: bytes) -> bytes:
        """The message as it goes to the endpoint at `address`."""
        return self._mac(address, payload) + payload

    def open(self, address: str, sealed: bytes) -> bytes | None:
        """What was said to this endpoint; None if it was not said with the job's key."""
        payload = sealed[MAC_BYTES:]
        if hmac.compare_digest(sealed[:MAC_BYTES], self._mac(address, payload)):
            return payload
        return None

    def _mac(self, address: str, payload: bytes) -> bytes:
        return hmac.digest(self._key, address.encode() + b"\0" + payload, "sha256")
