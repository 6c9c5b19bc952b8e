"""Autograd Functions of its own: what they save, what they change in place, what Python does in their backward."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.terra.programs.program import Feature, Program


class Clipped(torch.autograd.Function):
    """Rounds; the gradient passes where the value was small. Two results, one without gradient."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, limit: float, log: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        inside = given.abs() < limit
        ctx.save_for_backward(inside)
        ctx.log, ctx.limit = log, limit
        ctx.mark_non_differentiable(inside)
        return (given * 4).round() / 4, inside

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        ctx.log.append(f"clipped {ctx.limit.hex()}")
        return gradient * inside / ctx.limit, None, None


class AddedInPlace(torch.autograd.Function):
    """Writes into what it is given."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(given)
        return given.add_(added)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient if ctx.needs_input_grad[0] else None, gradient.sum(0) if ctx.needs_input_grad[1] else None


class Recomputing(torch.autograd.Function):
    """Keeps its input alone and runs a forward with autograd inside of its backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        return (given @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            made = (inputs[0] @ inputs[1]).tanh()
        return torch.autograd.grad(made, inputs, gradient)


class Functions(Program):
    name = "functions"
    features = frozenset({Feature.FUNCTION, Feature.IN_PLACE, Feature.BATCH, Feature.NUMBER, Feature.MUTATION})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight, self.bias = torch.randn(6, 6, requires_grad=True), torch.zeros(6, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight, self.bias], lr=0.1)
        self.tensors, self.optimizers = {"weight": self.weight, "bias": self.bias}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        given = torch.from_numpy(self.array(i, 3, 6))
        hidden = Recomputing.apply(given, self.weight)
        hidden = AddedInPlace.apply(hidden * 2, self.bias)
        rounded, inside = Clipped.apply(hidden, 1.0 + 0.1 * i, self.log)
        loss = (rounded - given).square().mean() + (inside * hidden).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.note("stepped")
        self.optimizer.step()
        return loss.detach()


build = Functions
