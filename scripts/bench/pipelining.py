"""Measure what `bpipe.torch` costs beside torch's own schedule: steps of the same stages by torch's class, and by
`BalancedSchedule` with nothing moving, with a report of steps 3 to 5, balanced, and within a memory budget, taking
turns in one run.

In: sizes, and which of these. Out: a table, and JSON with --json: of every rank the processor time of the training thread in a step by
each, and the ratio to torch's within a turn, medians and quartiles. Processor time, because on a machine with fewer
cores than ranks the clock says how the ranks shared them. Weights are left as they are, so every step computes the
same.

Where something moves on a CPU, a processor copies its bytes, which is in these numbers.

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
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.turns import add_sizes, on_ranks, processor_seconds, quotients, spread
from bpipe.ir.memory import num_transfers
from bpipe.runtime.meter import Meter
from bpipe.torch import BalancedSchedule

CPU = torch.device("cpu")
STOCK = "torch's"
ADAPTED, REPORTED, BALANCED, BUDGETED = WAYS = ("nothing moves", "reported", "balanced", "within a budget")
# Where between what the lightest rank and the heaviest hold alone the budget of all lies.
HEADROOM = 0.7


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


def options_of(way: str, folder: str, budget_bytes: int) -> dict[str, Any]:
    """Return what makes a schedule run this way."""
    options: dict[str, dict[str, Any]] = {
        ADAPTED: {"balance": "none"},
        REPORTED: {"balance": "none", "report": folder},
        BALANCED: {"minimum_bytes": 1024},
        BUDGETED: {"minimum_bytes": 1024, "memory": budget_bytes},
    }
    return options[way]


def budget_between(peak_bytes: int, sizes: argparse.Namespace) -> int:
    """Return a budget between the smallest and the largest peak of all ranks. Collective."""
    peaks = [0] * sizes.stages
    dist.all_gather_object(peaks, peak_bytes)
    # Two ranks of one stage hold 2 and 1, of which none can leave.
    headroom = 1 if sizes.stages * sizes.chunks == 2 else HEADROOM
    return int(min(peaks) + headroom * (max(peaks) - min(peaks)))


def measure(rank: int, sizes: argparse.Namespace, folder: str) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    loss, name = nn.MSELoss(), "1f1b" if sizes.chunks == 1 else "interleaved-1f1b"
    stages = {each: stages_of(rank, sizes) for each in (STOCK, *sizes.ways)}
    batch, target = torch.randn(2, sizes.microbatches, sizes.sequence, sizes.hidden)
    inputs = [batch] if rank == 0 else []
    wanted = target if rank == sizes.stages - 1 else None

    def balanced(way: str, **options: Any) -> BalancedSchedule:
        return BalancedSchedule(stages[way], sizes.microbatches, loss, schedule=name, **options)

    budget_bytes = 0
    if BUDGETED in sizes.ways:
        meter = Meter()
        balanced(BUDGETED, balance="none", meter=meter).step(*inputs, target=wanted, return_outputs=False)
        budget_bytes = budget_between(meter.peak_bytes, sizes)
    stock: Any = Schedule1F1B if sizes.chunks == 1 else ScheduleInterleaved1F1B
    own = stages[STOCK]
    schedules: dict[str, Any] = {STOCK: stock(own[0] if sizes.chunks == 1 else own, sizes.microbatches, loss)}
    schedules |= {way: balanced(way, **options_of(way, folder, budget_bytes)) for way in sizes.ways}

    def step(way: str) -> None:
        schedules[way].step(*inputs, target=wanted, return_outputs=False)

    def clear(name: str) -> None:
        for stage in stages[name]:
            stage.submod.zero_grad()

    spent = processor_seconds({way: functools.partial(step, way) for way in schedules}, clear, sizes.rounds)
    evictions = {way: num_transfers(schedules[way].schedule, rank).evictions for way in sizes.ways}
    return {"seconds": spent, "evictions": evictions}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_sizes(parser, microbatches=8)
    parser.add_argument("--chunks", type=int, default=2, help="stages of a rank; 1 for 1F1B")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="beside torch's own; by default all")
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = on_ranks(measure, sizes.stages, sizes, folder)
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; {sizes.stages} ranks of {sizes.chunks} stages, {sizes.microbatches} micro-batches; "
        f"{sizes.rounds} rounds, medians (quartiles); ratios to torch's, evictions a step behind the way"
    )
    rows = []
    for rank, of_rank in enumerate(measured):
        spent, evictions = of_rank["seconds"], of_rank["evictions"]
        ratios = {way: quotients(spent[way], spent[STOCK]) for way in sizes.ways}
        rows.append({"rank": rank, **of_rank, "ratios": ratios})
        print(f"{rank:<5} {STOCK + ', ms':<20} {spread([1e3 * seconds for seconds in spent[STOCK]], '.1f')}")
        for way in sizes.ways:
            print(f"{rank:<5} {f'{way}, {evictions[way]}':<20} {spread(ratios[way], '.3f')}")
    if sizes.json:
        Path(sizes.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
