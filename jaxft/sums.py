"""Checksums of a checkpoint's files: Orbax stores the bytes of arrays without any.

    DIRECTORY/100/jaxft-sums-0.json      {file's path in the checkpoint: [bytes, xxh3_64]}

The rules:
- Each process that writes sums what it wrote itself, while that is in its page cache; the first one
  all other files too, and the record is in a list of its own. So every file is in one list.
- Whoever restores looks at all files before it uses any; several processes share them out, and the
  restore holds when every one of them has found its share as it was written.
- A checkpoint that has no sums is taken as it is: an older jaxft, or plain Orbax, wrote it. In a
  bucket there are none: what it gives back is checked there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from jaxft.errors import RestoreError

SUMS = "jaxft-sums-"
_OWN = "ocdbt.process_"
# Small enough to be summed where it was read to, in the cache.
_BLOCK = 1 << 18
_THREADS = 4


def write_sums(checkpoint: Path, process: int) -> None:
    """Sums the files that this process of those that wrote the checkpoint has written."""
    files = [
        path
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
        and not path.name.startswith(SUMS)
        and _writer(path.relative_to(checkpoint)) == process
    ]
    _write(checkpoint, str(process), files)


def write_sum(checkpoint: Path, name: str) -> None:
    """Sums one file more, in a list of its own."""
    _write(checkpoint, name.partition(".")[0], [checkpoint / name])


def _write(checkpoint: Path, of: str, files: list[Path]) -> None:
    sums = {
        str(path.relative_to(checkpoint)): told
        for path, told in zip(files, _each(files), strict=True)
    }
    (checkpoint / f"{SUMS}{of}.json").write_text(json.dumps(sums))


def check_sums(checkpoint: Path, process: int, processes: int) -> None:
    """Looks whether this process's share of the files is as it was written.

    Args:
        checkpoint: its path.
        process, processes: this one's number, and how many share the files out.

    Raises:
        RestoreError: a file is not.
    """
    told: dict[str, list[int]] = {}
    for path in sorted(checkpoint.glob(f"{SUMS}*.json")):
        try:
            told.update(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise RestoreError(f"{path} cannot be read: {error}") from error
    by_size = sorted(told, key=lambda name: (-told[name][0], name))
    mine = by_size[process::processes]
    try:
        found = _each(checkpoint / name for name in mine)
    except OSError as error:
        raise RestoreError(f"checkpoint {checkpoint}: {error}") from error
    damaged = [name for name, sums in zip(mine, found, strict=True) if list(sums) != told[name]]
    if damaged:
        raise RestoreError(
            f"checkpoint {checkpoint}: {', '.join(damaged[:3])} is not as it was written"
        )


def _writer(file: Path) -> int:
    """Which process has written this file."""
    own = [part for part in file.parts if part.startswith(_OWN)]
    number = own[0].removeprefix(_OWN) if own else "0"
    return int(number) if number.isdigit() else 0


def _each(files: Iterable[Path]) -> list[tuple[int, int]]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_sum, files))


def _sum(file: Path) -> tuple[int, int]:
    """Its size and checksum."""
    digest, size = xxhash.xxh3_64(), 0
    with file.open("rb", buffering=0) as opened:
        block = bytearray(_BLOCK)
        while count := opened.readinto(block):
            digest.update(memoryview(block)[:count])
            size += count
    return size, digest.intdigest()
