"""Activations computed again in the backward, with the random numbers of the forward, in both ways that torch has."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.unit.terra.programs.program import Feature, Program


class Recompute(Program):
    name = "recompute"
    features = frozenset(
        {Feature.RECOMPUTE, Feature.RANDOM, Feature.RESEED, Feature.BATCH, Feature.NUMBER, Feature.MUTATION}
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.modules, self.optimizers = {"net": self.net}, {"adam": self.optimizer}

    def noisy(self, hidden: torch.Tensor, scale: float) -> torch.Tensor:
        # Comes twice a step.
        self.note("noisy", scale)
        return self.net[1](hidden) + torch.randn_like(hidden) * scale

    def step(self, i: int) -> torch.Tensor:
        hidden = torch.from_numpy(self.array(i, 3, 6)).requires_grad_()
        hidden = checkpoint(self.net[0], hidden, use_reentrant=False)
        hidden = checkpoint(self.noisy, hidden, 0.1 / (i + 1), use_reentrant=True)
        # Draws other numbers the second time.
        hidden = checkpoint(nn.functional.dropout, hidden, 0.2, use_reentrant=False, preserve_rng_state=False)
        hidden = checkpoint_sequential(self.net[2:], 2, hidden, use_reentrant=False)
        loss = (hidden - 0.5).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.note("drawn", torch.rand(()).item())
        return loss.detach()


build = Recompute
