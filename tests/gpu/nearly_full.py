"""A GPU that is nearly full, for which balancing is made: does the balanced program fit, and can a lender lend?

Limits torch's memory to what the balanced program of stage 0 was seen to reserve, and checks that it runs there with
the right bits and that the unbalanced program does not. Then, with torch's cache holding all but a little of the
device, checks that memory for host buffers, which is outside torch's allocator, can still be allocated.
"""

from dataclasses import dataclass

import torch

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, lender_on, repeats, tidy
from tests.gpu.one_stage import SmallStage, engine_of, loop_of, to_host


@dataclass(frozen=True)
class Sizes:
    """Sizes of the program and of the device's memory.

    Attributes:
        left_bytes: Memory that torch's cache leaves free on the device.
        lent_bytes: Memory that is requested then.
        slack_bytes: Slack for torch's allocator, whose two pools may each have a half-used block of 20 MiB.
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


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    device, result = on.device, Result()
    stage = SmallStage(on, sizes.rows, sizes.width)
    plans = {
        name: build(ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, balance=named_balance(balance)))
        for name, balance in (("without", "none"), ("with", "bpipe"))
    }
    engine = engine_of(plans["with"], 0, device, to_host(device), poison=True)

    def gradient(name: str) -> torch.Tensor:
        return stage.gradient_of(loop_of(plans[name], 0, stage, stage.received), engine if name == "with" else None)

    def reserved_bytes(name: str) -> int:
        """Return the bytes that torch takes from the driver for two iterations, starting from an empty cache."""
        tidy(device)
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(2):
            gradient(name)
        return int(torch.accelerator.max_memory_reserved())

    expected = gradient("without")
    needs = {name: reserved_bytes(name) for name in plans}
    text = ", ".join(f"{name} balancing {nbytes / 2**20:.0f} MiB" for name, nbytes in needs.items())
    result.row("reserved, with room", text)
    result.facts = {"needs": needs}
    room = needs["with"] + sizes.slack_bytes
    # From now on torch may reserve this much, and nothing is cached.
    tidy(device)
    on.limit(room)
    wrong = count = 0
    for _ in repeats(sizes.iterations, until, least=2):
        wrong += not torch.equal(gradient("with"), expected)
        count += 1
    stats = torch.accelerator.memory_stats(device)
    text = f"{wrong} of {count} iterations differ; {stats['num_alloc_retries']} retries, {stats['num_ooms']} failures"
    result.check("balanced, where there is no room to spare", wrong == 0, text)
    # Otherwise there was no limit, and the line above proves nothing.
    tidy(device)
    fits, text = True, f"fits into {room} B: the program above had memory to spare"
    try:
        gradient("without")
    except torch.OutOfMemoryError as error:
        fits, text = False, f"out of memory: {str(error).splitlines()[0][:120]}"
    result.check("without balancing, in the same room", not fits, text)
    on.limit(None)
    engine.release()
    del expected
    _lend_with_a_full_cache(device, sizes, result)
    return result


def _lend_with_a_full_cache(device: torch.device, sizes: Sizes, result: Result) -> None:
    """Torch caches what it freed, which the driver counts as used: a lender has to ask torch to return it."""
    tidy(device)
    cached = torch.accelerator.get_memory_info(device)[0] - sizes.left_bytes
    cache = torch.empty(cached, dtype=torch.uint8, device=device)
    del cache
    text = (
        f"{sizes.lent_bytes / 2**20:.0f} MiB with {sizes.left_bytes / 2**20:.0f} MiB free and "
        f"{cached / 2**20:.0f} MiB in torch's cache"
    )
    refused = ""
    try:
        lender_on(device).make(sizes.lent_bytes)[1].close()
    except RuntimeError as error:
        refused = f": {error}"
    result.check("memory for host buffers next to a full cache", not refused, text + refused)
    tidy(device)
