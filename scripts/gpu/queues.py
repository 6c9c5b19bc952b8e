"""Whether a stream waits for another's work that has nothing to do with it, because both stand in one queue of the
device.

In: a device; CUDA_DEVICE_MAX_CONNECTIONS, read by the driver when the process started, is how many queues there are. Out: for each of these
how often the last kernel ran before the other stream's first work had ended:
  (a) a long kernel on S1, a second kernel on S1, then a kernel on S2;
  (b) a long copy to the host on S1, then a kernel on S0, the compute stream; with no event behind the copy, with a plain event behind it,
      and with timing events before and behind it, as a transfer records them.
Times are the host's, which asks the events until all have ended: a timing event could be in the way itself. Knows no schedule.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bpipe.runtime.streams import synchronize
from gpu.common import CYCLES_PER_S, FULL, MODERATE, REHEARSAL, Result, Spread, on_cuda, pinned_region, repeats

# A second kernel or a probe: long enough to be one, short beside what it might wait for.
SHORT_S = 1e-4
# Ended when this part of the long work's time had passed: surely not behind it.
EARLY = 0.5
GIVE_UP_S = 20.0


@dataclass(frozen=True)
class Sizes:
    kernel_s: float
    copy_bytes: int
    rounds: int


SIZES = {
    FULL: Sizes(0.05, 2 << 30, 10),
    MODERATE: Sizes(0.02, 256 << 20, 3),
    REHEARSAL: Sizes(0.02, 256 << 20, 3),
}


class Issuing(Protocol):
    """Few calls of a device, so that another can stand in for it.

    A stream and an event are whatever the device gives.
    """

    def compute(self) -> Any:
        """Return the stream on which a training computes."""

    def stream(self) -> Any:
        """One beside it."""

    def kernel(self, stream: Any, seconds: float) -> None: ...

    def copy_home(self, stream: Any) -> None: ...

    def event(self, stream: Any, timing: bool = False) -> Any: ...

    def ended(self, event: Any) -> bool: ...

    def now(self) -> float: ...

    def drain(self) -> None: ...


class Device:
    """A GPU."""

    def __init__(self, device: torch.device, copy_bytes: int) -> None:
        self._device = device
        self._here = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
        # Locked as host buffers there are: torch's own pinned memory would record an event of its own behind the copy.
        self._home = pinned_region(copy_bytes, device)

    def compute(self) -> Any:
        return torch.cuda.current_stream()

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def kernel(self, stream: Any, seconds: float) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def copy_home(self, stream: Any) -> None:
        with torch.cuda.stream(stream):
            self._home.write(0, self._here)

    def event(self, stream: Any, timing: bool = False) -> Any:
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def ended(self, event: Any) -> bool:
        return bool(event.query())

    def now(self) -> float:
        return time.perf_counter()

    def drain(self) -> None:
        synchronize(self._device)

    def close(self) -> None:
        self.drain()
        self._home.close()


class Simulated:
    """A device made of numbers, for rehearsals: `connections` first-in-first-out queues, and one for copies.

    Nothing in a queue starts before what stands in front of it has; a stream's work starts when the stream's last has
    ended. It is what the questions suppose, so it shows that they would be answered, and nothing of a GPU.
    """

    COPY_S = 0.03
    TICK_S = 1e-5

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._now = 0.0
        self._started: dict[object, float] = {}
        self._ready: dict[int, float] = {0: 0.0}

    def compute(self) -> int:
        return 0

    def stream(self) -> int:
        self._ready[len(self._ready)] = self._now
        return len(self._ready) - 1

    def kernel(self, stream: int, seconds: float) -> None:
        self._issue(stream, stream % self._connections, seconds)

    def copy_home(self, stream: int) -> None:
        self._issue(stream, "copies", self.COPY_S)

    def event(self, stream: int, timing: bool = False) -> float:
        self._issue(stream, stream % self._connections, 0.0)
        return self._ready[stream]

    def _issue(self, stream: int, queue: object, seconds: float) -> None:
        start = max(self._now, self._ready[stream], self._started.get(queue, 0.0))
        self._started[queue] = start
        self._ready[stream] = start + seconds

    def ended(self, event: float) -> bool:
        return event <= self._now

    def now(self) -> float:
        self._now += self.TICK_S
        return self._now

    def drain(self) -> None:
        self._now = max(self._now, *self._ready.values())


# What is issued, and by which events one sees that the first work and the last have ended.
Question = Callable[[Issuing], tuple[Any, Any]]


def _behind_two_kernels(kernel_s: float) -> Question:
    def issue(device: Issuing) -> tuple[Any, Any]:
        first, other = device.stream(), device.stream()
        device.kernel(first, kernel_s)
        device.kernel(first, SHORT_S)
        device.kernel(other, SHORT_S)
        last = device.event(other)
        return device.event(first), last

    return issue


def _behind_a_copy(before: bool, behind: bool, timing: bool) -> Question:
    def issue(device: Issuing) -> tuple[Any, Any]:
        first = device.stream()
        if before:
            device.event(first, timing)
        device.copy_home(first)
        if behind:
            device.event(first, timing)
        device.kernel(device.compute(), SHORT_S)
        last = device.event(device.compute())
        return device.event(first), last

    return issue


def watch(device: Issuing, question: Question) -> tuple[float, float]:
    """Return the seconds after which the host saw the first work and the last ended."""
    device.drain()
    begin = device.now()
    events = question(device)
    seen: list[float | None] = [None, None]
    while None in seen:
        now = device.now() - begin
        for place, event in enumerate(events):
            if seen[place] is None and device.ended(event):
                seen[place] = now
        if now > GIVE_UP_S:
            raise TimeoutError(f"not ended within {GIVE_UP_S:g} s: first work {seen[0]}, last {seen[1]}")
    first, last = seen
    assert first is not None
    assert last is not None
    return first, last


def run(device: torch.device, sizes: Sizes, until: float) -> Result:
    result = Result()
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if not on_cuda(device):
        # A driver's default is 8.
        return ask(Simulated(int(connections or 8)), sizes, until, result)
    real = Device(device, sizes.copy_bytes)
    try:
        return ask(real, sizes, until, result)
    finally:
        real.close()


def ask(device: Issuing, sizes: Sizes, until: float, result: Result) -> Result:
    questions = {
        "(a) a kernel behind two of another stream": _behind_two_kernels(sizes.kernel_s),
        "(b) a kernel behind another stream's copy, no event": _behind_a_copy(False, False, False),
        "(b) a kernel behind another stream's copy, plain event": _behind_a_copy(False, True, False),
        "(b) a kernel behind another stream's copy, timing events": _behind_a_copy(True, True, True),
    }
    for question in questions.values():
        # Kernels are loaded with their first use.
        watch(device, question)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in questions}
    for _ in repeats(sizes.rounds, until):
        for name, question in questions.items():
            seen[name].append(watch(device, question))
    for name, times in seen.items():
        early = sum(last < EARLY * first for first, last in times)
        firsts, lasts = (Spread.of([one[place] for one in times]) for place in (0, 1))
        text = (
            f"did not wait in {early} of {len(times)} rounds; it had ended after ms {lasts.text(1e3)}, the other "
            f"after {firsts.text(1e3)}"
        )
        if not long_enough(name, firsts, sizes):
            text = f"cannot be judged, the other's work was too short: {text}"
        result.row(name, text)
        result.facts[name] = {"early": early, "rounds": len(times), "first_s": firsts.facts(), "last_s": lasts.facts()}
    return result


def long_enough(name: str, firsts: Spread, sizes: Sizes) -> bool:
    """What does not last cannot be waited for: the shortest must be many times a probe."""
    return firsts.low > max(20 * SHORT_S, 0.5 * sizes.kernel_s if name.startswith("(a)") else 0.0)
