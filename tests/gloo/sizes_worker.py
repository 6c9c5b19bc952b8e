"""Ranks without Megatron whose micro-batches are of whatever size somebody says, iteration after iteration.

In: a transport, and on every rank's own pipe a pattern a line: by iteration and micro-batch, the bytes of storages that
its forward saves, and whether the host buffers are given back first. Out: a line each, what came of it on this rank.
One process forks all ranks, which serve many patterns: importing torch and connecting are most of what one pattern
would take.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.stage import Messages, TorchStages
from bpipe.runtime.streams import copying_on
from bpipe.schedule.memory import num_transfers
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import connect
from bpipe.transport.edges import Edges, connect_edges
from tests.support.alone import Alone
from tests.unit.runtime.keeping import Keeping

CPU = torch.device("cpu")
RANKS, MICROBATCHES, WIDTH = 4, 6, 32
TIMEOUT_S = 20.0


class Rank:
    """One rank, its engine, and the patterns it is given."""

    def __init__(self, transport: str, rank: int) -> None:
        self.rank = rank
        self.plan = build(ScheduleConfig("1f1b", RANKS, MICROBATCHES, num_chunks=1, balance=BalanceConfig()))
        assert self.plan.partners is not None
        pairs = sorted({(r, self.plan.partners[r]) for r in range(RANKS) if num_transfers(self.plan, r).evictions})
        self.connection, _ = connect(pairs, transport, TIMEOUT_S, copying_on(CPU))
        self.edges = connect_edges(neighbours(self.plan), "gloo", TIMEOUT_S, CPU)
        config = EngineConfig(
            f"rank {rank}", CPU, TransferConfig(minimum_bytes=512, timeout_s=TIMEOUT_S, poison=True, differing=True)
        )
        self.engine = Engine(
            self.plan, rank, self.connection.transport(differing=True) if self.connection else None, config
        )
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank)) / 6)

    def serve(self, pattern: dict[str, Any]) -> dict[str, Any]:
        """Train the pattern's iterations, each twice: with the engine, and with nothing moved."""
        if pattern["release"]:
            self.engine.release()
            # As a new run, or the largest pattern so far would leave room for all that come.
            for evictor in self.engine._partners.evictors.values():
                evictor.sizing.most_bytes.clear()
        wrong, stayed = [], []
        for iteration, sizes in enumerate(pattern["iterations"]):
            found = self.gradient(sizes, iteration, self.engine)
            if not torch.equal(found, self.gradient(sizes, iteration, None)):
                wrong.append(iteration)
            stayed.append(asdict(self.engine.sizing.stayed) if self.engine.sizing else {})
        return {"wrong": wrong, "stayed": stayed, "grown": self.engine.sizing.num_grown if self.engine.sizing else 0}

    def gradient(self, sizes: list[list[int]], iteration: int, engine: Engine | None) -> torch.Tensor:
        self.weight.grad = None

        def part(microbatch: int, *token: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator().manual_seed(100 * iteration + microbatch)
            x = torch.randn(8, WIDTH, generator=generator).requires_grad_()
            kept = [
                torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) for nbytes in sizes[microbatch]
            ]
            made: torch.Tensor = Keeping.apply(torch.tanh(x @ self.weight), *kept)  # type: ignore[assignment,no-untyped-call]
            # A stage's gradient is one for all that comes in, so what goes wrong on one rank shows there alone.
            return made.square().sum() + sum(each.sum() for each in token)

        messages: Messages = Edges(self.rank, self.edges, CPU) if engine else Alone(lambda message: (torch.ones(()),))
        stages = TorchStages({self.rank: functools.partial(part)})
        Executor(self.plan, self.rank, stages, messages).run(engine)
        assert self.weight.grad is not None
        return self.weight.grad


def one_rank(transport: str, rank: int, folder: Path, asked: TextIO, answers: TextIO) -> None:
    """Serve patterns until the pipe ends."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS, timeout=timeout
    )
    this = Rank(transport, rank)
    for line in asked:
        print(json.dumps(this.serve(json.loads(line))), file=answers, flush=True)
    this.engine.release()
    if this.connection is not None:
        this.connection.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """`sizes_worker TRANSPORT FOLDER IN:OUT IN:OUT ...`, two descriptors a rank."""
    transport, folder, *pipes = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    children = []
    ends = [tuple(map(int, pipe.split(":"))) for pipe in pipes]
    for rank, (reads, writes) in enumerate(ends):
        child = os.fork()
        if child == 0:
            # A pipe ends when nobody has it open any more: not here, either.
            for other in (each for place, both in enumerate(ends) if place != rank for each in both):
                os.close(other)
            code = 0
            try:
                one_rank(transport, rank, Path(folder), os.fdopen(reads), os.fdopen(writes, "w"))
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    for each in (each for both in ends for each in both):
        os.close(each)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


if __name__ == "__main__":
    main()
