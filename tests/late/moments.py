"""Moments of Adam that wait on another rank's late device while micro-batches are computed: the real code of
`megatron.scheduling.memory.optimizer_state`, around a step of two ranks.

In: a draw. Out: what of weights and moments is not as on a CPU, from which nothing leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.late.devices import Draw, begin, device
from tests.late.group import join
from tests.late.hosts import run_hosts

RANKS, STEPS, WIDTH = 2, 4, 64


class Trained:
    """One rank's model and its steps. What a micro-batch allocates takes memory that moments have left."""

    def __init__(self, where: torch.device, rank: int) -> None:
        drawn = torch.Generator().manual_seed(rank)
        self._where, self._rank = where, rank
        self.weights = [
            torch.nn.Parameter((torch.randn(WIDTH, WIDTH, generator=drawn) / 8).to(where)) for _ in range(2)
        ]
        self.module = torch.nn.ParameterList(self.weights)
        self.optimizer = torch.optim.Adam(self.weights, 0.01)
        self.steps = 0

    def step(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        for microbatch in range(3):
            drawn = torch.Generator().manual_seed(100 * self.steps + 10 * self._rank + microbatch)
            x = torch.randn(WIDTH, WIDTH, generator=drawn).to(self._where)
            for weight in self.weights:
                x = torch.nn.functional.gelu(x @ weight)
            torch.autograd.backward(x.square().mean())
        self.optimizer.step()
        self.steps += 1

    def found(self) -> list[torch.Tensor]:
        """Return weights and moments, on the host."""
        state = [self.optimizer.state[weight][name] for weight in self.weights for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach().cpu() for tensor in (*self.weights, *state)]


@contextmanager
def _pipeline_of_threads() -> Iterator[None]:
    from megatron.scheduling.memory import optimizer_state

    def own() -> Any:
        return dist.distributed_c10d._get_default_group()

    with patch.object(optimizer_state, "parallel_state", SimpleNamespace(get_pipeline_model_parallel_group=own)):
        yield


def wrong_moments(draw: Draw) -> str:
    """Return what went wrong, or nothing."""
    from bpipe.flags.budgets import HostedState
    from megatron.scheduling.memory.optimizer_state import OptimizerState

    # Three of its four moments, of which one is no whole number of what it was asked for.
    moves = [HostedState(0, 1, 2 * WIDTH * WIDTH * 4 + 4)]
    ranks: dict[int, list[torch.Tensor]] = {}

    def one(rank: int) -> None:
        join(rank, RANKS)
        trained = Trained(device(rank), rank)
        state = OptimizerState(moves)
        for _ in range(STEPS):
            state._step({"optimizer": trained.optimizer, "model": [trained.module]}, trained.step)
        ranks[rank] = trained.found()

    begin(draw)
    try:
        with _pipeline_of_threads():
            run_hosts(RANKS, one)
    except Exception as error:
        return str(error).splitlines()[0]
    for rank, found in ranks.items():
        alone = Trained(torch.device("cpu"), rank)
        for _ in range(STEPS):
            alone.step()
        if not all(map(torch.equal, found, alone.found())):
            return f"wrong bits on rank {rank}"
    return ""
