"""Certificates for a server on loopback and its clients, and an authority that vouches for them."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Writes `ca.pem`, and for each name `NAME.pem` and `NAME.key`, into a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.ca = self._write("ca", self._sign(self._name, self._key, is_authority=True))

    def vouch(self, name: str, common: str = "") -> tuple[str, str]:
        """The files of a certificate on loopback and of its private key. It is nobody's by name
        unless it has a `common` one: etcd's gateway refuses clients that show such a one."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        path = self._directory / f"{name}.key"
        path.write_bytes(pem)
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, common)] if common else []
        return self._write(name, self._sign(x509.Name(subject), key)), str(path)

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool = False
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(form.Encoding.PEM)

    def _write(self, name: str, pem: bytes) -> str:
        path = self._directory / f"{name}.pem"
        path.write_bytes(pem)
        return str(path)
