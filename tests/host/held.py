"""What hosts hold, for tests of coding: read where it lies, without a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jaxft.host.memory import Bytes
from jaxft.host.wire import BulkReader, ReadRequest, Refused


class HeldMemory(BulkReader):
    """The bytes `held` under each key."""

    def __init__(self, held: dict[bytes, Bytes] | None = None) -> None:
        self.held = held or {}

    def read_many(
        self, requests: Iterable[ReadRequest[Any]], **limits: object
    ) -> Iterator[tuple[Any, memoryview | Refused]]:
        for request in requests:
            data = self.held.get(request.key)
            if data is None:
                yield request.tag, Refused("not here")
            else:
                piece = data[request.offset : request.offset + request.nbytes]
                assert piece.size == request.nbytes
                yield request.tag, piece.data
