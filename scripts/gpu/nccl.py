"""The `nccl` transport for the first time, with both ranks of a pair on one device: are the bytes and the gradients right?

In: a device, and NCCL 2.30 or newer, which allows two ranks on one GPU where NCCL_MULTI_RANK_GPU_ENABLE is 1. Out: right or wrong. Nothing
here is timed: two processes on one GPU take turns, and their messages use no link. A rehearsal does the same over gloo.
Rank 0 runs the program of the first stage and evicts, rank 1 that of the last one and hosts. The middle stages are not there.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from bpipe.runtime.streams import copying_on
from bpipe.transport.connect import connect
from gpu.common import FULL, MODERATE, REHEARSAL, Result, on_cuda
from gpu.one_stage import Delays
from gpu.peer import EVICTOR, LENDER, MODES, engine_of, judge_engines

# The first NCCL that has NCCL_MULTI_RANK_GPU_ENABLE; older ones end with "Duplicate GPU detected".
NEEDED = (2, 30)
TIMEOUT_S = 60.0


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
            return Result(skipped=f"torch {torch.__version__} brings NCCL {said}, which refuses two ranks on one GPU; {wanted} does not")
    backend = "nccl" if on_cuda(device) else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        # A process that has used CUDA cannot be forked.
        start_processes(_process, args=(folder, str(device), backend, sizes, until), nprocs=2, start_method="spawn")
        evictor, lender = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (EVICTOR, LENDER))
    result.check("transport of the pair, probed with 16 MiB", evictor["transport"] == backend, evictor["transport"])
    judge_engines(evictor["engine"], lender["engine"], sizes, result)
    result.check("host buffers on the acceptor", lender["engine"]["host_buffer_bytes"] > 0, f"{lender['engine']['host_buffer_bytes']} B")
    result.facts = {"evictor": evictor, "lender": lender}
    return result


def _process(rank: int, folder: str, device_name: str, backend: str, sizes: Sizes, until: float) -> None:
    device = torch.device(device_name)
    if on_cuda(device):
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    connection, links = connect([(EVICTOR, LENDER)], backend, TIMEOUT_S, copying_on(device))
    assert connection is not None
    found: dict[str, Any] = {"transport": links[0].transport}
    found["engine"] = engine_of(rank, device, connection.transport(), sizes, _together(sizes.iterations, until), Delays())
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    connection.close()
    dist.barrier()
    dist.destroy_process_group()


def _together(most: int, until: float) -> Iterator[int]:
    """As `repeats`, but both ranks stop at once: what one puts, the other has to host."""
    for number in range(most):
        go_on = torch.tensor(number < len(MODES) or time.monotonic() < until)
        dist.broadcast(go_on, EVICTOR)
        if not go_on:
            return
        yield number
