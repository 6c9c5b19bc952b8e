"""Shared by all cases: results, time limits, spreads, and memory that transfers can reach."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bpipe.runtime.capture import find
from bpipe.transport.memory import DeviceMemory, Lender, Region, own_memory
from bpipe.transport.streams import Clock, Device, synchronize

# `SMALL` is for late devices, which simulate a GPU on a small CPU.
FULL, MODERATE, SMALL = "full", "moderate", "small"


@dataclass
class Result:
    """The results of a case.

    Attributes:
        ok: Whether all checks passed; None if the case only measures.
        rows: Lines of the summary.
    """

    ok: bool | None = None
    rows: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    failure: str | None = None

    def row(self, name: str, value: str) -> None:
        """Add a line to the summary and print it."""
        self.rows.append((name, value))
        say(f"{name}: {value}")

    def check(self, name: str, good: bool, value: str) -> None:
        """Add a line as `row` does; the case is right only if all its checks are."""
        self.ok = good and self.ok is not False
        self.row(name, f"{'ok' if good else 'FAILED'}: {value}")


def say(line: str) -> None:
    print(f"  {line}", flush=True)


@dataclass(frozen=True)
class Spread:
    """The spread of several readings."""

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
    """Return the ratios of readings taken in turn, each to its neighbour."""
    return Spread.of([value / base for value, base in zip(values, against, strict=True)])


def repeats(limit: int, until: float, least: int = 1) -> Iterator[int]:
    """Yield 0, 1, ... below `limit`; at least `least`, but no more once `until` (`time.monotonic`) has passed."""
    for number in range(limit):
        if number >= least and time.monotonic() > until:
            say(f"out of time after {number} of {limit}")
            return
        yield number


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Return how long the device takes for what `work` issues, on the current stream; wait for it."""
    clock = Clock(device)
    begin = clock.mark()
    work()
    return clock.mark().since(begin)


def pinned_region(nbytes: int, device: torch.device) -> Region:
    """Return host memory to copy to and from, as for host buffers."""
    return own_memory(nbytes, Device(device))


def lender_on(device: torch.device) -> Lender:
    """Return the lender of memory that another process on this device accesses."""
    return DeviceMemory(Device(device))


def moved_bytes(device: torch.device, end: torch.Tensor, received: torch.Tensor, minimum_bytes: int) -> int:
    """Return the bytes that would be evicted of what the forward that ended here saved."""
    return sum(
        storage.nbytes
        for storage in find([end.grad_fn], [received], device)
        if storage.alone and storage.nbytes >= minimum_bytes
    )


def drawn(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Return random numbers that depend only on the seed."""
    return torch.randn(shape, generator=_generator(seed, device), device=_drawing_on(device)).to(device)


def random_bytes(nbytes: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator_device, generator = _drawing_on(device), _generator(seed, device)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device=generator_device).to(device)


def _drawing_on(device: torch.device) -> torch.device:
    """Return the device of the random generator: late devices have none."""
    return device if device.type == "cuda" else torch.device("cpu")


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(_drawing_on(device)).manual_seed(seed)


def tidy(device: torch.device) -> None:
    """Return unused device memory to the driver, so that each part of a case starts from the same state."""
    gc.collect()
    synchronize(device)
    torch.accelerator.empty_cache()
