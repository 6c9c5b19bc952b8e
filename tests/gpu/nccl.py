"""The `nccl` transport with both ranks of a pair on one device: are the bytes and the gradients right?

Nothing is timed: two processes on one GPU take turns, and their messages go through loopback sockets, because NCCL
takes each for a separate node. Rank 0 runs the program of the first stage and evicts, rank 1 that of the last one and
hosts. There are no middle stages.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result
from tests.gpu.pair import EVICTOR, Facts, Member, judge_engines, run_engine, run_pair
from tests.gpu.streams import MODES


@dataclass(frozen=True)
class Sizes:
    rows: int
    width: int
    iterations: int
    stages: int = 4
    microbatches: int = 8


SIZES = {FULL: Sizes(1024, 1024, 100), MODERATE: Sizes(512, 512, 12), SMALL: Sizes(16, 16, 4)}


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result = Result()
    evictor, lender = run_pair(_part, on, "nccl", sizes, until)
    result.check("transport of the pair, probed with 16 MiB", evictor["transport"] == "nccl", evictor["transport"])
    judge_engines(evictor["engine"], lender["engine"], sizes, result)
    result.facts = {"evictor": evictor, "lender": lender}
    return result


def _part(member: Member, sizes: Sizes, until: float) -> Facts:
    return {"engine": run_engine(member, member.connection.transport(), sizes, _together(sizes.iterations, until))}


def _together(limit: int, until: float) -> Iterator[int]:
    """Yield as `repeats` does, but to both ranks the same number: the other rank has to host what one evicts."""
    for number in range(limit):
        go_on = torch.tensor(number < len(MODES) or time.monotonic() < until)
        dist.broadcast(go_on, EVICTOR)
        if not go_on:
            return
        yield number
