"""What one GPU cannot show, whatever it measures. In: nothing. Out: the list."""

from __future__ import annotations

import torch

from gpu.common import FULL, MODERATE, REHEARSAL, Result

CANNOT = (
    ("NVLink", "neither its bandwidth nor what happens when several pairs share it"),
    (
        "NCCL between GPUs",
        "two ranks on one show that it is right; units occupied by another kernel stand for its cost, not its speed",
    ),
    ("pipeline speed-up", "one stage alone has no bubble, no neighbours and no messages"),
    ("a copy inside one GPU's memory", "is no transfer: never read one as overlap"),
    ("two processes on one GPU", "take turns: what they do is right or wrong, how long it takes means nothing"),
)


def run(device: torch.device, sizes: None, until: float) -> Result:
    result = Result()
    for what, why in CANNOT:
        result.row(what, why)
    return result


SIZES = dict.fromkeys((FULL, MODERATE, REHEARSAL))
