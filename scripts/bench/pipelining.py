"""Measure what `bpipe.torch` costs beside torch's own schedule: steps of the same stages by torch's class, by
`BalancedSchedule` with nothing moving, and balanced, taking turns in one run.

In: sizes. Out: a table, and JSON with --json: of every rank the processor time of the training thread in a step by
each, and the ratio to torch's within a turn, medians and quartiles. Processor time, because on a machine with fewer
cores than ranks the clock says how the ranks shared them. Weights are left as they are, so every step computes the
same.

What it cannot show: anything of a GPU, where the training thread issues what a device computes.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.turns import add_sizes, on_ranks, processor_seconds, quotients, spread
from bpipe.torch import BalancedSchedule

CPU = torch.device("cpu")
STOCK, ADAPTED, BALANCED = "torch's", "nothing moves", "balanced"


def stages_of(rank: int, sizes: argparse.Namespace) -> list[Any]:
    """This rank's stages: layers of attention and feed-forward, without dropout."""
    num_stages = sizes.stages * sizes.chunks
    made: list[Any] = []
    for index in range(rank, num_stages, sizes.stages):
        torch.manual_seed(index)
        layers = [
            nn.TransformerEncoderLayer(sizes.hidden, 4, 4 * sizes.hidden, 0.0, batch_first=True, norm_first=True)
            for _ in range(sizes.layers)
        ]
        made.append(PipelineStage(nn.Sequential(*layers), index, num_stages, CPU))
    return made


def measure(rank: int, sizes: argparse.Namespace) -> dict[str, list[float]]:
    logging.disable(logging.WARNING)
    loss, name = nn.MSELoss(), "1f1b" if sizes.chunks == 1 else "interleaved-1f1b"
    stages = {each: stages_of(rank, sizes) for each in (STOCK, ADAPTED, BALANCED)}
    own = stages[STOCK]
    schedules: dict[str, Any] = {
        STOCK: Schedule1F1B(own[0], sizes.microbatches, loss)
        if sizes.chunks == 1
        else ScheduleInterleaved1F1B(own, sizes.microbatches, loss),
        ADAPTED: BalancedSchedule(stages[ADAPTED], sizes.microbatches, loss, schedule=name, balance="none"),
        BALANCED: BalancedSchedule(stages[BALANCED], sizes.microbatches, loss, schedule=name, minimum_bytes=1024),
    }
    batch, target = torch.randn(2, sizes.microbatches, sizes.sequence, sizes.hidden)
    inputs = [batch] if rank == 0 else []
    wanted = target if rank == sizes.stages - 1 else None

    def step(name: str) -> None:
        schedules[name].step(*inputs, target=wanted, return_outputs=False)

    def clear(name: str) -> None:
        for stage in stages[name]:
            stage.submod.zero_grad()

    return processor_seconds({name: functools.partial(step, name) for name in schedules}, clear, sizes.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_sizes(parser, microbatches=8)
    parser.add_argument("--chunks", type=int, default=2, help="stages of a rank; 1 for 1F1B")
    sizes = parser.parse_args()
    measured = on_ranks(measure, sizes.stages, sizes)
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; {sizes.stages} ranks of {sizes.chunks} stages, {sizes.microbatches} micro-batches; "
        f"{sizes.rounds} rounds, medians (quartiles)"
    )
    print(f"{'rank':<5} {'torch, ms':>28} {'nothing moves to torch':>28} {'balanced to torch':>28}")
    rows = []
    for rank, spent in enumerate(measured):
        ratios = {name: quotients(spent[name], spent[STOCK]) for name in (ADAPTED, BALANCED)}
        rows.append({"rank": rank, "seconds": spent, "ratios": ratios})
        stock_ms = spread([1e3 * seconds for seconds in spent[STOCK]], ".1f")
        print(f"{rank:<5} {stock_ms:>28} {spread(ratios[ADAPTED], '.3f'):>28} {spread(ratios[BALANCED], '.3f'):>28}")
    if sizes.json:
        Path(sizes.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
