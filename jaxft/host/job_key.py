"""The job's key: 32 random bytes by which the processes of one job know each other over a network.

Nothing but the key is handed out; all that is needed beside it is derived from it, on each host
anew, by HKDF with SHA-256 (RFC 5869), no salt, 32 bytes, with `jaxft 1 USE` as info. The uses:

    control server, control client   secret keys of Curve25519, for ZeroMQ's CURVE
    stream certificate               the seed of the Ed25519 key of the job's certificate, for TLS
    stream proof, message            keys of HMAC-SHA256, where the network is trusted
    name                             what the key is called where it may be seen

The key's text is 64 hexadecimal digits, as `openssl rand -hex 32` makes it. It shows itself
nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path

from jaxft.errors import ConfigError

KEY_BYTES = 32
_TEXT = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")
_FILE_BYTES_MAX = 4096


class JobKey:
    """The key itself, which is compared and derived from, and never printed."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES
        self._secret = secret

    @classmethod
    def make(cls) -> JobKey:
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def parse(cls, text: str, where: str) -> JobKey:
        """Reads the text of a key.

        Raises:
            ConfigError: it is none; says `where`, and not what was there.
        """
        if not _TEXT.fullmatch(text.strip()):
            raise ConfigError(
                f"{where} has no job key: expected {2 * KEY_BYTES} hexadecimal digits, as "
                f"`openssl rand -hex {KEY_BYTES}` makes them"
            )
        return cls(bytes.fromhex(text.strip()))

    @classmethod
    def read(cls, path: Path, named_by: str) -> JobKey:
        """The key in a file that only this user, or root, can read; or, of root's, a group that
        root has chosen, which is what Kubernetes makes of a Secret in a pod that has an `fsGroup`.

        Raises:
            ConfigError: it cannot be read, others can read it, or it holds no key.
        """
        try:
            # A pipe that nobody writes into would be waited for.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status, content = os.fstat(fd), os.read(fd, _FILE_BYTES_MAX)
            finally:
                os.close(fd)
        except OSError as error:
            raise ConfigError(f"{named_by} {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                f"{named_by} {path}: this is no regular file (JAXFT_JOB_KEY takes the key itself)"
            )
        mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
        others = 0o037 if status.st_uid == 0 and user != 0 else 0o077
        if mode & others or status.st_uid not in (0, user):
            raise ConfigError(
                f"{named_by} {path}: it belongs to user {status.st_uid} and has mode {mode:o}, and "
                f"whoever reads it can join the job: it must belong to user {user} and be readable "
                "by nobody else (chown, chmod 600), or to root (then mode 640 will do, where this "
                "is not root)"
            )
        return cls.parse(content.decode(errors="replace"), f"{named_by} {path}")

    @property
    def text(self) -> str:
        """To hand it on, to where only the job can read it."""
        return self._secret.hex()

    @property
    def name(self) -> str:
        """Eight digits that two keys hardly share, and that give nothing away."""
        return self.derive("name")[:4].hex()

    def derive(self, use: str) -> bytes:
        """32 bytes for one of the uses above."""
        extracted = hmac.digest(bytes(hashlib.sha256().digest_size), self._secret, "sha256")
        return hmac.digest(extracted, f"jaxft 1 {use}".encode() + b"\x01", "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"JobKey({self.name})"
