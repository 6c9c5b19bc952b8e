"""Measure a pair's link through a transport that nothing has used yet, and check that what comes back was sent.

A trial runs in a thread and on a stream of its own, so that the run goes on without one that hangs.
"""

import statistics
import threading
import time
from collections.abc import Callable

import torch

from bpipe.transport.control import Control, Subject
from bpipe.transport.layout import BufferLayout
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import Device, synchronize

# Ten times what a latency-bound message takes on the slowest link here, a few milliseconds on the fastest.
PROBE_BYTES = 16 << 20
PROBES = 4
# Seconds that an aborted trial may take to end before nobody waits for it any more.
GRACE_S = 10.0


def measure(
    transport: Transport, control: Control, device: Device, evictor: bool, within_s: float, abort: Callable[[], None]
) -> tuple[float, str | None]:
    """Return the link's bytes per second there and back, or why it cannot be used. Both ranks call it.

    Args:
        transport: What to try.
        control: The pair's channel for agreeing on the outcome.
        device: This rank's device.
        evictor: Whether this rank evicts; the lower rank does.
        within_s: Time limit in seconds, shorter than that of a watchdog that ends the process.
        abort: Ends the transport's pending operations.
    """
    seconds: list[float] = []
    errors: list[str] = []

    def trial() -> None:
        try:
            with device.apart():
                seconds.extend(_rounds(transport, device, evictor))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    # A thread of its own: a communicator that is never made blocks its caller, and a copy that never comes the stream. A
    # daemon: one that hangs must not hold up the end of the process.
    thread = threading.Thread(target=trial, name="bpipe-probe", daemon=True)
    thread.start()
    thread.join(within_s)
    hangs = thread.is_alive()
    if hangs:
        abort()
        thread.join(GRACE_S)
    late = f"nothing arrived within {within_s:g} s (half of --bpipe-timeout)"
    why = late if hangs else next(iter(errors), None)
    # What the trial allocated is in the pool of its own stream, where nobody would use it again.
    device.empty_cache()
    # The first also connects, allocates and touches pages.
    speed = 0.0 if why else 2 * PROBE_BYTES / statistics.median(seconds[1:])
    other = control.exchange(Subject.PROBE, why)
    if not why and not other:
        transport.release()
        return speed, None
    # Another transport takes over and needs the memory, which is freed only once nobody has it open.
    if evictor:
        transport.withdraw()
    control.exchange(Subject.PROBE, None)
    if not evictor:
        transport.withdraw()
    return speed, why or other


def measure_alone(transport: Transport, device: Device) -> float:
    """Return the bytes per second of a transport into this rank's own memory. Raises what the transport raises."""
    seconds = _rounds(transport, device, evictor=True)
    transport.release()
    return 2 * PROBE_BYTES / statistics.median(seconds[1:])


def _rounds(transport: Transport, device: Device, evictor: bool) -> list[float]:
    """Return the seconds of every round there and back. Raises RuntimeError if other bytes come back."""
    buffer = torch.arange(PROBE_BYTES // 8, device=device.device).view(torch.uint8)
    back = torch.zeros_like(buffer)
    # One host buffer for one tensor.
    layout = BufferLayout.of([(0,)], {0: (PROBE_BYTES,)})
    if evictor:
        if transport.one_sided:
            transport.reach(layout)
        transport.announce({0: (PROBE_BYTES,)}).wait()
    else:
        transport.learn()
        if transport.one_sided and transport.lends:
            transport.lend(layout.nbytes)
    seconds = []
    for _ in range(PROBES):
        begin = time.perf_counter()
        if evictor:
            transport.put(0, [buffer]).wait()
            transport.get(0, [back]).wait()
        elif not transport.one_sided:
            transport.host(0, [back]).wait()
            transport.give_back(0, [back]).wait()
        synchronize(device.device)
        seconds.append(time.perf_counter() - begin)
    if evictor and not torch.equal(buffer, back):
        raise RuntimeError("received data differs from the data sent")
    return seconds
