"""One rank of a pipeline over a small real autograd graph, run by the executor with an engine around every operation.

The gradients depend on every bit of every micro-batch. There are no neighbours: what they would send is generated from
the micro-batch's number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.executor import ComputationHooks, Executor
from bpipe.runtime.stage import Tensors, TorchStages
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.program import Message
from bpipe.schedule.schedule import Schedule
from tests.support.alone import Alone

WIDTH = 32

Layer = Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor]


def schedule(p: int = 4, m: int = 8, balance: str = "bpipe") -> Schedule:
    return build(ScheduleConfig(schedule="1f1b", num_ranks=p, num_microbatches=m, balance=named_balance(balance)))


def inputs_of(microbatch: int, rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(rows, WIDTH, generator=generator).requires_grad_()


def stage(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.gelu(x @ weight)
    return torch.softmax(hidden @ weight.t(), dim=-1) * hidden.sum(dim=-1, keepdim=True)


def new_weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))


Rows = Callable[[int], int]


class Small(TorchStages):
    """A rank's stages, which share one weight; `computing` runs inside every forward and backward."""

    def __init__(
        self,
        plan: Schedule,
        rank: int,
        weight: torch.nn.Parameter,
        rows: Rows = lambda microbatch: 16,
        computing: Callable[[], None] = lambda: None,
        forward: Layer = stage,
    ) -> None:
        self._computing = computing
        last = plan.num_stages - 1

        def part(number: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
            computing()
            # No other reference may remain: the first stage's input is evicted with everything else it saved.
            output = forward(weight, *(received or (inputs_of(microbatch, rows(microbatch)),)))
            return output if number < last else (output * (0.5 + microbatch)).sum()

        super().__init__({number: functools.partial(part, number) for number in plan.layout.stages_of(rank)})

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        self._computing()
        return super().backward(action, gradients)


def drawn(rows: Rows = lambda microbatch: 16) -> Alone:
    """The messages that neighbours would send."""

    def tensors(message: Message) -> Tensors:
        (made_by,) = message.made_by
        x = inputs_of(made_by.microbatch, rows(made_by.microbatch))
        return (x if made_by.kind is Kind.FORWARD else torch.full_like(x, 0.5 + made_by.microbatch),)

    return Alone(tensors)


def run_iteration(
    engine: ComputationHooks | None,
    plan: Schedule,
    weight: torch.nn.Parameter,
    rows: Rows = lambda microbatch: 16,
    rank: int = 0,
    computing: Callable[[], None] = lambda: None,
    forward: Layer = stage,
) -> None:
    Executor(plan, rank, Small(plan, rank, weight, rows, computing, forward), drawn(rows)).run(engine)


def gradient(
    engine: ComputationHooks | None,
    plan: Schedule,
    iterations: int = 1,
    rank: int = 0,
    computing: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """The weight's gradient after the given number of iterations."""
    weight = new_weight()
    for _ in range(iterations):
        run_iteration(engine, plan, weight, rank=rank, computing=computing)
    assert weight.grad is not None
    return weight.grad
