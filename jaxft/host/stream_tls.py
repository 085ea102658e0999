"""Stream connections in TLS 1.3.

Each side shows the job's certificate and takes no other. The certificate and its private key are
derived from the job's key, so every host has the same one and no file is exchanged.
"""

from __future__ import annotations

import datetime
import hmac
import os
import select
import socket
import ssl
import time
from collections.abc import Callable

from jaxft.errors import ConfigError
from jaxft.host.stream_frames import SEND_S
from jaxft.host.stream_links import OTHER_KEY, Link
from jaxft.host.trust import Trust

_NAME = "jaxft job"
# What is not longer than a record goes with its header.
_RECORD_BYTES = 1 << 14


class TlsLink(Link):
    """In TLS 1.3.

    Args:
        connected: does not block.
        context: with the job's certificate, for this side.
        certificate: the only one that is taken from the other side, in DER.
    """

    def __init__(
        self,
        connected: socket.socket,
        context: ssl.SSLContext,
        certificate: bytes,
        *,
        is_server: bool,
    ) -> None:
        wrapped = context.wrap_socket(
            connected, server_side=is_server, do_handshake_on_connect=False
        )
        super().__init__(wrapped)
        self.socket: ssl.SSLSocket = wrapped
        self._certificate = certificate

    def prove(self) -> int:
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLCertVerificationError as error:
            raise ConnectionRefusedError(OTHER_KEY) from error
        except ssl.SSLError as error:
            raise ConnectionRefusedError(
                "the other side does not take this job key, or only one of the two has "
                f"--trust-network ({error.reason or error})"
            ) from error
        shown = self.socket.getpeercert(binary_form=True)
        if shown is None or not hmac.compare_digest(shown, self._certificate):
            raise ConnectionRefusedError("the other side shows another certificate than the job's")
        return 0

    def begin(self, receive_s: float) -> None:
        super().begin(receive_s)
        # What was set there ends system calls, after which TLS would begin them anew.
        self.socket.settimeout(receive_s or None)

    @property
    def has_more(self) -> bool:
        return self.socket.pending() > 0

    def receive(self, into: memoryview) -> int:
        filled, deadline_s = 0, time.monotonic() + self._receive_s
        try:
            while filled < len(into):
                # One record, 16 KiB at most, a call.
                count = self.socket.recv_into(into[filled:])
                filled += count
                if count == 0 or (self._receive_s and time.monotonic() > deadline_s):
                    break
        except TimeoutError:
            if not filled:
                raise BlockingIOError from None
        return filled

    def send(self, header: bytes, data: memoryview | bytes = b"") -> None:
        self.socket.settimeout(SEND_S)
        if len(data) <= _RECORD_BYTES:
            self.socket.sendall(header + data)
        else:
            self.socket.sendall(header)
            left = memoryview(data)
            while left:
                left = left[self.socket.send(left) :]
        self.socket.settimeout(self._receive_s or None)


class Tls:
    """The job's certificate, and what TLS is to be like.

    Raises:
        ConfigError: the package `cryptography` is not installed.
    """

    def __init__(self, trust: Trust) -> None:
        self._certificate, certificate_pem, key_pem = _certificate(trust)
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER, certificate_pem, key_pem)
        # A ticket would be one more thing that arrives when nobody waits for it.
        self._server.num_tickets = 0
        self._client = self._context(ssl.PROTOCOL_TLS_CLIENT, certificate_pem, key_pem)

    def link(self, connected: socket.socket, *, is_server: bool) -> TlsLink:
        context = self._server if is_server else self._client
        return TlsLink(connected, context, self._certificate, is_server=is_server)

    def _context(
        self, protocol: ssl._SSLMethod, certificate_pem: bytes, key_pem: bytes
    ) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # It is the job's, whatever host shows it.
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._certificate)
        _in_memory(certificate_pem + key_pem, context.load_cert_chain)
        return context


def _in_memory(content: bytes, load: Callable[[str], None]) -> None:
    """For what can only be loaded from a file: one in memory, that nobody else can open."""
    fd = os.memfd_create("jaxft-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        load(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _certificate(trust: Trust) -> tuple[bytes, bytes, bytes]:
    """The job's certificate in DER and in PEM, and its private key in PEM: the same on each host,
    for Ed25519 (RFC 8032) signs the same thing the same way."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.x509.oid import NameOID
    except ModuleNotFoundError as error:
        raise ConfigError(
            "hosts on several machines talk in TLS, and the package cryptography is not installed: "
            "pip install 'jaxft[etcd]', or --trust-network on a network that is the job's alone"
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(trust.key.derive("stream certificate"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        # That is "without an end" (RFC 5280, 4.1.2.5): it ends with the job's key.
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .sign(key, algorithm=None)
    )
    key_pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    der, pem = made.public_bytes(form.Encoding.DER), made.public_bytes(form.Encoding.PEM)
    return der, pem, key_pem
