"""What every step shares: its result, its time, spreads, and delays on a device.

In: a device and a moment until which a step may go on. Out: results that print and that fit into JSON. Knows no step.
On a CPU everything here does the same without streams, so that the steps can be rehearsed: that shows nothing of a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bpipe.runtime.capture import find
from bpipe.runtime.streams import Clock, copying_on, synchronize
from bpipe.transport.device_memory import DeviceMemory
from bpipe.transport.memory import Lender, Region, SharedMemory, own_memory
from bpipe.transport.one_sided import Host

FULL, MODERATE, REHEARSAL = "full", "moderate", "rehearsal"

# What `torch.cuda._sleep` counts, at the highest clock of a Hopper GPU; at a lower one a delay is longer.
CYCLES_PER_S = 2e9


@dataclass
class Result:
    """What a step found. `ok` is None for what is measured: nothing there can be right or wrong.

    `rows` go into the summary.
    """

    ok: bool | None = None
    rows: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    failure: str | None = None

    def row(self, what: str, value: str) -> None:
        """Add a line to the summary, and print it now."""
        self.rows.append((what, value))
        say(f"{what}: {value}")

    def check(self, what: str, good: bool, value: str) -> None:
        """As `row`; the step is right only if all that it checked is."""
        self.ok = good and self.ok is not False
        self.row(what, f"{'ok' if good else 'FAILED'}: {value}")


def on_cuda(device: torch.device) -> bool:
    """Return whether to take the way of a GPU.

    Asked here and nowhere else, so that a test can send a step that way without one.
    """
    return device.type == "cuda"


def say(line: str) -> None:
    print(f"  {line}", flush=True)


@dataclass(frozen=True)
class Spread:
    """Several readings of one thing."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def text(self, scale: float = 1.0, digits: int = 4) -> str:
        median, low, high = (f"{value * scale:.{digits}g}" for value in (self.median, self.low, self.high))
        return f"{median} ({low} to {high}, {self.count} runs)"

    def facts(self) -> dict[str, float]:
        return asdict(self)


def ratios(values: Sequence[float], against: Sequence[float]) -> Spread:
    """Readings taken in turn, each against its neighbour."""
    return Spread.of([value / base for value, base in zip(values, against, strict=True)])


def repeats(most: int, until: float, least: int = 1) -> Iterator[int]:
    """0, 1, ... up to `most` times, fewer (at least `least`) where `until`, a moment of `time.monotonic`, has
    passed."""
    for number in range(most):
        if number >= least and time.monotonic() > until:
            say(f"out of time after {number} of {most}")
            return
        yield number


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Return how long the device takes for what `work` issues, the current stream's view. Waits for it."""
    clock = Clock(device)
    begin = clock.mark()
    work()
    return clock.mark().since(begin)


def hold_back(device: torch.device, delay_s: float) -> None:
    """Keep what is issued next waiting: a kernel that only counts cycles on a GPU, a sleep of the calling thread on
    a CPU."""
    if delay_s <= 0:
        return
    if on_cuda(device):
        torch.cuda._sleep(int(delay_s * CYCLES_PER_S))
    else:
        time.sleep(delay_s)


class Beside:
    """A second stream. On a CPU there is none, and things happen one after another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if on_cuda(device) else None

    def now(self) -> AbstractContextManager[Any]:
        """What is issued inside runs on this stream, behind all that was issued to the current one."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The current stream waits for this one."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def host_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that the device's copy engines reach."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_cuda(device))


def in_host_memory(device: torch.device) -> Host:
    """Host buffers in this process's own memory, its pages locked where a device's copy engines have to reach them."""
    return Host(copying_on(device))


def pinned_region(nbytes: int, device: torch.device) -> Region:
    """Host memory to copy to and from, with locked pages, as host buffers there are."""
    return own_memory(nbytes, copying_on(device))


def lender_on(device: torch.device) -> Lender:
    """Who makes memory that another process on this device, or on a CPU, reaches into."""
    here = copying_on(device)
    return DeviceMemory(here) if here.has_runtime else SharedMemory()


def moved_bytes(device: torch.device, end: torch.Tensor, received: torch.Tensor, minimum_bytes: int) -> int:
    """Of what a forward saved that ended here, the bytes that would leave."""
    return sum(
        found.nbytes
        for found in find([end.grad_fn], [received], device)
        if found.alone and found.nbytes >= minimum_bytes
    )


def tidy(device: torch.device) -> None:
    """Give the device's memory that nobody holds back to the driver, so that each part of a step starts from the
    same place."""
    if on_cuda(device):
        gc.collect()
        synchronize(device)
        torch.cuda.empty_cache()
