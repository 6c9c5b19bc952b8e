"""A pipeline loop of one rank over a small real autograd graph, with the engine's calls around every operation.

In: a schedule, a rank, an engine or none. Out: gradients that depend on every micro-batch's every bit. Its neighbours are not there: what
they would send is drawn from the micro-batch's number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bpipe.ir.action import Kind
from bpipe.ir.schedule import Schedule
from bpipe.ir.steps import steps
from bpipe.program import ScheduleConfig, balancing, build
from bpipe.runtime.engine import Engine

WIDTH = 32


def schedule(p: int = 4, m: int = 8, balance: str = "bpipe") -> Schedule:
    return build(ScheduleConfig(schedule="1f1b", num_ranks=p, num_microbatches=m, balance=balancing(balance)))


def inputs_of(microbatch: int, rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(rows, WIDTH, generator=generator).requires_grad_()


def stage(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.gelu(x @ weight)
    return torch.softmax(hidden @ weight.t(), dim=-1) * hidden.sum(dim=-1, keepdim=True)


def new_weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))


def run_iteration(
    engine: Engine | None,
    plan: Schedule,
    weight: torch.nn.Parameter,
    rows: Callable[[int], int] = lambda microbatch: 16,
    rank: int = 0,
    computing: Callable[[], None] = lambda: None,
    forward: Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor] = stage,
) -> None:
    """One iteration. `computing` is called inside every forward and backward, to hold the computation up."""
    outputs: dict[int, torch.Tensor] = {}
    if engine:
        engine.begin()
    for step in steps(plan, rank)[1:-1]:
        op = step.compute
        assert op is not None
        if op.kind is Kind.FORWARD:
            received = inputs_of(op.microbatch, rows(op.microbatch))
        if engine:
            engine.before(op)
        computing()
        if op.kind is Kind.FORWARD:
            outputs[op.microbatch] = forward(weight, received)
            if engine:
                engine.after(op, [outputs[op.microbatch]], [received])
        else:
            output = outputs.pop(op.microbatch)
            torch.autograd.backward(output, torch.full_like(output, 0.5 + op.microbatch))
            del output
            if engine:
                engine.after(op)
    if engine:
        engine.end()


def gradient(
    engine: Engine | None, plan: Schedule, iterations: int = 1, rank: int = 0, computing: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """The weight's gradient after so many iterations."""
    weight = new_weight()
    for _ in range(iterations):
        run_iteration(engine, plan, weight, rank=rank, computing=computing)
    assert weight.grad is not None
    return weight.grad
