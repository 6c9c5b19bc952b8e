"""A GPU with no room to spare, which is what balancing is for: does the balanced program run in what it needs, and can
a lender lend?

In: a device. Out: with torch's share of the memory cut to what the balanced program of stage 0 was seen to reserve:
whether it runs there with the right bits, and that the program without balancing does not. And with torch's cache
holding all but a little of the device: whether memory for host buffers, which is outside torch's allocator, can still
be made. On a CPU nothing is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bpipe.build import ScheduleConfig, build, named_balance
from bpipe.ir.schedule import Schedule
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.streams import lanes, synchronize
from bpipe.transport.lanes import CopyLane
from bpipe.transport.one_sided import OneSidedCopies
from gpu.common import FULL, MODERATE, REHEARSAL, Result, in_host_memory, lender_on, on_cuda, repeats, tidy
from gpu.one_stage import Delays, SmallStage, loop_of

TIMEOUT_S = 60.0
# torch's allocator asks for whole blocks of up to 20 MiB; two pools may each have one of them half used.
SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Sizes:
    """`left_bytes`: what torch's cache leaves of the device; `lent_bytes`: what is asked for then."""

    rows: int
    width: int
    iterations: int
    left_bytes: int
    lent_bytes: int
    stages: int = 8
    microbatches: int = 16


SIZES = {
    FULL: Sizes(16384, 1024, 20, 1 << 30, 4 << 30),
    MODERATE: Sizes(8192, 1024, 4, 1 << 30, 2 << 30),
    REHEARSAL: Sizes(16, 16, 2, 1 << 20, 1 << 20),
}


class Program:
    """Stage 0's program, without balancing or with it."""

    def __init__(
        self, device: torch.device, stage: SmallStage, plan: Schedule, both: tuple[CopyLane, CopyLane]
    ) -> None:
        self._device = device
        self._stage = stage
        self._loop = loop_of(plan, 0, stage, stage.received)
        self.engine: Engine | None = None
        if plan.partners is not None:
            config = EngineConfig("stage 0", device, minimum_bytes=1, timeout_s=TIMEOUT_S, poison=True)
            self.engine = Engine(plan, 0, OneSidedCopies(in_host_memory(device), *both), config)

    def gradient(self) -> torch.Tensor:
        self._loop.run(self.engine)
        synchronize(self._device)
        return self._stage.gradient()

    def reserved_bytes(self) -> int:
        """What torch takes from the driver for two iterations, from an empty cache."""
        tidy(self._device)
        if on_cuda(self._device):
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.gradient()
        return torch.cuda.max_memory_reserved() if on_cuda(self._device) else 0


def run(device: torch.device, sizes: Sizes, until: float) -> Result:
    result = Result()
    both = lanes(device, TIMEOUT_S)
    stage = SmallStage(device, sizes.rows, sizes.width, Delays())
    plain, balanced = (
        Program(
            device,
            stage,
            build(ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, balance=named_balance(balance))),
            both,
        )
        for balance in ("none", "bpipe")
    )
    expected = plain.gradient()
    needs = {name: program.reserved_bytes() for name, program in (("without", plain), ("with", balanced))}
    text = ", ".join(f"{name} balancing {nbytes / 2**20:.0f} MiB" for name, nbytes in needs.items())
    result.row("reserved, with room", text)
    result.facts = {"needs": needs}
    if on_cuda(device):
        _cut(device, needs["with"] + SLACK_BYTES)
    wrong = count = 0
    for _ in repeats(sizes.iterations, until, least=2):
        wrong += not torch.equal(balanced.gradient(), expected)
        count += 1
    stats = torch.cuda.memory_stats(device) if on_cuda(device) else {}
    text = (
        f"{wrong} of {count} iterations differ; {stats.get('num_alloc_retries', 0)} retries, "
        f"{stats.get('num_ooms', 0)} failures"
    )
    result.check("balanced, where there is no room to spare", wrong == 0, text)
    if on_cuda(device):
        _must_not_fit(device, plain, needs, result)
    assert balanced.engine is not None
    balanced.engine.release()
    del expected
    _lend_beside_a_full_cache(device, sizes, result)
    for lane in both:
        lane.close()
    return result


def _cut(device: torch.device, nbytes: int) -> None:
    """From now on torch may reserve this much, and has nothing cached to live on."""
    tidy(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), device)


def _must_not_fit(device: torch.device, plain: Program, needs: dict[str, int], result: Result) -> None:
    """Or the limit was none, and the line above it says nothing."""
    tidy(device)
    try:
        plain.gradient()
    except torch.cuda.OutOfMemoryError as error:
        result.check("without balancing, in the same room", True, f"out of memory: {str(error).splitlines()[0][:120]}")
    else:
        room = needs["with"] + SLACK_BYTES
        result.check(
            "without balancing, in the same room",
            False,
            f"fits into {room} B: the program above was not short of anything",
        )
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def _lend_beside_a_full_cache(device: torch.device, sizes: Sizes, result: Result) -> None:
    """torch keeps what it freed, and the driver's own calls do not see it: a lender has to ask torch for it."""
    tidy(device)
    cached = 0
    if on_cuda(device):
        cached = torch.cuda.mem_get_info(device)[0] - sizes.left_bytes
        kept = torch.empty(cached, dtype=torch.uint8, device=device)
        del kept
    lender = lender_on(device)
    asked = (
        f"{sizes.lent_bytes / 2**20:.0f} MiB with {sizes.left_bytes / 2**20:.0f} MiB free and "
        f"{cached / 2**20:.0f} MiB in torch's cache"
    )
    try:
        _, region = lender.make(sizes.lent_bytes)
    except RuntimeError as error:
        result.check("memory for host buffers beside a full cache", False, f"{asked}: {error}")
    else:
        region.close()
        result.check("memory for host buffers beside a full cache", True, asked)
    tidy(device)
