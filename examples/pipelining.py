"""A balanced schedule in a torch.distributed.pipelining script: four processes with one stage of a small model each.

In: nothing. Out: what each stage held under torch's own 1F1B and under a balanced schedule. The exit status is 0 if
both runs are bit-identical, 1 if not. Runs on the CPU: `python examples/pipelining.py`. Balancing needs only the lines
that name `BalancedSchedule` and `TransferConfig`; all else is plain torch (docs/pipelining.md).
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing import ProcessExitedException, start_processes

from bpipe.runtime.meter import Meter
from bpipe.torch import BalancedSchedule, TransferConfig

STAGES, MICROBATCHES, STEPS = 4, 8, 3
ROWS, WIDTH = 64, 128


def stage_of(rank: int) -> PipelineStage:
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
    return PipelineStage(layers, rank, STAGES, torch.device("cpu"))


def train(rank: int, stage: PipelineStage, schedule: Schedule1F1B | BalancedSchedule) -> list[str]:
    """The losses of every micro-batch of the last stage. Nothing here knows whether the schedule is balanced."""
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    found = []
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        batch, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH)
        if rank == 0:
            schedule.step(batch)
        elif rank == STAGES - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach().item().hex() for loss in losses]
    return found


def run(rank: int, folder: str) -> None:
    """One process: the training by torch's own schedule, then the same balanced."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=STAGES)
    loss_fn = nn.MSELoss()
    stock, stage, meter = stage_of(rank), stage_of(rank), Meter()
    losses = train(rank, stock, Schedule1F1B(stock, MICROBATCHES, loss_fn))
    transfers = TransferConfig(minimum_bytes=1024)
    schedule = BalancedSchedule(stage, MICROBATCHES, loss_fn, schedule="1f1b", transfers=transfers, meter=meter)
    same = losses == train(rank, stage, schedule) and all(
        map(torch.equal, stock.submod.parameters(), stage.submod.parameters())
    )
    everyone: list[tuple[int, bool]] = [(0, False)] * STAGES
    dist.all_gather_object(everyone, (meter.peak_microbatches, same))
    same = all(each for _, each in everyone)
    if rank == 0:
        print("most micro-batches held, stage by stage")
        print("  torch's 1F1B:", *(min(STAGES - each, MICROBATCHES) for each in range(STAGES)))
        print("  balanced:    ", *(peak for peak, _ in everyone))
        print("identical: losses and weights agree to the last bit" if same else "NOT identical")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if same else 1)


def main() -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(run, args=(folder,), nprocs=STAGES, start_method="fork")
        except ProcessExitedException:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
