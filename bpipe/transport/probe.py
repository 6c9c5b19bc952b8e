"""Measure a pair's link through a transport, and see that what comes back is what was sent.

In: a transport that nothing has used yet, on both ranks at once. Out: bytes a second there and back, or why it did not work.
"""

from __future__ import annotations

import statistics
import time

import torch

from bpipe.transport.base import Transport
from bpipe.transport.control import About, Control
from bpipe.transport.device import Device
from bpipe.transport.layout import BufferLayout

# Ten times what a latency-bound message takes on the slowest link here, a few milliseconds on the fastest.
PROBE_BYTES = 16 << 20
PROBES = 4


def measure(transport: Transport, control: Control, device: Device, evictor: bool) -> tuple[float, str | None]:
    """The speed, or why there is none; the lower rank is the evictor. It ends with both telling how it went."""
    speed, why = 0.0, None
    try:
        seconds = _rounds(transport, device, evictor)
        # The first also connects, allocates and touches pages.
        speed = 2 * PROBE_BYTES / statistics.median(seconds[1:])
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    other = control.exchange(About.PROBE, why)
    if not why and not other:
        transport.release()
        return speed, None
    # Another transport takes over and needs the room. Memory is freed only once nobody has it open.
    if evictor:
        transport.withdraw()
    control.exchange(About.PROBE, None)
    if not evictor:
        transport.withdraw()
    return speed, why or other


def measure_alone(transport: Transport, device: Device) -> float:
    """The speed of a transport into this rank's own memory, of which nobody else is a part. Raises what it raises."""
    seconds = _rounds(transport, device, evictor=True)
    transport.release()
    return 2 * PROBE_BYTES / statistics.median(seconds[1:])


def _rounds(transport: Transport, device: Device, evictor: bool) -> list[float]:
    """Seconds of every round there and back. Raises RuntimeError where a byte came back that was not sent."""
    buffer = torch.arange(PROBE_BYTES // 8, device=device.device).view(torch.uint8)
    back = torch.zeros_like(buffer)
    _open(transport, evictor)
    seconds = []
    for _ in range(PROBES):
        begin = time.perf_counter()
        _round(transport, buffer, back, evictor)
        device.synchronize(device.device)
        seconds.append(time.perf_counter() - begin)
    if evictor and not torch.equal(buffer, back):
        raise RuntimeError("what came back is not what was sent")
    return seconds


def _open(transport: Transport, evictor: bool) -> None:
    """One host buffer for one tensor."""
    layout = BufferLayout.of([(0,)], {0: (PROBE_BYTES,)})
    if evictor:
        if transport.one_sided:
            transport.reach(layout)
        transport.announce({0: (PROBE_BYTES,)}).wait()
    else:
        transport.learn()
        if transport.one_sided and transport.lends:
            transport.lend(layout.nbytes)


def _round(transport: Transport, buffer: torch.Tensor, back: torch.Tensor, evictor: bool) -> None:
    if evictor:
        transport.put(0, [buffer]).wait()
        transport.get(0, [back]).wait()
    elif not transport.one_sided:
        transport.host(0, [back]).wait()
        transport.give_back(0, [back]).wait()
