"""BPipe without Megatron: four processes with one stage of a small torch model each. The engine runs around every
forward and backward.

In: nothing. Out: a table of the most micro-batches that each stage held with and without balancing. The exit status
is 0 if both runs are bit-identical, 1 if not. Runs on the CPU: `python examples/toy.py`. docs/pipelining.md explains
each part.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException, start_processes

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.links import disconnect
from bpipe.runtime.meter import Meter
from bpipe.runtime.stage import TorchStages
from bpipe.schedule.memory import num_transfers
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import Connection, connect
from bpipe.transport.edges import Edges, connect_edges
from bpipe.transport.streams import Device

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 3
ROWS, WIDTH = 64, 128
CPU = torch.device("cpu")
TIMEOUT_S = 60.0


class StageModel(nn.Module):
    """One stage. The first reads the data, the last makes the loss and keeps what it was."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
        self.is_last = rank == STAGES - 1
        self.loss = 0.0

    def forward(self, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        (x,) = received or (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(microbatch)),)
        output: torch.Tensor = self.layers(x)
        if self.is_last:
            output = output.square().mean()
            self.loss += output.item()
        return output


def engine_of(schedule: Schedule, rank: int, meter: Meter) -> tuple[Engine, Connection | None]:
    """Moves this rank's activations to its partner and back, or lends its partner memory, as the schedule says."""
    evictors = [stage for stage in range(STAGES) if num_transfers(schedule, stage).evictions]
    # Connecting is collective, so every rank names the same pairs in the same order.
    pairs = [(stage, schedule.partners[stage]) for stage in evictors] if schedule.partners else []
    connection, _ = connect(pairs, "auto", TIMEOUT_S, Device(CPU))
    transfers = TransferConfig(minimum_bytes=1024, timeout_s=TIMEOUT_S, poison=True)
    config = EngineConfig(name=f"rank {rank}", device=CPU, transfers=transfers)
    return Engine(schedule, rank, connection.transport() if connection else None, config, meter), connection


def train(rank: int, balance: str) -> tuple[list[str], list[torch.Tensor], int, int]:
    """This rank's part of a training: every iteration's loss, the weights at the end, most micro-batches held, and
    how many left."""
    schedule = build(
        ScheduleConfig(schedule="1f1b", num_ranks=STAGES, num_microbatches=MICROBATCHES, balance=named_balance(balance))
    )
    model, meter = StageModel(rank), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, connection = engine_of(schedule, rank, meter)
    edges = connect_edges(neighbours(schedule), "gloo", TIMEOUT_S, CPU)
    loop = Executor(schedule, rank, TorchStages({rank: model}), Edges(rank, edges, CPU))
    losses = []
    for _ in range(ITERATIONS):
        model.loss = 0.0
        loop.run(engine)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.loss.hex())
    disconnect(engine, [connection, *edges.values()])
    weights = [parameter.detach() for parameter in model.parameters()]
    return losses, weights, meter.peak_microbatches, num_transfers(schedule, rank).evictions


def run(rank: int, folder: str) -> None:
    """One process: the training without balancing, then the same with it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=STAGES)
    losses, weights, plain, _ = train(rank, "none")
    other_losses, other_weights, balanced, evictions = train(rank, "bpipe")
    same = losses == other_losses and all(map(torch.equal, weights, other_weights))
    everyone: list[tuple[int, int, int, bool, list[str]]] = [(0, 0, 0, False, [])] * STAGES
    dist.all_gather_object(everyone, (plain, balanced, evictions, same, losses))
    if rank == 0:
        report(everyone)
    # The first process that ends with 1 ends the others, so not before the report is out.
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if all(row[3] for row in everyone) else 1)


def report(everyone: list[tuple[int, int, int, bool, list[str]]]) -> None:
    print("most micro-batches held on each stage\nstage  without  with  evictions per iteration")
    for stage, (plain, balanced, evictions, _, _) in enumerate(everyone):
        print(f"{stage:>5}  {plain:>7}  {balanced:>4}  {evictions:>9}")
    print("losses:", ", ".join(f"{float.fromhex(loss):.6f}" for loss in everyone[-1][4]))
    same = all(row[3] for row in everyone)
    print("identical: losses and weights agree to the last bit" if same else "NOT identical")


def main() -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        try:
            # Forked, because importing torch four times is most of the time this takes; nothing has started a thread
            # yet.
            start_processes(run, args=(folder,), nprocs=STAGES, start_method="fork")
        except ProcessExitedException:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
