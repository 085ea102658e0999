"""A bad cable: carries frames between two network interfaces, later, not all, or not those of some
TCP ports: `python cable.py ONE OTHER SEED DELAY_S LOSS [PORT ...]`.

In a process of its own, since netem, the kernel's own way, is not in every kernel. It runs until it
is killed, and says "ready" first. Frames keep their order. They are what the kernel hands over as
one (segmentation is left to it, see packet(7), PACKET_VNET_HDR), up to 64 KiB; so a lost one is a
burst.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import sys
import time
from collections import deque

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
# virtio_net_hdr, what the kernel still has to do to a frame; then the Ethernet header.
VNET_BYTES, ETHERNET_BYTES = 10, 14
FRAME_BYTES_MAX = 1 << 18
# Behind it a sender finds its frames dropped, as at any full switch.
QUEUE_MAX = 4096


def opened(interface: str) -> socket.socket:
    """All frames that come in at this interface; what is sent goes out there."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.bind((interface, ETH_P_ALL))
    end.setblocking(False)
    return end


def tcp_ports(frame: bytes) -> tuple[int, int] | None:
    """The source and the destination port of an IPv4 frame's TCP segment (RFC 791, RFC 9293)."""
    packet = frame[VNET_BYTES + ETHERNET_BYTES :]
    if frame[VNET_BYTES + 12 : VNET_BYTES + 14] != b"\x08\x00" or packet[9] != socket.IPPROTO_TCP:
        return None
    ports: tuple[int, int] = struct.unpack_from("!HH", packet, 4 * (packet[0] & 0x0F))
    return ports


def carry(
    ends: tuple[socket.socket, socket.socket],
    chance: random.Random,
    delay_s: float,
    loss: float,
    closed: frozenset[int],
) -> None:
    """For ever.

    Args:
        ends: from each to the other.
        delay_s: of every frame.
        loss: share of frames that do not arrive.
        closed: TCP ports to and from which none does.
    """
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    poller = select.poll()
    for end in ends:
        poller.register(end, select.POLLIN)
    while True:
        left_s = under_way[0][0] - time.monotonic() if under_way else None
        poller.poll(None if left_s is None else max(0.0, left_s) * 1000)
        for end, other in (ends, ends[::-1]):
            # BlockingIOError: nothing more. Another: the interface is down.
            with contextlib.suppress(OSError):
                while True:
                    frame = end.recv(FRAME_BYTES_MAX)
                    if closed and not closed.isdisjoint(tcp_ports(frame) or ()):
                        continue
                    if len(under_way) < QUEUE_MAX and chance.random() >= loss:
                        under_way.append((time.monotonic() + delay_s, other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, other, frame = under_way.popleft()
            with contextlib.suppress(OSError):
                other.send(frame)


def main() -> None:
    one, other, seed, delay_s, loss, *ports = sys.argv[1:]
    ends = (opened(one), opened(other))
    print("ready", flush=True)
    chance = random.Random(int(seed))
    carry(ends, chance, float(delay_s), float(loss), frozenset(map(int, ports)))


if __name__ == "__main__":
    main()
