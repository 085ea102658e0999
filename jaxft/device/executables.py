"""Executables: compiled programs that are kept on disk, so that a restart does not compile them.

The rules:
- One file a program and process. Its name is made of all that the program depends on: its text (in
  which shapes, shardings and donations are), the versions, devices, flags and JAX's settings, and
  the process.
- Whoever keeps programs has FILES_MAX of them; the one that was not used for longest goes. (A step
  may have another static argument in each call.)
- Loading one runs what it says (JAX unpickles it). So only files are read that nobody but this user
  can have written: a private directory (0700) and file (0600), both this user's, no links.
- A file that is not what it should be is passed over with a line in the log, and written anew.
- A program that came out of JAX's own cache is not kept: written down once more it lacks functions,
  on CPU devices, which is not seen before it runs. Whoever keeps one says how `found` stood before.

Layout of a file: MAGIC, the sha256 of the rest (32 bytes), the payload of
`jax.experimental.serialize_executable.serialize`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax import Device
from jax.experimental import serialize_executable

from jaxft import config

_log = logging.getLogger(__name__)

MAGIC = b"jaxft-executable-1\n"
_HEADER_BYTES = len(MAGIC) + 32
# Of one rank of a job: for each of its worlds its steps, and each kind of call's twin.
FILES_MAX = 32
_FOUND = "/jax/compilation_cache/cache_hits"
_found: list[str] = []


def _note(event: str, **facts: Any) -> None:
    if event == _FOUND:
        _found.append(event)


jax.monitoring.register_event_listener(_note)


def found() -> int:
    """How many programs this process has found in JAX's own cache so far."""
    return len(_found)


def key_of(text: str, devices: Sequence[Device]) -> str:
    """A name for a program on these devices, in hex.

    Args:
        text: the program as it was lowered, StableHLO.
    """
    client = devices[0].client
    parts = [
        jax.__version__,
        jaxlib.version.__version__,
        client.platform,
        client.platform_version,
        str([(one.id, one.process_index, one.device_kind) for one in devices]),
        f"{jax.process_index()} of {jax.process_count()}",
        config.compiler_flags(),
        _settings(),
        _processor_flags(),
        text,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _settings() -> str:
    """All that JAX is set to: some of it goes to the compilers without being in a program's text,
    such as how much they are to optimize."""
    return str(sorted(getattr(jax.config, "values", {}).items()))


def _processor_flags() -> str:
    """What this machine's processor can do; a program compiled for more would crash on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((one for one in lines if one.lower().startswith(("flags", "features"))), "")


class Executables:
    """The programs that are kept in a directory, which is made when the first one is kept.

    Args:
        directory: others may keep theirs there too.
        owner: who keeps these: a job and rank, for example.
    """

    def __init__(self, directory: Path, owner: str = "") -> None:
        self._directory = directory
        self._prefix = f"{hashlib.sha256(owner.encode()).hexdigest()[:16]}-"

    def load(
        self, key: str, in_tree: Any, out_tree: Any, devices: Sequence[Device]
    ) -> jax.stages.Compiled | None:
        """A program that was kept; None if there is none that can be trusted and loaded."""
        path = self._path(key)
        try:
            payload = self._read(path)
            if payload is None:
                return None
            compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=list(devices)
            )
        # Whatever JAX raises for bytes that it cannot load: the program is compiled instead.
        except Exception as error:  # noqa: BLE001
            _log.warning(
                "%s is not used, and the program compiled anew: %s: %s",
                path,
                type(error).__name__,
                error,
            )
            return None
        return compiled

    def keep(self, key: str, compiled: jax.stages.Compiled, before: int | None = None) -> None:
        """Keeps a program; one that cannot be kept is compiled again after a restart.

        Args:
            key: see `key_of`.
            compiled: the program.
            before: what `found` gave before it was compiled; None: it surely was.
        """
        if before is not None and found() != before:
            return
        path = self._path(key)
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            self._write(path, payload)
        # Whatever JAX raises for a program that it cannot write down, such as one with a callback
        # in it; and a disk that is full.
        except Exception as error:  # noqa: BLE001
            _log.warning(
                "a compiled program could not be kept in %s, and is compiled again by the next "
                "start: %s: %s",
                self._directory,
                type(error).__name__,
                error,
            )

    def _path(self, key: str) -> Path:
        return self._directory / f"{self._prefix}{key}.jaxexec"

    def _read(self, path: Path) -> bytes | None:
        """The payload of a file; None if there is no such file.

        Raises:
            OSError: it cannot be read.
            ValueError: it cannot be trusted, or is damaged.
        """
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(handle, "rb") as file:
            _check_private("its directory", os.stat(path.parent, follow_symlinks=False), 0o700)
            _check_private("it", os.fstat(handle), 0o600)
            data = file.read()
        payload = data[_HEADER_BYTES:]
        if data[:_HEADER_BYTES] != MAGIC + hashlib.sha256(payload).digest():
            raise ValueError("its checksum is another one")
        with contextlib.suppress(OSError):  # of a file system that is only to be read, say
            os.utime(path)
        return payload

    def _write(self, path: Path, payload: bytes) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private("the directory", os.stat(self._directory, follow_symlinks=False), 0o700)
        handle, name = tempfile.mkstemp(prefix=self._prefix, dir=self._directory)  # with mode 0600
        try:
            with open(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        mine = self._directory.glob(f"{self._prefix}*")  # what a killed process has begun, too
        newest_first = sorted(mine, key=lambda one: one.lstat().st_mtime_ns, reverse=True)
        for old in newest_first[FILES_MAX:]:
            old.unlink(missing_ok=True)


def _check_private(what: str, found: os.stat_result, mode: int) -> None:
    """Raises ValueError unless this is this user's own, with that mode, and no link."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise ValueError(f"{what} is neither a file nor a directory")
    if found.st_uid != os.getuid():
        raise ValueError(f"{what} belongs to user {found.st_uid}, not to user {os.getuid()}")
    if stat.S_IMODE(found.st_mode) != mode:
        raise ValueError(f"{what} has mode {stat.S_IMODE(found.st_mode):o}, expected {mode:o}")
