"""Find ports that no socket gets which asks for any: gloo asks by the hundred, and had taken one before it was
listened on."""

from __future__ import annotations

import random
import socket

# Below what Linux hands out by itself (net.ipv4.ip_local_port_range), above what services use.
_FIRST, _LAST = 15_000, 32_000


def free_ports(number: int) -> list[int]:
    """Return so many ports of this machine on which nobody listens now."""
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < number:
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", random.SystemRandom().randint(_FIRST, _LAST)))
            except OSError:
                one.close()
                continue
            sockets.append(one)
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
