"""Find ports outside of the range from which systems choose: gloo opens hundreds of sockets, one of which had taken a port
before its listener did."""

from __future__ import annotations

import random
import socket

# Below what Linux hands out by itself (net.ipv4.ip_local_port_range), above what services use.
_FIRST, _LAST = 15_000, 32_000


def free_ports(number: int) -> list[int]:
    """Return this many ports of this machine on which nobody listens."""
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < number:
            listener = socket.socket()
            try:
                listener.bind(("127.0.0.1", random.SystemRandom().randint(_FIRST, _LAST)))
            except OSError:
                listener.close()
                continue
            sockets.append(listener)
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
