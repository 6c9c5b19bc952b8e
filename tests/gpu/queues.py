"""Whether a stream waits for another's work that has nothing to do with it, because both stand in one queue of the
device.

In: a device; CUDA_DEVICE_MAX_CONNECTIONS, read by the driver when the process started, is how many queues there are. Out: for each of these
how often the last kernel ran before the other stream's first work had ended:
  (a) a long kernel on S1, a second kernel on S1, then a kernel on S2;
  (b) a long copy to the host on S1, then a kernel on S0, the compute stream; with no event behind the copy, with a plain event behind it,
      and with timing events before and behind it, as a transfer records them.
Times are the host's, which asks the events until all have ended: a timing event could be in the way itself. Knows no schedule.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bpipe.runtime.streams import current, synchronize
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, Spread, pinned_region, repeats

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
    SMALL: Sizes(0.02, 1 << 20, 2),
}


class Device:
    """What the questions issue, and how one sees that it has ended."""

    def __init__(self, on: Accelerator, copy_bytes: int) -> None:
        self._on = on
        self._here = torch.zeros(copy_bytes, dtype=torch.uint8, device=on.device)
        # Locked as host buffers there are: torch's own pinned memory would record an event of its own behind the copy.
        self._home = pinned_region(copy_bytes, on.device)
        self.compute = torch.accelerator.current_stream()

    def stream(self) -> torch.Stream:
        return torch.Stream(self._on.device)

    def kernel(self, stream: torch.Stream, seconds: float) -> None:
        with current(stream):
            self._on.hold_back(seconds)

    def copy_home(self, stream: torch.Stream) -> None:
        with current(stream):
            self._home.write([(0, self._here)])

    def event(self, stream: torch.Stream, timing: bool = False) -> torch.Event:
        event = torch.Event(self._on.device, enable_timing=timing)
        event.record(stream)
        return event

    def drain(self) -> None:
        synchronize(self._on.device)

    def close(self) -> None:
        self.drain()
        self._home.close()


# What is issued, and by which events one sees that the first work and the last have ended.
Question = Callable[[Device], tuple[torch.Event, torch.Event]]


def _behind_two_kernels(kernel_s: float) -> Question:
    def issue(device: Device) -> tuple[torch.Event, torch.Event]:
        first, other = device.stream(), device.stream()
        device.kernel(first, kernel_s)
        device.kernel(first, SHORT_S)
        device.kernel(other, SHORT_S)
        last = device.event(other)
        return device.event(first), last

    return issue


def _behind_a_copy(before: bool, behind: bool, timing: bool) -> Question:
    def issue(device: Device) -> tuple[torch.Event, torch.Event]:
        first = device.stream()
        if before:
            device.event(first, timing)
        device.copy_home(first)
        if behind:
            device.event(first, timing)
        device.kernel(device.compute, SHORT_S)
        last = device.event(device.compute)
        return device.event(first), last

    return issue


def watch(device: Device, question: Question) -> tuple[float, float]:
    """Return the seconds after which the host saw the first work and the last ended."""
    device.drain()
    begin = time.perf_counter()
    events = question(device)
    seen: list[float | None] = [None, None]
    while None in seen:
        now = time.perf_counter() - begin
        for place, event in enumerate(events):
            if seen[place] is None and event.query():
                seen[place] = now
        if now > GIVE_UP_S:
            raise TimeoutError(f"not ended within {GIVE_UP_S:g} s: first work {seen[0]}, last {seen[1]}")
    first, last = seen
    assert first is not None
    assert last is not None
    return first, last


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    device = Device(on, sizes.copy_bytes)
    try:
        return ask(device, sizes, until)
    finally:
        device.close()


def ask(device: Device, sizes: Sizes, until: float) -> Result:
    result = Result()
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
