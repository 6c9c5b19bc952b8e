"""Train several times in one process without Megatron, and record the resources that each training leaves.

Takes a folder, and writes to `<folder>/rank<r>.json`: by training, whether its bits are those of torch's own class, and
the process's resources afterwards; how a closed schedule refuses a step; and how long `close` took, and what it
logged, after this rank's partner had left without it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B
from torch.multiprocessing import start_processes

from bpipe.torch import BalancedSchedule
from bpipe.transport.config import TransferConfig
from examples import toy
from tests.gloo.pipelined_stages import loss_of, same, stages_of, steps_of
from tests.support.holding import holding

RANKS, MICROBATCHES, TIMEOUT_S = 4, 8, 20.0
TRANSPORTS = ("peer", "gloo", "host", "peer", "peer")


class Lines(logging.Handler):
    """A log handler that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def balanced(rank: int, transport: str) -> tuple[BalancedSchedule, Any]:
    stages = stages_of([rank], RANKS)
    transfers = TransferConfig(transport=transport, timeout_s=TIMEOUT_S, minimum_bytes=256, poison=True)
    return BalancedSchedule(stages, MICROBATCHES, loss_of, schedule="1f1b", transfers=transfers), stages


def trained(rank: int, transport: str, expected: Any) -> dict[str, Any]:
    schedule, stages = balanced(rank, transport)
    with schedule:
        is_same = same(expected, steps_of(schedule, stages, MICROBATCHES))
        moved, resources = sum(schedule.engine.moved_bytes.values()), holding()
    dist.barrier()
    return {"same": is_same, "moved": moved, "held": resources, "left": holding()}


def refusal(rank: int) -> str:
    """Return the error of a closed schedule."""
    schedule, stages = balanced(rank, "peer")
    schedule.close()
    schedule.close()
    try:
        steps_of(schedule, stages, MICROBATCHES, num_steps=1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def raised(rank: int) -> float:
    """Return how long a schedule takes to end on one rank after an error between two steps."""
    schedule, stages = balanced(rank, "peer")
    begin_s = 0.0
    try:
        with schedule:
            steps_of(schedule, stages, MICROBATCHES, num_steps=1)
            dist.barrier()
            if rank:
                # No other rank arrives.
                time.sleep(2.0)
            begin_s = time.perf_counter()
            raise ArithmeticError
    except ArithmeticError:
        return time.perf_counter() - begin_s


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    lines = Lines()
    logging.getLogger("bpipe").addHandler(lines)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    stages = stages_of([rank], RANKS)
    expected = steps_of(Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of), stages, MICROBATCHES)
    result: dict[str, Any] = {"trainings": [trained(rank, transport, expected) for transport in TRANSPORTS]}
    result["own loop"] = [[*toy.train(rank, "bpipe")[0], holding()] for _ in range(2)]
    result["refusal"] = refusal(rank)
    result["raised_s"] = raised(rank)
    dist.barrier()
    schedule, stages = balanced(rank, "peer")
    steps_of(schedule, stages, MICROBATCHES, num_steps=1)
    dist.barrier()
    if rank != RANKS - 1:
        begin_s = time.perf_counter()
        lines.lines.clear()
        schedule.close()
        result |= {"alone_s": time.perf_counter() - begin_s, "alone": lines.lines}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    # Exit without tearing down the groups, as the other ranks do.
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start_processes(one_rank, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
