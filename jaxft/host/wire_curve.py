"""Control messages encrypted, from the job alone: CURVE (rfc.zeromq.org/spec/26) with its key.

Every SMP listens with one pair of keys and sends with another, both derived from the job's key. Who
does not know the first pair's public key cannot talk to a listener at all; and a listener lets only
the second pair in, which its `Doorkeeper` says (ZAP, rfc.zeromq.org/spec/27). Without a doorkeeper
nobody would be let in.
"""

from __future__ import annotations

import logging
import threading

import zmq
from zmq.utils import z85

from jaxft.host.trust import Trust
from jaxft.host.wire import Waker

_log = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"jaxft"


class Curve:
    """The two pairs of keys."""

    def __init__(self, trust: Trust) -> None:
        self._listener = z85.encode(trust.key.derive("control server"))
        self._sender = z85.encode(trust.key.derive("control client"))
        self._listener_public = zmq.curve_public(self._listener)
        self._sender_public = zmq.curve_public(self._sender)
        self.let_in = z85.decode(self._sender_public)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """For a socket that is about to listen."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._listener)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Else CURVE lets everybody in who knows the listener's public key, if nobody answers there.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def introduce(self, socket: zmq.Socket[bytes]) -> None:
        """For a socket that is about to connect."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._sender)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._sender_public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._listener_public)


class Doorkeeper:
    """Answers, in a thread, who may come in to the listeners of a context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> None:
        self._curve = curve
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._ending = Waker()
        self._thread = threading.Thread(target=self._answer, name="jaxft-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.wake()
        self._thread.join()
        self._ending.close()

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ending, zmq.POLLIN)
        while self._ending.fileno() not in (ready := dict(poller.poll())):
            if self._socket in ready:
                self._socket.send_multipart(self._judge(self._socket.recv_multipart()))
        self._socket.close()

    def _judge(self, request: list[bytes]) -> list[bytes]:
        """Version, number, domain, address, identity, mechanism, the public key of who knocks."""
        version, number, domain, address, _, mechanism, *shown = request
        welcome = (
            version == b"1.0"
            and (domain, mechanism) == (_DOMAIN, b"CURVE")
            and shown == [self._curve.let_in]
        )
        if not welcome:
            _log.warning("somebody at %s is not of this job", address.decode(errors="replace"))
        code, text = (b"200", b"OK") if welcome else (b"400", b"not of this job")
        return [b"1.0", number, code, text, b"", b""]
