"""Hooks on tensors, parameters, modules and autograd's nodes, some taken away in mid-step; the order of what they
say is the log's."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.terra.programs.program import Feature, Program


class Hooks(Program):
    name = "hooks"
    features = frozenset(
        {Feature.HOOK, Feature.BRANCH, Feature.BATCH, Feature.NUMBER, Feature.READ, Feature.MUTATION, Feature.IN_PLACE}
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.factor, self.now = 1.0, 0
        first, last = self.net[0], self.net[2]
        first.weight.register_hook(self.scaled)
        last.bias.register_post_accumulate_grad_hook(self.at_once)
        self.net[1].register_forward_hook(lambda module, given, made: made + 0.01)
        self.net.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        last.register_full_backward_hook(self.passed)
        self.optimizer = torch.optim.SGD([*first.parameters(), last.weight], lr=0.1)
        self.modules, self.optimizers = {"net": self.net}, {"sgd": self.optimizer}

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        self.note("scaled", self.factor)
        return gradient * self.factor

    def at_once(self, parameter: torch.Tensor) -> None:
        """Updates it in the backward and lets its gradient go."""
        self.note("at once", parameter.grad.abs().sum().item())
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def passed(
        self, module: nn.Module, given: tuple[torch.Tensor, ...], made: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        self.note("passed", len(given))
        return (given[0].clamp(-0.05, 0.05),) if self.now % 3 else None

    def step(self, i: int) -> torch.Tensor:
        self.factor, self.now = 1 / (1 + i), i
        self.optimizer.zero_grad()
        hidden = torch.from_numpy(self.array(i, 4, 5))
        inner = self.net[0](hidden)
        handles = [
            inner.register_hook(lambda gradient: self.note("inner")),
            inner.register_hook(lambda gradient: gradient * 2),
        ]
        if i % 2:
            handles.pop().remove()
        made = self.net(hidden)
        made.grad_fn.register_hook(lambda given, got: self.note("node", len(got)))
        made.retain_grad()
        loss = made.square().mean() + inner.mean()
        loss.backward()
        with torch.no_grad():
            self.net[0].bias.grad.add_(made.grad.sum() * 1e-2)
        self.optimizer.step()
        return loss.detach()


build = Hooks
