"""The `nccl` transport for the first time, with both ranks of a pair on one device: are the bytes and the gradients
right?

In: a device, and NCCL 2.30 or newer, which allows two ranks on one GPU where NCCL_MULTI_RANK_GPU_ENABLE is 1. Out:
right or wrong. Nothing here is timed: two processes on one GPU take turns, and their messages use no link. A rehearsal
does the same over gloo. Rank 0 runs the program of the first stage and evicts, rank 1 that of the last one and hosts.
The middle stages are not there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gpu.common import FULL, MODERATE, REHEARSAL, Result, on_cuda
from gpu.pair import EVICTOR, MODES, Found, Member, judge_engines, run_engine, run_pair

# The first NCCL that has NCCL_MULTI_RANK_GPU_ENABLE; older ones end with "Duplicate GPU detected".
NEEDED = (2, 30)


@dataclass(frozen=True)
class Sizes:
    rows: int
    width: int
    iterations: int
    forward_s: float
    stages: int = 4
    microbatches: int = 8
    copy_s: float = 0.0


SIZES = {FULL: Sizes(1024, 1024, 100, 1e-3), MODERATE: Sizes(512, 512, 12, 1e-3), REHEARSAL: Sizes(16, 16, 4, 1e-4)}


def run(device: torch.device, sizes: Sizes, until: float) -> Result:
    if on_cuda(device):
        version = torch.cuda.nccl.version()
        if version[:2] < NEEDED:
            said, wanted = (".".join(map(str, one)) for one in (version, NEEDED))
            return Result(
                skipped=f"torch {torch.__version__} brings NCCL {said}, which refuses two ranks on one GPU; {wanted} "
                f"does not"
            )
    backend = "nccl" if on_cuda(device) else "gloo"
    result = Result()
    evictor, lender = run_pair(_part, device, backend, sizes, until)
    result.check("transport of the pair, probed with 16 MiB", evictor["transport"] == backend, evictor["transport"])
    judge_engines(evictor["engine"], lender["engine"], sizes, result)
    result.check(
        "host buffers on the acceptor",
        lender["engine"]["host_buffer_bytes"] > 0,
        f"{lender['engine']['host_buffer_bytes']} B",
    )
    result.facts = {"evictor": evictor, "lender": lender}
    return result


def _part(member: Member, sizes: Sizes, until: float) -> Found:
    return {"engine": run_engine(member, member.connection.transport(), sizes, _together(sizes.iterations, until))}


def _together(most: int, until: float) -> Iterator[int]:
    """As `repeats`, but both ranks stop at once: what one puts, the other has to host."""
    for number in range(most):
        go_on = torch.tensor(number < len(MODES) or time.monotonic() < until)
        dist.broadcast(go_on, EVICTOR)
        if not go_on:
            return
        yield number
