"""The gain of another micro-batch size, from stage MFUs alone.

Source: Huang et al. 2024, "Re-evaluating the Memory-balanced Pipeline Parallelism: BPipe":
    iteration time = (B/b + p - 1) T(b)
    MFU(x) / MFU(y) = (B + y(p-1)) / (B + x(p-1)) * MFU_stage(x) / MFU_stage(y)
B is the global batch of one replica. Transfers are taken to be hidden.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate by the paper's formula: `ratio` is MFU(x) / MFU(y); above 1, size x is faster.

    MFUs lie from 0 to 1; a bubble is the share (p-1) b / (B + (p-1) b).
    """

    ratio: float
    mfu_x: float
    mfu_y: float
    bubble_x: float
    bubble_y: float


def iteration_seconds(batch: int, pipeline: int, micro_batch: int, stage_seconds: float) -> float:
    """Return (B/b + p - 1) T(b), the seconds of an iteration."""
    if not 0 < stage_seconds < math.inf:
        raise ValueError(f"stage seconds are {stage_seconds}, but must be above 0")
    return (batch / micro_batch + pipeline - 1) * stage_seconds


def estimate(batch: int, pipeline: int, x: int, y: int, stage_mfu_x: float, stage_mfu_y: float) -> Estimate:
    """Compare micro-batch sizes x and y."""
    for name, value in (("global batch", batch), ("pipeline", pipeline), ("micro-batch", x), ("micro-batch", y)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    for size in (x, y):
        if batch % size:
            raise ValueError(f"micro-batch {size} does not divide the global batch {batch} of one replica")
    for stage_mfu in (stage_mfu_x, stage_mfu_y):
        if not 0 < stage_mfu <= 1:
            raise ValueError(f"a stage MFU is {100 * stage_mfu:g} %, but must be above 0 and at most 100")
    full_x, full_y = batch + x * (pipeline - 1), batch + y * (pipeline - 1)
    return Estimate(
        ratio=full_y / full_x * stage_mfu_x / stage_mfu_y,
        mfu_x=stage_mfu_x * batch / full_x,
        mfu_y=stage_mfu_y * batch / full_y,
        bubble_x=1 - batch / full_x,
        bubble_y=1 - batch / full_y,
    )


# The authors measured both sizes (GPT-3 96B): 1.35 with recomputed and 0.99 with flash attention. The formula gives
# 1.39 and 1.03.
ERROR = 0.04


def verdict(result: Estimate, x: int, y: int, stage_mfu_x: float, stage_mfu_y: float) -> str:
    """Return a sentence that says whether size x is worth making it fit, and why."""
    stage = f"a stage is {stage_mfu_x / stage_mfu_y:.3f} times as fast"
    reason = f"{stage}, the bubble goes from {100 * result.bubble_y:.1f} to {100 * result.bubble_x:.1f} %"
    if result.ratio > 1 + ERROR:
        return f"micro-batch {x} gains {result.ratio:.3f}x over {y}: {reason}"
    if result.ratio > 1:
        doubt = f"{result.ratio:.3f}x is within the formula's error of {100 * ERROR:g} %"
        return f"micro-batch {x} does not clearly help over {y}, {doubt}: {reason}"
    return f"micro-batch {x} does not help over {y} ({result.ratio:.3f}x): {reason}"
