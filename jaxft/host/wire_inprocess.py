"""The peer channel within one process: the twin of `wire_zmq`, without sockets.

It differs in nothing that `wire` promises. It loses messages only to full queues and to addresses
where nobody listens; losing, doubling and reordering on purpose belong to the simulator.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from jaxft.errors import (
    ConfigError,
    JaxftError,
    PeerUnreachable,
    ProtocolError,
    ReadCancelled,
    WireError,
)
from jaxft.host.wire import (
    CANCEL_POLL_S,
    MESSAGE_BYTES_MAX,
    WINDOW_BYTES,
    BulkReader,
    BulkServer,
    Endpoint,
    Network,
    Provider,
    ReadRequest,
    Refused,
    Shared,
    T,
    Waker,
    check_size,
)

_SCHEME = "inprocess://"
_QUEUE = 256


class InProcessNetwork(Network):
    """Everyone made by one of these can reach each other. Addresses: inprocess://NAME, or * ."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = 0
        self._endpoints: dict[str, InProcessEndpoint] = {}
        self._servers: dict[str, InProcessServer] = {}

    def endpoint(self, hint: str) -> Endpoint:
        with self._lock:
            address = self._address(hint, self._endpoints)
            endpoint = self._endpoints[address] = InProcessEndpoint(self, address)
        return endpoint

    def serve(self, hint: str, provider: Provider) -> BulkServer:
        with self._lock:
            address = self._address(hint, self._servers)
            server = self._servers[address] = InProcessServer(self, address, provider)
        return server

    def reader(self) -> BulkReader:
        return InProcessReader(self)

    def close(self) -> None:
        with self._lock:
            left = [*self._endpoints, *self._servers]
        if left:
            raise WireError(f"still open: {', '.join(left)}")

    def deliver(self, address: str, payload: bytes) -> bool:
        """Whether there was room. A message to nobody is gone, and that is not known to anyone."""
        check_address(address)
        with self._lock:
            endpoint = self._endpoints.get(address)
            return endpoint is None or endpoint.put(payload)

    def provider(self, address: str) -> Provider | None:
        check_address(address)
        with self._lock:
            server = self._servers.get(address)
        return None if server is None else server.provider

    def remove(self, gone: InProcessEndpoint | InProcessServer) -> None:
        with self._lock:
            if self._endpoints.get(gone.address) is gone:
                del self._endpoints[gone.address]
            if self._servers.get(gone.address) is gone:
                del self._servers[gone.address]

    def _address(self, hint: str, taken: Iterable[str]) -> str:
        check_address(hint)
        if hint == f"{_SCHEME}*":
            self._made += 1
            hint = f"{_SCHEME}{self._made}"
        if hint in taken:
            raise WireError(f'cannot listen at "{hint}": address already in use')
        return hint


def check_address(address: str) -> None:
    if not address.startswith(_SCHEME) or address == _SCHEME:
        raise ConfigError(f'address "{address}" is not of the form {_SCHEME}NAME')


class InProcessEndpoint(Endpoint):
    def __init__(self, network: InProcessNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._inbox: deque[bytes] = deque()
        self._arrivals = Waker()
        self._waker = Waker()
        self._dropped = 0

    @property
    def address(self) -> str:
        return self._address

    @property
    def dropped(self) -> int:
        return self._dropped

    def send(self, address: str, payload: bytes) -> None:
        if len(payload) > MESSAGE_BYTES_MAX:
            raise ProtocolError(
                f"a message to {address} has {len(payload)} bytes, at most {MESSAGE_BYTES_MAX} go"
            )
        self._dropped += not self._network.deliver(address, payload)

    def put(self, payload: bytes) -> bool:
        """For the network only."""
        if len(self._inbox) >= _QUEUE:
            return False
        self._inbox.append(payload)
        self._arrivals.wake()
        return True

    def receive(self, timeout_s: float) -> list[bytes]:
        if not self._inbox:
            _poll([self._arrivals.fileno()], timeout_s)
        # Cleared before the queue is emptied: what comes in between sets it again.
        self._arrivals.clear()
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def wait(self, fds: Iterable[int], timeout_s: float) -> list[int]:
        wanted = set(fds)
        ready = _poll([self._arrivals.fileno(), self._waker.fileno(), *wanted], timeout_s)
        if self._waker.fileno() in ready:
            self._waker.clear()
        return [fd for fd in wanted if fd in ready]

    def wake(self) -> None:
        self._waker.wake()

    def forget(self, address: str) -> None:
        check_address(address)

    def close(self) -> None:
        self._network.remove(self)
        self._arrivals.close()
        self._waker.close()


class InProcessServer(BulkServer):
    """Its provider is called in the reader's thread."""

    def __init__(self, network: InProcessNetwork, address: str, provider: Provider) -> None:
        self._network = network
        self._address = address
        self.provider = provider

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._network.remove(self)


class InProcessReader(BulkReader):
    def __init__(self, network: InProcessNetwork) -> None:
        self._network = network

    def read_many(
        self,
        requests: Iterable[ReadRequest[T]],
        *,
        peer_s: float,
        deadline_s: float,
        window_bytes: int = WINDOW_BYTES,
        cancel: threading.Event | None = None,
    ) -> Iterator[tuple[T, memoryview | Refused]]:
        deadline = time.monotonic() + deadline_s
        for request in requests:
            check_size(request)
            provider = self._find(request.address, min(deadline, time.monotonic() + peer_s), cancel)
            yield request.tag, _read(provider, request)

    def _find(self, address: str, deadline: float, cancel: threading.Event | None) -> Provider:
        """The provider at an address, waiting for it to be there."""
        while True:
            if cancel is not None and cancel.is_set():
                raise ReadCancelled("the read was cancelled")
            provider = self._network.provider(address)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PeerUnreachable(f"the host at {address} has not answered: it is down")
            if provider is not None:
                return provider
            time.sleep(min(left_s, CANCEL_POLL_S / 5))


def _read(provider: Provider, request: ReadRequest[T]) -> memoryview | Refused:
    if request.offset < 0:
        return Refused(f"{request.nbytes} bytes at {request.offset} cannot be asked for")
    try:
        given = provider(request.key, request.offset, request.nbytes)
    except JaxftError as error:
        return Refused(str(error))
    except Exception as error:  # noqa: BLE001 - what a real server's reader would see of it
        return Refused(f"the server failed: {error!r}")
    if isinstance(given, Refused):
        return Refused(given.reason or "refused")
    if isinstance(given, Shared):
        given = given.data
    if given.nbytes != request.nbytes:
        return Refused(f"{request.address} gave {given.nbytes} bytes for {request.nbytes}")
    # What was read stays as it was when the server's memory changes, as if it had been sent.
    return memoryview(bytes(given))


def _poll(fds: Iterable[int], timeout_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)}
