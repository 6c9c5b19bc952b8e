"""Sections without autograd and in inference mode, parameters that freeze and thaw, and a penalty on gradients that
trains too."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.terra.programs.program import Feature, Program


class Modes(Program):
    name = "modes"
    features = frozenset(
        {
            Feature.MODES,
            Feature.DOUBLE_BACKWARD,
            Feature.BATCH,
            Feature.BRANCH,
            Feature.READ,
            Feature.NUMBER,
            Feature.RANDOM,
        }
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Softplus(), nn.Dropout(0.2), nn.Linear(6, 1))
        self.target = torch.zeros(3, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.modules, self.optimizers, self.tensors = (
            {"net": self.net},
            {"adam": self.optimizer},
            {"target": self.target},
        )

    @torch.no_grad()
    def update(self, made: torch.Tensor) -> None:
        self.target.mul_(0.7).add_(made, alpha=0.3)

    def step(self, i: int) -> torch.Tensor:
        given = torch.from_numpy(self.array(i, 3, 5)).requires_grad_()
        self.net[0].bias.requires_grad_(i % 3 != 1)
        self.net.eval()
        with torch.inference_mode():
            looked = self.net(given)
            self.note("looked", looked.mean().item(), looked.is_inference())
        self.net.train()
        self.update(self.net(given).detach())
        made = self.net(given)
        (slope,) = torch.autograd.grad(made.sum(), given, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        with torch.set_grad_enabled(i % 2 == 0):
            extra = made.exp().mean()
        self.note("differentiable", extra.requires_grad)
        loss = (made - self.target).square().mean() + penalty + 0.01 * extra
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = Modes
