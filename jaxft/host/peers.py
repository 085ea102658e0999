"""What an SMP and its peers say to each other, as bytes.

Most words of an idle world have been said before, and are said again as signs of life to processes
whose caches are cold. They are known by their bytes: neither encoded nor decoded anew, nor are they
other objects than before.
"""

from __future__ import annotations

import logging

import msgspec

from jaxft.group.messages import Body, Directive, Envelope, Invite, Status
from jaxft.group.world import Generation
from jaxft.host.wire import Endpoint

_log = logging.getLogger(__name__)


class Peers:
    """The other SMPs of the job.

    Args:
        job, host: names.
        arena: id of this SMP's memory.
        endpoint: to others.
    """

    def __init__(self, *, job: str, host: str, arena: str, endpoint: Endpoint) -> None:
        self._job = job
        self._host = host
        self._arena = arena
        self._endpoint = endpoint
        self._generation: Generation | None = None
        self._encoded: tuple[Body | None, bytes] = (None, b"")
        self._said: dict[str, Body] = {}  # to each address, the last
        self._heard: dict[bytes, Envelope] = {}  # of each sender, the last that may come again
        self._last: dict[str, bytes] = {}

    def forget(self) -> None:
        """Nothing more is said to those of an older generation, who may be gone for ever."""
        for address in self._said:
            self._endpoint.forget(address)
        self._said.clear()
        self._enter(None)

    def say(self, address: str, body: Body, generation: Generation, *, calm: bool) -> None:
        """Sends a message.

        Args:
            calm: nothing is under way here. A status that is said again then only shows that this
                host lives: the root takes note of those when it says its own next word, since each
                for itself would wake it once more.
        """
        if generation is not self._generation:
            self._enter(generation)
        again = self._said.get(address) is body
        self._said[address] = body
        payload = self._encode(body, generation)
        if again and calm and isinstance(body, Status):
            self._endpoint.whisper(address, payload)
        else:
            self._endpoint.send(address, payload)

    def hear(self, payload: bytes, generation: Generation | None) -> Envelope | None:
        """What a message says, if it is of this generation and of one of its members with the
        memory that it takes part with, or an invitation to a newer one."""
        if generation is not self._generation:
            self._enter(generation)
        known = self._heard.get(payload)
        if known is not None:
            return known
        try:
            envelope = msgspec.msgpack.decode(payload, type=Envelope)
        except msgspec.MsgspecError as error:
            _log.warning("a message of %d bytes is none of ours: %s", len(payload), error)
            return None
        if envelope.job != self._job:
            return None
        if isinstance(envelope.body, Invite):
            return envelope
        if generation is None or not _is_of(envelope, generation):
            return None
        if isinstance(envelope.body, Directive | Status):
            self._heard.pop(self._last.get(envelope.sender, b""), None)
            self._last[envelope.sender] = payload
            self._heard[payload] = envelope
        return envelope

    def _enter(self, generation: Generation | None) -> None:
        self._generation = generation
        self._encoded = (None, b"")
        self._heard.clear()
        self._last.clear()

    def _encode(self, body: Body, generation: Generation) -> bytes:
        said, payload = self._encoded
        if said is not body:
            envelope = Envelope(
                job=self._job,
                generation=generation.number,
                nonce=generation.nonce,
                sender=self._host,
                arena=self._arena,
                body=body,
            )
            payload = msgspec.msgpack.encode(envelope)
            self._encoded = (body, payload)
        return payload


def _is_of(envelope: Envelope, generation: Generation) -> bool:
    if (envelope.generation, envelope.nonce) != (generation.number, generation.nonce):
        return False
    sender = (envelope.sender, envelope.arena)
    members = (*generation.hosts, *generation.holders)
    return any((member.host, member.arena) == sender for member in members)
