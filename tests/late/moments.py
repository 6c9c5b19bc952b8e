"""Moments of Adam that wait on another rank's late device while micro-batches are computed: the real code of
`megatron.scheduling.memory.optimizer_state`, around a step of two ranks, or around a pipeline whose activations leave.

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

from bpipe.ir.schedule import Schedule
from bpipe.runtime.executor import Executor
from tests.gpu.pipelines import Place, summed
from tests.late.devices import Draw, begin, device
from tests.late.group import join
from tests.late.hosts import run_hosts
from tests.late.model import Extra, LateModel, nothing
from tests.late.model import differing as differing_sizes
from tests.late.pipeline import LatePipeline, Rank

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


class TrainedModel(LateModel):
    """Its weights are updated after each iteration. What comes out of it are weights and moments."""

    def __init__(self, num_stages: int, extra: Extra) -> None:
        super().__init__(num_stages, extra)
        self._optimizers: dict[int, torch.optim.Adam] = {}

    def updated(self, rank: int) -> tuple[torch.optim.Adam, torch.nn.ParameterList]:
        """Return a rank's optimizer and module."""
        weights = [weight for (owner, _), weight in self._on_device.items() if owner == rank]
        self._optimizers[rank] = torch.optim.Adam(weights, 0.01)
        return self._optimizers[rank], torch.nn.ParameterList(weights)

    def gradients_on(self, rank: int) -> dict[Place, torch.Tensor]:
        return {
            place: _with_moments(weight, self._optimizers[rank])
            for place, weight in self._on_device.items()
            if place[0] == rank
        }

    def expected(self, schedule: Schedule, iterations: int) -> dict[Place, torch.Tensor]:
        drawn = self.weights
        places = [(rank, stage) for rank in range(schedule.num_ranks) for stage in schedule.layout.stages_of(rank)]
        weights = {place: torch.nn.Parameter(drawn[place[1]].clone()) for place in places}
        optimizer = torch.optim.Adam(weights.values(), 0.01)
        for _ in range(iterations):
            self.weights = [weights[place].detach() for place in sorted(places, key=lambda place: place[1])]
            for place, gradient in summed(schedule, self.parts(schedule), 1).items():
                weights[place].grad = gradient
            optimizer.step()
        self.weights = drawn
        return {place: _with_moments(weight, optimizer) for place, weight in weights.items()}


def _with_moments(weight: torch.nn.Parameter, optimizer: torch.optim.Adam) -> torch.Tensor:
    state = optimizer.state[weight]
    return torch.stack([tensor.detach().cpu() for tensor in (weight, state["exp_avg"], state["exp_avg_sq"])])


class TrainedRank(Rank):
    def executor(self, *given: Any) -> Executor:
        from megatron.scheduling.memory.optimizer_state import OptimizerState

        pipeline = self._pipeline
        assert isinstance(pipeline, TrainedPipeline)
        self._optimizer, self._module = pipeline.model.updated(self.rank)
        self._state = OptimizerState(pipeline.moves)
        return super().executor(*given)

    def iterate(self, executor: Executor) -> None:
        def train() -> None:
            super(TrainedRank, self).iterate(executor)
            self._optimizer.step()
            self._optimizer.zero_grad()

        self._state._step({"optimizer": self._optimizer, "model": [self._module]}, train)


class TrainedPipeline(LatePipeline):
    """A pipeline, one stage per rank, that updates its weights. The first and the second rank's moments wait on the last
    two while activations leave the same ranks."""

    model: TrainedModel

    def __init__(self, schedule: Schedule, kind: str, differing: bool = False) -> None:
        from bpipe.flags.budgets import HostedState

        last = schedule.num_ranks - 1
        model = TrainedModel(schedule.num_stages, differing_sizes if differing else nothing)
        super().__init__(schedule, kind, model=model, differing=differing)
        moment = self.model.weights[0].nbytes
        # All of the one's moments, and of the other's one, which is more than is asked.
        self.moves = [HostedState(0, last, 2 * moment), HostedState(1, last - 1, moment // 2)]

    def rank_of(self, rank: int) -> Rank:
        return TrainedRank(self, rank)

    def run(self, draw: Draw, iterations: int = 3) -> dict[Place, torch.Tensor]:
        """Before the first update there is nothing to move: in the first iteration nothing leaves."""
        with _pipeline_of_threads():
            return super().run(draw, iterations)
