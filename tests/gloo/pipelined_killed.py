"""Ranks of a balanced schedule under torch's pipelining, one of which dies during its second step.

Takes a folder and points: the rank that dies, the share of the step's calls after which it dies, and a transport.
Writes `<folder>/killed.json`: by point, all exit codes, the ranks still running, and what the others printed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from bpipe.torch import BalancedSchedule
from bpipe.torch.calls import StepCalls
from bpipe.transport.config import TransferConfig
from tests.gloo.pipelined_stages import loss_of, stages_of, steps_of

RANKS, MICROBATCHES, TIMEOUT_S = 4, 8, 5.0
CALLS = ("computes", "forward_ran", "backward_ran", "_sent")


def die_after(count: int) -> None:
    """Kill this process at the engine's `count`-th call."""
    seen = 0

    def counted(function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == count:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(StepCalls, name, counted(getattr(StepCalls, name)))


def one_rank(rank: int, folder: str, dying: int, part: float, transport: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    stages = stages_of([rank], RANKS)
    transfers = TransferConfig(transport=transport, timeout_s=TIMEOUT_S, minimum_bytes=256, poison=True)
    balanced = BalancedSchedule(stages, MICROBATCHES, loss_of, schedule="1f1b", transfers=transfers)
    steps_of(balanced, stages, MICROBATCHES, num_steps=1)
    if rank == dying:
        # A forward and a backward of each micro-batch, each begun, ended and sent.
        die_after(1 + int(part * 6 * MICROBATCHES))
    try:
        steps_of(balanced, stages, MICROBATCHES, num_steps=2, first_step=1)
    except Exception:
        (Path(folder) / f"rank{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def killed(folder: Path, dying: int, part: float, transport: str) -> dict[str, Any]:
    """Return the exit codes of all ranks, those still running after some time, and what the others printed."""
    folder.mkdir()
    context = get_context("fork")
    arguments = (str(folder), dying, part, transport)
    processes = [context.Process(target=one_rank, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    end = time.monotonic() + 8 * TIMEOUT_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    printed = {path.stem: path.read_text() for path in sorted(folder.glob("rank*.txt"))}
    return {"codes": [process.exitcode for process in processes], "late": late, "said": printed}


def main(folder: Path, points: list[str]) -> None:
    results = {}
    for number, point in enumerate(points):
        dying, part, transport = point.split()
        results[point] = killed(folder / str(number), int(dying), float(part), transport)
    (folder / "killed.json").write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]), sys.argv[2:])
