"""Free ports outside the range that the system assigns: otherwise one of gloo's sockets may take a listener's port."""

from __future__ import annotations

import random
import socket

# Below the ports that Linux assigns (net.ipv4.ip_local_port_range), above those of services.
_FIRST, _LAST = 15_000, 32_000


def free_ports(number: int) -> list[int]:
    """Return this many free ports of this machine."""
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
