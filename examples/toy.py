"""BPipe without Megatron: four processes, a stage of a small torch model each, and the engine around every forward and backward.

In: nothing. Out: a table of what each stage held without and with balancing, and whether both trainings computed the same bits (exit
status 0) or not (1). Runs on the CPU: `python examples/toy.py`. Shows what a training loop of one's own has to call.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException, start_processes

from bpipe.ir.action import Action, Kind
from bpipe.ir.memory import num_transfers
from bpipe.ir.schedule import Schedule
from bpipe.ir.steps import steps
from bpipe.program import ScheduleConfig, balancing, build
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.meter import Meter
from bpipe.runtime.streams import copying_on
from bpipe.transport.connect import connect

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 3
ROWS, WIDTH = 64, 128
CPU = torch.device("cpu")


class Pipeline:
    """One rank's loop. It walks the very schedule that the engine checks it against."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.meter = schedule, rank, Meter()
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        evictors = [stage for stage in range(STAGES) if num_transfers(schedule, stage).evictions]
        # Connecting is collective, so every rank names the same pairs in the same order.
        pairs = [(stage, schedule.partners[stage]) for stage in evictors] if schedule.partners else []
        connection, _ = connect(pairs, "auto", 60.0, copying_on(CPU))
        config = EngineConfig(name=f"rank {rank}", device=CPU, minimum_bytes=1024, timeout_s=60.0, poison=True)
        self.engine = Engine(schedule, rank, connection.transport() if connection else None, config, self.meter)
        self.sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    def iteration(self) -> float:
        """Every micro-batch forward and backward, and one step; the loss on the last stage, 0 elsewhere."""
        held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        total = 0.0
        self.engine.begin()
        for step in steps(self.schedule, self.rank)[1:-1]:
            op = step.compute
            assert op is not None
            if op.kind is Kind.FORWARD:
                received, output = self.forward(op)
                held[op.microbatch] = received, output
                total += output.item() if self.rank == STAGES - 1 else 0.0
            else:
                self.backward(op, *held.pop(op.microbatch))
        self.engine.end()
        for work, _ in self.sent:
            if work is not None:
                work.wait()
        self.sent.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def forward(self, op: Action) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rank == 0:
            received = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(op.microbatch))
        else:
            received = self.receive(self.rank - 1)
        received.requires_grad_()
        self.engine.before(op)
        output = self.model(received)
        if self.rank == STAGES - 1:
            output = output.square().mean()
        self.engine.after(op, [output], [received])
        if self.rank < STAGES - 1:
            self.send(output.detach(), self.rank + 1)
        return received, output

    def backward(self, op: Action, received: torch.Tensor, output: torch.Tensor) -> None:
        gradient = None if self.rank == STAGES - 1 else self.receive(self.rank + 1)
        self.engine.before(op)
        torch.autograd.backward(output, gradient)
        self.engine.after(op)
        if self.rank > 0:
            assert received.grad is not None
            self.send(received.grad, self.rank - 1)

    def receive(self, source: int) -> torch.Tensor:
        tensor = torch.empty(ROWS, WIDTH)
        dist.recv(tensor, source)
        return tensor

    def send(self, tensor: torch.Tensor, target: int) -> None:
        # Not waited for here: both neighbours may be sending at once. The copy is what must not change until it is.
        copy = tensor.clone()
        self.sent.append((dist.isend(copy, target), copy))


def run(rank: int, folder: str) -> None:
    """One process: the training without balancing, then the same with it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=STAGES)
    results = []
    for balance in ("none", "bpipe"):
        schedule = build(ScheduleConfig(schedule="1f1b", num_ranks=STAGES, num_microbatches=MICROBATCHES, balance=balancing(balance)))
        pipeline = Pipeline(schedule, rank)
        losses = [pipeline.iteration().hex() for _ in range(ITERATIONS)]
        weights = [parameter.detach() for parameter in pipeline.model.parameters()]
        results.append((losses, weights, pipeline.meter.peak_microbatches, num_transfers(schedule, rank).evictions))
    (losses, weights, plain, _), (other_losses, other_weights, balanced, evictions) = results
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
    print("most micro-batches held on each stage\nstage  without  with  evictions an iteration")
    for stage, (plain, balanced, evictions, _, _) in enumerate(everyone):
        print(f"{stage:>5}  {plain:>7}  {balanced:>4}  {evictions:>9}")
    print("losses:", ", ".join(f"{float.fromhex(loss):.6f}" for loss in everyone[-1][4]))
    same = all(row[3] for row in everyone)
    print("identical: losses and weights agree to the last bit" if same else "NOT identical")


def main() -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        try:
            # Forked, because importing torch four times is most of the time this takes; nothing has started a thread yet.
            start_processes(run, args=(folder,), nprocs=STAGES, start_method="fork")
        except ProcessExitedException:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
