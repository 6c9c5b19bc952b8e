"""A GPU with no room to spare, which is what balancing is for: does the balanced program run in what it needs, and can
a lender lend?

In: a device. Out: with torch's share of the memory cut to what the balanced program of stage 0 was seen to reserve:
whether it runs there with the right bits, and that the program without balancing does not. And with torch's cache
holding all but a little of the device: whether memory for host buffers, which is outside torch's allocator, can still
be made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bpipe.build import ScheduleConfig, build, named_balance
from bpipe.ir.schedule import Schedule
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, lender_on, repeats, tidy
from tests.gpu.one_stage import SmallStage, engine_of, loop_of, to_host


@dataclass(frozen=True)
class Sizes:
    """`left_bytes`: what torch's cache leaves of the device; `lent_bytes`: what is asked for then.

    `slack_bytes`: torch's allocator asks for whole blocks of up to 20 MiB, and two pools may each have one of them half
    used.
    """

    rows: int
    width: int
    iterations: int
    left_bytes: int
    lent_bytes: int
    slack_bytes: int = 64 << 20
    stages: int = 8
    microbatches: int = 16


SIZES = {
    FULL: Sizes(16384, 1024, 20, 1 << 30, 4 << 30),
    MODERATE: Sizes(8192, 1024, 4, 1 << 30, 2 << 30),
    SMALL: Sizes(4096, 128, 2, 4 << 20, 32 << 20, 8 << 20, microbatches=8),
}


class Program:
    """Stage 0's program, without balancing or with it."""

    def __init__(self, device: torch.device, stage: SmallStage, plan: Schedule) -> None:
        self._device = device
        self._stage = stage
        self._loop = loop_of(plan, 0, stage, stage.received)
        self.engine = engine_of(plan, 0, device, to_host(device), poison=True) if plan.partners is not None else None

    def gradient(self) -> torch.Tensor:
        return self._stage.gradient_of(self._loop, self.engine)

    def reserved_bytes(self) -> int:
        """What torch takes from the driver for two iterations, from an empty cache."""
        tidy(self._device)
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(2):
            self.gradient()
        return int(torch.accelerator.max_memory_reserved())


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    device, result = on.device, Result()
    stage = SmallStage(on, sizes.rows, sizes.width)
    plain, balanced = (
        Program(
            device,
            stage,
            build(ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, balance=named_balance(balance))),
        )
        for balance in ("none", "bpipe")
    )
    expected = plain.gradient()
    needs = {name: program.reserved_bytes() for name, program in (("without", plain), ("with", balanced))}
    text = ", ".join(f"{name} balancing {nbytes / 2**20:.0f} MiB" for name, nbytes in needs.items())
    result.row("reserved, with room", text)
    result.facts = {"needs": needs}
    room = needs["with"] + sizes.slack_bytes
    # From now on torch may reserve this much, and has nothing cached to live on.
    tidy(device)
    on.limit(room)
    wrong = count = 0
    for _ in repeats(sizes.iterations, until, least=2):
        wrong += not torch.equal(balanced.gradient(), expected)
        count += 1
    stats = torch.accelerator.memory_stats(device)
    text = f"{wrong} of {count} iterations differ; {stats['num_alloc_retries']} retries, {stats['num_ooms']} failures"
    result.check("balanced, where there is no room to spare", wrong == 0, text)
    _must_not_fit(on, plain, room, result)
    on.limit(None)
    assert balanced.engine is not None
    balanced.engine.release()
    del expected
    _lend_beside_a_full_cache(device, sizes, result)
    return result


def _must_not_fit(on: Accelerator, plain: Program, room: int, result: Result) -> None:
    """Or the limit was none, and the line above it says nothing."""
    tidy(on.device)
    try:
        plain.gradient()
    except torch.OutOfMemoryError as error:
        result.check("without balancing, in the same room", True, f"out of memory: {str(error).splitlines()[0][:120]}")
    else:
        result.check(
            "without balancing, in the same room",
            False,
            f"fits into {room} B: the program above was not short of anything",
        )


def _lend_beside_a_full_cache(device: torch.device, sizes: Sizes, result: Result) -> None:
    """torch keeps what it freed, and the driver's own calls do not see it: a lender has to ask torch for it."""
    tidy(device)
    cached = torch.accelerator.get_memory_info(device)[0] - sizes.left_bytes
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
